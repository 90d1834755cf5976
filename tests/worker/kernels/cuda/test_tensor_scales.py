"""Matrices with one scale each, and a layer's passes made of them: the Triton kernels give the reference's bits."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from octet.worker.kernels import reference
from octet.worker.kernels.cuda import language, tensor_scales
from octet.worker.kernels.linear import gradients_by, output_by
from octet.worker.kernels.scales import LinearFormats, Operand, ScaledCodes, ScaleKind

E4M3, E5M2, BF16, FP32 = torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16, torch.float32
pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # NumPy's, of the interpreter
    pytest.mark.skipif(
        not language.INTERPRETED.value, reason="missing: Triton's interpreter, TRITON_INTERPRET=1 before the start"
    ),
]
OUR_KERNELS = SimpleNamespace(
    quantize_operand=tensor_scales.quantize_operand,
    requantize=tensor_scales.requantize,
    activate_operand=tensor_scales.activate_operand,
    matmul=reference.matmul,  # cuBLAS's
)


def held(weight_NK: Tensor, dtype: torch.dtype) -> Operand:
    """The weight as levels hold it, with its scale and amax."""
    if dtype == FP32:
        return Operand(weight_NK)
    return Operand(*reference.quantize(weight_NK, dtype, ScaleKind.TENSOR, 0, None), weight_NK.abs().amax())


@pytest.mark.parametrize(
    ("dtype", "activation", "sides"),
    [(FP32, None, "both"), (torch.float16, "relu", "rows"), (torch.float16, None, "both"), (E4M3, None, "columns")],
)
def test_passes_equal_the_reference(dtype: torch.dtype, activation: str | None, sides: str) -> None:
    generator = torch.Generator().manual_seed(0)
    x_TK, grad_output_TN, weight_NK = (torch.randn(shape, generator=generator) for shape in ((32, 48), (32, 16), (16, 48)))
    x_TK, weight = x_TK.bfloat16(), held(weight_NK, dtype)
    formats = LinearFormats(margin=1, activation=activation)
    outputs, gradients = ([by(OUR_KERNELS), by(reference)] for by in (output_by, gradients_by))
    for amax in (None, x_TK.abs().amax().float()):
        for keeps in ("nothing", sides):
            given: Any = (Operand(x_TK, None, amax), weight, formats, BF16, keeps)
            found, expected = (run(*given) for run in outputs)
            assert len(found) == len(expected)
            assert all(map(torch.equal, found, expected))
    if activation is None:
        codes, scale = reference.quantize_operand(x_TK, E4M3, ScaleKind.TENSOR, 1, "columns")
        kept = Operand(codes, scale)
    else:
        kept = Operand(x_TK, None, torch.tensor(3.0))
    weight_KN = weight._replace(data=weight.data.t()) if dtype == E4M3 else weight
    for wanted in {sides, "both"}:
        exact = grad_output_TN.abs().amax()
        for amax in (None, exact, exact * 4):  # a known amax is believed
            backward = (Operand(grad_output_TN, None, amax), None, kept, weight_KN, formats, wanted, BF16, FP32)
            found, expected = (run(*backward) for run in gradients)
            assert len(found) == (2 if wanted == "both" else 1)
            assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("sides", ["rows", "columns", "both"])
@pytest.mark.parametrize("is_transposed", [False, True])
def test_stored_codes_are_quantized_again_as_the_reference_does(sides: str, is_transposed: bool) -> None:
    x = torch.randn(16, 130, generator=torch.Generator().manual_seed(0))
    codes, scale = reference.quantize(x, torch.float16, ScaleKind.TENSOR, 0, None)
    stored = ScaledCodes(codes.t() if is_transposed else codes, scale, ScaleKind.TENSOR)
    for amax, margin in ((torch.tensor(3.0), 1), (torch.tensor(0.01), 0)):
        found, expected = (each.requantize(stored, amax, E4M3, margin, sides) for each in (tensor_scales, reference))
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one.float(), other.float())
