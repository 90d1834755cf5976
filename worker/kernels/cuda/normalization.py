"""Normalize rows and find the amax of the result in one pass: the twin of `reference.normalize`.

A program holds whole rows in registers, so x is read once. Sums run over a tree of threads and the inverse root is the device's
own, so fp32 results differ from the twin's by a few units in the last place; the amax is that of the result as it is written.
Sizes are for an H200 and fp32 or bf16 rows of a thousand features or more.
"""

import struct
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from octet.worker.kernels.cuda import language
from octet.worker.kernels.cuda.known_scale import write_codes
from octet.worker.kernels.cuda.launching import MOST_KNOWN, Launcher, Layout, PreparedLaunch, contiguous_layout
from octet.worker.kernels.cuda.rescale import FORMAT_NAMES

TILE = 8192  # elements: short rows share a program
WARPS = 8


# fmt: off
@triton.jit
def normalize_kernel(
    x, weight, bias, amax, uses_amax, out, mean, rstd, new_amax, codes, stride, num_rows, num_columns,
    EPS_BITS: tl.constexpr, IS_LAYER_NORM: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr,
    FORMAT: tl.constexpr, MARGIN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):
    # fmt: on
    """Write the normalized rows and their statistics, and raise *new_amax to their largest magnitude.

    FORMAT: also write codes, if *uses_amax, at the scale of *amax; None for no codes.
    EPS_BITS: of an fp32. `Launcher` knows a kernel by its integers, and sends one with a float the long way.
    """
    eps = tl.full((), EPS_BITS, tl.int32).to(tl.float32, bitcast=True)
    first_row = tl.program_id(0).to(tl.int64) * ROWS
    rows, columns = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    is_row, is_column = rows < num_rows - first_row, columns < num_columns
    mask = is_row[:, None] & is_column[None, :]
    pointers = x + first_row * stride + rows[:, None] * stride + columns[None, :]
    values = tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
    if IS_LAYER_NORM:
        center = tl.sum(values, 1) / num_columns
        tl.store(mean + first_row + rows, center, mask=is_row)
        values = tl.where(is_column[None, :], values - center[:, None], 0.0)
    inverse_root = tl.math.rsqrt(tl.sum(values * values, 1) / num_columns + eps)
    tl.store(rstd + first_row + rows, inverse_root, mask=is_row)
    values = values * inverse_root[:, None]
    if HAS_WEIGHT:
        values = values * tl.load(weight + columns, mask=is_column, other=0.0).to(tl.float32)[None, :]
    if HAS_BIAS:
        values = values + tl.load(bias + columns, mask=is_column, other=0.0).to(tl.float32)[None, :]
    result = language.cast(values, out.dtype.element_ty)
    at = first_row * num_columns + rows[:, None] * num_columns + columns[None, :]
    tl.store(out + at, result, mask=mask)
    largest = tl.where(mask, result.to(tl.float32), 0.0)
    if FORMAT is not None:
        write_codes(largest, codes + at, amax, uses_amax, mask, FORMAT, MARGIN)
    language.atomic_amax(new_amax, language.amax(language.amax(largest, 1), 0))


_launch = Launcher(normalize_kernel, num_warps=WARPS, enable_fp_fusion=False)


def normalize(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    is_layer_norm: bool,
    dtype: torch.dtype,
    codes_dtype: torch.dtype | None = None,
    margin: int = 0,
    amax: Tensor | None = None,
    uses_amax: Tensor | None = None,
) -> list[Tensor]:
    """See the reference. Two launches: one clears the amax."""
    is_matrix = x.ndim == 2 and x.stride(1) == 1
    x = x if is_matrix or x.is_contiguous() else x.contiguous()
    shape, device = x.shape, x.device
    dtypes = x.dtype, None if weight is None else weight.dtype, None if bias is None else bias.dtype, dtype, codes_dtype
    stride = x.stride(0) if is_matrix else shape[-1]
    launch, strides, statistics = _plan(shape, stride, dtypes, eps, is_layer_norm, margin)
    output = torch.empty_strided(shape, strides, dtype=dtype, device=device)  # see `tensor_scales.py`
    rstd = torch.empty_strided(*statistics, dtype=torch.float32, device=device)
    mean = torch.empty_like(rstd) if is_layer_norm else None
    new_amax = torch.empty_strided((), (), dtype=torch.float32, device=device).zero_()
    codes = None if codes_dtype is None else torch.empty_strided(shape, strides, dtype=codes_dtype, device=device)
    launch(x, weight, bias, amax, uses_amax, output, mean, rstd, new_amax, codes)
    found = [output, rstd, new_amax] if mean is None else [output, mean, rstd, new_amax]
    return found if codes is None else [*found, codes]


@lru_cache(MOST_KNOWN)
def _plan(
    shape: torch.Size, stride: int, dtypes: tuple[torch.dtype | None, ...], eps: float, is_layer_norm: bool, margin: int
) -> tuple[PreparedLaunch, tuple[int, ...], Layout]:
    """Return the launch for inputs of one shape, the output's strides, and sizes and strides of the statistics.

    stride: from one row to the next. dtypes: of x, weight, bias, output and codes; None for what is not there.
    """
    num_columns, of_statistics = shape[-1], contiguous_layout((*shape[:-1], 1))
    num_rows = shape.numel() // num_columns
    columns = triton.next_power_of_2(num_columns)
    rows = max(1, TILE // columns)
    _, weight, bias, _, codes = dtypes
    launch = PreparedLaunch(
        _launch, language.cdiv(num_rows, rows), stride, num_rows, num_columns,
        struct.unpack("<i", struct.pack("<f", eps))[0], is_layer_norm, weight is not None, bias is not None,
        None if codes is None else FORMAT_NAMES[codes], margin, rows, columns, num_given=3,
    )  # fmt: skip
    return launch, contiguous_layout(tuple(shape))[1], of_statistics
