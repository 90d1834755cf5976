"""Do to models what people do, at every level: each gives what it gives on a plain fp32 model, within the level's error.

What cannot be done is refused and changes nothing. `torch.compile` is in test_torch_machinery.py; here it would take a minute.
"""

import copy
import io
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.utils import parametrizations, prune
from torch.nn.utils.fusion import fuse_linear_bn_eval
from torch.optim import swa_utils
from torch.utils.checkpoint import checkpoint

from octet.api_schemas.levels import LEVELS
from octet.worker import AveragedModel, initialize
from tests.kit.small_model import SPREAD, spread

Results = list[Tensor]
TOLERANCE = {"fp32": 1e-5, "fp16": 5e-3, "bf16": 2e-2, "fp8": 0.15}
"""Largest relative error of an output or gradient, by the dtype of the products. E4M3 and E5M2 round by up to 6 and 12 %."""


class Network(nn.Module):
    """Two projections with one weight, a layer that is called twice, and an MLP as people write it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.twice = nn.Linear(32, 64), nn.Linear(64, 64)
        self.mlp = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
        self.norm, self.head, self.tied = nn.LayerNorm(64), nn.Linear(64, 32), nn.Linear(64, 32)
        self.tied.weight = self.head.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = x + self.twice(torch.tanh(self.twice(x)))
        x = self.norm(x + self.mlp(x))
        return self.head(x) + self.tied(x)


def x(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*(shape or (24, 32)), generator=torch.Generator().manual_seed(seed))


def backward(model: nn.Module, input: Tensor | None = None) -> Results:
    """The output, the gradient of the input and those of the parameters."""
    input = (x() if input is None else input).requires_grad_()
    output = model(input)
    output.float().square().mean().backward()
    assert input.grad is not None
    return [output, input.grad, *gradients(model)]


def gradients(model: nn.Module) -> Results:
    return [parameter.grad + 0 for parameter in model.parameters() if parameter.grad is not None]


def accumulate(model: nn.Module) -> Results:
    for seed in (1, 2, 3):
        model(x(seed=seed)).square().mean().backward()
    return gradients(model)


def zero_in_place(model: nn.Module) -> Results:
    backward(model)
    model.zero_grad(set_to_none=False)
    return backward(model)


def under_no_grad(model: nn.Module) -> Results:
    with torch.no_grad():
        found = [model.eval()(x())]
    with torch.inference_mode():
        found.append(model(x()).clone())
    model.train()
    return found + backward(model)


def freeze_and_thaw(model: nn.Module) -> Results:
    model.twice.requires_grad_(False)
    found = backward(model)
    assert model.twice.weight.grad is None
    model.twice.requires_grad_(True)
    model.zero_grad()
    return found + backward(model)


def saved_and_loaded(model: nn.Module) -> Results:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return backward(torch.load(buffer, weights_only=False))


def with_its_own_state(model: nn.Module) -> Results:
    state = copy.deepcopy(model.state_dict())
    for parameter in model.parameters():
        parameter.data.zero_()
    model.load_state_dict(state)
    return backward(model)


def checkpointed(model: nn.Module) -> Results:
    model.mlp.register_forward_hook(lambda *_: None)
    own = model.mlp.forward
    model.mlp.forward = lambda input: checkpoint(own, input, use_reentrant=False)
    return backward(model)


def under_autocast(model: nn.Module) -> Results:
    with torch.autocast("cpu", torch.bfloat16):
        return backward(model)


def functional(model: nn.Module) -> Results:
    input = x()
    output = torch.func.functional_call(model, dict(model.named_parameters()), (input,))
    output.square().mean().backward()
    return [output, *gradients(model)]


def hooks(model: nn.Module) -> Results:
    seen: Results = []
    model.mlp[1].register_forward_hook(lambda _module, _args, output: seen.append(output))
    model.first.register_full_backward_hook(lambda _module, _grad_input, grad_output: seen.append(grad_output[0]))
    model.twice.weight.register_hook(lambda gradient: gradient * 2)
    found = backward(model)
    assert len(seen) == 2
    return [*found, seen[0], seen[1] / seen[1].norm()]  # a gradient within the model is scaled at fp16-amp


def asked_for_gradients(model: nn.Module) -> Results:
    return list(torch.autograd.grad(model(x()).square().mean(), list(model.parameters())))


def moved(model: nn.Module) -> Results:
    return backward(model.to("cpu").cpu())


def in_parallel(model: nn.Module) -> Results:
    return backward(DataParallel(model))  # on a machine without GPUs it calls the model


def fused_with_a_norm(model: nn.Module) -> Results:
    norm = nn.BatchNorm1d(64).eval()
    norm.running_mean, norm.running_var = x(64) * 0.1, x(64).square() + 0.5
    return [fuse_linear_bn_eval(copy.deepcopy(model.first).eval(), norm)(x())]


def cast(model: nn.Module, dtype: torch.dtype) -> Results:
    model.to(dtype)
    return backward(model, x().to(dtype))


def clipped_by_norm(model: nn.Module) -> Results:
    backward(model)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    return [norm.reshape(1), *gradients(model)]


def clipped_by_value(model: nn.Module) -> Results:
    """At half of the largest one, since each model has a limit of its own to compare by."""
    backward(model)
    limit = max(float(gradient.abs().max()) for gradient in gradients(model)) / 2
    nn.utils.clip_grad_value_(model.parameters(), limit)
    found = gradients(model)
    assert max(float(gradient.abs().max()) for gradient in found) == pytest.approx(limit, rel=1e-6)
    return found


def scaled_by_hand(model: nn.Module) -> Results:
    """A loss scale that GradScaler takes out of the gradients again. A larger one overflows at fp16-amp, which has its own."""
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(model(x()).square().mean()).backward()
    scaler.unscale_(torch.optim.SGD(model.parameters(), lr=0.0))
    return gradients(model)


def arithmetic_on_gradients(model: nn.Module) -> Results:
    backward(model)
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.mul_(3.0)
        parameter.grad += parameter.grad * 0.5
        parameter.grad /= 4.5
    return gradients(model)


def averaged(model: nn.Module, kind: Callable[[nn.Module], nn.Module]) -> Results:
    """The average of a model with itself is the model."""
    average = kind(model)
    for _ in range(3):
        average.update_parameters(model)
    return backward(average)


def pruned(model: nn.Module) -> Results:
    """The half of a weight that is smallest is zero in the products; all of it receives gradients."""
    prune.l1_unstructured(model.twice, "weight", 0.5)
    assert (model.twice.weight == 0).sum() == model.twice.weight.numel() // 2
    output = model(x())
    output.square().mean().backward()
    return [output, model.twice.weight_orig.grad]


def weight_normed(model: nn.Module) -> Results:
    parametrizations.weight_norm(model.twice)
    output = model(x())
    output.square().mean().backward()
    return [output, *(parameter.grad for parameter in model.twice.parametrizations.weight.parameters())]


def weight_normed_as_of_old(model: nn.Module) -> Results:
    """By the deprecated function, which takes the weight out of the layer before it registers what takes its place."""
    with pytest.warns(FutureWarning, match="deprecated"):
        nn.utils.weight_norm(model.twice)
    output = model(x())
    output.square().mean().backward()
    return [output, model.twice.weight_g.grad, model.twice.weight_v.grad]


DONE: dict[str, Callable[[nn.Module], Results]] = {
    "nothing": backward,
    "deepcopy": lambda model: backward(copy.deepcopy(model)),
    "torch.save of the module": saved_and_loaded,
    "state_dict": with_its_own_state,
    "no_grad and inference_mode": under_no_grad,
    "freeze and thaw": freeze_and_thaw,
    "accumulation": accumulate,
    "zero_grad in place": zero_in_place,
    "checkpoint": checkpointed,
    "autocast": under_autocast,
    "functional_call": functional,
    "hooks": hooks,
    "autograd.grad": asked_for_gradients,
    "to": moved,
    "DataParallel": in_parallel,
    "three dimensions": lambda model: backward(model, x(2, 12, 32)),
    "four dimensions": lambda model: backward(model, x(2, 3, 4, 32)),
    "one dimension": lambda model: backward(model, x(32)),
    "strided input": lambda model: backward(model, x(32, 24).t()),
    "fusion with a norm": fused_with_a_norm,
    "an empty batch": lambda model: backward(model, x(0, 32))[1:],
    "bfloat16": lambda model: cast(model, torch.bfloat16),
    "half": lambda model: cast(model, torch.float16),
    "clip_grad_norm_": clipped_by_norm,
    "clip_grad_value_": clipped_by_value,
    "GradScaler": scaled_by_hand,
    "arithmetic on .grad": arithmetic_on_gradients,
    "AveragedModel of ours": lambda model: averaged(model, AveragedModel),
    "AveragedModel of torch": lambda model: averaged(model, swa_utils.AveragedModel),
    "prune": pruned,
    "weight_norm": weight_normed,
    "weight_norm of old": weight_normed_as_of_old,
    "DistributedDataParallel": lambda model: backward(DistributedDataParallel(model)),
}  # fmt: skip
IN_BF16 = (under_autocast, DONE["bfloat16"], DONE["half"])


def make(level: str) -> tuple[Network, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Network()
    model, optimizer = initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-3), opt_level=level)
    assert model.head.weight is model.tied.weight
    return model, optimizer


@cache
def on_a_plain_model(do: Callable[[nn.Module], Results]) -> Results:
    """The same for every level."""
    torch.manual_seed(0)
    return do(Network())


def assert_close(level: str, found: Results, expected: Results, tolerance: float | None = None) -> None:
    limit = TOLERANCE[LEVELS[level].gemm] if tolerance is None else tolerance
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape
        error = (one.float() - other.float()).norm() / other.float().norm().clamp(min=1e-12)
        assert not other.numel() or not other.any() or error.item() < limit


def done_at_levels() -> list[Any]:
    """Each thing at every level; in `make test` at two of SPREAD, one with codes in FP8 and one without, which take turns."""
    found = []
    for number, (name, do) in enumerate(DONE.items()):
        for level in LEVELS:
            marks = () if level in SPREAD[number % 2 :: 2] else pytest.mark.matrix
            found.append(pytest.param(do, level, id=f"{name}-{level}", marks=marks))
    return found


@pytest.mark.parametrize(("do", "level"), done_at_levels())
def test_it_works_as_on_a_plain_model(do: Callable[[nn.Module], Results], level: str) -> None:
    model, optimizer = make(level)
    assert_close(level, do(model), on_a_plain_model(do), 0.15 if do in IN_BF16 else None)
    before = model.first.weight.detach() + 0
    if any(parameter.grad is not None and (parameter.grad + 0).any() for parameter in model.first.parameters()):
        optimizer.step()
        assert not torch.equal(model.first.weight + 0, before)


@pytest.mark.parametrize("level", spread(LEVELS))
def test_a_layer_that_was_frozen_at_first_is_thawed(level: str) -> None:
    """At fp16-amp its gradient would else keep the loss scale; at levels of codes it would not be held in FP8."""
    torch.manual_seed(0)
    plain = Network()
    plain.twice.requires_grad_(False)
    model = copy.deepcopy(plain)
    model, optimizer = initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-3), opt_level=level)
    for each in (plain, model):
        backward(each)
        assert each.twice.weight.grad is None
        each.zero_grad()
        each.twice.requires_grad_(True)
    assert_close(level, backward(model), backward(plain))
    before = model.twice.weight.detach() + 0
    optimizer.step()
    assert not torch.equal(model.twice.weight + 0, before)


@pytest.mark.parametrize("level", spread(LEVELS))
def test_rates_and_groups_change_between_steps(level: str) -> None:
    model, optimizer = make(level)
    other = nn.Linear(32, 16)
    weights = []
    for rate in (1e-2, 0.0):
        optimizer.param_groups[0]["lr"] = rate
        optimizer.param_groups[0]["weight_decay"] = 0.0
        if rate == 0.0:
            optimizer.add_param_group({"params": list(other.parameters()), "lr": 1e-2})
        weights.append([model.first.bias.detach().clone(), other.weight.detach().clone()])
        other(model(x())).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    last = [model.first.bias.detach(), other.weight.detach()]
    assert not torch.equal(weights[0][0], weights[1][0])
    assert torch.equal(weights[1][0], last[0])
    assert torch.equal(weights[0][1], weights[1][1])
    assert 0 < (last[1] - weights[1][1]).abs().max() < 1.1e-2


def twice_differentiated(model: nn.Module) -> object:
    input = x().requires_grad_()
    (gradient,) = torch.autograd.grad(model(input).square().mean(), input, create_graph=True)
    return gradient.square().sum().backward()


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    """A process group of this process alone, for DistributedDataParallel."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


