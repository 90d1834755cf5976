"""The two passes of a linear layer as one op each: check, op, fake, and the sequence of kernels behind it.

    linear_output      quantize the input and the weight, then multiply
    linear_gradients   quantize the gradient and the weight, then multiply twice

Both devices take the sequence below. They differ in what they call in it: `quantize_operand`, `requantize`,
`activate_operand` and `matmul` of `reference.py` on a CPU, of `octet.worker.kernels.cuda` on a CUDA device. An operand
comes as values, which are quantized here, or as codes, which are multiplied as they are.
Shape suffixes as in worker/fp8/linear.py.
"""

from math import prod
from typing import Any

import torch
from torch import Tensor

from octet.worker.kernels.gemm import padded
from octet.worker.kernels.library import Function, define
from octet.worker.kernels.operands import SIDES
from octet.worker.kernels.scales import LinearFormats, Operand, ScaledCodes, ScaleKind, empty_operand_scale

KEEPS = ("nothing", *SIDES)
_FP8 = frozenset((torch.float8_e4m3fn, torch.float8_e5m2))


def linear_output(
    input_TK: Operand, weight: Operand, formats: LinearFormats, out_dtype: torch.dtype, *, keeps: str = "nothing"
) -> list[Tensor]:
    """[input, or an activation of it, @ weight.T (T, N)], and what `linear_gradients` needs of the input.

    input: values, or codes for its rows. weight: values, or codes of FP16 with their scale (), as
    they are stored; or codes of the weight's own format, (N, K).
    keeps: the sides of the input, as of `quantize_operand`, whose codes and scales are returned,
    too. Of an activation with one scale its amax () is returned instead.
    """
    if keeps not in KEEPS:
        raise ValueError(f"keeps is {keeps!r}; allowed: {', '.join(KEEPS)}.")
    results: list[Tensor] = _output_op(input_TK, weight, formats, out_dtype, keeps)
    return results


def linear_gradients(
    grad_output_TN: Operand,
    grad_columns_NT: Operand | None,
    input: Operand | None,
    weight: Operand | None,
    formats: LinearFormats,
    sides: str,
    dtypes: tuple[torch.dtype, torch.dtype],
) -> list[Tensor]:
    """The gradients of the input (T, K), for the "rows" among sides, and of the weight as stored, for the "columns".

    grad_output: values, or codes for its rows; for its columns, where these are all of sides. grad_columns: codes for its
    columns, where both sides are wanted in codes.
    input: codes for its columns, (K, T), or the input (T, K) of the activation, with the activation's amax (). The gradient
    of the input is then that of the activation's result.
    weight: as for `linear_output`, but codes of its own format are (K, N). Input and weight are None where their gradient's
    side is not wanted. dtypes: of the two gradients.
    """
    if sides not in SIDES:
        raise ValueError(f"sides is {sides!r}; allowed: {', '.join(SIDES)}.")
    gradients: list[Tensor] = _gradients_op(grad_output_TN, grad_columns_NT, input, weight, formats, sides, *dtypes)
    return gradients


def output_by(kernels: Any) -> Function:
    """The sequence of `linear_output`, of a device's kernels."""
    matmul = padded(kernels.matmul)

    def run(input: Operand, weight: Operand, formats: LinearFormats, out_dtype: torch.dtype, keeps: str) -> list[Tensor]:
        dtype, kind = formats.input.dtype, formats.input.kind
        kept: list[Tensor] = []
        data, scale, amax = input
        if scale is not None:
            rows = _codes(data, scale, kind)
        elif formats.activation is None:
            sides = "rows" if keeps in ("nothing", "rows") else "both"
            parts = kernels.quantize_operand(data, dtype, kind, formats.margin, sides, amax, None)
            rows = ScaledCodes(parts[0], parts[1], kind)
            kept = [] if keeps == "nothing" else parts[2:] if keeps == "columns" else parts
        else:
            codes, scale, *kept = kernels.activate_operand(
                data, formats.activation, dtype, kind, formats.margin, "rows", amax, None, None
            )
            rows = ScaledCodes(codes, scale, kind)
            kept = [amax.clone()] if amax is not None else kept
        operand_NK = _weight_operand(kernels, weight, formats, "columns" if formats.is_transposed else "rows")
        is_fast = rows.kind is operand_NK.kind is ScaleKind.TENSOR
        return [matmul(rows, operand_NK, out_dtype, is_fast), *kept]

    return run


