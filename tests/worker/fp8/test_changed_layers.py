"""Passes of layers and norms follow what is done to a model between two of them: they have the bits of separate steps."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import parametrize

from octet.worker import initialize
from octet.worker.fp8 import operand
from octet.worker.fp8.accelerator import cpu_as_accelerator
from octet.worker.fp8.linear import Float8Linear
from octet.worker.fp8.operand import OperandScaling, advance
from octet.worker.fp8.weight import hold, stored
from tests.worker.fp8.test_products import Names, quantized_by_either_amax, quantized_first

Change = Callable[[nn.Module], Any]


class Network(nn.Module):
    """Two layers after one norm, and a sequence with an activation. in_place: what a network may do to a layer's output."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.one, self.other = nn.Linear(32, 32), nn.Linear(32, 32)
        self.mlp = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        output: Tensor = self.mlp(self.one(x).mul_(0.5).add_(self.other(x)))
        return output.add_(1.0)


def network(level: str, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    model = Network()
    level, _, is_delayed = level.partition(" ")
    recipe = {"scaling": "delayed", "amax_history_length": 1} if is_delayed else {"scaling": "current"}
    options: dict[str, Any] = {"auto_filter": False, "statistics_every": 0, "recipe": recipe}
    return initialize(model, torch.optim.AdamW(model.parameters()), opt_level=level, **options)[0]


def step(model: nn.Module, seed: int) -> list[Tensor]:
    """The output, and all gradients, of an input with two dimensions before the last."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2, 16, 32, generator=generator).to(model.norm.weight.dtype).requires_grad_()
    output = model(x)
    assert output.shape == x.shape
    (output.float() * torch.linspace(-1, 2, 32)).sum().backward()
    parameters = [parameter for parameter in model.parameters() if parameter.grad is not None]
    found = [output.detach().clone(), x.grad, *(parameter.grad + 0 for parameter in parameters)]
    for parameter in parameters:
        parameter.grad = None
    return [*found, *getattr(model, "seen", [])]


def windows(model: nn.Module) -> list[OperandScaling]:
    return [module for module in model.modules() if isinstance(module, OperandScaling)]


def replace_data(model: nn.Module) -> None:
    """Put other memory with other values under the same parameters, as ranks do when they divide weights again."""
    for layer in (model.one, model.mlp[2]):
        held = stored(layer.weight).detach()
        memory = torch.zeros(held.numel() + 16, dtype=held.dtype)
        memory[16:] = held.t().flatten()
        hold(layer.weight, memory[16:].view(held.shape))
        layer.bias.data = layer.bias.detach() + 1


def assign(model: nn.Module) -> None:
    """Write values into a weight, its data, a view of it, and put a plain parameter in the place of another."""
    values = torch.linspace(-1, 1, 32 * 32).view(32, 32)
    with torch.no_grad():
        model.one.weight.copy_(values)
        model.other.weight.t()[3:5] = 0.25
        model.mlp[0].weight.data.mul_(2)
    model.mlp[2].weight = nn.Parameter(torch.linspace(-2, 1, 32 * 64).view(32, 64))


def tie(model: nn.Module) -> None:
    model.other.weight = model.one.weight


def freeze(model: nn.Module) -> None:
    model.one.weight.requires_grad_(False)
    model.mlp[0].bias.requires_grad_(False)
    model.norm.weight.requires_grad_(False)


def drop_parameters(model: nn.Module) -> None:
    model.one.bias = None
    model.norm.bias = None


def hook_forward(model: nn.Module) -> None:
    """Hooks that look at what comes between an activation and its layer, and change what a layer and a norm return."""
    seen: list[Tensor] = []
    object.__setattr__(model, "seen", seen)
    model.mlp[1].register_forward_hook(lambda _module, _args, output: seen.append(output.detach().clone()))
    model.one.register_forward_hook(lambda _module, _args, output: output * 2)
    model.other.register_forward_pre_hook(lambda _module, args: (args[0] + 1,))
    model.norm.register_forward_hook(lambda _module, _args, output: output - 1)


def hook_backward(model: nn.Module) -> None:
    seen: list[Tensor] = []
    object.__setattr__(model, "seen", seen)
    model.mlp[0].register_full_backward_hook(lambda _module, grads, _of_output: seen.append(grads[0].clone()))
    model.mlp[0].weight.register_post_accumulate_grad_hook(lambda weight: seen.append(weight.grad + 0))
    model.mlp[0].bias.register_hook(lambda grad: grad * 3)


def replace_forward(model: nn.Module) -> None:
    """A user's subclass that computes something around the layer, and a norm's forward of the user's own."""

    class Doubled(Float8Linear):
        def forward(self, input: Tensor, **options: Any) -> Tensor:
            return super().forward(input * 2, **options) + 1

    model.one.__class__ = Doubled
    model.norm.forward = lambda x: nn.functional.layer_norm(x, (32,)) * 2


def accumulate_elsewhere(model: nn.Module) -> None:
    """Parameters that are given for one call alone."""
    forward = model.forward
    biases = {name: value.detach() + 1 for name, value in model.named_parameters() if name.endswith("bias")}
    model.forward = lambda x: _with(model, biases, forward, x)


def _with(model: nn.Module, values: dict[str, Tensor], forward: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    model.forward, replaced = forward, model.forward
    try:
        output: Tensor = functional_call(model, values, (x,))
        return output
    finally:
        model.forward = replaced


CHANGES: dict[str, Change] = {
    "nothing": lambda _model: None,
    "moved": lambda model: model._apply(lambda tensor: tensor.detach().clone()),
    "loaded": lambda model: model.load_state_dict({**network(model.level, seed=1).state_dict()}),
    "data replaced": replace_data,
    "assigned": assign,
    "tied": tie,
    "frozen": freeze,
    "cast": lambda model: model.bfloat16(),
    "without biases": drop_parameters,
    "hooks before and after": hook_forward,
    "hooks of gradients": hook_backward,
    "forward replaced": replace_forward,
    "parameters of one call": accumulate_elsewhere,
    "evaluation": lambda model: model.eval(),
}
CHANGE_OUTPUTS = {
    *("loaded", "data replaced", "assigned", "tied", "without biases", "hooks before and after", "forward replaced"),
    "parameters of one call",
}


LEVELS_OF_CHANGES = ("O2", "te delayed", "te", "O3-split delayed", "O3-split")
CASES = [
    pytest.param(level, change, marks=() if level == "O2" or place == 1 + number % 4 else pytest.mark.matrix)
    for place, level in enumerate(LEVELS_OF_CHANGES)
    for number, change in enumerate(CHANGES)
]
"""Each change at O2 and at one of the other levels, which take turns; the rest is in the matrix."""


@pytest.mark.parametrize(("level", "change"), CASES)
def test_a_pass_after_a_change_has_the_bits_of_its_steps(monkeypatch: pytest.MonkeyPatch, level: str, change: str) -> None:
    """The separate steps quantize operands before their products; with windows, by ops that remember nothing themselves."""
    found, ops = [], []
    for in_steps in (False, True):
        with cpu_as_accelerator(), Names() as seen, quantized_first() if in_steps else nullcontext():
            if in_steps:
                monkeypatch.setattr(operand.kernels, "quantize_delayed", quantized_by_either_amax)
            model = network(level)
            object.__setattr__(model, "level", level)
            before = step(model, 0)
            advance(windows(model))
            CHANGES[change](model)
            after = step(model, 1)
            found.append([*before, *after, *(buffer for scaling in windows(model) for buffer in scaling.buffers())])
            ops.append(seen.names.count("quantize_operand"))
    assert ops[0] < ops[1]
    assert len(found[0]) == len(found[1])
    for one, other in zip(*found, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one.nan_to_num(), other.nan_to_num())  # NaN: nothing was sampled
    if change in CHANGE_OUTPUTS:
        monkeypatch.undo()
        with cpu_as_accelerator():
            unchanged = network(level)
            step(unchanged, 0)
            advance(windows(unchanged))
            assert not torch.equal(step(unchanged, 1)[0], found[0][len(before)])


@pytest.mark.parametrize("level", ["te", "O2", "O3"])
def test_a_weight_that_is_parametrized_later_is_computed(level: str) -> None:
    class Twice(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return weight * 2

    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(0))
    with cpu_as_accelerator(), torch.no_grad():
        model, doubled = network(level), network(level)
        doubled.one.weight.mul_(2)
        parametrize.register_parametrization(model.one, "weight", Twice())
        assert torch.equal(model.one(x), doubled.one(x))
        assert not torch.equal(model.one(x), network(level).one(x))


@pytest.mark.parametrize("level", ["te", "te delayed", "O2", "O3", "O3-split"])
def test_a_weight_that_changes_before_its_backward_pass_is_refused(level: str) -> None:
    with cpu_as_accelerator():
        layer = network(level).one
        output = layer(torch.randn(2, 16, 32).requires_grad_())
        with torch.no_grad():
            layer.weight.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            output.sum().backward()
