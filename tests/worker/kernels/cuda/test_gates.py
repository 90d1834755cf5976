"""The kernels of activations and their gradients against their twin, and their amaxes against what they write, bit for bit."""

import math

import pytest
import torch
from torch import Tensor

from octet.worker import kernels
from octet.worker.kernels import reference
from octet.worker.kernels.activations import ACTIVATIONS
from octet.worker.kernels.cuda import gates, language

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of the interpreter, about NaN and overflow
DEVICE = "cpu" if language.INTERPRETED.value else "cuda"
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SHAPES = [(1, 1), (3, 129), (70, 128)]


def operands(shape: tuple[int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """An input from the activations' whole range, what it gates, and a gradient, whose rows have their own magnitude."""
    draw = torch.Generator().manual_seed(0)
    rows = torch.logspace(-3, 1, shape[0])[:, None]
    x, gated, grad = torch.randn(3, *shape, generator=draw)
    return (x * 3).to(DEVICE, dtype), (gated * rows).to(DEVICE, dtype), (grad * rows).to(DEVICE, dtype)


def assert_close(found: Tensor, expected: Tensor, magnitude: Tensor, *, exact: bool) -> None:
    """Equal, or, in the last bits of fp32 that exp and erf differ in, within an ulp of the dtype."""
    assert (found.dtype, found.shape, found.is_contiguous()) == (expected.dtype, expected.shape, True)
    if exact:
        assert torch.equal(found, expected)
        return
    # Near the root of a derivative terms as large as the gradient cancel; a product of two rounded factors has both errors.
    within = torch.finfo(found.dtype).eps * 2 * expected.float().abs() + 2.0**-20 * magnitude.float().abs() + 2.0**-24
    assert ((found.float() - expected.float()).abs() <= within).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("has_gated", [False, True])
def test_kernels_equal_their_twins(activation: str, dtype: torch.dtype, has_gated: bool) -> None:
    for shape in SHAPES:
        x, gated, grad = operands(shape, dtype)
        other, is_exact = gated if has_gated else None, activation == "relu"
        found, expected = gates.activate(x, other, activation), reference.activate(x, other, activation)
        assert_close(found[0], expected[0], x * (gated if has_gated else 1), exact=is_exact)
        assert torch.equal(found[1], kernels.compute_amax(found[0]))
        found = gates.activate_backward(grad, x, other, activation)
        expected = reference.activate_backward(grad, x, other, activation)
        assert len(found) == len(expected) == 2 + has_gated
        magnitudes = (grad * (gated if has_gated else 1) * x.abs().clamp_min(1), grad * x)
        for number, (one, twin) in enumerate(zip(found[:-1], expected[:-1], strict=True)):
            assert_close(one, twin, magnitudes[number], exact=is_exact)
            assert torch.equal(found[-1][number, 0], kernels.compute_amax(one))
            assert torch.equal(expected[-1][number, 0], kernels.compute_amax(twin))


@pytest.mark.parametrize("has_gated", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_twins_have_the_bits_of_torchs_autograd(activation: str, has_gated: bool) -> None:
    for dtype in DTYPES:
        x, gated, grad = (part.requires_grad_() for part in operands((40, 48), dtype))
        output = ACTIVATIONS[activation].forward(x)
        output = output * gated if has_gated else output
        parts = (x, gated) if has_gated else (x,)
        wanted = torch.autograd.grad(output, parts, grad)
        other = gated.detach() if has_gated else None
        assert torch.equal(reference.activate(x.detach(), other, activation)[0], output)
        found = reference.activate_backward(grad.detach(), x.detach(), other, activation)
        assert all(torch.equal(one, expected) for one, expected in zip(found[:-1], wanted, strict=True))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_reach_the_amaxes(activation: str, value: float) -> None:
    x, gated, grad = operands((9, 40), torch.float32)
    x[8, 39], gated[8, 39] = 2.0, value
    assert not gates.activate(x, gated, activation)[1].isfinite()
    amaxes = gates.activate_backward(grad, x, gated, activation)[-1][:, 0]
    assert amaxes.isfinite().tolist() == [False, True]
    grad[8, 39] = value
    assert not gates.activate_backward(grad, x, None, activation)[-1][0, 0].isfinite()


def test_strided_and_empty_matrices() -> None:
    x, gated, grad = operands((16, 48), torch.bfloat16)
    x_t, gated_t, grad_t = x.t(), gated.t(), grad.t()
    found, expected = gates.activate(x_t, gated_t, "relu"), reference.activate(x_t, gated_t, "relu")
    assert all(map(torch.equal, found, expected))
    backward = gates.activate_backward(grad_t, x_t, gated_t, "relu")
    assert all(map(torch.equal, backward, reference.activate_backward(grad_t, x_t, gated_t, "relu")))
    empty = x[:0]
    assert [part.shape for part in gates.activate(empty, empty, "silu")] == [(0, 48), ()]
    assert gates.activate_backward(empty, empty, empty, "silu")[-1].tolist() == [[0.0] * 4] * 2


def test_what_no_kernel_takes_is_refused() -> None:
    x = torch.zeros(4, 16)
    with pytest.raises(ValueError, match="activation is 'mish'; allowed: gelu, gelu-tanh, relu, silu"):
        kernels.activate(x, "mish")
    with pytest.raises(ValueError, match=r"gated is \(16,\) of torch.float32; allowed: \(4, 16\) of torch.float32"):
        kernels.activate(x, "silu", torch.zeros(16))
    with pytest.raises(ValueError, match=r"grad is \(4, 16\) of torch.bfloat16"):
        kernels.activate_backward(x.bfloat16(), x, "silu")
