"""Usual passes of a layer, one op each, have the bits of the passes that are computed step by step."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from worker import initialize, kernels
from worker.fp8 import linear as fp8_linear
from worker.fp8.linear import Float8Linear
from worker.kernels import ScaledCodes, ScaleKind

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


@pytest.mark.parametrize("level", ["O2", "te", "O3-split"])
def test_usual_passes_have_the_bits_of_their_steps(monkeypatch: pytest.MonkeyPatch, level: str) -> None:
    options = {"recipe": {"scaling": "current"}}
    found, names = passes(level, **options)
    assert names.count("linear_output") == names.count("linear_gradients") == 6
    assert not {"matmul", "quantize_operand"} & set(names)
    monkeypatch.setattr(fp8_linear, "is_usual_pass", lambda _layer, _input: False)
    expected, names = passes(level, **options)
    assert names.count("matmul") == 18
    assert [one.dtype for one in found] == [one.dtype for one in expected]
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("level", ["te", "O3-split"])
@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
def test_passes_by_windows_have_the_bits_of_their_steps(monkeypatch: pytest.MonkeyPatch, level: str, algorithm: str) -> None:
    """Over steps of two micro-batches in which windows fill, grow, meet an infinite gradient and fill again."""
    recipe = {"scaling": "delayed", "amax_history_length": 2, "amax_compute_algorithm": algorithm}
    found, names = steps_by_windows(level, recipe)
    assert names.count("quantize_delayed") > 50
    monkeypatch.setattr(fp8_linear, "is_usual_pass", lambda _layer, _input: False)
    expected, names = steps_by_windows(level, recipe)
    assert "quantize_delayed" not in names
    assert len(found) == len(expected) > 100
    assert [one.dtype for one in found] == [one.dtype for one in expected]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


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
def test_other_passes_are_computed_step_by_step(num_tokens: int, options: dict[str, object]) -> None:
    _, names = passes("O2", num_tokens, **options)
    assert "matmul" in names
    assert "linear_output" not in names


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
    if level == "te":
        assert seen.names.count("matmul") == (1 if needs == "bias" else 2)
        assert seen.names.count("quantize_delayed") == (2 if needs == "bias" else 3)
    else:
        assert ("linear_gradients" in seen.names) == (needs != "bias")
    grads = {"input": x.grad, "weight": layer.weight.grad, "bias": layer.bias.grad}
    assert {name for name, gradient in grads.items() if gradient is not None} == {needs}


@pytest.mark.parametrize("level", ["O2", "te"])
def test_codes_that_ranks_have_gathered_are_taken(level: str) -> None:
    """As `worker/parallel/tokens.py` gives the codes of a row layer's grad_output."""
    layer = network(level)[3]
    x = torch.randn(16, 48).requires_grad_()
    output = layer(x)
    other = torch.linspace(-3, 1, 16 * 16).view(16, 16).bfloat16()
    rows, columns = (
        ScaledCodes(*kernels.quantize(values.contiguous(), torch.float8_e5m2), ScaleKind.TENSOR)
        for values in (other, other.t())
    )
    layer.grad_output_scaling.given = (rows, columns)
    output.backward(torch.ones_like(output))
    given, x.grad = x.grad, None
    layer(x).backward(other)
    assert given.any()
    assert torch.equal(given, x.grad)
    assert layer.grad_output_scaling.given is None


def test_the_ops_are_what_torch_expects() -> None:
    weight, unit = kernels.quantize(torch.randn(16, 32), torch.float16)
    held = (weight, unit, torch.tensor(4.0))
    x, grad_output = torch.randn(16, 32), torch.randn(16, 16)
    e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
    forward = (x, *held, e4m3, e4m3, 0, None, "both", torch.bfloat16)
    utilities = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_static")  # test_schema adds up FP8 codes
    torch.library.opcheck(ops.linear_output.default, forward, test_utils=utilities)
    kept = ops.linear_output(*forward)[1:]
    backward = (grad_output, None, *kept, *held, e4m3, e4m3, e5m2, 0, None, "both", torch.bfloat16, torch.float32)
    torch.library.opcheck(ops.linear_gradients.default, backward, test_utils=utilities)