HOLDS_CODES = tuple(name for name, level in LEVELS.items() if level.weight != "fp32")


REFUSED: dict[str, tuple[Callable[[nn.Module], Any], Callable[[str], bool], str]] = {
    "a second derivative": (twice_differentiated, lambda level: LEVELS[level].has_own_fp8, "differentiate twice"),
    "torch.func.grad": (
        lambda model: torch.func.grad(lambda input: model(input).sum())(x()),
        lambda level: LEVELS[level].has_own_fp8,
        "setup_context",
    ),
    "double": (lambda model: model.double(), lambda _level: True, r"cannot be cast to torch\.float64"),
    "a second initialize": (lambda model: initialize(model, opt_level="O2"), lambda _level: True, "initialized already"),
}


def refused() -> list[Any]:
    """Each thing at the levels that refuse it; most of them only in `make test-matrix`."""
    found = []
    for name, (_, is_refused, _) in REFUSED.items():
        for level in filter(is_refused, LEVELS):
            marks = () if level in (*SPREAD, "bf16-amp") else pytest.mark.matrix
            found.append(pytest.param(level, name, id=f"{level}-{name}", marks=marks))
    return found


@pytest.mark.parametrize(("level", "name"), refused())
def test_it_is_refused_and_nothing_is_changed(level: str, name: str) -> None:
    do, _, message = REFUSED[name]
    model, _ = make(level)
    with pytest.raises((ValueError, RuntimeError), match=message):
        do(model)
    model.zero_grad()
    assert_close(level, backward(model), on_a_plain_model(backward))


