"""Products of many weights, each with its own run of rows, in as many launches as of one: twins of `grouped_reference.py`.

A program is one tile of one matrix. Of runs it finds its own by the prefix sum of their tiles, on the device; weights lie
anywhere, and a table has their addresses. Tiles and warps are those of single products (`gemm.py`, `quantization.py`), for an
H200, and not measured there.

torch's `scaled_grouped_mm` is not used: on Hopper it takes E4M3 with E4M3 alone, with scales of rows, and writes bf16
(`_f8_f8_bf16_rowwise_grouped_mm_cuda`), so E5M2 gradients would need the kernels below all the same.

Shape suffixes: E runs and weights, S rows of all runs, P columns of padded runs, see `worker/kernels/grouped.py`.
"""

from functools import cache, reduce
from operator import or_

import torch
import triton
import triton.language as tl
from torch import Tensor

from octet.worker.kernels import grouped_reference
from octet.worker.kernels.cuda import gemm, language, tables
from octet.worker.kernels.cuda.launching import Launcher
from octet.worker.kernels.cuda.quantization import SHARED_SCALE_TILE, TILE_REGISTERS, TILE_WARPS
from octet.worker.kernels.cuda.rescale import FORMAT_NAMES
from octet.worker.kernels.gemm import ALIGNMENT
from octet.worker.kernels.grouped_reference import AMAX_STRIDE, padded_width
from octet.worker.kernels.scales import LinearFormats, Operand, Operands

TILE_K = 128
ROWS_OF_SUM = 32
_FP8 = frozenset((torch.float8_e4m3fn, torch.float8_e5m2))

# The columns of the table of weights, int64: addresses. 0 for what there is not.
_DATA, _SCALE, _AMAX, _NUM_COLUMNS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
_ALIGNMENT = tl.constexpr(ALIGNMENT)


@triton.jit
def _run_of(tile, counts, num_runs, TILE: tl.constexpr, RUNS: tl.constexpr):
    """Return, of the run that a tile of rows lies in: its number, tiles before it, first row, rows, and first padded column."""
    runs = tl.arange(0, RUNS)
    lengths = tl.load(counts + runs, mask=runs < num_runs, other=0)
    num_tiles = (lengths + TILE - 1) // TILE
    run = tl.sum((tl.cumsum(num_tiles, 0) <= tile).to(tl.int32), 0)
    first, length, first_column = _place_of(run, lengths, runs)
    return run, tl.sum(tl.where(runs < run, num_tiles, 0), 0), first, length, first_column


