"""A layer's passes are one op each; where operands are quantized before their products, they have the same bits."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from octet.worker import initialize, kernels
from octet.worker.fp8 import linear as fp8_linear
from octet.worker.fp8 import operand
from octet.worker.fp8.linear import Float8Linear
from octet.worker.fp8.plan import plan_of
from octet.worker.kernels import LinearFormats, ScaledCodes, ScaleKind

ops = torch.ops.octet
pytestmark = pytest.mark.usefixtures("accelerator")


class Names(TorchDispatchMode):
    """Notes the names of our ops."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "octet":
            self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@contextmanager
def quantized_first() -> Iterator[None]:
    """Inside, layers are converted to quantize operands before the ops of their products, as in a step that is sampled."""

    def other_plan_of(*args: Any, **options: Any) -> Any:
        return replace(plan_of(*args, **options), quantizes_input_first=True, quantizes_grad_first=True)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fp8_linear, "plan_of", other_plan_of)
        yield


def network(level: str, **options: object) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 48, bias=False), nn.Linear(48, 16))
    options = {"auto_filter": False, "statistics_every": 0, **options}
    return initialize(model, torch.optim.AdamW(model.parameters()), opt_level=level, **options)[0]


def passes(level: str, num_tokens: int = 32, **options: object) -> tuple[list[Tensor], list[str]]:
    """Two passes' outputs and all gradients, and the names of our ops."""
    model, found = network(level, **options), []
    with Names() as seen:
        for seed in range(2):
            x = torch.randn(num_tokens, 32, generator=torch.Generator().manual_seed(seed)).requires_grad_()
            output = model(x)
            (output.float() * torch.linspace(-1, 2, 16)).sum().backward()
            found += [output.detach(), x.grad]
    return [*found, *(parameter.grad + 0 for parameter in model.parameters())], seen.names


@pytest.mark.parametrize("granularity", ["tensor", "row", "block", "mx"])
@pytest.mark.parametrize("level", ["O2", "te", "O3-split"])
@pytest.mark.parametrize("num_tokens", [32, 24])
def test_a_pass_is_one_op_with_the_bits_of_its_steps(num_tokens: int, level: str, granularity: str) -> None:
    options = {"recipe": {"scaling": "current", "granularity": granularity}}
    found, names = passes(level, num_tokens, **options)
    assert names.count("linear_output") == names.count("linear_gradients") == 6
    assert not {"matmul", "quantize_operand"} & set(names)
    with quantized_first():
        expected, names = passes(level, num_tokens, **options)
    assert names.count("quantize_operand") == 6 + 4  # inputs but for the one after an activation, and gradients
    assert [one.dtype for one in found] == [one.dtype for one in expected]
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("level", ["te", "O3-split"])
@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
def test_passes_by_windows_have_the_bits_of_codes_by_either_amax(
    monkeypatch: pytest.MonkeyPatch, level: str, algorithm: str
) -> None:
    """Over steps of two micro-batches in which windows fill, grow, meet an infinite gradient and fill again.

    As graphs of torch.compile quantize: each operand by the window's amax or its own, which is remembered beside it.
    """
    recipe = {"scaling": "delayed", "amax_history_length": 2, "amax_compute_algorithm": algorithm}
    found, names = steps_by_windows(level, recipe)
    assert names.count("quantize_delayed") > 50
    monkeypatch.setattr(operand.kernels, "quantize_delayed", quantized_by_either_amax)
    expected, names = steps_by_windows(level, recipe)
    assert "quantize_delayed" not in names
    assert len(found) == len(expected) > 100
    assert [one.dtype for one in found] == [one.dtype for one in expected]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def quantized_by_either_amax(
    x: Tensor, window: kernels.Window, dtype: torch.dtype, *, sides: str, activation: str | None, amax: Tensor | None
) -> kernels.QuantizedOperand:
    """Return what `quantize_delayed` returns, but quantize with `quantize_operand`."""
    values = x if activation is None else kernels.ACTIVATIONS[activation].forward(x)
    is_full = window.num_finite_steps >= window.history_length
    own = kernels.compute_amax(values) if amax is None else amax
    how: Any = {"margin": window.margin, "sides": sides, "amax": torch.where(is_full, window.window_amax, own)}
    if window.remembers:
        window.step_amax.copy_(torch.maximum(window.step_amax, own))
    rows, columns, _ = kernels.quantize_operand(values, dtype, **how)
    return kernels.QuantizedOperand(rows, columns, how["amax"])