def gradients_by(kernels: Any) -> Function:
    """The sequence of `linear_gradients`, of a device's kernels."""
    matmul = padded(kernels.matmul)

    def run(
        grad_output: Operand,
        grad_columns: Operand | None,
        input: Operand | None,
        weight: Operand | None,
        formats: LinearFormats,
        sides: str,
        *dtypes: torch.dtype,
    ) -> list[Tensor]:
        dtype, kind, gradients = formats.grad_output.dtype, formats.grad_output.kind, []
        data, scale, amax = grad_output
        if scale is None:
            parts = kernels.quantize_operand(data, dtype, kind, formats.margin, sides, amax, None)
            rows, columns = ScaledCodes(parts[0], parts[1], kind), ScaledCodes(parts[-2], parts[-1], kind)
        else:
            rows = columns = _codes(data, scale, kind)
            if grad_columns is not None and grad_columns.dequant_scale is not None:
                columns = _codes(grad_columns.data, grad_columns.dequant_scale, kind)
        if sides != "columns":
            assert weight is not None
            operand_KN = _weight_operand(kernels, weight, formats, "rows" if formats.is_transposed else "columns")
            gradients.append(matmul(rows, operand_KN, dtypes[0], formats.fast_grad_input))
        if sides != "rows":
            assert input is not None
            input_KT = _input_columns(kernels, input, formats)
            left, right = (input_KT, columns) if formats.is_transposed else (columns, input_KT)
            gradients.append(matmul(left, right, dtypes[1], False))
        return gradients

    return run


def _weight_operand(kernels: Any, weight: Operand, formats: LinearFormats, side: str) -> ScaledCodes:
    """The weight's codes as they come, or made for the rows or columns of what is stored."""
    data, scale, amax = weight
    dtype, kind = formats.weight.dtype, formats.weight.kind
    if scale is None:
        codes, dequant_scale = kernels.quantize_operand(data, dtype, kind, formats.margin, side, amax, None)
    elif data.dtype in _FP8:
        return _codes(data, scale, kind)
    elif amax is not None:
        stored = ScaledCodes(data, scale, ScaleKind.TENSOR)
        codes, dequant_scale = kernels.requantize(stored, amax, dtype, formats.margin, side)
    else:  # scales of rows or blocks, of what the codes are without their own scale
        codes, dequant_scale = kernels.quantize_operand(data, dtype, kind, formats.margin, side, None, None)
        dequant_scale = dequant_scale * scale
    return ScaledCodes(codes, dequant_scale, kind)


def _input_columns(kernels: Any, input: Operand, formats: LinearFormats) -> ScaledCodes:
    """The input's codes (K, T) as they were kept, or made of the activation's input once more."""
    data, scale, amax = input
    dtype, kind = formats.input.dtype, formats.input.kind
    if scale is not None:
        return _codes(data, scale, kind)
    codes, scale, *_ = kernels.activate_operand(
        data, formats.activation, dtype, kind, formats.margin, "columns", amax, None, None
    )
    return ScaledCodes(codes, scale, kind)


def _codes(codes: Tensor, scale: Tensor, kind: ScaleKind) -> ScaledCodes:
    """Codes that have come with their scale. A stored weight has one for the tensor, whatever the recipe's kind."""
    return ScaledCodes(codes, scale, kind if scale.dim() else ScaleKind.TENSOR)


def _num_outputs(weight: Operand, formats: LinearFormats) -> int:
    """N of a weight as `linear_output` takes it."""
    is_stored = weight.dequant_scale is None or weight.data.dtype not in _FP8
    return weight.data.shape[1 if formats.is_transposed and is_stored else 0]


def _fake_output(input: Operand, weight: Operand, formats: LinearFormats, out_dtype: torch.dtype, keeps: str) -> list[Tensor]:
    data, kind = input.data, formats.input.kind
    results = [data.new_empty((data.shape[0], _num_outputs(weight, formats)), dtype=out_dtype)]
    if input.dequant_scale is not None:
        return results
    if formats.activation is not None:
        return [*results, *([data.new_empty((), dtype=torch.float32)] if kind is ScaleKind.TENSOR else [])]
    for side, shape in (("rows", data.shape), ("columns", data.shape[::-1])):
        if keeps in (side, "both"):
            codes = data.new_empty(shape, dtype=formats.input.dtype)
            results += [codes, empty_operand_scale(codes.shape, kind, data.device)]
    return results


