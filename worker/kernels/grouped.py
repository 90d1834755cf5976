"""The passes of many linear layers of one shape, each with its own run of rows, as one op: check, op and fake.

    grouped_output       quantize the runs and the weights, then multiply each run by its weight
    grouped_gradients    quantize the gradient's runs and the weights, then multiply twice
    quantize_gradients   codes of gradients that lie in one tensor, each with its scale
    sum_runs             the gradients of biases

Every operand has one scale: for each run, and for each weight. The bits are those of separate layers, up to the order in
which a product sums on a GPU. Number of launches: the same for any number of layers.

Columns of runs, as codes for products over the rows, lie in one matrix (K, P): each run begins at a multiple of ALIGNMENT,
in which kernels read 16 bytes at a time, and zero codes fill the gaps. Shape suffixes: E layers, S rows of all runs.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from octet.worker.kernels import grouped_reference
from octet.worker.kernels.grouped_reference import padded_width
from octet.worker.kernels.library import define as define_op
from octet.worker.kernels.operands import SIDES
from octet.worker.kernels.scales import LinearFormats, Operand, Operands, ScaleKind

define = partial(define_op, twins=grouped_reference)


def grouped_output(
    input_SK: Operand,
    counts: list[int],
    weights: Operands,
    formats: LinearFormats,
    out_dtype: torch.dtype,
    *,
    keeps_columns: bool,
) -> list[Tensor]:
    """[each run @ its weight.T (S, N)], and what `grouped_gradients` needs of the input and the weights.

    input: values, with the amaxes (E,) to scale by if they are known, or codes with a dequant_scale (E,). counts: the rows of
    each run. weights: as the layers store them: values, perhaps with amax, codes of FP16 with dequant_scale and amax, or E4M3
    codes with dequant_scale; `formats.is_transposed` says which way round.
    keeps_columns: [codes (K, P), dequant_scale (E,)] of the input follow. Of values without it, the weights' amax (E,) is last.
    """
    _check(input_SK.data, counts, weights, formats)
    results: list[Tensor] = _output_op(input_SK, counts, weights, formats, out_dtype, keeps_columns)
    return results


def grouped_gradients(  # noqa: PLR0913 - the op's arguments
    grad_output_SN: Operand,
    counts: list[int],
    input_columns: Operand | None,
    weights: Operands,
    formats: LinearFormats,
    sides: str,
    dtypes: tuple[torch.dtype, torch.dtype],
    *,
    finds_amax: bool = False,
) -> list[Tensor]:
    """The gradients of the input (S, K), for the "rows" among sides, and of the weights as stored (E, ...), for "columns".

    grad_output: values, or codes with a dequant_scale (E,). input_columns: the codes that `grouped_output` kept. weights: as
    there; values with their amax. dtypes: of the two gradients. A run without rows has a weight gradient of zeros.
    finds_amax: the amaxes (E,) of the weights' gradients in their dtype come last, for `quantize_gradients`.
    """
    if sides not in SIDES:
        raise ValueError(f"sides is {sides!r}; allowed: {', '.join(SIDES)}.")
    _check(grad_output_SN.data, counts, weights, formats)
    gradients: list[Tensor] = _gradients_op(grad_output_SN, counts, input_columns, weights, formats, sides, finds_amax, *dtypes)
    return gradients


def quantize_gradients(values_ENK: Tensor, amax_E: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return codes (E, N, K) and a dequant_scale for each, as `quantize_gradient` makes them one by one.

    amax_E: the largest magnitude of each, fp32. The scales are the first column of fp32 (E, AMAX_STRIDE), so that each begins
    at a multiple of 16 bytes.
    """
    codes_ENK, scales = _quantize_op(values_ENK, amax_E, dtype)
    return codes_ENK, scales[:, 0]


def amax_of_runs(values_SN: Tensor, counts: list[int]) -> Tensor:
    """Return the largest magnitude of each run, fp32 (E,); 0 without rows."""
    amax_E: Tensor = _amax_op(values_SN.detach(), counts)
    return amax_E