def in_module(model: nn.Module, stop: Callable[..., None]) -> Any:
    return model.mlp[2].register_full_backward_hook(stop)


def at_gradient(model: nn.Module, stop: Callable[..., None]) -> Any:
    return model.first.weight.register_hook(stop)


def after_gradient(model: nn.Module, stop: Callable[..., None]) -> Any:
    return model.twice.weight.register_post_accumulate_grad_hook(stop)


def interrupted() -> list[Any]:
    """Each place at every level; in `make test` at one of SPREAD, which take turns."""
    return [
        pytest.param(place, level, marks=() if level == SPREAD[number] else pytest.mark.matrix)
        for number, place in enumerate((in_module, at_gradient, after_gradient))
        for level in LEVELS
    ]


@pytest.mark.parametrize(("place", "level"), interrupted())
def test_an_error_in_a_backward_pass_leaves_no_trace(place: Callable[..., Any], level: str) -> None:
    """Out of memory, and Ctrl-C in a notebook: after `zero_grad` the next steps are those of a run without it."""

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    found = []
    for is_interrupted in (False, True):
        model, optimizer = make(level)
        losses = []
        for step in range(3):
            if is_interrupted and step == 1:
                hook = place(model, stop)
                with pytest.raises(KeyboardInterrupt):
                    backward(model)
                hook.remove()
                optimizer.zero_grad()
            loss = model(x(seed=step)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        found.append([*losses, *(parameter.detach() + 0 for parameter in model.parameters())])
    assert all(torch.equal(torch.as_tensor(one), torch.as_tensor(other)) for one, other in zip(*found, strict=True))
