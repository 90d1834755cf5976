"""Do with `model.parameters()` what people do, at every level: each leaves what it leaves on a plain fp32 model.

Weights begin as the same rounded values in both models, so what differs is rounding of the level's own: none of what is read,
and of what is written that of its storage.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.optim import swa_utils

from octet.api_schemas.levels import LEVELS
from tests.kit.small_model import SPREAD, Small, make
from tests.kit.timm_averages import model_ema

Result = list[Tensor]
ROUNDING = {"fp32": 1e-5, "codes": 6e-4}
"""Largest relative error of values that are written. Codes have FP16's digits at least: a master, or INT8, refines E4M3."""


def noise(tensor: Tensor, seed: int = 0) -> Tensor:
    return torch.randn(tuple(tensor.shape), generator=torch.Generator().manual_seed(seed)) * 0.02


def values(model: nn.Module) -> Result:
    return [parameter.detach() + 0 for parameter in model.parameters()]


def target_of(model: nn.Module) -> nn.Module:
    target = copy.deepcopy(model)
    with torch.no_grad():
        for seed, parameter in enumerate(target.parameters()):
            parameter.add_(noise(parameter, seed))
    return target


def each(change: Callable[[nn.Parameter], Any]) -> Callable[[nn.Module], Result]:
    def run(model: nn.Module) -> Result:
        with torch.no_grad():
            for parameter in model.parameters():
                change(parameter)
        return values(model)

    return run


def climb_and_return(model: nn.Module) -> Result:
    """SAM: the climb is seen by products, and taken back exactly."""
    climbed = [noise(parameter, 1) for parameter in model.parameters()]
    with torch.no_grad():
        for _ in range(20):
            for parameter, step in zip(model.parameters(), climbed, strict=True):
                parameter.add_(step)
            for parameter, step in zip(model.parameters(), climbed, strict=True):
                parameter.sub_(step)
    return values(model)


def soft_update(model: nn.Module) -> Result:
    """A target network as reinforcement learning has it, 100 slow updates."""
    target = target_of(model)
    for _ in range(100):
        for slow, fast in zip(target.parameters(), model.parameters(), strict=True):
            slow.data.copy_(0.999 * slow.data + 0.001 * fast.data)
    return values(target)


def soft_update_in_place(model: nn.Module) -> Result:
    target = target_of(model)
    for _ in range(100):
        for slow, fast in zip(target.parameters(), model.parameters(), strict=True):
            slow.data.mul_(0.9999).add_(fast.data, alpha=0.0001)
    return values(target)


def averaged_by_timm(model: nn.Module) -> Result:
    """V3 in its three forms, and V2, which writes entry by entry into the average's state dict, as YOLO's does."""
    timm = model_ema()
    options: list[dict[str, Any]] = [{}, {"foreach": False}, {"exclude_buffers": True}, {"use_warmup": True, "device": "cpu"}]
    averages = [timm.ModelEmaV2(model, decay=0.99), *(timm.ModelEmaV3(model, decay=0.99, **option) for option in options)]
    for step in range(6):
        each(lambda parameter, seed=step: parameter.add_(noise(parameter, seed)))(model)
        averages[0].update(model)
        for average in averages[1:]:
            average.update(model, step=step + 2)
    found = [value for average in averages for value in values(average.module)]
    averages[1].set(model)
    return [*found, *values(averages[1].module)]


def soup(model: nn.Module) -> Result:
    states = [model.state_dict(), target_of(model).state_dict()]
    mean = {name: (states[0][name] + states[1][name]) / 2 for name, _ in model.named_parameters()}
    model.load_state_dict(mean, strict=False)
    return values(model)


def lookahead(model: nn.Module) -> Result:
    slow = [parameter.clone().detach() for parameter in model.parameters()]
    each(lambda parameter: parameter.add_(noise(parameter, 2)))(model)
    with torch.no_grad():
        for kept, fast in zip(slow, model.parameters(), strict=True):
            kept.lerp_(fast, 0.5)
            fast.copy_(kept)
    return values(model)