def _fake_gradients(
    grad_output: Operand,
    _columns: Any,
    input: Operand | None,
    weight: Operand | None,
    formats: LinearFormats,
    sides: str,
    *dtypes: torch.dtype,
) -> list[Tensor]:
    data, is_codes = grad_output.data, grad_output.dequant_scale is not None
    num_tokens, num_out = data.shape[::-1] if is_codes and sides == "columns" else data.shape
    given, num_others = (input, num_tokens) if weight is None else (weight, num_out)
    assert given is not None
    num_in = prod(given.data.shape) // num_others
    stored = (num_in, num_out) if formats.is_transposed else (num_out, num_in)
    grad_input = [data.new_empty((num_tokens, num_in), dtype=dtypes[0])] if sides != "columns" else []
    grad_weight = [data.new_empty(stored, dtype=dtypes[1])] if sides != "rows" else []
    return [*grad_input, *grad_weight]


_output_op = define(
    "linear_output(Operand input, Operand weight, LinearFormats formats, ScalarType out_dtype, str keeps) -> Tensor[]",
    _fake_output,
    compose=output_by,
)
_gradients_op = define(
    "linear_gradients(Operand grad_output, Operand? grad_columns, Operand? input, Operand? weight, LinearFormats formats, "
    "str sides, ScalarType grad_input_dtype, ScalarType grad_weight_dtype) -> Tensor[]",
    _fake_gradients,
    compose=gradients_by,
)


def count_flops() -> None:
    """Let torch's FlopCounterMode count FP8 products too. Not done at import, since torch's counter loads Triton."""
    from torch.utils.flop_counter import flop_registry, register_flop_formula

    if torch.ops.octet.matmul not in flop_registry:
        register_flop_formula(torch.ops.octet.matmul)(_matmul_flops)
        register_flop_formula(torch.ops.octet.linear_output)(_output_flops)
        register_flop_formula(torch.ops.octet.linear_gradients)(_gradients_flops)
        register_flop_formula(torch.ops.octet.grouped_output)(_grouped_output_flops)
        register_flop_formula(torch.ops.octet.grouped_gradients)(_grouped_gradients_flops)


def _matmul_flops(a_shape: Any, _scale: Any, _kind: Any, b_shape: Any, *_args: Any, **_options: Any) -> int:
    """2 · M · N · K, whatever is added to them."""
    flops: int = 2 * a_shape[0] * b_shape[0] * a_shape[1]
    return flops


def _output_flops(input_shape: Any, _scale: Any, _amax: Any, weight_shape: Any, *_args: Any, **_options: Any) -> int:
    """2 · T · N · K."""
    flops: int = 2 * input_shape[0] * prod(weight_shape)
    return flops


def _gradients_flops(grad_output_shape: Any, *args: Any, **_options: Any) -> int:
    """2 · T · N · K for each of the gradients. args: those of the op after the gradient, tensors as their shapes."""
    input_shape, weight_shape, sides = args[5], args[8], args[12]
    num_tokens, num_out = grad_output_shape[::-1] if sides == "columns" and args[0] is not None else grad_output_shape
    num_in = prod(input_shape) // num_tokens if weight_shape is None else prod(weight_shape) // num_out
    return 2 * num_tokens * num_out * num_in * (2 if sides == "both" else 1)


def _grouped_output_flops(
    input_shape: Any, _scale: Any, _amax: Any, _counts: Any, weight_shapes: Any, *_: Any, **_o: Any
) -> int:
    """2 · S · N · K: each row is multiplied by one weight."""
    flops: int = 2 * input_shape[0] * prod(weight_shapes[0])
    return flops


def _grouped_gradients_flops(grad_output_shape: Any, *args: Any, **_options: Any) -> int:
    """2 · S · N · K for each of the gradients. args: those of the op after the gradient, tensors as their shapes."""
    weight_shapes, sides = args[6], args[10]
    flops: int = 2 * grad_output_shape[0] * prod(weight_shapes[0]) * (2 if sides == "both" else 1)
    return flops
