"""An activation and its gradients, written with their amaxes in one pass: twins of `reference.activate*`.

Results in between are rounded to the dtype of x, as torch's ops round what they write. ReLU equals the twin bit for bit; the
others are within the last bits of exp and erf. An amax is that of the result as written. The block is for an H200 and bf16.
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from octet.worker.kernels import reference
from octet.worker.kernels.cuda import activations, language
from octet.worker.kernels.cuda.known_scale import write_codes
from octet.worker.kernels.cuda.launching import MOST_KNOWN, Launcher, PreparedLaunch
from octet.worker.kernels.cuda.rescale import FORMAT_NAMES
from octet.worker.kernels.reference import AMAX_STRIDE

BLOCK, WARPS = 4096, 8


# fmt: off
@triton.jit
def activate_kernel(
    x, gated, out, new_amax, codes, amax, uses_amax, num_elements,
    ACTIVATION: tl.constexpr, HAS_GATED: tl.constexpr, FORMAT: tl.constexpr, MARGIN: tl.constexpr, BLOCK: tl.constexpr,
):
    # fmt: on
    """Write an activation of x, times gated, and raise *new_amax to its largest magnitude.

    FORMAT: also write codes, if *uses_amax, at the scale of *amax; None for no codes.
    """
    start = tl.program_id(0).to(tl.int64) * BLOCK
    offsets = tl.arange(0, BLOCK)
    mask = offsets < num_elements - start
    values = activations.activated(tl.load(x + start + offsets, mask=mask, other=0.0), ACTIVATION)
    if HAS_GATED:
        values = values * tl.load(gated + start + offsets, mask=mask, other=0.0).to(tl.float32)
    written = _write(values, out, new_amax, start, offsets, mask)
    if FORMAT is not None:
        write_codes(written, codes + start + offsets, amax, uses_amax, mask, FORMAT, MARGIN)


# fmt: off
@triton.jit
def activate_backward_kernel(
    grad, x, gated, out, gated_out, amaxes, codes, amax, uses_amax, gated_codes, gated_amax, gated_uses_amax, num_elements,
    ACTIVATION: tl.constexpr, HAS_GATED: tl.constexpr, FORMAT: tl.constexpr, MARGIN: tl.constexpr,
    GATED_FORMAT: tl.constexpr, GATED_MARGIN: tl.constexpr, STRIDE: tl.constexpr, BLOCK: tl.constexpr,
):
    # fmt: on
    """Write the gradients of x and of gated, and raise amaxes[0] and amaxes[STRIDE] to their largest magnitudes.

    FORMAT, GATED_FORMAT: also write codes of either, if *uses_amax, at the scale of *amax; None for no codes.
    """
    start = tl.program_id(0).to(tl.int64) * BLOCK
    offsets = tl.arange(0, BLOCK)
    mask = offsets < num_elements - start
    given = tl.load(x + start + offsets, mask=mask, other=0.0)
    grad_values = tl.load(grad + start + offsets, mask=mask, other=0.0).to(tl.float32)
    if HAS_GATED:
        grad_gated = grad_values * activations.activated(given, ACTIVATION)
        written = _write(grad_gated, gated_out, amaxes + STRIDE, start, offsets, mask)
        if GATED_FORMAT is not None:
            write_codes(
                written, gated_codes + start + offsets, gated_amax, gated_uses_amax, mask, GATED_FORMAT, GATED_MARGIN
            )
        others = tl.load(gated + start + offsets, mask=mask, other=0.0).to(tl.float32)
        grad_values = language.cast(grad_values * others, given.dtype).to(tl.float32)
    found = _write(activations.times_derivative(grad_values, given, ACTIVATION), out, amaxes, start, offsets, mask)
    if FORMAT is not None:
        write_codes(found, codes + start + offsets, amax, uses_amax, mask, FORMAT, MARGIN)


@triton.jit
def _write(values, out, new_amax, start, offsets, mask):
    """Store fp32 values as out holds them, and raise *new_amax. Returns what was stored, fp32."""
    result = language.cast(values, out.dtype.element_ty)
    tl.store(out + start + offsets, result, mask=mask)
    written = tl.where(mask, result.to(tl.float32), 0.0)
    language.atomic_amax(new_amax, language.amax(written, 0))
    return written


_launch = Launcher(activate_kernel, num_warps=WARPS, enable_fp_fusion=False)
_launch_backward = Launcher(activate_backward_kernel, num_warps=WARPS, enable_fp_fusion=False)


@lru_cache(MOST_KNOWN)
def _plan(
    num_elements: int, _dtype: torch.dtype, activation: str, has_gated: bool, codes_dtype: torch.dtype | None, margin: int
) -> PreparedLaunch:
    """The launch of an activation of so many elements."""
    name = None if codes_dtype is None else FORMAT_NAMES[codes_dtype]
    values = (num_elements, activation, has_gated, name, margin, BLOCK)
    return PreparedLaunch(_launch, language.cdiv(num_elements, BLOCK), *values, num_given=2)


@lru_cache(MOST_KNOWN)
def _backward_plan(
    num_elements: int,
    _dtype: torch.dtype,
    activation: str,
    has_gated: bool,
    codes_dtypes: tuple[torch.dtype | None, ...],
    margins: tuple[int, int],
) -> PreparedLaunch:
    """The launch of an activation's gradients."""
    name, gated_name = (None if dtype is None else FORMAT_NAMES[dtype] for dtype in codes_dtypes)
    values = (num_elements, activation, has_gated, name, margins[0], gated_name, margins[1], AMAX_STRIDE, BLOCK)
    return PreparedLaunch(_launch_backward, language.cdiv(num_elements, BLOCK), *values, num_given=3)


