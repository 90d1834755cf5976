"""A converted model under torch's own tools: compile, activation checkpointing, 16-bit parameters, Adam with L2 decay."""

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from octet.api_schemas.levels import LEVELS
from octet.worker import initialize
from octet.worker.fp8.gradient import Float8Gradient
from octet.worker.fp8.operand import OperandScaling
from tests.kit.small_model import spread

OCTET_LEVELS = [name for name, row in LEVELS.items() if row.gemm == "fp8" and row.engine == "octet"]
DELAYED = {"scaling": "delayed", "amax_history_length": 2}


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 32))


def make(level: str = "O2", dtype: torch.dtype = torch.float32, **options: object) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = network().to(dtype)
    return initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-2), opt_level=level, **options)


def inputs(step: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(24, 32, generator=torch.Generator().manual_seed(step)).to(dtype)


def amaxes(model: nn.Module) -> list[Tensor]:
    return [module.step_amax for module in model.modules() if isinstance(module, OperandScaling)]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, forward: object, num_steps: int) -> list[float]:
    losses = []
    for step in range(num_steps):
        loss = (forward(inputs(step)) - inputs(step).roll(1, dims=-1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.system
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # raised by Dynamo itself
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # Dynamo asks for it, and hides the answer
@pytest.mark.parametrize(
    "level",
    ["O2", *(pytest.param(level, marks=pytest.mark.matrix) for level in ("te", "O3-split", "fp16-amp"))],
)
def test_compiles_without_a_graph_break(level: str) -> None:
    """aot_eager runs the graph that Inductor would get, without the compiler's own rounding."""
    recipe = {"recipe": DELAYED} if LEVELS[level].gemm == "fp8" else {}
    compiled = [make(level, **recipe) for _ in range(2)]
    (eager, eager_optimizer), (model, optimizer) = compiled
    forward = torch.compile(model, backend="aot_eager", fullgraph=True)
    expected = train(eager, eager_optimizer, eager, 4)
    assert train(model, optimizer, forward, 4) == expected
    forward(inputs(0)).mean().backward()
    eager(inputs(0)).mean().backward()
    for parameter, eager_parameter in zip(model.parameters(), eager.parameters(), strict=True):
        assert torch.equal(parameter.grad + 0, eager_parameter.grad + 0)
    assert torch.equal(torch.tensor(amaxes(model)), torch.tensor(amaxes(eager)))


@pytest.mark.parametrize("level", spread(OCTET_LEVELS))
def test_activation_checkpointing_changes_nothing(level: str) -> None:
    plain, plain_optimizer = make(level, recipe=DELAYED)
    model, optimizer = make(level, recipe=DELAYED)
    expected = train(plain, plain_optimizer, plain, 4)
    assert train(model, optimizer, lambda x: checkpoint(model, x, use_reentrant=False), 4) == expected


@pytest.mark.parametrize(
    ("level", "dtype"),
    [
        pytest.param(level, dtype, marks=() if dtype is torch.bfloat16 or level in ("bf16-amp", "O3") else pytest.mark.matrix)
        for level in ("bf16-amp", "te", "O2", "O3", "O3-split")
        for dtype in (torch.bfloat16, torch.float16)
    ],
)
def test_16_bit_parameters_are_trained(dtype: torch.dtype, level: str) -> None:
    model, optimizer = make(level, dtype)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for step in range(3):
        loss = (model(inputs(step, dtype)).float() - 1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    for name, parameter in model.named_parameters():
        assert not torch.equal(parameter, before[name]), name
        if parameter.ndim == 1:
            assert parameter.dtype == dtype


def test_adam_keeps_its_l2_decay() -> None:
    model = nn.Linear(64, 64)
    adam = torch.optim.Adam(model.parameters(), weight_decay=0.1)
    _, optimizer = initialize(model, adam, opt_level="O2")
    assert optimizer.param_groups[0]["decoupled_weight_decay"] is False
    assert optimizer.param_groups[0]["weight_decay"] == 0.1


def test_frozen_and_unused_layers_do_no_harm() -> None:
    model = network()
    model[0].weight.requires_grad_(False)
    model.append(nn.Linear(32, 32))
    model, optimizer = initialize(model, torch.optim.AdamW(model.parameters()), opt_level="O2")
    frozen, unused = model[0].weight.clone(), model[5].weight.clone()
    model[:5](inputs(0)).sum().backward()
    assert isinstance(model[4].weight.grad, Float8Gradient)
    optimizer.step()
    assert torch.equal(model[0].weight, frozen)
    assert torch.equal(model[5].weight, unused)


def test_a_parameter_used_twice_gets_both_gradients() -> None:
    linear = nn.Linear(32, 32, bias=False)
    model, _ = initialize(nn.Sequential(linear, linear), opt_level="O2")
    model(inputs(0)).sum().backward()
    weight = model[0].weight_values().requires_grad_()
    (inputs(0) @ weight.T @ weight.T).sum().backward()
    gradient = model[0].weight.grad
    assert isinstance(gradient, Float8Gradient)
    assert ((gradient.dequantize() - weight.grad).norm() / weight.grad.norm()).item() < 0.08
