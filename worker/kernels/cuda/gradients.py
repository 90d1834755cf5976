"""FP8 gradients on a CUDA device: accumulation, clamping, and the sum of shards.

Twins: `worker/kernels/gradient_reference.py`.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from octet.worker.kernels.cuda import language
from octet.worker.kernels.cuda.launching import Launcher
from octet.worker.kernels.formats import finite_or_nan

CHUNK = 4096
"""Elements that a program reads."""
_EXACT = {"enable_fp_fusion": False}


@triton.jit
def _total(codes, other, dequant_scale, alpha, at, inside):
    values = language.decode(tl.load(codes + at, mask=inside, other=0), "e4m3") * dequant_scale
    return values + tl.load(other + at, mask=inside, other=0).to(tl.float32) * alpha


@triton.jit
def accumulated_amax_kernel(codes, dequant_scale, other, alpha, amax, num_elements, count, CHUNK: tl.constexpr):
    """count: None, or the int64 number of draws so far, which the first program increases for `accumulate_kernel`."""
    if count is not None:
        is_first = tl.program_id(0) == 0
        tl.store(count, tl.load(count, mask=is_first, other=0) + 1, mask=is_first)
    at = tl.program_id(0).to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
    total = _total(codes, other, tl.load(dequant_scale), alpha, at, at < num_elements)
    language.atomic_amax(amax, language.amax(tl.where(at < num_elements, total, 0.0), 0))


@triton.jit
def _rounded(scaled, values, numbers):
    """E4M3 codes of scaled values, with the signs of values."""
    bits = language.roundable(scaled, -6)
    rounded = tl.where(bits < 0x7F800000, language.stochastic_codes(bits, numbers, 3, 0x7E), 0x7F)
    return rounded | ((values.to(tl.int32, bitcast=True) >> 24) & 0x80)


@triton.jit(do_not_specialize=["seed", "step", "stream", "stride"])
def accumulate_kernel(
    codes, dequant_scale, other, alpha, new_scale, num_elements, seed, step, stream, count, stride, CHUNK: tl.constexpr
):
    first = tl.program_id(0).to(tl.int64) * CHUNK
    at = first + tl.arange(0, CHUNK)
    total = _total(codes, other, tl.load(dequant_scale), alpha, at, at < num_elements)
    seed, step, stream = tl.cast(seed, tl.int64), tl.cast(step, tl.int64), tl.cast(stream, tl.int64)
    if count is not None:
        step += tl.load(count) * tl.cast(stride, tl.int64)
    first_draw = first // language.NUMBERS_PER_DRAW
    numbers = tl.reshape(language.random_numbers(seed, step, stream, first_draw, CHUNK // 128, 128), (CHUNK,))
    rounded = _rounded(total * tl.div_rn(1.0, tl.load(new_scale)), total, numbers)
    tl.store(codes + at, rounded.to(tl.uint8), mask=at < num_elements)


_launch_accumulated_amax = Launcher(accumulated_amax_kernel, **_EXACT)
_launch_accumulate = Launcher(accumulate_kernel, **_EXACT)


def accumulate_(
    codes: Tensor,
    dequant_scale: Tensor,
    other: Tensor,
    alpha: float,
    draw: Sequence[int],
    count: Tensor | None = None,
    stride: int = 1,
) -> None:
    """See the reference. Two passes over both; the host knows no count, so a CUDA graph draws new numbers in each replay."""
    addend, num_elements = other.contiguous(), codes.numel()
    amax, num_programs = torch.zeros((), device=codes.device), language.cdiv(num_elements, CHUNK)
    _launch_accumulated_amax(num_programs, codes, dequant_scale, addend, alpha, amax, num_elements, count, CHUNK)
    new_scale = finite_or_nan(amax, torch.float8_e4m3fn)
    numbers = (num_elements, *draw, count, stride, CHUNK)
    _launch_accumulate(num_programs, codes, dequant_scale, addend, alpha, new_scale, *numbers)
    dequant_scale.copy_(new_scale)


@triton.jit
def _clamped(codes, dequant_scale, low, high, at, inside):
    """The values, and the values clamped; NaN stays."""
    values = language.decode(tl.load(codes + at, mask=inside, other=0), "e4m3") * tl.load(dequant_scale)
    clamped = tl.where(values < low, low, values)
    return values, tl.where(clamped > high, high, clamped)


@triton.jit
def clamped_amax_kernel(codes, dequant_scale, low, high, amax, is_changed, num_elements, count, CHUNK: tl.constexpr):
    """Also raises is_changed, int32 (), to 1 where a value is beyond. count: as in `accumulated_amax_kernel`."""
    if count is not None:
        is_first = tl.program_id(0) == 0
        tl.store(count, tl.load(count, mask=is_first, other=0) + 1, mask=is_first)
    at = tl.program_id(0).to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
    inside = at < num_elements
    values, clamped = _clamped(codes, dequant_scale, low, high, at, inside)
    language.atomic_amax(amax, language.amax(tl.where(inside, clamped, 0.0), 0))
    tl.atomic_max(is_changed, tl.max((inside & (values != clamped)).to(tl.int32), 0), sem="relaxed")


@triton.jit(do_not_specialize=["seed", "step", "stream", "stride"])
def clamp_kernel(
    codes, dequant_scale, low, high, new_scale, is_changed, num_elements, seed, step, stream, count, stride, CHUNK: tl.constexpr
):
    first = tl.program_id(0).to(tl.int64) * CHUNK
    at = first + tl.arange(0, CHUNK)
    inside = at < num_elements
    _, clamped = _clamped(codes, dequant_scale, low, high, at, inside)
    seed, step, stream = tl.cast(seed, tl.int64), tl.cast(step, tl.int64), tl.cast(stream, tl.int64)
    if count is not None:
        step += tl.load(count) * tl.cast(stride, tl.int64)
    first_draw = first // language.NUMBERS_PER_DRAW
    numbers = tl.reshape(language.random_numbers(seed, step, stream, first_draw, CHUNK // 128, 128), (CHUNK,))
    rounded = _rounded(tl.div_rn(clamped, tl.load(new_scale)), clamped, numbers)
    tl.store(codes + at, rounded.to(tl.uint8), mask=inside & (tl.load(is_changed) != 0))


_launch_clamped_amax = Launcher(clamped_amax_kernel, **_EXACT)
_launch_clamp = Launcher(clamp_kernel, **_EXACT)


def clamp_(
    codes: Tensor,
    dequant_scale: Tensor,
    bounds: Sequence[float],
    draw: Sequence[int],
    count: Tensor | None = None,
    stride: int = 1,
) -> None:
    """See the twin. Two passes over the codes; the second one writes them."""
    low, high, limit = bounds
    num_elements, num_programs = codes.numel(), language.cdiv(codes.numel(), CHUNK)
    amax, is_beyond = torch.zeros((), device=codes.device), torch.zeros((), dtype=torch.int32, device=codes.device)
    _launch_clamped_amax(num_programs, codes, dequant_scale, low, high, amax, is_beyond, num_elements, count, CHUNK)
    unit = torch.full((), limit or 1.0, device=codes.device)
    is_changed, new_scale = (is_beyond != 0) & amax.isfinite(), finite_or_nan(amax / unit, torch.float8_e4m3fn) * unit
    numbers = (num_elements, *draw, count, stride, CHUNK)
    _launch_clamp(num_programs, codes, dequant_scale, low, high, new_scale, is_changed.int(), *numbers)
    dequant_scale.copy_(torch.where(is_changed, new_scale, dequant_scale))


@triton.jit
def mean_of_shards_kernel(codes, scales, mean, amax, num_elements, stride, NUM_RANKS: tl.constexpr, CHUNK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
    inside = at < num_elements
    total = tl.zeros((CHUNK,), tl.float32)
    for rank in tl.static_range(NUM_RANKS):
        shard = tl.load(codes + rank * stride + at, mask=inside, other=0)
        total += language.decode(shard, "e4m3") * tl.load(scales + rank)
    total = tl.div_rn(total, tl.full((CHUNK,), NUM_RANKS, tl.float32))
    tl.store(mean + at, total, mask=inside)
    language.atomic_amax(amax, language.amax(tl.where(inside, total, 0.0), 0))


_launch_mean_of_shards = Launcher(mean_of_shards_kernel, **_EXACT)


def mean_of_shards(codes_RS: Tensor, scales_R: Tensor) -> tuple[Tensor, Tensor]:
    """See the reference. One read of every rank's codes."""
    num_ranks, num_elements = codes_RS.shape
    mean_S, amax = torch.empty(num_elements, device=codes_RS.device), torch.zeros((), device=codes_RS.device)
    num_programs, scales = language.cdiv(num_elements, CHUNK), scales_R.contiguous()
    stride = codes_RS.stride(0)
    _launch_mean_of_shards(num_programs, codes_RS, scales, mean_S, amax, num_elements, stride, num_ranks, CHUNK)
    return mean_S, amax
