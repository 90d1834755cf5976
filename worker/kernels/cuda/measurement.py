"""Measure how well codes hold a matrix.

The twin is `reference.measure`; results are equal up to the order of sums and the last bits of a
logarithm. One program measures the whole sample: it is small, and partial sums of several programs
would need a second launch. Shape suffixes: M rows, N columns.
"""

import triton
import triton.language as tl
from torch import Tensor

from octet.worker.kernels import reference
from octet.worker.kernels.cuda import language
from octet.worker.kernels.cuda.launching import Launcher
from octet.worker.kernels.cuda.rescale import FORMAT_NAMES
from octet.worker.kernels.formats import SCALED_FORMATS
from octet.worker.kernels.sampling import MOST_DECIBELS, sampled_rows
from octet.worker.kernels.scales import ScaledCodes, ScaleKind

TILE, MAX_COLUMNS, WARPS = 4096, 1024, 16
_MOST_DECIBELS = tl.constexpr(MOST_DECIBELS)
_DECIBELS_PER_BINADE = tl.constexpr(3.0102999566398120)


@triton.jit
def _measure_sample(
    x,
    stride,
    column_stride,
    codes,
    code_stride,
    code_column_stride,
    scales,
    scale_stride_m,
    scale_stride_n,
    stored_scale,
    out,
    num_rows,
    num_columns,
    row_step,
    SCALE_ROWS: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr,
    FORMAT: tl.constexpr,
    LIMIT: tl.constexpr,
    HAS_STORED_SCALE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Write the five numbers of every row_step-th row. num_rows: of the sample. SCALE_ROWS · SCALE_COLUMNS share a scale."""
    amax = tl.zeros((ROWS, COLUMNS), tl.float32)
    largest_scale = tl.zeros((ROWS, COLUMNS), tl.float32)
    num_clamped, num_lost = tl.zeros((ROWS, COLUMNS), tl.int32), tl.zeros((ROWS, COLUMNS), tl.int32)
    signal, noise = tl.zeros((ROWS, COLUMNS), tl.float64), tl.zeros((ROWS, COLUMNS), tl.float64)
    for first_row in range(0, num_rows, ROWS):
        sampled = first_row + tl.arange(0, ROWS)
        row = (sampled.to(tl.int64) * row_step)[:, None]
        for first_column in range(0, num_columns, COLUMNS):
            column = (first_column + tl.arange(0, COLUMNS)).to(tl.int64)[None, :]
            mask = (sampled < num_rows)[:, None] & (column < num_columns)
            wide = tl.load(x + row * stride + column * column_stride, mask=mask, other=0.0).to(tl.float32)
            code = tl.load(codes + row * code_stride + column * code_column_stride, mask=mask, other=0)
            place = row // SCALE_ROWS * scale_stride_m + column // SCALE_COLUMNS * scale_stride_n
            scale = tl.load(scales + place, mask=mask, other=0.0)
            stored = language.decode(code, FORMAT)
            values = stored * scale
            magnitude, error = tl.abs(wide), wide - values
            num_clamped += ((tl.abs(stored) == LIMIT) & (magnitude > tl.abs(values))).to(tl.int32)
            num_lost += ((stored == 0) & (magnitude > 0)).to(tl.int32)
            signal += (wide * wide).to(tl.float64)
            noise += (error * error).to(tl.float64)
            amax = language.max_magnitude(amax, magnitude)
            largest_scale = language.max_magnitude(largest_scale, scale)
    factor = 1.0
    if HAS_STORED_SCALE:
        factor = tl.load(stored_scale)
    total_noise = tl.sum(tl.sum(noise, 1), 0).to(tl.float32)
    ratio = tl.div_rn(tl.sum(tl.sum(signal, 1), 0).to(tl.float32), tl.where(total_noise == 0, 1.0, total_noise))
    num_elements = tl.full((), 0.0, tl.float32) + num_rows * num_columns
    tl.store(out, language.amax(language.amax(amax, 1), 0) * factor)
    tl.store(out + 1, language.amax(language.amax(largest_scale, 1), 0) * factor)
    tl.store(out + 2, tl.div_rn(tl.sum(tl.sum(num_clamped, 1), 0).to(tl.float32), num_elements))
    tl.store(out + 3, tl.div_rn(tl.sum(tl.sum(num_lost, 1), 0).to(tl.float32), num_elements))
    tl.store(out + 4, tl.where(total_noise == 0, _MOST_DECIBELS, tl.log2(ratio) * _DECIBELS_PER_BINADE))


_launch = Launcher(_measure_sample, num_warps=WARPS, enable_fp_fusion=False)


def measure(x_MN: Tensor, quantized: ScaledCodes, stored_scale: Tensor | None, out: Tensor) -> None:
    """See the reference. One launch."""
    if x_MN.numel() == 0:
        reference.measure(x_MN, quantized, stored_scale, out)
        return
    codes, dequant_scale, kind = quantized
    rows, num_columns = sampled_rows(*x_MN.shape), x_MN.shape[1]
    scale_strides = (0, 0) if kind is ScaleKind.TENSOR else (dequant_scale.stride(0), 0)
    if kind.is_blockwise:
        scale_strides = (dequant_scale.stride(0), dequant_scale.stride(1))
    columns = min(triton.next_power_of_2(num_columns), MAX_COLUMNS)
    strided = (x_MN, *x_MN.stride(), codes, *codes.stride(), dequant_scale, *scale_strides)
    _launch(
        1, *strided, stored_scale, out, len(rows), num_columns, rows.step, *kind.block, FORMAT_NAMES[codes.dtype],
        SCALED_FORMATS[codes.dtype].max, stored_scale is not None, max(1, TILE // columns), columns,
    )  # fmt: skip