def steps_by_windows(level: str, recipe: dict[str, object]) -> tuple[list[Tensor], list[str]]:
    """Outputs, gradients and all that is remembered of seven optimizer steps, and the names of our ops."""
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 48), nn.Linear(48, 16))
    options: dict[str, Any] = {"auto_filter": False, "statistics_every": 0, "recipe": recipe}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model, optimizer = initialize(model, optimizer, opt_level=level, **options)
    found: list[Tensor] = []
    with Names() as seen:
        for number in range(14):
            x = torch.randn(2, 16, 32, generator=torch.Generator().manual_seed(number)).requires_grad_()
            output = model(x * (1 + number))
            factor = torch.inf if number == 6 else 1.0 + number
            (output.float() * torch.linspace(-1, 2, 16) * factor).sum().backward()
            found += [output.detach(), x.grad, *(parameter.grad + 0 for parameter in model.parameters())]
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()
                found += [value.clone() for name, value in model.named_buffers() if "_scaling." in name]
    return found, seen.names


@pytest.mark.parametrize(
    ("num_tokens", "options"),
    [(24, {}), (32, {"recipe": {"scaling": "delayed", "amax_history_length": 2}}), (32, {"statistics_every": 1})],
)
def test_every_pass_is_two_ops_of_products(num_tokens: int, options: dict[str, object]) -> None:
    """Also of ragged tiles, by windows, and in a step that is sampled, which quantize before."""
    _, names = passes("O2", num_tokens, **options)
    assert names.count("linear_output") == names.count("linear_gradients") == 6
    assert "matmul" not in names


@pytest.mark.parametrize("level", ["O2", "te"])
@pytest.mark.parametrize("needs", ["input", "weight", "bias"])
def test_only_what_is_needed_is_computed(needs: str, level: str) -> None:
    """At te by windows, with the forward pass's product among the others."""
    layer = network(level)[3]
    assert isinstance(layer, Float8Linear)
    for name, parameter in layer.named_parameters():
        parameter.requires_grad_(name == needs)
    layer.weight.requires_grad_(needs == "weight")
    x = torch.randn(16, 48).requires_grad_(needs == "input")
    with Names() as seen:
        layer(x).sum().backward()
    assert seen.names.count("linear_output") == 1
    assert seen.names.count("linear_gradients") == (needs != "bias")
    if level == "te":
        assert seen.names.count("quantize_delayed") == (2 if needs == "bias" else 3)
    grads = {"input": x.grad, "weight": layer.weight.grad, "bias": layer.bias.grad}
    assert {name for name, gradient in grads.items() if gradient is not None} == {needs}


@pytest.mark.parametrize("level", ["O2", "te"])
def test_codes_that_ranks_have_gathered_are_taken(level: str) -> None:
    """Set the codes of grad_output as `worker/parallel/tokens.py` does for a row layer."""
    layer = network(level)[3]
    x = torch.randn(16, 48).requires_grad_()
    output = layer(x)
    other = torch.linspace(-3, 1, 16 * 16).view(16, 16).bfloat16()
    rows, columns = (
        ScaledCodes(*kernels.quantize(values.contiguous(), torch.float8_e5m2), ScaleKind.TENSOR)
        for values in (other, other.t())
    )
    layer.grad_output_scaling.gathered_codes = (rows, columns)
    output.backward(torch.ones_like(output))
    given, x.grad = x.grad, None
    layer(x).backward(other)
    assert given.any()
    assert torch.equal(given, x.grad)
    assert layer.grad_output_scaling.gathered_codes is None


def test_the_ops_are_what_torch_expects() -> None:
    weight, stored_scale = kernels.quantize(torch.randn(16, 32), torch.float16)
    held = (weight, stored_scale, torch.tensor(4.0))
    formats = LinearFormats().text
    x, grad_output = torch.randn(16, 32), torch.randn(16, 16)
    forward = (x, None, None, *held, formats, torch.bfloat16, "columns")
    utilities = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_static")  # test_schema adds up FP8 codes
    torch.library.opcheck(ops.linear_output.default, forward, test_utils=utilities)
    kept = ops.linear_output(*forward)[1:]
    nothing = (None, None, None)
    gradients = (formats, "both", torch.bfloat16, torch.float32)
    backward = (grad_output, None, None, *nothing, *kept, None, *held, *gradients)
    torch.library.opcheck(ops.linear_gradients.default, backward, test_utils=utilities)
