"""A user's attachments to an optimizer or a layer survive `initialize`, or the layer is left alone."""

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR

from octet.api_schemas.levels import LEVELS
from octet.worker import initialize
from octet.worker.fp8.linear import Float8Linear
from octet.worker.optim import LowBitAdamW, LowBitLion, LowBitSGD


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 48))


def backward(model: nn.Module, step: int = 0) -> None:
    model(torch.randn(8, 32, generator=torch.Generator().manual_seed(step))).square().mean().backward()


@pytest.mark.parametrize("level", LEVELS)
def test_a_scheduler_made_before_drives_the_new_optimizer(level: str) -> None:
    """Also without a warning about the order of steps; pytest makes errors of warnings."""
    model = network()
    given = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler, group = LambdaLR(given, lambda step: 0.5**step), given.param_groups[0]
    model, optimizer = initialize(model, given, opt_level=level)
    for step in range(3):
        backward(model, step)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    assert isinstance(optimizer, LowBitAdamW)
    assert optimizer.param_groups[0]["lr"] == 1e-2 / 8
    assert scheduler.get_last_lr() == [1e-2 / 8]
    assert optimizer.param_groups[0] is group
    assert given is optimizer


def test_a_scheduler_still_warns_of_the_wrong_order() -> None:
    model = network()
    given = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = LambdaLR(given, lambda _step: 1.0)
    initialize(model, given, opt_level="O2")
    with pytest.warns(UserWarning, match="before `optimizer.step"):
        scheduler.step()


def test_a_scheduler_of_momentum_drives_the_betas() -> None:
    model = network()
    given = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = OneCycleLR(given, max_lr=1e-2, total_steps=10)
    model, optimizer = initialize(model, given, opt_level="O2")
    backward(model)
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["betas"][0] == pytest.approx(scheduler.optimizer.param_groups[0]["betas"][0])
    assert optimizer.param_groups[0]["betas"][0] < 0.95


@pytest.mark.parametrize("optimizer_class", [torch.optim.AdamW, torch.optim.Adam, LowBitAdamW, LowBitLion])
def test_hooks_of_the_optimizer_are_called_and_can_be_removed(optimizer_class: type[torch.optim.Optimizer]) -> None:
    model, calls = network(), []
    given = optimizer_class(model.parameters())
    given.note = "mine"
    handles = [
        given.register_step_pre_hook(lambda *_: calls.append("pre")),
        given.register_step_post_hook(lambda optimizer, *_: calls.append(optimizer)),
        given.register_state_dict_pre_hook(lambda *_: calls.append("state_dict pre")),
        given.register_state_dict_post_hook(lambda _optimizer, state: state | {"more": 1}),
        given.register_load_state_dict_pre_hook(lambda *_: calls.append("load pre")),
        given.register_load_state_dict_post_hook(lambda *_: calls.append("load post")),
    ]
    model, optimizer = initialize(model, given, opt_level="O2")
    backward(model)
    optimizer.step()
    assert calls == ["pre", optimizer]
    state = optimizer.state_dict()
    assert state["more"] == 1
    optimizer.load_state_dict(state)
    assert calls[2:] == ["state_dict pre", "load pre", "load post"]
    assert optimizer.note == "mine"
    for handle in handles:
        handle.remove()
    optimizer.step()
    optimizer.state_dict()
    assert len(calls) == 5


def test_states_of_before_are_taken_over_and_released() -> None:
    model = network()
    given = torch.optim.AdamW(model.parameters(), lr=1e-2)
    backward(model)
    given.step()
    expected = copy.deepcopy(given.state[model[0].weight]["exp_avg"])
    _, optimizer = initialize(model, given, opt_level="O1")
    state = optimizer.state[model[0].weight]
    assert torch.equal(state["exp_avg"]["codes"], expected.reshape(-1))
    assert int(state["step"]) == 1
    assert not any(isinstance(value, Tensor) and value.ndim == 2 for value in state.values())


def test_a_fused_optimizer_leaves_nothing_of_its_class_behind() -> None:
    model = network()
    given = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    model, optimizer = initialize(model, given, opt_level="O2")
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(model(torch.ones(2, 32)).sum()).backward()
    before = model[0].weight_values()
    scaler.step(optimizer)
    assert (model[0].weight_values() - before).abs().max() <= 1.1e-2


