"""Norms of gradients on a CUDA device, and clipping by them: E4M3 codes and values of any dtype, by tables of addresses.

Twins: `worker/kernels/gradient_reference.py`. Sums over programs are stored and added in one order,
so every run has the same result. When an address has changed, a table is sent, without a further
launch.
"""

import ctypes
import math
from collections.abc import Sequence
from functools import lru_cache, reduce
from itertools import accumulate
from operator import or_

import torch
import triton
import triton.language as tl
from torch import Tensor

from octet.worker.kernels.cuda import language, tables
from octet.worker.kernels.cuda.launching import Launcher
from octet.worker.kernels.torch_private import foreach_mul_

CHUNK, WARPS = 8192, 8
"""Elements that a program reads."""
SUMS = 8192
"""Partial sums that a program adds at a time."""
FORMATS = {torch.float8_e4m3fn: 0, torch.float32: 1, torch.bfloat16: 2, torch.float16: 3, torch.float64: 4}
"""The number of each dtype in the table."""

# The columns of the table of gradients, int64. A gradient that is not in codes has no scale.
_GRADIENT, _SCALE, _NUM_ELEMENTS, _FORMAT = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
_FIRST_SUM, _NUM_SUMS = tl.constexpr(4), tl.constexpr(5)  # multiples of 4, 16 bytes
_NUM_COLUMNS = tl.constexpr(6)