def activate(
    x: Tensor,
    gated: Tensor | None,
    activation: str,
    codes_dtype: torch.dtype | None = None,
    margin: int = 0,
    amax: Tensor | None = None,
    uses_amax: Tensor | None = None,
) -> list[Tensor]:
    """See the reference. Two launches: one clears the amax."""
    if x.numel() == 0:
        return reference.activate(x, gated, activation, codes_dtype, margin, amax, uses_amax)
    x, gated = x.contiguous(), None if gated is None else gated.contiguous()
    output = torch.empty_like(x)
    new_amax = torch.empty_strided((), (), dtype=torch.float32, device=x.device).zero_()  # see `linear.py`
    codes = None if codes_dtype is None else torch.empty_like(x, dtype=codes_dtype)
    launch = _plan(x.numel(), x.dtype, activation, gated is not None, codes_dtype, margin)
    launch(x, gated, output, new_amax, codes, amax, uses_amax)
    return [output, new_amax] if codes is None else [output, new_amax, codes]


def activate_backward(
    grad: Tensor,
    x: Tensor,
    gated: Tensor | None,
    activation: str,
    codes_dtype: torch.dtype | None = None,
    margin: int = 0,
    amax: Tensor | None = None,
    uses_amax: Tensor | None = None,
    gated_codes_dtype: torch.dtype | None = None,
    gated_margin: int = 0,
    gated_amax: Tensor | None = None,
    gated_uses_amax: Tensor | None = None,
) -> list[Tensor]:
    """See the reference. Two launches: one clears the amaxes."""
    if x.numel() == 0:
        scales = (codes_dtype, margin, amax, uses_amax, gated_codes_dtype, gated_margin, gated_amax, gated_uses_amax)
        return reference.activate_backward(grad, x, gated, activation, *scales)
    grad, x, gated = grad.contiguous(), x.contiguous(), None if gated is None else gated.contiguous()
    gradients = [torch.empty_like(x) for _ in range(1 if gated is None else 2)]
    shape = (len(gradients), AMAX_STRIDE)
    amaxes = torch.empty_strided(shape, (AMAX_STRIDE, 1), dtype=torch.float32, device=x.device).zero_()
    grad_gated = None if gated is None else gradients[1]
    dtypes = (codes_dtype, gated_codes_dtype)
    codes, gated_codes = (None if dtype is None else torch.empty_like(x, dtype=dtype) for dtype in dtypes)
    launch = _backward_plan(x.numel(), x.dtype, activation, gated is not None, dtypes, (margin, gated_margin))
    launch(
        grad, x, gated, gradients[0], grad_gated, amaxes, codes, amax, uses_amax, gated_codes, gated_amax, gated_uses_amax
    )
    return [*gradients, amaxes, *(part for part in (codes, gated_codes) if part is not None)]
