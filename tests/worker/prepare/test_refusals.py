"""`initialize` refuses before it changes anything: model and optimizer stay as they were."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from octet.worker import initialize
from octet.worker.fp8.weight import stored
from octet.worker.optim import LowBitAdamW

Pair = tuple[nn.Module, torch.optim.Optimizer | None]


def network(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 32)).to(dtype)


def stepped(optimizer_class: Callable[..., torch.optim.Optimizer], dtype: torch.dtype = torch.float32, **options: Any) -> Pair:
    model = network(dtype)
    optimizer = optimizer_class(model.parameters(), **options)
    model(torch.ones(4, 32, dtype=dtype)).sum().backward()
    optimizer.step()
    return model, optimizer


def of_another_model() -> Pair:
    return network(), torch.optim.AdamW(network().parameters())


def with_one_more_parameter() -> Pair:
    model = network()
    return model, torch.optim.AdamW([*model.parameters(), nn.Parameter(torch.zeros(3))])


def with_a_complex_parameter() -> Pair:
    model = network()
    model.register_parameter("phase", nn.Parameter(torch.zeros(3, dtype=torch.complex64)))
    return model, torch.optim.AdamW(model.parameters())


def with_a_bad_group(**options: Any) -> Pair:
    model = network()
    return model, torch.optim.AdamW([{"params": list(model.parameters()), **options}])


def with_amsgrads_states() -> Pair:
    model, optimizer = stepped(torch.optim.AdamW, amsgrad=True)
    assert optimizer is not None
    optimizer.param_groups[0]["amsgrad"] = False
    return model, optimizer


def around_an_initialized_one() -> Pair:
    inner, _ = initialize(network(), opt_level="O2")
    outer = nn.Sequential(inner, nn.Linear(32, 32))
    return outer, torch.optim.AdamW(outer[1].parameters())


REFUSED: dict[str, tuple[Callable[[], Pair], dict[str, Any], str]] = {
    "amsgrad": (lambda: stepped(torch.optim.AdamW, amsgrad=True), {}, "amsgrad=True"),
    "amsgrad in one group": (lambda: with_a_bad_group(amsgrad=True), {"opt_level": "fp32"}, "amsgrad=True"),
    "amsgrad before": (with_amsgrads_states, {}, "max_exp_avg_sq"),
    "differentiable": (lambda: with_a_bad_group(differentiable=True), {}, "differentiable=True"),
    "float64": (lambda: stepped(torch.optim.AdamW, torch.float64), {}, "float64; allowed: torch.float32"),
    "float64 at te": (lambda: stepped(torch.optim.Adam, torch.float64), {"opt_level": "te"}, "float64"),
    "complex": (with_a_complex_parameter, {}, "complex64; allowed: torch.float32"),
    "a bad codec": (lambda: with_a_bad_group(exp_avg_sq_codec="fp8-block"), {}, "exp_avg_sq_codec is 'fp8-block'"),
    "another model's parameters": (of_another_model, {}, "8 of .* are not of the model, the first of shape .64, 32."),
    "another model's, at bf16-amp": (of_another_model, {"opt_level": "bf16-amp"}, "are not of the model"),
    "one foreign parameter": (with_one_more_parameter, {}, r"1 of .* the first of shape \(3,\)"),
    "an optimizer of another class": (lambda: stepped(torch.optim.RMSprop), {}, "cannot hold the states of RMSprop"),
    "no optimizer at all": (lambda: (network(), [1]), {"opt_level": "bf16-amp"}, "optimizer: got list"),
    "an unknown option": (lambda: stepped(torch.optim.AdamW), {"exclud": ("*",)}, "unknown field 'exclud'"),
    "an unknown level": (lambda: stepped(torch.optim.AdamW), {"opt_level": "O4"}, "level: got O4"),
    "tokens": (lambda: stepped(torch.optim.AdamW), {"tokens": 0}, "tokens is 0"),
    "strict": (lambda: stepped(torch.optim.AdamW), {"strict": True, "include": ("nothing",)}, "strict conversion"),
    "a part is initialized": (around_an_initialized_one, {}, "initialized already"),
    "our own optimizer of another model": (
        lambda: (network(), LowBitAdamW(network().parameters())), {}, "not of the model"
    ),
}  # fmt: skip


def snapshot(model: nn.Module, optimizer: Any) -> list[Any]:
    modules = [(name, type(module), id(module)) for name, module in model.named_modules()]
    tensors = [
        (name, id(tensor), stored(tensor).data_ptr(), tensor.dtype, tensor.requires_grad, tensor.grad_dtype, id(tensor.grad))
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
    ]
    hooks = [
        (len(module._forward_hooks), len(module._forward_pre_hooks), sorted(vars(module)), len(module._buffers))
        for module in model.modules()
    ]
    parameter_hooks = [(list(p._backward_hooks or ()), list(p._post_accumulate_grad_hooks or ())) for p in model.parameters()]
    kept: list[Any] = [modules, tensors, hooks, parameter_hooks]
    if isinstance(optimizer, torch.optim.Optimizer):
        groups = [{**group, "params": [id(p) for p in group["params"]]} for group in optimizer.param_groups]
        states = [(id(p), {name: _bits(value) for name, value in state.items()}) for p, state in optimizer.state.items()]
        kept += [groups, states, len(optimizer._optimizer_step_post_hooks)]
    return copy.deepcopy(kept)


def _bits(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _bits(part) for name, part in value.items()}
    return (stored(value).data_ptr(), stored(value).dtype, value.float().tolist()) if isinstance(value, Tensor) else value


@pytest.mark.parametrize(("make", "options", "message"), REFUSED.values(), ids=REFUSED)
def test_what_is_refused_stays_as_it_was(make: Callable[[], Pair], options: dict[str, Any], message: str) -> None:
    model, optimizer = make()
    before, values = snapshot(model, optimizer), [p.detach().clone() for p in model.parameters()]
    with pytest.raises((ValueError, TypeError), match=message):
        initialize(model, optimizer, **{"opt_level": "O2", **options})
    assert snapshot(model, optimizer) == before
    for parameter, value in zip(model.parameters(), values, strict=True):
        assert torch.equal(parameter, value)


@pytest.mark.parametrize("level", ["bf16-amp", "te", "O2"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
def test_layers_of_other_dtypes_stay_as_they_are(level: str, dtype: torch.dtype) -> None:
    model = nn.ModuleDict({"wide": nn.Linear(32, 32, dtype=dtype), "plain": nn.Linear(32, 32)})
    wide, x = model["wide"], torch.ones(2, 32, dtype=dtype)
    expected = wide(x)
    initialize(model, torch.optim.AdamW(model["plain"].parameters()), opt_level=level)
    assert model["wide"] is wide
    assert torch.equal(model["wide"](x), expected)
    assert f"wide: its weight is {dtype}" in str(model.octet_report) or level == "bf16-amp"


def test_a_model_with_nothing_to_train_needs_no_loss_scaling() -> None:
    model = network().requires_grad_(False)
    model, _ = initialize(model, opt_level="fp16-amp")
    assert torch.isfinite(model(torch.ones(2, 32))).all()
