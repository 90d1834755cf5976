"""Plain-torch twins of the grouped ops: each layer by itself, by the sequence of a single one. See `grouped.py`."""

from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from octet.worker.kernels import reference
from octet.worker.kernels.gemm import ALIGNMENT
from octet.worker.kernels.linear import gradients_by, output_by
from octet.worker.kernels.reference import AMAX_STRIDE
from octet.worker.kernels.scales import LinearFormats, Operand, Operands, ScaleKind

_run_output, _run_gradients = output_by(reference), gradients_by(reference)
_FP8 = frozenset((torch.float8_e4m3fn, torch.float8_e5m2))


def padded_width(num_rows: int, num_runs: int) -> int:
    """Return P: the columns that any runs of so many rows fit into, each from a multiple of ALIGNMENT on."""
    return -(-(num_rows + (ALIGNMENT - 1) * num_runs) // ALIGNMENT) * ALIGNMENT


def first_columns(counts: list[int]) -> list[int]:
    """Return the column at which each run begins."""
    return [0, *accumulate(-(-count // ALIGNMENT) * ALIGNMENT for count in counts)][:-1]


def grouped_output(
    input: Operand,
    counts: list[int],
    weights: Operands,
    formats: LinearFormats,
    out_dtype: torch.dtype,
    keeps_columns: bool,
) -> list[Tensor]:
    """See the op."""
    data, scales, known = input
    amaxes: Any = weights.amaxes
    found = []
    if not weights.dequant_scales and not amaxes:
        amaxes = [reference.compute_amax(weight, ScaleKind.TENSOR) for weight in weights.data]
        found = [torch.stack(amaxes)]
    outputs: list[Tensor] = []
    columns: list[Any] = []
    for expert, run in enumerate(data.split(counts)):
        if not len(run):
            columns.append(None)
            continue
        weight = _weight(weights._replace(amaxes=amaxes), expert, formats, turns=formats.is_transposed)
        keeps = "columns" if keeps_columns and scales is None else "nothing"
        rows = Operand(run, *(None if part is None else part[expert] for part in (scales, known)))
        output, *kept = _run_output(rows, weight, formats, out_dtype, keeps)
        outputs.append(output)
        columns.append(kept or (run.t(), rows.dequant_scale))
    num_out = weights.data[0].shape[1 if formats.is_transposed else 0]
    results = [torch.cat(outputs) if outputs else data.new_empty((0, num_out), dtype=out_dtype)]
    if keeps_columns:
        codes_KP = data.new_zeros((data.shape[1], padded_width(len(data), len(counts))), dtype=torch.uint8)
        scales_E = data.new_ones(len(counts), dtype=torch.float32)
        for expert, (kept, first, count) in enumerate(zip(columns, first_columns(counts), counts, strict=True)):
            if kept is not None:
                codes_KP[:, first : first + count] = kept[0].view(torch.uint8)
                scales_E[expert] = kept[1]
        results += [codes_KP.view(formats.input.dtype), scales_E]
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
    """See the op."""
    data, scales, known = grad_output
    stored = weights.data[0].shape
    num_in = stored[0 if formats.is_transposed else 1]
    grads_input = []
    grad_weight = data.new_zeros((len(counts), *stored), dtype=dtypes[1])
    for expert, (run, first) in enumerate(zip(data.split(counts), first_columns(counts), strict=True)):
        if not len(run):
            continue
        scale = None if scales is None else scales[expert]
        amax = None if known is None else known[expert]
        rows = Operand(run.t() if scale is not None and sides == "columns" else run, scale, amax)
        columns = Operand(run.t(), scale) if scale is not None and sides == "both" else None
        input = None
        if input_columns is not None:
            assert input_columns.dequant_scale is not None
            own = input_columns.data[:, first : first + len(run)].contiguous()
            input = Operand(own, input_columns.dequant_scale[expert])
        weight = _weight(weights, expert, formats, turns=not formats.is_transposed) if sides != "columns" else None
        gradients = _run_gradients(rows, columns, input, weight, formats, sides, *dtypes)
        if sides != "columns":
            grads_input.append(gradients[0])
        if sides != "rows":
            grad_weight[expert] = gradients[-1]
    grad_input = torch.cat(grads_input) if grads_input else data.new_empty((0, num_in), dtype=dtypes[0])
    grad_weights = [grad_weight] if sides != "rows" else []
    amaxes = [amax_of_each(list(grad_weight.unbind()))] if grad_weights and finds_amax else []
    return [*([grad_input] if sides != "columns" else []), *grad_weights, *amaxes]


def quantize_gradients(values_ENK: Tensor, amax_E: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """See the op."""
    codes = torch.empty(values_ENK.shape, dtype=dtype, device=values_ENK.device)
    scales = torch.zeros((len(values_ENK), AMAX_STRIDE), device=values_ENK.device)
    for expert, (values, amax) in enumerate(zip(values_ENK, amax_E, strict=True)):
        made, scales[expert, 0] = reference.quantize_gradient(values, dtype, amax)
        codes[expert].view(torch.uint8).copy_(made.view(torch.uint8))
    return codes, scales


def amax_of_runs(values_SN: Tensor, counts: list[int]) -> Tensor:
    """See the op."""
    return torch.stack([reference.compute_amax(run, ScaleKind.TENSOR) for run in values_SN.split(counts)])


def amax_of_each(matrices: list[Tensor]) -> Tensor:
    """See the op."""
    return torch.stack([reference.compute_amax(matrix, ScaleKind.TENSOR) for matrix in matrices])


def sum_runs(values_SN: Tensor, counts: list[int]) -> Tensor:
    """See the op."""
    return torch.stack([run.sum(0) for run in values_SN.split(counts)])


def _weight(weights: Operands, expert: int, formats: LinearFormats, *, turns: bool) -> Operand:
    """One weight as a single layer's op takes it. turns: FP8 codes are those of the stored matrix, transposed."""
    data = weights.data[expert]
    scale = weights.dequant_scales[expert] if weights.dequant_scales else None
    if data.dtype in _FP8:
        return Operand(data.t() if turns else data, scale)
    return Operand(data, scale, weights.amaxes[expert])