@pytest.mark.parametrize(
    ("name", "expected"), [("adamw", LowBitAdamW), ("adam", LowBitAdamW), ("lion", LowBitLion), ("sgd", LowBitSGD)]
)
def test_an_optimizer_is_made_by_name(name: str, expected: type) -> None:
    model, optimizer = initialize(network(), opt_level="O2", optimizer_name=name)
    assert type(optimizer) is expected
    assert [id(p) for group in optimizer.param_groups for p in group["params"]] == [id(p) for p in model.parameters()]
    backward(model)
    before = model[0].weight_values()
    optimizer.step()
    assert not torch.equal(model[0].weight_values(), before)


def test_one_optimizer_is_asked_for() -> None:
    model = network()
    assert initialize(network(), opt_level="O2")[1] is None
    with pytest.raises(ValueError, match="optimizer_name is 'adagrad'; allowed: adamw, adam, lion, muon, sgd"):
        initialize(model, opt_level="O2", optimizer_name="adagrad")
    with pytest.raises(ValueError, match="both an optimizer and optimizer_name"):
        initialize(model, torch.optim.AdamW(model.parameters()), opt_level="O2", optimizer_name="adamw")
    assert type(model[0]) is nn.Linear


@pytest.mark.parametrize("level", ["bf16-amp", "te", "ao", "O2"])
def test_attributes_of_a_layer_and_its_parameters_stay(level: str) -> None:
    model = network()
    model[0].note, model[0].weight.no_decay, model.title = "first", True, "mine"
    model[0].eval()
    model, _ = initialize(model, opt_level=level)
    assert type(model[0]) is not nn.Linear
    assert (model[0].note, model[0].weight.no_decay, model.title) == ("first", True, "mine")
    assert not model[0].training
    assert copy.deepcopy(model)[0].note == "first"


def with_hook(linear: nn.Linear) -> None:
    linear.register_state_dict_post_hook(lambda *_: None)


def with_parameter(linear: nn.Linear) -> None:
    linear.lora = nn.Parameter(torch.zeros(2, 2))


def with_buffer(linear: nn.Linear) -> None:
    linear.register_buffer("mask", torch.ones(2))


def with_module(linear: nn.Linear) -> None:
    linear.adapter = nn.Linear(32, 32)


def with_forward(linear: nn.Linear) -> None:
    linear.forward = lambda x: nn.functional.linear(x, linear.weight) * 2


def with_attribute_of_ours(linear: nn.Linear) -> None:
    linear.recipe = "bake"


CHANGES: dict[str, tuple[Any, str]] = {
    "parametrization": (parametrizations.spectral_norm, "subclass of nn.Linear"),
    "weight norm": (parametrizations.weight_norm, "subclass of nn.Linear"),
    "pruning": (lambda linear: prune.random_unstructured(linear, "weight", 0.5), "it has hooks"),
    "state_dict hook": (with_hook, "it has hooks"),
    "forward hook": (lambda linear: linear.register_forward_hook(lambda *_: None), "it has hooks"),
    "parameter": (with_parameter, "it also holds lora"),
    "buffer": (with_buffer, "it also holds mask"),
    "module": (with_module, "it also holds adapter"),
    "forward": (with_forward, "its forward was replaced"),
    "attribute of ours": (with_attribute_of_ours, "its attribute recipe would be lost"),
}


@pytest.mark.parametrize("level", ["bf16-amp", "te", "O2"])
@pytest.mark.parametrize(("change", "reason"), CHANGES.values(), ids=CHANGES)
def test_a_layer_that_would_lose_something_is_left_alone(change: Any, reason: str, level: str) -> None:
    model = network()
    change(model[0])
    model.eval()
    first, x = model[0], torch.ones(2, 32)
    expected = first(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model, _ = initialize(model, opt_level=level)
    assert model[0] is first
    assert torch.equal(model[0](x), expected)
    if level != "bf16-amp":
        assert isinstance(model[2], Float8Linear)
        assert f"0: {reason}" in str(model.octet_report) or reason in str(model.octet_report)
