"""FP8 gradients on a CUDA device: norm, accumulation, and the sum of shards. The twins are in `worker/kernels/reference.py`.

Sums over programs are written down and added by torch in one order: the same result in every run.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker.kernels.cuda import language
from worker.kernels.cuda.launching import Launcher
from worker.kernels.formats import finite_or_nan
from worker.kernels.held import hold

CHUNK = 4096
"""Elements that a program reads."""
_EXACT = {"enable_fp_fusion": False}


# The columns of the table of gradients whose norms are taken, int64. A gradient without a scale holds fp32 values.
_GRADIENT, _SCALE, _NUM_ELEMENTS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
_FIRST_SUM, _NUM_SUMS = tl.constexpr(3), tl.constexpr(4)  # multiples of 4, 16 bytes
_NUM_COLUMNS = tl.constexpr(5)
SUMS = 1024
"""Partial sums that a program adds at a time."""


@triton.jit
def _squares(address, start, num_elements, FORMAT: tl.constexpr, ALIGNED: tl.constexpr, CHUNK: tl.constexpr):
    pointer = address.to(tl.pointer_type(tl.float32 if FORMAT == "fp32" else tl.uint8)) + start
    remaining = tl.minimum(num_elements - start, CHUNK).to(tl.int32)
    if ALIGNED:
        pointer, remaining = tl.multiple_of(pointer, 16), tl.multiple_of(remaining, 16)
    at = tl.arange(0, CHUNK)
    values = language.decode(tl.load(pointer + at, mask=at < remaining, other=0), FORMAT)
    return tl.sum(values * values, 0)


@triton.jit
def sums_of_squares_kernel(table, chunks, partial, ALIGNED: tl.constexpr, CHUNK: tl.constexpr):
    """A program for each chunk of each gradient. chunks: int32, (the gradient's row, the chunk's number); some are empty."""
    row = table + tl.load(chunks + 2 * tl.program_id(0)) * _NUM_COLUMNS
    start = tl.load(chunks + 2 * tl.program_id(0) + 1).to(tl.int64) * CHUNK
    address, num_elements = tl.load(row + _GRADIENT), tl.load(row + _NUM_ELEMENTS)
    if tl.load(row + _SCALE) != 0:
        tl.store(partial + tl.program_id(0), _squares(address, start, num_elements, "e4m3", ALIGNED, CHUNK))
    else:
        tl.store(partial + tl.program_id(0), _squares(address, start, num_elements, "fp32", ALIGNED, CHUNK))


@triton.jit
def norms_kernel(table, partial, out, SUMS: tl.constexpr):
    """A program for each gradient adds its sums, in one order, and takes the root."""
    row = table + tl.program_id(0) * _NUM_COLUMNS
    first, num_sums = tl.multiple_of(tl.load(row + _FIRST_SUM), 4), tl.multiple_of(tl.load(row + _NUM_SUMS), 4)
    at, total = tl.arange(0, SUMS), tl.zeros((SUMS,), tl.float32)
    for start in tl.range(0, num_sums, SUMS):
        total += tl.load(partial + first + start + at, mask=at < num_sums - start, other=0.0)
    norm = tl.sqrt_rn(tl.sum(total, 0))
    scale = tl.load(row + _SCALE)
    if scale != 0:  # mul_(-1) leaves a negative scale
        norm = tl.abs(norm * tl.load(scale.to(tl.pointer_type(tl.float32))))
    tl.store(out + tl.program_id(0), norm)


_launch_squares, _launch_norms = Launcher(sums_of_squares_kernel), Launcher(norms_kernel)
_SENT: dict[tuple[str, torch.device], tuple[list[Any], Tensor]] = {}
"""By name and device, what was last sent there and from what it was made: it is sent again only when that has changed."""


def norms(codes: Sequence[Tensor], dequant_scales: Sequence[Tensor], values: Sequence[Tensor]) -> Tensor:
    """See the reference. Two launches for all of them, and a table of addresses that is sent when one has changed."""
    gradients = [each.contiguous() for each in (*codes, *values)]  # a copy has to outlive the launch
    device, sizes = gradients[0].device, [each.numel() for each in gradients]
    scales = [scale.data_ptr() for scale in dequant_scales] + [0] * len(values)
    addresses = [each.data_ptr() for each in gradients]
    num_sums = [4 * language.cdiv(size, 4 * CHUNK) for size in sizes]
    firsts = [0, *accumulate(num_sums)][:-1]
    rows = [*zip(addresses, scales, sizes, firsts, num_sums, strict=True)]
    table = _sent("table", rows, device, torch.int64, lambda rows: rows)
    chunks = _sent("chunks", num_sums, device, torch.int32, _chunks)
    is_aligned = all(address % 16 == size % 16 == 0 for address, size in zip(addresses, sizes, strict=True))
    partial, out = chunks.new_empty(len(chunks), dtype=torch.float32), chunks.new_empty(len(rows), dtype=torch.float32)
    _launch_squares(len(chunks), table, chunks, partial, is_aligned, CHUNK)
    _launch_norms(len(rows), table, partial, out, SUMS)
    return out


def _chunks(num_sums: list[int]) -> list[tuple[int, int]]:
    return [(row, chunk) for row, number in enumerate(num_sums) for chunk in range(number)]


def _sent(
    name: str, content: list[Any], device: torch.device, dtype: torch.dtype, rows: Callable[[list[Any]], list[Any]]
) -> Tensor:
    """The rows made of a content, on the device. The host does not wait."""
    known = _SENT.get((name, device))
    if known is not None and known[0] == content:
        hold(known[1])
        return known[1]
    host = torch.tensor(rows(content), dtype=dtype, pin_memory=device.type == "cuda")
    on_device = host.to(device, non_blocking=True)
    hold(on_device, host)
    if type(on_device) is Tensor:  # a fake one belongs to its mode
        _SENT[name, device] = (content, on_device)
    return on_device


@triton.jit
def _total(codes, other, dequant_scale, alpha, at, inside):
    values = language.decode(tl.load(codes + at, mask=inside, other=0), "e4m3") * dequant_scale
    return values + tl.load(other + at, mask=inside, other=0).to(tl.float32) * alpha


@triton.jit
def accumulated_amax_kernel(codes, dequant_scale, other, alpha, amax, num_elements, count, CHUNK: tl.constexpr):
    """count: None, or the int64 number of draws so far, which the first program increases for `accumulate_kernel`."""
    if count is not None:
        tl.store(count, tl.load(count) + 1, mask=tl.program_id(0) == 0)
    at = tl.program_id(0).to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
    total = _total(codes, other, tl.load(dequant_scale), alpha, at, at < num_elements)
    language.atomic_amax(amax, language.amax(tl.where(at < num_elements, total, 0.0), 0))


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
    bits = language.roundable(total * tl.div_rn(1.0, tl.load(new_scale)), -6)
    rounded = tl.where(bits < 0x7F800000, language.stochastic_codes(bits, numbers, 3, 0x7E), 0x7F)
    rounded |= (total.to(tl.int32, bitcast=True) >> 24) & 0x80
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