def ewc_penalty(model: nn.Module) -> Result:
    anchors = [parameter.detach().clone() for parameter in model.parameters()]
    each(lambda parameter: parameter.add_(noise(parameter, 3)))(model)
    loss = torch.stack(
        [(parameter - anchor).square().sum() for parameter, anchor in zip(model.parameters(), anchors, strict=True)]
    ).sum()
    return [loss, *torch.autograd.grad(loss, list(model.parameters()))]


def l2_penalty(model: nn.Module) -> Result:
    loss = torch.stack([parameter.square().sum() for parameter in model.parameters()]).sum()
    loss.backward()
    return [loss, *(parameter.grad + 0 for parameter in model.parameters() if parameter.grad is not None)]


def adapted_by_maml(model: nn.Module) -> Result:
    """One inner step, its values given to functional_call; the outer gradient goes to the parameters through them."""
    parameters = dict(model.named_parameters())
    inner = {name: parameter - 0.1 * noise(parameter, 4) * parameter for name, parameter in parameters.items()}
    loss = torch.stack([value.square().sum() for value in inner.values()]).sum()
    return [loss, *torch.autograd.grad(loss, list(parameters.values()))]


def called_with_values(model: nn.Module) -> Result:
    """The products of given values; within FP8's error, which the comparison of two such calls takes out."""
    given = {name: parameter.detach() * 2 for name, parameter in model.named_parameters()}
    before = values(model)
    with torch.no_grad():
        functional_call(model, given, (torch.ones(16, 32),))
    return [one - other for one, other in zip(values(model), before, strict=True)]


def as_vector(model: nn.Module) -> Result:
    vector = parameters_to_vector(model.parameters()).detach()
    vector_to_parameters(vector + noise(vector, 5), model.parameters())
    return [vector, *values(model)]


def averaged_by_torch(model: nn.Module) -> Result:
    average = swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9))
    mean = swa_utils.AveragedModel(model)
    for seed in range(5):
        average.update_parameters(model)
        mean.update_parameters(model)
        each(lambda parameter, seed=seed: parameter.add_(noise(parameter, seed)))(model)
    return [*values(average.module), *values(mean.module)]


def averaged_by_torch_ema(model: nn.Module) -> Result:
    from torch_ema import ExponentialMovingAverage

    average = ExponentialMovingAverage(model.parameters(), decay=0.9999)
    for seed in range(20):
        each(lambda parameter, seed=seed: parameter.add_(noise(parameter, seed)))(model)
        average.update()
    trained = values(model)
    with average.average_parameters():
        inside = values(model)
    return [*inside, *(one - other for one, other in zip(values(model), trained, strict=True))]


def replaced(model: nn.Module) -> Result:
    """The optimizer goes on with the parameter that it has; the layer multiplies with the new one."""
    model.first.weight = nn.Parameter(noise(model.first.weight, 6))
    return values(model)


def stepped(make_optimizer: Callable[[Any], torch.optim.Optimizer]) -> Callable[[nn.Module], Result]:
    """An optimizer of torch over the converted model's parameters, ten steps of given gradients."""

    def run(model: nn.Module) -> Result:
        optimizer = make_optimizer(model.parameters())
        for seed in range(10):
            for parameter in model.parameters():
                parameter.grad = noise(parameter, seed)
            optimizer.step()
        return values(model)

    return run


def update_to_weight(model: nn.Module) -> Result:
    before = [parameter.clone() for parameter in model.parameters()]
    each(lambda parameter: parameter.add_(noise(parameter, 7)))(model)
    pairs = zip(model.parameters(), before, strict=True)
    return [((parameter - old).norm() / old.norm().clamp(min=1e-3)).detach() for parameter, old in pairs]