def amax_of_each(matrices: list[Tensor]) -> Tensor:
    """Return the largest magnitude of each of some matrices of one shape and dtype, fp32 (E,)."""
    amax_E: Tensor = _each_op([matrix.detach() for matrix in matrices])
    return amax_E


def sum_runs(values_SN: Tensor, counts: list[int]) -> Tensor:
    """Return the sum of the rows of each run, (E, N), in the dtype of the values; summed in fp32 on a GPU."""
    sums_EN: Tensor = _sum_op(values_SN, counts)
    return sums_EN


def _check(runs: Tensor, counts: list[int], weights: Operands, formats: LinearFormats) -> None:
    kinds = {formats.input.kind, formats.weight.kind, formats.grad_output.kind}
    if kinds != {ScaleKind.TENSOR} or formats.activation is not None:
        got = f"{formats.text}"
        raise ValueError(f"grouped products need scales of the tensor, and no activation; got {got}. Call layer by layer.")
    if sum(counts) != len(runs) or len(counts) != len(weights.data):
        raise ValueError(
            f"{len(runs)} rows for {len(weights.data)} weights come as runs of {counts}; allowed: one run for each weight, all "
            "rows together. Pass the number of rows of each."
        )


def _fake_output(
    input: Operand,
    counts: list[int],
    weights: Operands,
    formats: LinearFormats,
    out_dtype: torch.dtype,
    keeps_columns: bool,
) -> list[Tensor]:
    data, num_out = input.data, weights.data[0].shape[1 if formats.is_transposed else 0]
    results = [data.new_empty((len(data), num_out), dtype=out_dtype)]
    if keeps_columns:
        columns = data.new_empty((data.shape[1], padded_width(len(data), len(counts))), dtype=formats.input.dtype)
        results += [columns, data.new_empty(len(counts), dtype=torch.float32)]
    if not weights.dequant_scales and not weights.amaxes:
        results.append(data.new_empty(len(counts), dtype=torch.float32))
    return results


def _fake_gradients(
    grad_output: Operand,
    counts: list[int],
    _columns: Any,
    weights: Operands,
    formats: LinearFormats,
    sides: str,
    finds_amax: bool,
    *dtypes: torch.dtype,
) -> list[Tensor]:
    data, stored = grad_output.data, weights.data[0].shape
    num_in = stored[0 if formats.is_transposed else 1]
    grad_input = [data.new_empty((len(data), num_in), dtype=dtypes[0])] if sides != "columns" else []
    grad_weight = [data.new_empty((len(counts), *stored), dtype=dtypes[1])] if sides != "rows" else []
    amax = [data.new_empty(len(counts), dtype=torch.float32)] if grad_weight and finds_amax else []
    return [*grad_input, *grad_weight, *amax]


def _fake_quantized(values: Tensor, _amax: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    scales = values.new_empty((len(values), grouped_reference.AMAX_STRIDE), dtype=torch.float32)
    return values.new_empty(values.shape, dtype=dtype), scales


_output_op = define(
    "grouped_output(Operand input, int[] counts, Operands weights, LinearFormats formats, ScalarType out_dtype, "
    "bool keeps_columns) -> Tensor[]",
    _fake_output,
)
_gradients_op = define(
    "grouped_gradients(Operand grad_output, int[] counts, Operand? input_columns, Operands weights, LinearFormats formats, "
    "str sides, bool finds_amax, ScalarType grad_input_dtype, ScalarType grad_weight_dtype) -> Tensor[]",
    _fake_gradients,
)
_quantize_op = define(
    "quantize_gradients(Tensor values_ENK, Tensor amax_E, ScalarType dtype) -> (Tensor, Tensor)", _fake_quantized
)
_amax_op = define(
    "amax_of_runs(Tensor values_SN, int[] counts) -> Tensor",
    lambda values, counts: values.new_empty(len(counts), dtype=torch.float32),
)
_each_op = define(
    "amax_of_each(Tensor[] matrices) -> Tensor",
    lambda matrices: matrices[0].new_empty(len(matrices), dtype=torch.float32),
)
_sum_op = define(
    "sum_runs(Tensor values_SN, int[] counts) -> Tensor",
    lambda values, counts: values.new_empty((len(counts), values.shape[1])),
)
