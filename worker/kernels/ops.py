"""The operations as torch's own, `torch.ops.octet.*`, one for all devices: each runs the implementation for its tensors'.

A graph of torch.compile holds them as they are, a FLOP counter counts `matmul`, and a CPU runs the path that a GPU does.
Results are new, contiguous tensors, but for scales of operands (formats.empty_operand_scale). Arguments are checked by who
calls them, `quantization.py` and `gemm.py`.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from worker.kernels.activations import ACTIVATIONS
from worker.kernels.dispatch import implementation
from worker.kernels.formats import KINDS, empty_operand_scale, kind_of_scale, scale_shape

ALIGNMENT = 16  # CUDA's FP8 GEMM takes K and N in multiples of this
_LIBRARY = torch.library.Library("octet", "FRAGMENT")


def _define(signature: str, fake: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function as an op. fake: the shapes, strides and dtypes of its results, for a compiler."""

    def register(run: Callable[..., Any]) -> Callable[..., Any]:
        name = _LIBRARY.define(signature, tags=(torch.Tag.pt2_compliant_tag,))
        _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"octet::{name}", fake, lib=_LIBRARY)
        return getattr(torch.ops.octet, name).default

    return register


def _fake_amax(x: Tensor, kind: str) -> Tensor:
    return x.new_empty(scale_shape(x.shape, *KINDS[kind]), dtype=torch.float32)


@_define("compute_amax(Tensor x, str kind) -> Tensor", _fake_amax)
def compute_amax(x: Tensor, kind: str) -> Tensor:
    return implementation(x.device).compute_amax(x, kind)


def _fake_quantize(x: Tensor, dtype: torch.dtype, kind: str, margin: int, amax: Tensor | None) -> tuple[Tensor, Tensor]:
    shape = scale_shape(x.shape, *KINDS[kind]) if amax is None else amax.shape
    return x.new_empty(x.shape, dtype=dtype), x.new_empty(shape, dtype=torch.float32)


@_define("quantize(Tensor x, ScalarType dtype, str kind, int margin, Tensor? amax) -> (Tensor, Tensor)", _fake_quantize)
def quantize(x: Tensor, dtype: torch.dtype, kind: str, margin: int, amax: Tensor | None) -> tuple[Tensor, Tensor]:
    return implementation(x.device).quantize(x, dtype, kind, margin, amax)


def _fake_operand(x: Tensor, dtype: torch.dtype, kind: str, margin: int, sides: str, window: list[Tensor]) -> list[Tensor]:
    parts = []
    for side, shape in (("rows", x.shape), ("columns", x.shape[::-1])):
        if sides in (side, "both"):
            parts += [x.new_empty(shape, dtype=dtype), empty_operand_scale(torch.Size(shape), kind, x.device)]
    return [*parts, x.new_empty((), dtype=torch.float32)] if len(window) > 1 else parts


@_define(
    "quantize_operand(Tensor x, ScalarType dtype, str kind, int margin, str sides, Tensor[] window) -> Tensor[]",
    _fake_operand,
)
def quantize_operand(x: Tensor, dtype: torch.dtype, kind: str, margin: int, sides: str, window: list[Tensor]) -> list[Tensor]:
    """window: empty, an amax to scale by, or that and whether to."""
    pair = (window[0], window[1] if len(window) > 1 else None) if window else None
    return implementation(x.device).quantize_operand(x, dtype, kind, margin, sides, pair)


def _fake_elementwise(x: Tensor, dequant_scale: Tensor, dtype: torch.dtype) -> Tensor:
    return x.new_empty(x.shape, dtype=dtype)


@_define("encode(Tensor x, Tensor dequant_scale, ScalarType dtype) -> Tensor", _fake_elementwise)
def encode(x: Tensor, dequant_scale: Tensor, dtype: torch.dtype) -> Tensor:
    return implementation(x.device).encode(x, dequant_scale, dtype)


@_define("dequantize(Tensor codes, Tensor dequant_scale, ScalarType dtype) -> Tensor", _fake_elementwise)
def dequantize(codes: Tensor, dequant_scale: Tensor, dtype: torch.dtype) -> Tensor:
    return implementation(codes.device).dequantize(codes, dequant_scale, dtype)


def _fake_split(codes: Tensor, residual: Tensor, dequant_scale: Tensor, dtype: torch.dtype) -> Tensor:
    return codes.new_empty(codes.shape, dtype=dtype)


@_define("split_dequantize(Tensor codes, Tensor residual, Tensor dequant_scale, ScalarType dtype) -> Tensor", _fake_split)
def split_dequantize(codes: Tensor, residual: Tensor, dequant_scale: Tensor, dtype: torch.dtype) -> Tensor:
    return implementation(codes.device).split_dequantize(codes, residual, dequant_scale, dtype)


@_define("activate_again(Tensor x, str activation, Tensor after) -> Tensor", lambda x, activation, after: torch.empty_like(x))
def activate_again(x: Tensor, activation: str, after: Tensor) -> Tensor:
    """An activation computed a second time, in the backward pass: a compiler may not put it before `after` and keep it."""
    return ACTIVATIONS[activation].forward(x)


@_define("all_finite(Tensor x) -> Tensor", lambda x: x.new_empty((), dtype=torch.bool))
def all_finite(x: Tensor) -> Tensor:
    return implementation(x.device).all_finite(x)


def _fake_matmul(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out_dtype: torch.dtype, fast: bool) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[0]), dtype=out_dtype)


@_define(
    "matmul(Tensor a, Tensor a_dequant_scale, Tensor b, Tensor b_dequant_scale, ScalarType out_dtype, "
    "bool fast_accumulation) -> Tensor",
    _fake_matmul,
)
def matmul(
    a_MK: Tensor,
    a_dequant_scale: Tensor,
    b_NK: Tensor,
    b_dequant_scale: Tensor,
    out_dtype: torch.dtype,
    fast_accumulation: bool,
) -> Tensor:
    """K and N are padded here with zero codes: after scaling, so that padding never enters an amax."""
    num_out = b_NK.shape[0]
    has_scale_for_each_row = kind_of_scale(b_dequant_scale, b_NK.shape) in ("row", "block 1x128")
    a_MK, b_NK = _pad_codes(a_MK, 1), _pad_codes(b_NK, ALIGNMENT)
    if has_scale_for_each_row and b_NK.shape[0] > num_out:
        b_dequant_scale = F.pad(b_dequant_scale, (0, 0, 0, b_NK.shape[0] - num_out), value=1.0)
    run = implementation(a_MK.device).matmul
    return run(a_MK, a_dequant_scale, b_NK, b_dequant_scale, out_dtype, fast_accumulation)[:, :num_out].contiguous()


@register_flop_formula(torch.ops.octet.matmul)
def _matmul_flops(
    a_shape: tuple[int, int], a_scale: Any, b_shape: tuple[int, int], *_args: Any, out_shape: Any = None, **_options: Any
) -> int:
    """2 · M · N · K, whatever is added to them."""
    return 2 * a_shape[0] * b_shape[0] * a_shape[1]


def _pad_codes(codes: Tensor, row_multiple: int) -> Tensor:
    rows, columns = -codes.shape[0] % row_multiple, -codes.shape[1] % ALIGNMENT
    if not rows and not columns:
        return codes
    return F.pad(codes.view(torch.uint8), (0, columns, 0, rows)).view(codes.dtype)
