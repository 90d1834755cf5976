"""FP8 gradients on a CUDA device: norm, accumulation, and the sum of shards. The twins are in `worker/kernels/reference.py`.

Sums over programs are written down and added by torch in one order: the same result in every run.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker.kernels.cuda import language
from worker.kernels.formats import finite_or_nan

CHUNK = 4096
"""Elements that a program reads."""
_EXACT = {"enable_fp_fusion": False}


@triton.jit
def sum_of_squares_kernel(codes, partial, num_elements, CHUNK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
    values = language.decode(tl.load(codes + at, mask=at < num_elements, other=0), "e4m3")
    tl.store(partial + tl.program_id(0), tl.sum(values * values, 0))


def norms(codes: Sequence[Tensor], dequant_scales: Sequence[Tensor]) -> list[Tensor]:
    """See the reference. A launch for each, and four for all of them."""
    partials = [_sums_of_squares(each) for each in codes]
    roots = torch._foreach_sqrt(torch._foreach_norm(partials, 1))
    return list(torch._foreach_abs(torch._foreach_mul(roots, list(dequant_scales))))  # mul_(-1) leaves a negative scale


def _sums_of_squares(codes: Tensor) -> Tensor:
    """The sum of squares of each program's chunk."""
    flat = codes.view(torch.uint8).reshape(-1)
    partial = torch.empty(language.cdiv(flat.numel(), CHUNK), device=flat.device)
    sum_of_squares_kernel[(len(partial),)](flat, partial, flat.numel(), CHUNK)
    return partial


@triton.jit
def _total(codes, other, dequant_scale, alpha, at, inside):
    values = language.decode(tl.load(codes + at, mask=inside, other=0), "e4m3") * dequant_scale
    return values + tl.load(other + at, mask=inside, other=0).to(tl.float32) * alpha


@triton.jit
def accumulated_amax_kernel(codes, dequant_scale, other, alpha, amax, num_elements, CHUNK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
    total = _total(codes, other, tl.load(dequant_scale), alpha, at, at < num_elements)
    language.atomic_amax(amax, language.amax(tl.where(at < num_elements, total, 0.0), 0))


@triton.jit(do_not_specialize=["seed", "step", "stream"])
def accumulate_kernel(codes, dequant_scale, other, alpha, new_scale, num_elements, seed, step, stream, CHUNK: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * CHUNK
    at = first + tl.arange(0, CHUNK)
    total = _total(codes, other, tl.load(dequant_scale), alpha, at, at < num_elements)
    seed, step, stream = tl.cast(seed, tl.int64), tl.cast(step, tl.int64), tl.cast(stream, tl.int64)
    first_draw = first // language.NUMBERS_PER_DRAW
    numbers = tl.reshape(language.random_numbers(seed, step, stream, first_draw, CHUNK // 128, 128), (CHUNK,))
    bits = language.roundable(total * tl.div_rn(1.0, tl.load(new_scale)), -6)
    rounded = tl.where(bits < 0x7F800000, language.stochastic_codes(bits, numbers, 3, 0x7E), 0x7F)
    rounded |= (total.to(tl.int32, bitcast=True) >> 24) & 0x80
    tl.store(codes + at, rounded.to(tl.uint8), mask=at < num_elements)


def accumulate_(codes: Tensor, dequant_scale: Tensor, other: Tensor, alpha: float, draw: Sequence[int]) -> None:
    """See the reference. Two passes over both."""
    flat, addend = codes.view(torch.uint8).view(-1), other.contiguous().view(-1)
    amax, grid = torch.zeros((), device=codes.device), (language.cdiv(flat.numel(), CHUNK),)
    accumulated_amax_kernel[grid](flat, dequant_scale, addend, alpha, amax, flat.numel(), CHUNK, **_EXACT)
    new_scale = finite_or_nan(amax, torch.float8_e4m3fn)
    accumulate_kernel[grid](flat, dequant_scale, addend, alpha, new_scale, flat.numel(), *draw, CHUNK, **_EXACT)
    dequant_scale.copy_(new_scale)


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


def mean_of_shards(codes_RS: Tensor, scales_R: Tensor) -> tuple[Tensor, Tensor]:
    """See the reference. One read of every rank's codes."""
    num_ranks, num_elements = codes_RS.shape
    mean_S, amax = torch.empty(num_elements, device=codes_RS.device), torch.zeros((), device=codes_RS.device)
    mean_of_shards_kernel[(language.cdiv(num_elements, CHUNK),)](
        codes_RS.view(torch.uint8),
        scales_R.contiguous(),
        mean_S,
        amax,
        num_elements,
        codes_RS.stride(0),
        num_ranks,
        CHUNK,
        **_EXACT,
    )
    return mean_S, amax
