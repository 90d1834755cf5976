"""The passes of a linear layer as one op each, where every operand has one scale, found now: check, op and fake.

They equal `quantize_operand`, `requantize`, `activate_operand` and `matmul`, called one after the other, bit for bit.
T, N and K are multiples of 16. Shape suffixes as in worker/fp8/linear.py.
"""

from typing import Any

import torch
from torch import Tensor

from worker.kernels.library import define


def _fake_output(
    x_TK: Tensor, weight_NK: Tensor, _unit: Tensor | None, _weight_amax: Tensor | None, *formats: Any
) -> list[Tensor]:
    input_dtype, _, _, activation, sides, out_dtype, _, keeps_rows = (*formats, None, False)[:8]
    output_TN = x_TK.new_empty((x_TK.shape[0], weight_NK.shape[0]), dtype=out_dtype)
    number = x_TK.new_empty((), dtype=torch.float32)
    if activation is not None:
        return [output_TN, number]
    shapes = [x_TK.shape] * bool(keeps_rows) + [x_TK.shape[::-1]] * (sides == "both")
    codes = [x_TK.new_empty(shape, dtype=input_dtype) for shape in shapes]
    return [output_TN, *codes, number] if codes else [output_TN]


def _fake_product(codes_TK: Tensor, _scale: Tensor, weight_NK: Tensor, *rest: Any) -> Tensor:
    return codes_TK.new_empty((codes_TK.shape[0], weight_NK.shape[0]), dtype=rest[-1])


def _fake_gradients(
    grad_output_TN: Tensor, _amax: Any, _input: Any, _scale: Any, weight_NK: Tensor, *rest: Any
) -> list[Tensor]:
    *_, sides, grad_input_dtype, grad_weight_dtype = rest
    grad_input = grad_output_TN.new_empty((grad_output_TN.shape[0], weight_NK.shape[1]), dtype=grad_input_dtype)
    grad_weight = grad_output_TN.new_empty(weight_NK.shape, dtype=grad_weight_dtype)
    return [grad_input] * (sides != "columns") + [grad_weight] * (sides != "rows")


_output_op = define(
    "linear_output(Tensor x, Tensor weight, Tensor? unit, Tensor? weight_amax, ScalarType input_dtype, "
    "ScalarType weight_dtype, int margin, str? activation, str sides, ScalarType out_dtype, Tensor? input_amax=None, "
    "bool keeps_rows=False) -> Tensor[]",
    _fake_output,
)
_product_op = define(
    "linear_product(Tensor codes, Tensor scale, Tensor weight, Tensor? unit, Tensor? weight_amax, ScalarType weight_dtype, "
    "int margin, ScalarType out_dtype) -> Tensor",
    _fake_product,
)
_gradients_op = define(
    "linear_gradients(Tensor grad_output, Tensor? grad_amax, Tensor? input, Tensor? input_scale, Tensor weight, Tensor? unit, "
    "Tensor? weight_amax, ScalarType input_dtype, ScalarType weight_dtype, ScalarType grad_dtype, int margin, str? activation, "
    "str sides, ScalarType grad_input_dtype, ScalarType grad_weight_dtype) -> Tensor[]",
    _fake_gradients,
)


def linear_output(
    x_TK: Tensor, weight_NK: Tensor, unit: Tensor | None, weight_amax: Tensor | None, *formats: Any
) -> list[Tensor]:
    """[x, or an activation of it, @ weight.T (T, N)], and what `linear_gradients` needs of x.

    unit: the scale () of a weight that is held in codes, of FP16 or FP8, else None. weight_amax: fp32 (), of the weight's
    values, where it is known; needed for codes of FP16.
    formats: dtypes of the input's and the weight's codes, margin, activation (of ACTIVATIONS) or None, sides, dtype of the
    output, the amax, fp32 (), of x or of the activation of x, where it is known, and whether to return codes of x (T, K) for
    `linear_product`, too. sides: "both" also returns the codes of x (K, T); of an activation always "rows", which returns its
    amax (). The scale () of codes that are returned is the last.
    """
    results: list[Tensor] = _output_op(x_TK, weight_NK, unit, weight_amax, *formats)
    return results


def linear_product(
    codes_TK: Tensor, scale: Tensor, weight_NK: Tensor, unit: Tensor | None, weight_amax: Tensor | None, *formats: Any
) -> Tensor:
    """x @ weight.T (T, N), where the codes of x and their scale () are there already.

    unit, weight_amax: as for `linear_output`. formats: dtype of the weight's codes, margin, dtype of the output.
    """
    output_TN: Tensor = _product_op(codes_TK, scale, weight_NK, unit, weight_amax, *formats)
    return output_TN


def linear_gradients(
    grad_output_TN: Tensor,
    grad_amax: Tensor | None,
    input: Tensor | None,
    input_scale: Tensor | None,
    weight_NK: Tensor,
    unit: Tensor | None,
    weight_amax: Tensor | None,
    *formats: Any,
) -> list[Tensor]:
    """The gradients of the input (T, K) and of the weight (N, K): the first for the "rows", the second for the "columns".

    grad_amax: fp32 (), of grad_output, where it is known, so that it is not looked for.
    input, input_scale: codes (K, T) and scale; or the input (T, K) of an activation, and the activation's amax (). The gradient
    of the input is then that of the activation's result.
    formats: dtypes of the codes of input, weight and grad_output, margin, activation or None, sides ("rows", "columns",
    "both"), dtypes of both gradients.
    """
    gradients: list[Tensor] = _gradients_op(
        grad_output_TN, grad_amax, input, input_scale, weight_NK, unit, weight_amax, *formats
    )
    return gradients
