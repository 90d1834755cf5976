"""A layer's passes as one op: the Triton kernels give the reference's bits, and settled launches skip Triton's own."""

from typing import Any

import pytest
import torch
from torch import Tensor

from worker.kernels import reference
from worker.kernels.cuda import language, linear
from worker.kernels.scales import ScaledCodes, ScaleKind

E4M3, E5M2, BF16, FP32 = torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16, torch.float32
pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # NumPy's, of the interpreter
    pytest.mark.skipif(
        not language.INTERPRETED.value, reason="missing: Triton's interpreter, TRITON_INTERPRET=1 before the start"
    ),
]


def held(weight_NK: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The weight as levels hold it, with its scale and amax."""
    if dtype == FP32:
        return weight_NK, None, None
    return *reference.quantize(weight_NK, dtype, ScaleKind.TENSOR, 0, None), weight_NK.abs().amax()


BACKWARD_PASSES = (linear.linear_gradients, reference.linear_gradients)


def product(a: Tensor, a_scale: Tensor, b_t: Tensor, b_scale: Tensor, *how: Any) -> Tensor:
    assert a.is_contiguous()
    assert b_t.t().is_contiguous()
    return reference.matmul(ScaledCodes(a, a_scale, ScaleKind.TENSOR), ScaledCodes(b_t.t(), b_scale, ScaleKind.TENSOR), *how)


@pytest.mark.parametrize(
    ("dtype", "activation", "sides"),
    [(FP32, None, "both"), (torch.float16, "relu", "rows"), (torch.float16, None, "both"), (E4M3, None, "columns")],
)
def test_equals_the_reference(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, activation: str | None, sides: str) -> None:
    monkeypatch.setattr(linear, "product_of_tensors", product)  # cuBLAS's
    generator = torch.Generator().manual_seed(0)
    x_TK, grad_output_TN, weight_NK = (torch.randn(shape, generator=generator) for shape in ((32, 48), (32, 16), (16, 48)))
    x_TK, weight, given = x_TK.bfloat16(), held(weight_NK, dtype), sides if sides != "columns" else "both"
    forward = (x_TK, *weight, E4M3, E4M3, 1, activation, given if activation is None else "rows", BF16)
    expected = reference.linear_output(*forward)
    assert all(map(torch.equal, linear.linear_output(*forward), expected))
    if activation is None:  # with codes for other layers, of an amax that is known
        shared = (*forward, x_TK.abs().amax().float(), True)
        assert len(linear.linear_output(*shared)) == len(expected) + 1
        assert all(map(torch.equal, linear.linear_output(*shared), reference.linear_output(*shared)))
    kept = expected[1:] if activation is None else (x_TK, expected[1])
    for wanted in {sides, "both"}:
        backward = (*kept, *weight, E4M3, E4M3, E5M2, 1, activation, wanted, BF16, FP32)
        gradients = reference.linear_gradients(grad_output_TN, None, *backward)
        assert len(gradients) == (2 if wanted == "both" else 1)
        for grad_amax in (None, grad_output_TN.abs().amax()):
            found = linear.linear_gradients(grad_output_TN, grad_amax, *backward)
            assert len(found) == len(gradients)
            assert all(map(torch.equal, found, gradients))
        four_times = grad_output_TN.abs().amax() * 4  # a known amax is believed
        found, expected = (pass_of(grad_output_TN, four_times, *backward) for pass_of in BACKWARD_PASSES)
        assert all(map(torch.equal, found, expected))