@triton.jit
def _place_of(run, lengths, runs):
    """Return a run's first row, its rows, and its first column among padded ones."""
    first = tl.sum(tl.where(runs < run, lengths, 0), 0)
    parts = tl.sum(tl.where(runs < run, (lengths + _ALIGNMENT - 1) // _ALIGNMENT, 0), 0)
    length = tl.sum(tl.where(runs == run, lengths, 0), 0)
    return first.to(tl.int64), length, parts.to(tl.int64) * _ALIGNMENT  # by which the compiler finds 16 bytes aligned


@triton.jit
def _address(table, row, COLUMN: tl.constexpr, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    pointer = tl.load(table + row * _NUM_COLUMNS + COLUMN).to(tl.pointer_type(DTYPE))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


# fmt: off
@triton.jit
def _matrix_of(
    tile, x, table, counts, num_matrices, num_rows, num_columns,
    HAS_RUNS: tl.constexpr, IN_TABLE: tl.constexpr, ALIGNED: tl.constexpr, RUNS: tl.constexpr, TILE: tl.constexpr,
):
    # fmt: on
    """Return, of the matrix that a tile of rows lies in: number, address, first row, rows, first column, tiles before."""
    if HAS_RUNS:
        matrix, num_before, first, length, first_column = _run_of(tile, counts, num_matrices, TILE, RUNS)
        return matrix, x + first * num_columns, first, length, first_column, num_before
    else:
        num_tiles = tl.cdiv(num_rows, TILE)
        matrix = tile // num_tiles
        first = matrix.to(tl.int64) * num_rows
        in_x = x + first * num_columns
        address = _address(table, matrix, _DATA, x.dtype.element_ty, ALIGNED) if IN_TABLE else in_x
        return matrix, address, first, num_rows, first, matrix * num_tiles


# fmt: off
@triton.jit
def amax_kernel(
    x, table, counts, out, num_matrices, num_rows, num_columns,
    HAS_RUNS: tl.constexpr, IN_TABLE: tl.constexpr, ALIGNED: tl.constexpr, RUNS: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr,
):
    # fmt: on
    """Raise the amax of each matrix: of runs of x, of matrices that lie in x one after the other, or of a table."""
    num_column_tiles = tl.cdiv(num_columns, TILE_N)
    tile, tile_n = tl.program_id(0) // num_column_tiles, tl.program_id(0) % num_column_tiles
    matrix, address, _, length, _, num_before = _matrix_of(
        tile, x, table, counts, num_matrices, num_rows, num_columns, HAS_RUNS, IN_TABLE, ALIGNED, RUNS, TILE_M
    )
    rows = (tile - num_before) * TILE_M + tl.arange(0, TILE_M)
    columns = tile_n * TILE_N + tl.arange(0, TILE_N)
    inputs = address + rows[:, None].to(tl.int64) * num_columns + columns[None, :]
    values = tl.load(inputs, mask=(rows < length)[:, None] & (columns < num_columns)[None, :], other=0.0).to(tl.float32)
    language.atomic_amax(out + matrix, language.amax(language.amax(values, 1), 0))


# fmt: off
@triton.jit
def quantize_kernel(
    x, table, counts, amax, codes, codes_t, scales, num_matrices, num_rows, num_columns, stride_t,
    FORMAT: tl.constexpr, MARGIN: tl.constexpr, HAS_STORED_SCALE: tl.constexpr, MARKS_NONFINITE: tl.constexpr,
    HAS_RUNS: tl.constexpr, IN_TABLE: tl.constexpr, ALIGNED: tl.constexpr, RUNS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, SCALE_STRIDE: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
):
    # fmt: on
    """Codes of a tile, and of the tile transposed. Without a FORMAT x has codes, which are laid out the other way round.

    amax: of each matrix; None if the table has its address. HAS_STORED_SCALE: matrices are codes of FP16, whose scale's address
    is in the table. ROWS, COLUMNS: what is wanted. stride_t: of codes_t with runs; else (matrices, columns, rows).
    """
    num_column_tiles = tl.cdiv(num_columns, TILE_N)
    tile, tile_n = tl.program_id(0) // num_column_tiles, tl.program_id(0) % num_column_tiles
    matrix, address, first, length, first_t, num_before = _matrix_of(
        tile, x, table, counts, num_matrices, num_rows, num_columns, HAS_RUNS, IN_TABLE, ALIGNED, RUNS, TILE_M
    )
    rows = (tile - num_before) * TILE_M + tl.arange(0, TILE_M)
    columns = tile_n * TILE_N + tl.arange(0, TILE_N)
    mask = (rows < length)[:, None] & (columns < num_columns)[None, :]
    loaded = tl.load(address + rows[:, None].to(tl.int64) * num_columns + columns[None, :], mask=mask, other=0)
    if FORMAT is None:
        encoded = loaded
    else:
        stored_scale = None
        if HAS_STORED_SCALE:
            stored_scale = _address(table, matrix, _SCALE, tl.float32, False)
        amax_of = _address(table, matrix, _AMAX, tl.float32, False) if amax is None else amax + matrix
        largest = tl.load(amax_of)
        in_codes = language.over_stored_scale(largest, stored_scale, HAS_STORED_SCALE)
        scale = language.scale_from_amax(in_codes, FORMAT, MARGIN)
        stored = language.times_stored_scale(scale, stored_scale, HAS_STORED_SCALE)
        if MARKS_NONFINITE:
            stored = tl.where(language.is_finite(largest), stored, float("nan"))
        tl.store(scales + matrix * SCALE_STRIDE, stored, mask=(tile == num_before) & (tile_n == 0))
        values = language.nan_unless_finite(loaded.to(tl.float32))
        encoded = language.encode_scaled(values, language.inverse(scale), FORMAT)
    if ROWS:
        tl.store(codes + (first + rows)[:, None] * num_columns + columns[None, :], encoded, mask=mask)
    if COLUMNS:
        if HAS_RUNS:  # a gap up to the next run is filled too
            outputs_t = codes_t + first_t + columns[:, None].to(tl.int64) * stride_t + rows[None, :]
            mask_t = (rows < (length + _ALIGNMENT - 1) // _ALIGNMENT * _ALIGNMENT)[None, :]
        else:
            outputs_t = codes_t + first_t * num_columns + columns[:, None].to(tl.int64) * num_rows + rows[None, :]
            mask_t = (rows < num_rows)[None, :]
        tl.store(outputs_t, tl.trans(encoded), mask=mask_t & (columns < num_columns)[:, None])


# fmt: off
@triton.jit
def matmul_kernel(
    a, a_scales, b, b_scales, table, counts, out, amax, num_matrices, num_rows, num_columns, stride,
    A_FORMAT: tl.constexpr, B_FORMAT: tl.constexpr, SUMS_RUNS: tl.constexpr, IN_TABLE: tl.constexpr, ALIGNED: tl.constexpr,
    RUNS: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr,
):
    # fmt: on
    """One tile of a run of a times its weight b.T; with SUMS_RUNS of a @ b.T, summed over the columns of one padded run.

    stride: elements from one row of a, and of b, to the next: what is summed, or P. IN_TABLE: b is, and so are its scales
    where b_scales is None. amax: None, or what each product raises to the largest magnitude that it writes.
    """
    num_tiles_n = tl.cdiv(num_columns, TILE_N)
    tile, tile_n = tl.program_id(0) // num_tiles_n, tl.program_id(0) % num_tiles_n
    runs = tl.arange(0, RUNS)
    if SUMS_RUNS:
        num_tiles_m = tl.cdiv(num_rows, TILE_M)
        run, tile_m = tile // num_tiles_m, tile % num_tiles_m
        _, length, first_column = _place_of(run, tl.load(counts + runs, mask=runs < num_matrices, other=0), runs)
        num_summed = (length + _ALIGNMENT - 1) // _ALIGNMENT * _ALIGNMENT
        a_run, b_run, out_run, last_row = a + first_column, b + first_column, run.to(tl.int64) * num_rows, num_rows
    else:
        run, num_before, first, last_row, _ = _run_of(tile, counts, num_matrices, TILE_M, RUNS)
        tile_m, num_summed, out_run, a_run = tile - num_before, stride, first, a + first * stride
        if IN_TABLE:
            b_run = _address(table, run, _DATA, b.dtype.element_ty, ALIGNED)
        else:
            b_run = b + run.to(tl.int64) * num_columns * stride
    rows, columns = tile_m * TILE_M + tl.arange(0, TILE_M), tile_n * TILE_N + tl.arange(0, TILE_N)
    summed = tl.arange(0, TILE_K)
    is_row, is_column = rows < last_row, columns < num_columns
    a_pointers = a_run + rows[:, None].to(tl.int64) * stride + summed[None, :]
    b_pointers = b_run + columns[:, None].to(tl.int64) * stride + summed[None, :]
    total = tl.zeros((TILE_M, TILE_N), tl.float32)
    for step in range(tl.cdiv(num_summed, TILE_K)):
        is_summed = summed < num_summed - step * TILE_K
        a_tile = gemm.load_codes(a_pointers + step * TILE_K, is_row[:, None] & is_summed[None, :], A_FORMAT)
        b_tile = gemm.load_codes(b_pointers + step * TILE_K, is_column[:, None] & is_summed[None, :], B_FORMAT)
        total += gemm.dot(a_tile, b_tile)
    if b_scales is None:
        total *= tl.load(a_scales + run) * tl.load(_address(table, run, _SCALE, tl.float32, False))
    else:
        total *= tl.load(a_scales + run) * tl.load(b_scales + run)
    outputs = out + (out_run + rows)[:, None] * num_columns + columns[None, :]
    mask, rounded = is_row[:, None] & is_column[None, :], language.cast(total, out.dtype.element_ty)
    tl.store(outputs, rounded, mask=mask)
    if amax is not None:
        written = tl.where(mask, rounded.to(tl.float32), 0.0)
        language.atomic_amax(amax + run, language.amax(language.amax(written, 1), 0))


# fmt: off
@triton.jit
def sum_kernel(
    x, counts, out, num_runs, num_columns, RUNS: tl.constexpr, ROWS: tl.constexpr, TILE_N: tl.constexpr
):
    # fmt: on
    """The sums of the columns of a run, in fp32."""
    num_tiles = tl.cdiv(num_columns, TILE_N)
    run, runs = tl.program_id(0) // num_tiles, tl.arange(0, RUNS)
    first, length, _ = _place_of(run, tl.load(counts + runs, mask=runs < num_runs, other=0), runs)
    rows, columns = tl.arange(0, ROWS), tl.program_id(0) % num_tiles * TILE_N + tl.arange(0, TILE_N)
    is_column = columns < num_columns
    inputs = x + first * num_columns + rows[:, None] * num_columns + columns[None, :]
    total = tl.zeros((ROWS, TILE_N), tl.float32)
    for start in range(0, length, ROWS):
        mask = (rows < length - start)[:, None] & is_column[None, :]
        total += tl.load(inputs, mask=mask, other=0.0).to(tl.float32)
        inputs += ROWS * num_columns
    tl.store(out + run * num_columns + columns, language.cast(tl.sum(total, 0), out.dtype.element_ty), mask=is_column)


_launch_amax = Launcher(amax_kernel, num_warps=TILE_WARPS)
_launch_quantize = Launcher(quantize_kernel, num_warps=TILE_WARPS, maxnreg=TILE_REGISTERS, enable_fp_fusion=False)
_launch_sum = Launcher(sum_kernel, num_warps=4)


@cache
def _matmul_launcher(num_stages: int) -> Launcher:
    return Launcher(matmul_kernel, reads_fp8=True, num_warps=gemm.WARPS, num_stages=num_stages)


class _Runs:
    """The rows of runs, on the host and on the device."""

    def __init__(self, counts: list[int], device: torch.device) -> None:
        self.counts, self.num_rows = counts, sum(counts)
        self.width = padded_width(self.num_rows, len(counts))
        self.on_device = tables.send("runs", counts, device, torch.int32, lambda counts: [[count] for count in counts])
        self.size = max(16, triton.next_power_of_2(len(counts)))  # of the prefix sum

    def num_tiles(self, tile: int) -> int:
        return sum(language.cdiv(count, tile) for count in self.counts)


class _Weights:
    """Weights of one shape, by a table of their addresses."""

    def __init__(self, weights: Operands, device: torch.device) -> None:
        self.first, self.num_matrices = weights.data[0], len(weights.data)
        self.shape = self.first.shape
        self.is_stored = bool(weights.dequant_scales)
        none: list[Tensor | None] = [None] * self.num_matrices
        parts = zip(weights.data, weights.dequant_scales or none, weights.amaxes or none, strict=True)
        rows = [[0 if part is None else part.data_ptr() for part in each] for each in parts]
        self.is_aligned = not reduce(or_, (row[0] for row in rows)) % ALIGNMENT
        self.table = tables.send(f"weights at {rows[0][0]}", rows, device, torch.int64)

    def find_amax(self) -> Tensor:
        """Return the amax of each, fp32 (E,)."""
        return _amax(self.first, self.table, None, self.num_matrices, *self.shape, is_aligned=self.is_aligned)

    def codes(self, formats: LinearFormats, amax_E: Tensor | None, *, turns: bool) -> tuple[Tensor, Tensor | None, bool]:
        """Return codes (E, rows, columns) and dequant_scales, None if in the table; and True if the codes are there, as stored.

        turns: of the matrices, transposed.
        """
        is_fp8, dtype = self.first.dtype in _FP8, formats.weight.dtype
        if is_fp8 and not turns:
            return self.first, None, True
        (num_rows, num_columns), device = self.shape, self.first.device
        shape = self.shape[::-1] if turns else self.shape
        codes = torch.empty(self.num_matrices, *shape, dtype=dtype, device=device)
        scales = None if is_fp8 else torch.empty(self.num_matrices, dtype=torch.float32, device=device)
        tile_m, tile_n = SHARED_SCALE_TILE
        _launch_quantize(
            self.num_matrices * language.cdiv(num_rows, tile_m) * language.cdiv(num_columns, tile_n),
            self.first, self.table, None, amax_E, None if turns else codes, codes if turns else None, scales,
            self.num_matrices, num_rows, num_columns, num_rows, None if is_fp8 else FORMAT_NAMES[dtype], formats.margin,
            self.is_stored and not is_fp8, False, False, True, self.is_aligned, 16, not turns, turns, 1, tile_m, tile_n,
        )  # fmt: skip
        return codes, scales, False


def _amax(
    x: Tensor, table: Tensor | None, runs: _Runs | None, num_matrices: int, num_rows: int, num_columns: int, *, is_aligned: bool
) -> Tensor:
    """Return the amax of each matrix, fp32 (E,): of a table, of runs of x, or of matrices that lie in x."""
    out = torch.zeros(num_matrices, dtype=torch.float32, device=x.device)
    tile_m, tile_n = SHARED_SCALE_TILE
    num_tiles = num_matrices * language.cdiv(num_rows, tile_m) if runs is None else runs.num_tiles(tile_m)
    if num_tiles:
        _launch_amax(
            num_tiles * language.cdiv(num_columns, tile_n),
            x, table, None if runs is None else runs.on_device, out, num_matrices, num_rows, num_columns,
            runs is not None, table is not None, is_aligned, 16 if runs is None else runs.size, tile_m, tile_n,
        )  # fmt: skip
    return out


def _quantize_runs(
    x_SK: Tensor, runs: _Runs, dtype: torch.dtype, margin: int, sides: str, amax_E: Tensor | None = None
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """Return codes (S, K) and (K, P), None if not among sides, and scales (E,). x: values, or codes to be laid out (K, P)."""
    is_fp8, num_columns, device = x_SK.dtype in _FP8, x_SK.shape[1], x_SK.device
    x_SK = x_SK.contiguous()
    if amax_E is None and not is_fp8:
        amax_E = _amax(x_SK, None, runs, len(runs.counts), runs.num_rows, num_columns, is_aligned=True)
    codes = None if sides == "columns" else torch.empty(x_SK.shape, dtype=dtype, device=device)
    codes_t = None if sides == "rows" else torch.empty(num_columns, runs.width, dtype=dtype, device=device)
    scales_E = torch.ones(len(runs.counts), dtype=torch.float32, device=device)  # of runs without rows too
    tile_m, tile_n = SHARED_SCALE_TILE
    if runs.num_rows:
        _launch_quantize(
            runs.num_tiles(tile_m) * language.cdiv(num_columns, tile_n),
            x_SK, None, runs.on_device, amax_E, codes, codes_t, scales_E,
            len(runs.counts), runs.num_rows, num_columns, runs.width,
            None if is_fp8 else FORMAT_NAMES[dtype], margin, False, False, True, False, True, runs.size, sides != "columns",
            sides != "rows", 1, tile_m, tile_n,
        )  # fmt: skip
    return codes, codes_t, scales_E


def _multiply_runs(
    a_SK: Tensor,
    a_scales: Tensor,
    runs: _Runs,
    weights: _Weights,
    coded: tuple[Tensor, Tensor | None, bool],
    dtype: torch.dtype,
) -> Tensor:
    """Each run @ its weight.T, (S, N)."""
    codes, scales, in_table = coded
    num_columns, num_summed = codes.shape[-2:]
    out = torch.empty(runs.num_rows, num_columns, dtype=dtype, device=a_SK.device)
    if runs.num_rows:
        _launch_matmul(
            runs.num_tiles(gemm.TILE_M) * language.cdiv(num_columns, gemm.TILE_N),
            a_SK, a_scales, codes, scales, weights.table, runs, out, None, runs.num_rows, num_columns, num_summed,
            sums_runs=False, in_table=in_table, is_aligned=weights.is_aligned,
        )  # fmt: skip
    return out


def _launch_matmul(
    num_programs: int, a: Tensor, a_scales: Tensor, b: Tensor, b_scales: Tensor | None, table: Tensor | None, runs: _Runs,
    out: Tensor, amax: Tensor | None, *sizes: int, sums_runs: bool, in_table: bool, is_aligned: bool,
) -> None:  # fmt: skip
    capability, _ = gemm.platform(a.device)
    _matmul_launcher(gemm.NUM_STAGES.get(capability, 2))(
        num_programs, a, a_scales, b, b_scales, table, runs.on_device, out, amax, len(runs.counts), *sizes,
        FORMAT_NAMES[a.dtype], FORMAT_NAMES[b.dtype], sums_runs, in_table, is_aligned, runs.size,
        gemm.TILE_M, gemm.TILE_N, TILE_K,
    )  # fmt: skip


def grouped_output(
    input: Operand,
    counts: list[int],
    weights: Operands,
    formats: LinearFormats,
    out_dtype: torch.dtype,
    keeps_columns: bool,
) -> list[Tensor]:
    """See the twin. Five launches, or six if the weights are values whose amaxes have to be found; tables are sent besides."""
    data, scales, known = input
    runs, held = _Runs(counts, data.device), _Weights(weights, data.device)
    found = [held.find_amax()] if not weights.dequant_scales and not weights.amaxes else []
    codes: Tensor | None = data
    columns, own_scales = None, scales
    if scales is None:
        codes, columns, own_scales = _quantize_runs(
            data, runs, formats.input.dtype, formats.margin, "both" if keeps_columns else "rows", known
        )
    elif keeps_columns:
        _, columns, _ = _quantize_runs(data, runs, data.dtype, 0, "columns")
    assert codes is not None
    assert own_scales is not None
    coded = held.codes(formats, found[0] if found else None, turns=formats.is_transposed)
    results = [_multiply_runs(codes.contiguous(), own_scales, runs, held, coded, out_dtype)]
    if columns is not None:
        results += [columns, own_scales.clone() if own_scales is scales else own_scales]
    return results + found


def grouped_gradients(
    grad_output: Operand,
    counts: list[int],
    input_columns: Operand | None,
    weights: Operands,
    formats: LinearFormats,
    sides: str,
    finds_amax: bool,
    *dtypes: torch.dtype,
) -> list[Tensor]:
    """See the twin. Six launches for both sides."""
    data, scales, known = grad_output
    runs, held, gradients = _Runs(counts, data.device), _Weights(weights, data.device), []
    rows: Tensor | None = data
    columns, own_scales = None, scales
    if scales is None:
        rows, columns, own_scales = _quantize_runs(data, runs, formats.grad_output.dtype, formats.margin, sides, known)
    elif sides != "rows":
        _, columns, _ = _quantize_runs(data, runs, data.dtype, 0, "columns")
    assert own_scales is not None
    if sides != "columns":
        assert rows is not None
        coded = held.codes(formats, None, turns=not formats.is_transposed)
        gradients.append(_multiply_runs(rows.contiguous(), own_scales, runs, held, coded, dtypes[0]))
    if sides != "rows":
        assert columns is not None
        assert input_columns is not None
        assert input_columns.dequant_scale is not None
        (a, a_scales), (b, b_scales) = (columns, own_scales), (input_columns.data, input_columns.dequant_scale)
        if formats.is_transposed:
            (a, a_scales), (b, b_scales) = (b, b_scales), (a, a_scales)
        num_rows, num_columns = held.shape
        out = torch.empty(len(counts), num_rows, num_columns, dtype=dtypes[1], device=data.device)
        amax = torch.zeros(len(counts), dtype=torch.float32, device=data.device) if finds_amax else None
        _launch_matmul(
            len(counts) * language.cdiv(num_rows, gemm.TILE_M) * language.cdiv(num_columns, gemm.TILE_N),
            a, a_scales, b, b_scales, None, runs, out, amax, num_rows, num_columns, runs.width,
            sums_runs=True, in_table=False, is_aligned=True,
        )  # fmt: skip
        gradients += [out] if amax is None else [out, amax]
    return gradients


def quantize_gradients(values_ENK: Tensor, amax_E: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """See the twin. One launch."""
    num_matrices, num_rows, num_columns = values_ENK.shape
    if not values_ENK.numel():
        return grouped_reference.quantize_gradients(values_ENK, amax_E, dtype)
    values = values_ENK.contiguous()
    codes = torch.empty(values.shape, dtype=dtype, device=values.device)
    scales = torch.empty(num_matrices, AMAX_STRIDE, dtype=torch.float32, device=values.device)
    tile_m, tile_n = SHARED_SCALE_TILE
    _launch_quantize(
        num_matrices * language.cdiv(num_rows, tile_m) * language.cdiv(num_columns, tile_n),
        values, None, None, amax_E, codes, None, scales, num_matrices, num_rows, num_columns, num_rows,
        FORMAT_NAMES[dtype], 0, False, True, False, False, True, 16, True, False, AMAX_STRIDE, tile_m, tile_n,
    )  # fmt: skip
    return codes, scales


def amax_of_runs(values_SN: Tensor, counts: list[int]) -> Tensor:
    """See the twin. Two launches."""
    runs = _Runs(counts, values_SN.device)
    return _amax(values_SN.contiguous(), None, runs, len(counts), runs.num_rows, values_SN.shape[1], is_aligned=True)


def amax_of_each(matrices: list[Tensor]) -> Tensor:
    """See the twin. Two launches, and a table."""
    return _Weights(Operands(matrices, [], []), matrices[0].device).find_amax()


def sum_runs(values_SN: Tensor, counts: list[int]) -> Tensor:
    """See the twin. One launch, in fp32."""
    runs, num_columns = _Runs(counts, values_SN.device), values_SN.shape[1]
    out = torch.empty(len(counts), num_columns, dtype=values_SN.dtype, device=values_SN.device)
    if out.numel():
        tile = gemm.TILE_N
        _launch_sum(
            len(counts) * language.cdiv(num_columns, tile),
            values_SN.contiguous(), runs.on_device, out, len(counts), num_columns, runs.size, ROWS_OF_SUM, tile,
        )  # fmt: skip
    return out