READS: dict[str, Callable[[nn.Module], Result]] = {
    "norm": lambda model: [parameter.norm() for parameter in model.parameters()],
    "float": lambda model: [parameter.float() + 0 for parameter in model.parameters()],
    "numpy": lambda model: [torch.from_numpy(parameter.detach().numpy()) + 0 for parameter in model.parameters()],
    "muP, spread of each": lambda model: [parameter.std(correction=0) for parameter in model.parameters()],
    "spectrum": lambda model: [torch.linalg.svdvals(parameter) for parameter in model.parameters() if parameter.dim() == 2],
    "state dict": lambda model: [model.state_dict()[name] for name, _ in model.named_parameters()],
    "L2 penalty": l2_penalty,
    "MAML": adapted_by_maml,
    "functional_call": called_with_values,
    "matmul": lambda model: [model.first.weight @ torch.ones(32, 2)],
    "histogram": lambda model: [torch.histc(parameter.detach(), 10) for parameter in model.parameters()],
    "shares of zeros": lambda model: [(parameter == 0).float().mean() for parameter in model.parameters()],
}
WRITES: dict[str, Callable[[nn.Module], Result]] = {
    "copy_": each(lambda parameter: parameter.copy_(noise(parameter))),
    "data.add_ of noise": each(lambda parameter: parameter.data.add_(noise(parameter))),
    "mul_, 100 times": each(lambda parameter: [parameter.mul_(1 - 1e-5) for _ in range(100)]),
    "decay by hand": each(lambda parameter: parameter.mul_(1 - 0.01 * 0.1)),
    "clamp_": each(lambda parameter: parameter.clamp_(-0.05, 0.05)),
    "a row": each(lambda parameter: parameter[1:3].fill_(0.01)),
    "data =": each(lambda parameter: setattr(parameter, "data", noise(parameter))),
    "init": each(lambda parameter: nn.init.trunc_normal_(parameter, std=0.02, generator=torch.Generator().manual_seed(0))),
    "+=": each(lambda parameter: parameter.__iadd__(noise(parameter))),
    "SAM": climb_and_return,
    "target network": soft_update,
    "target network in place": soft_update_in_place,
    "soup": soup,
    "Lookahead": lookahead,
    "EWC": ewc_penalty,
    "vector_to_parameters": as_vector,
    "AveragedModel of torch": averaged_by_torch,
    "torch-ema": averaged_by_torch_ema,
    "timm": averaged_by_timm,
    "replaced": replaced,
    "update to weight": update_to_weight,
    "SGD": stepped(lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, foreach=False)),
    "SGD, foreach": stepped(lambda parameters: torch.optim.SGD(parameters, lr=0.1, foreach=True)),
    "SGD, fused": stepped(lambda parameters: torch.optim.SGD(parameters, lr=0.1, fused=True)),
    "AdamW": stepped(lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, foreach=False)),
    "AdamW, foreach": stepped(lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, foreach=True)),
    "AdamW, fused": stepped(lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, fused=True)),
}


def plain_twin(model: nn.Module) -> nn.Module:
    """A plain fp32 model with the values that the converted one holds."""
    plain = Small()
    with torch.no_grad():
        for parameter, held in zip(plain.parameters(), model.parameters(), strict=True):
            parameter.copy_(held)
    return plain


def cases(actions: dict[str, Any]) -> list[Any]:
    """Each action at every level; in `make test` at one of SPREAD, which take turns."""
    found = []
    for number, name in enumerate(actions):
        for level in LEVELS:
            marks = () if level == SPREAD[number % len(SPREAD)] else pytest.mark.matrix
            found.append(pytest.param(name, level, id=f"{name}-{level}", marks=marks))
    return found


def prepared(level: str) -> nn.Module:
    """A model that was trained for a step."""
    model, optimizer = make(level)
    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(1))
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model


@pytest.mark.parametrize(("name", "level"), cases(READS))
def test_what_is_read_is_what_a_plain_model_has(name: str, level: str) -> None:
    model = prepared(level)
    expected, found = READS[name](plain_twin(model)), READS[name](model)
    for one, other in zip(found, expected, strict=True):
        bf16_or_fp8 = 0.15 if name in ("L2 penalty", "MAML") and one.dim() else 1e-5
        other = other.detach()
        limits = {"rtol": bf16_or_fp8, "atol": bf16_or_fp8 * float(other.abs().max())}
        torch.testing.assert_close(one.detach().float() + 0, other, **limits)


@pytest.mark.parametrize(("name", "level"), cases(WRITES))
def test_what_is_written_is_what_a_plain_model_has(name: str, level: str) -> None:
    model = prepared(level)
    expected, found = WRITES[name](plain_twin(model)), WRITES[name](model)
    limit = ROUNDING["fp32" if LEVELS[level].weight == "fp32" else "codes"]
    for one, other in zip(found, expected, strict=True):
        error = (one.detach().float() - other.detach()).norm() / other.detach().norm().clamp(min=1e-3)
        assert error < limit