@triton.jit
def _pointer(address, start, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    pointer = address.to(tl.pointer_type(DTYPE)) + start
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def _part(
    address,
    start,
    remaining,
    scale,
    FORMAT: tl.constexpr,
    DTYPE: tl.constexpr,
    ORDER: tl.constexpr,
    ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Return what a chunk adds to its gradient's norm before the root: a sum of powers, or the largest magnitude."""
    at = tl.arange(0, CHUNK)
    loaded = tl.load(_pointer(address, start, DTYPE, ALIGNED) + at, mask=at < remaining, other=0)
    values = language.decode(loaded, FORMAT) * scale
    if ORDER == "inf":
        return language.amax(values, 0)
    elif ORDER == 2:
        return tl.sum(values * values, 0)
    else:
        return tl.sum(tl.exp2(tl.log2(tl.abs(values)) * ORDER), 0)


@triton.jit
def norm_parts_kernel(table, chunks, parts, ORDER: tl.constexpr, ALIGNED: tl.constexpr, CHUNK: tl.constexpr):
    """A program for each chunk of each gradient. chunks: int32, (the gradient's row, the chunk's number); some are empty."""
    row = table + tl.load(chunks + 2 * tl.program_id(0)) * _NUM_COLUMNS
    start = tl.load(chunks + 2 * tl.program_id(0) + 1).to(tl.int64) * CHUNK
    address, out, form = tl.load(row + _GRADIENT), parts + tl.program_id(0), tl.load(row + _FORMAT)
    remaining = tl.minimum(tl.load(row + _NUM_ELEMENTS) - start, CHUNK).to(tl.int32)
    if ALIGNED:
        remaining = tl.multiple_of(remaining, 16)
    if form == 0:
        scale = tl.load(tl.load(row + _SCALE).to(tl.pointer_type(tl.float32)))
        tl.store(out, _part(address, start, remaining, scale, "e4m3", tl.uint8, ORDER, ALIGNED, CHUNK))
    elif form == 1:
        tl.store(out, _part(address, start, remaining, 1.0, "wide", tl.float32, ORDER, ALIGNED, CHUNK))
    elif form == 2:
        tl.store(out, _part(address, start, remaining, 1.0, "wide", tl.bfloat16, ORDER, ALIGNED, CHUNK))
    elif form == 3:
        tl.store(out, _part(address, start, remaining, 1.0, "wide", tl.float16, ORDER, ALIGNED, CHUNK))
    else:
        tl.store(out, _part(address, start, remaining, 1.0, "wide", tl.float64, ORDER, ALIGNED, CHUNK))


@triton.jit
def _norm_of(parts, num_parts, ORDER: tl.constexpr, SUMS: tl.constexpr):
    at, total = tl.arange(0, SUMS), tl.zeros((SUMS,), tl.float32)
    for start in tl.range(0, num_parts, SUMS):
        found = tl.load(parts + start + at, mask=at < num_parts - start, other=0.0)
        if ORDER == "inf":  # of two magnitudes the larger, or NaN, by their bits
            larger = tl.maximum(total.to(tl.int32, bitcast=True), found.to(tl.int32, bitcast=True))
            total = larger.to(tl.float32, bitcast=True)
        else:
            total += found
    if ORDER == "inf":
        return language.amax(total, 0)
    elif ORDER == 2:
        return tl.sqrt_rn(tl.sum(total, 0))
    else:
        return tl.exp2(tl.log2(tl.sum(total, 0)) / ORDER)


@triton.jit
def norms_kernel(table, parts, out, ORDER: tl.constexpr, SUMS: tl.constexpr):
    """A program for each gradient adds what its chunks have found, in one order, and takes the root."""
    row = table + tl.program_id(0) * _NUM_COLUMNS
    first, num_parts = tl.multiple_of(tl.load(row + _FIRST_SUM), 4), tl.multiple_of(tl.load(row + _NUM_SUMS), 4)
    tl.store(out + tl.program_id(0), _norm_of(parts + first, num_parts, ORDER, SUMS))


@triton.jit
def total_norm_kernel(parts, out, num_quads, ORDER: tl.constexpr, SUMS: tl.constexpr):
    """One program adds the parts of all gradients and takes the root. num_quads: a quarter of the number of parts."""
    tl.store(out, _norm_of(parts, 4 * num_quads, ORDER, SUMS))


@triton.jit
def _scale_chunk(address, start, remaining, factor, DTYPE: tl.constexpr, ALIGNED: tl.constexpr, CHUNK: tl.constexpr):
    at, pointer = tl.arange(0, CHUNK), _pointer(address, start, DTYPE, ALIGNED)
    values = tl.load(pointer + at, mask=at < remaining, other=0)
    if tl.float64 == DTYPE:
        tl.store(pointer + at, values * factor.to(tl.float64), mask=at < remaining)
    else:
        tl.store(pointer + at, language.cast(values.to(tl.float32) * factor, DTYPE), mask=at < remaining)


@triton.jit(do_not_specialize=["max_norm_bits"])
def clip_kernel(table, chunks, norm, max_norm_bits, ALIGNED: tl.constexpr, CHUNK: tl.constexpr):
    """A program for each gradient in codes, whose scale it multiplies, and for each chunk of the others."""
    row = table + tl.load(chunks + 2 * tl.program_id(0)) * _NUM_COLUMNS
    start = tl.load(chunks + 2 * tl.program_id(0) + 1).to(tl.int64) * CHUNK
    max_norm = tl.cast(max_norm_bits, tl.int32).to(tl.float32, bitcast=True)
    factor = tl.div_rn(1.0, tl.load(norm) + 1e-6) * max_norm
    factor = tl.where(factor > 1.0, 1.0, factor)  # NaN stays
    address, form = tl.load(row + _GRADIENT), tl.load(row + _FORMAT)
    remaining = tl.minimum(tl.load(row + _NUM_ELEMENTS) - start, CHUNK).to(tl.int32)
    if ALIGNED:
        remaining = tl.multiple_of(remaining, 16)
    if form == 0:
        scale = tl.load(row + _SCALE).to(tl.pointer_type(tl.float32))
        tl.store(scale, tl.load(scale) * factor)
    elif form == 1:
        _scale_chunk(address, start, remaining, factor, tl.float32, ALIGNED, CHUNK)
    elif form == 2:
        _scale_chunk(address, start, remaining, factor, tl.bfloat16, ALIGNED, CHUNK)
    elif form == 3:
        _scale_chunk(address, start, remaining, factor, tl.float16, ALIGNED, CHUNK)
    else:
        _scale_chunk(address, start, remaining, factor, tl.float64, ALIGNED, CHUNK)


_launch_parts = Launcher(norm_parts_kernel, num_warps=WARPS)
_launch_norms = Launcher(norms_kernel, num_warps=WARPS)
_launch_total = Launcher(total_norm_kernel, num_warps=WARPS)
_launch_clip = Launcher(clip_kernel, num_warps=WARPS, enable_fp_fusion=False)


def norms(gradients: Sequence[Tensor], scaled: Sequence[Tensor], order: float) -> Tensor:
    """See the twin. Two launches; in fp32, whatever the gradients' dtypes."""
    if any(map(Tensor.is_complex, gradients)):
        scaled = [_as_real(each, order) for each in scaled]
        gradients = [_as_real(each, order) for each in gradients]
    table, parts, _ = _parts(gradients, scaled, order)
    out = parts.new_empty(len(gradients))
    _launch_norms(len(gradients), table, parts, out, _as_constant(order), SUMS)
    return out


def total_norm(gradients: Sequence[Tensor], scaled: Sequence[Tensor], order: float) -> Tensor:
    """See the twin. Two launches; in fp32, whatever the gradients' dtypes."""
    if any(map(Tensor.is_complex, gradients)):
        scaled = [_as_real(each, order) for each in scaled]
        gradients = [_as_real(each, order) for each in gradients]
    _, parts, _ = _parts(gradients, scaled, order)
    out = parts.new_empty(())
    _launch_total(1, parts, out, len(parts) // 4, _as_constant(order), SUMS)
    return out


def clip_(gradients: Sequence[Tensor], scaled: Sequence[Tensor], norm: Tensor, max_norm: float) -> None:
    """See the twin. One launch; one more op of torch for values that are not contiguous."""
    if any(map(Tensor.is_complex, gradients)):
        gradients, scaled = [_as_real(each) for each in gradients], [_as_real(each) for each in scaled]
    dense = [index for index, gradient in enumerate(gradients) if gradient.is_contiguous()]
    if len(dense) < len(gradients):
        foreach_mul_([each for each in scaled if not each.is_contiguous()], (max_norm / (norm + 1e-6)).clamp(max=1.0))
        gradients, scaled = [gradients[index] for index in dense], [scaled[index] for index in dense]
    if not gradients:
        return
    table, is_aligned, sizes, forms = _table(gradients, scaled)
    num_chunks = [-(-size // CHUNK) if form else 1 for size, form in zip(sizes, forms, strict=True)]
    chunks = tables.send("chunks to scale", num_chunks, norm.device, torch.int32, tables.chunk_rows)
    if not len(chunks):
        return
    bits = ctypes.c_int32.from_buffer(ctypes.c_float(max_norm)).value  # a launch with a Python float would be slow
    _launch_clip(len(chunks), table, chunks, norm, bits, is_aligned, CHUNK)


def _parts(gradients: Sequence[Tensor], scaled: Sequence[Tensor], order: float) -> tuple[Tensor, Tensor, bool]:
    """The table of gradients, and what each chunk adds to the norm."""
    gradients = [each.contiguous() for each in gradients]  # a copy has to outlive the launch
    name = "inf" if order == math.inf else ""  # the check for finite values has other gradients than clipping
    table, is_aligned, sizes, _ = _table(gradients, scaled, name)
    chunks = tables.send(f"chunks {name}", _parts_of(tuple(sizes))[0], table.device, torch.int32, tables.chunk_rows)
    parts = chunks.new_empty(len(chunks), dtype=torch.float32)
    if len(chunks):
        _launch_parts(len(chunks), table, chunks, parts, _as_constant(order), is_aligned, CHUNK)
    return table, parts, is_aligned


def _table(gradients: Sequence[Tensor], scaled: Sequence[Tensor], name: str = "") -> tuple[Tensor, bool, list[int], list[int]]:
    """The table on the device, and whether all addresses and sizes are multiples of 16; the gradients' sizes and formats."""
    sizes, addresses = [*map(Tensor.numel, gradients)], [*map(Tensor.data_ptr, gradients)]
    forms = [FORMATS[each.dtype] for each in gradients]
    scales = [0 if form else scale.data_ptr() for form, scale in zip(forms, scaled, strict=True)]
    num_parts, firsts, bits = _parts_of(tuple(sizes))
    rows = [*zip(addresses, scales, sizes, forms, firsts, num_parts, strict=True)]
    is_aligned = not reduce(or_, addresses, bits) % 16
    return tables.send(f"table {name}", rows, gradients[0].device, torch.int64), is_aligned, sizes, forms


@lru_cache(64)
def _parts_of(sizes: tuple[int, ...]) -> tuple[list[int], list[int], int]:
    """Return the number of parts of each gradient's norm, the index of its first part, and all sizes joined by OR."""
    num_parts = [4 * language.cdiv(size, 4 * CHUNK) for size in sizes]
    return num_parts, [0, *accumulate(num_parts)][:-1], reduce(or_, sizes, 0)


def _as_real(gradient: Tensor, order: float = 2) -> Tensor:
    """Numbers with the norm of complex ones: by order 2 their parts, in the same memory, else their magnitudes."""
    if not gradient.is_complex():
        return gradient
    return torch.view_as_real(gradient) if order == 2 else gradient.abs()


def _as_constant(order: float) -> int | str | float:
    return "inf" if order == math.inf else 2 if order == 2 else order
