"""Moving and casting a model after `initialize`: the optimizer steps what the layers hold, codes keep their dtype."""

import copy
import io
from collections.abc import Callable

import pytest
import torch
from torch import nn

from octet.api_schemas.levels import LEVELS
from octet.worker.fp8.linear import Float8Linear
from octet.worker.fp8.stored import exact_state_dict
from octet.worker.optim import LowBitAdamW
from tests.kit.small_model import FP8_LEVELS, LEVELS_OF_CODES, Small, make, spread, values_of_weights


def through_a_file(pair: object) -> object:
    """torch.save and torch.load of whole objects: model and optimizer together, so that they stay together."""
    file = io.BytesIO()
    torch.save(pair, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def train(model: Small, optimizer: torch.optim.Optimizer, num_steps: int) -> list[float]:
    losses = []
    for step in range(num_steps):
        inputs = torch.randn(16, 32, generator=torch.Generator().manual_seed(step)).to(model.norm.weight.dtype)
        loss = (model(inputs).float() - 1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("level", spread(LEVELS))
def test_a_move_changes_nothing(level: str) -> None:
    """`_apply` is what `.to`, `.cuda`, Accelerate's `prepare` and our trainer call; a clone is a move to the same device."""
    stayed, moved = make(level), make(level)
    losses = [train(*stayed, 2), train(*moved, 2)]
    moved[0]._apply(lambda tensor: tensor.clone())
    losses = [losses[0] + train(*stayed, 4), losses[1] + train(*moved, 4)]
    assert losses[0] == losses[1]
    assert losses[0][-1] < losses[0][0]
    for (name, one), other in zip(exact_state_dict(stayed[0]).items(), exact_state_dict(moved[0]).values(), strict=True):
        assert torch.equal(one.view(-1).view(torch.uint8), other.view(-1).view(torch.uint8)), name


@pytest.mark.parametrize("level", spread(LEVELS_OF_CODES))
def test_the_optimizer_reads_what_the_layer_holds(level: str) -> None:
    """Large steps change the scale: with one scale for the layer and another for the optimizer the values were off by 4."""
    values = []
    for is_moved in (False, True):
        model, optimizer = make(level, lr=0.05)
        if is_moved:
            model._apply(lambda tensor: tensor.clone())
        train(model, optimizer, 10)
        values.append(values_of_weights(model))
        for layer in (module for module in model.modules() if isinstance(module, Float8Linear)):
            assert optimizer.quantized[layer.weight].dequant_scale is layer.weight.dequant_scale
    assert all(torch.equal(values[0][name], values[1][name]) for name in values[0])


@pytest.mark.parametrize(
    ("cast", "gradients"),
    [
        pytest.param(cast, gradients, id=f"{cast.__name__}-{gradients}", marks=marks)
        for cast, gradients, marks in (
            (nn.Module.half, "held", ()), (nn.Module.half, "none", pytest.mark.matrix),
            (nn.Module.bfloat16, "held", pytest.mark.matrix), (nn.Module.bfloat16, "none", ()),
        )
    ],
)  # fmt: skip
@pytest.mark.parametrize("level", spread(FP8_LEVELS))
def test_a_cast_leaves_codes_and_scales(level: str, cast: Callable[[nn.Module], nn.Module], gradients: str) -> None:
    model, optimizer = make(level)
    train(model, optimizer, 2)
    if gradients == "held":
        model(torch.randn(16, 32)).square().mean().backward()
    before = {name: (tensor.dtype, tensor.clone()) for name, tensor in exact_state_dict(model).items()}
    values = values_of_weights(model)
    cast(model)
    for name, tensor in exact_state_dict(model).items():
        if "scal" in name or "amax" in name or "codes" in name or "residual" in name:
            assert tensor.dtype == before[name][0], name
            assert torch.equal(tensor.view(-1).view(torch.uint8), before[name][1].view(-1).view(torch.uint8)), name
    assert model.norm.weight.dtype == model.first.bias.dtype == (torch.float16 if cast is nn.Module.half else torch.bfloat16)
    for name, value in values_of_weights(model).items():
        tolerance = {"rtol": 0, "atol": 0} if LEVELS[level].weight != "fp32" else {"rtol": 2**-8, "atol": 1e-7}
        torch.testing.assert_close(value.float(), values[name], **tolerance)
    losses = train(model, optimizer, 6)
    assert losses[-1] < losses[0]


@pytest.mark.filterwarnings("ignore:Complex modules are a new feature")
@pytest.mark.parametrize("part", ["model", "inner"])
@pytest.mark.parametrize("cast", [nn.Module.double, lambda module: module.to(torch.complex64)], ids=["double", "complex"])
@pytest.mark.parametrize("level", ["te", "O3", "ao", "bf16-amp", "fp16-amp"])
def test_a_cast_that_no_step_could_train_is_refused_before_anything_changes(
    level: str, cast: Callable[[nn.Module], nn.Module], part: str
) -> None:
    model, optimizer = make(level)
    before = {name: (tensor.dtype, tensor.data_ptr()) for name, tensor in exact_state_dict(model, keep_vars=True).items()}
    before = {name: known for name, known in before.items() if "extra_state" not in name}
    with pytest.raises(ValueError, match=r"cannot be cast to torch\..*allowed: torch\.float32, torch\.bfloat16"):
        cast(model if part == "model" else model.inner)
    after = {name: (tensor.dtype, tensor.data_ptr()) for name, tensor in exact_state_dict(model, keep_vars=True).items()}
    assert {name: after[name] for name in before} == before
    train(model, optimizer, 1)


def test_the_loss_scale_keeps_its_dtype() -> None:
    model, optimizer = make("fp16-amp")
    model.bfloat16()
    assert model.octet_loss_scaling_state.dtype == torch.float64
    train(model, optimizer, 2)
    assert model.octet_loss_scaling_state.tolist() == [2.0**16, 2.0, 0.0]


def test_the_loss_scale_is_the_models_after_a_move() -> None:
    model, optimizer = make("fp16-amp")
    model._apply(lambda tensor: tensor.clone())
    train(model, optimizer, 3)
    assert model.octet_loss_scaling_state[1] == 3


@pytest.mark.parametrize("copied", [copy.deepcopy, through_a_file])
@pytest.mark.parametrize("level", ["O2", "O3", "fp16-amp"])
def test_a_copy_is_guarded_and_trained_for_itself(level: str, copied: Callable[[object], tuple[Small, object]]) -> None:
    pair = make(level)
    train(*pair, 2)
    model, optimizer = copied(pair)
    with pytest.raises(ValueError, match="cannot be cast"):
        model.double()
    model._apply(lambda tensor: tensor.clone())
    before = pair[0].first.weight.detach().clone()
    train(model, optimizer, 3)
    assert torch.equal(pair[0].first.weight.float(), before.float())
    assert not torch.equal(model.first.weight.float(), before.float())


def test_a_replaced_parameter_is_refused_at_the_step() -> None:
    """torch's own optimizers train the tensor that nobody uses any more."""
    model, optimizer = make("O2")
    layer = model.first
    assert isinstance(layer, Float8Linear)
    train(model, optimizer, 1)
    model(torch.randn(16, 32)).sum().backward()
    layer.weight = nn.Parameter(layer.weight.detach().clone(), requires_grad=False)
    before = model.norm.weight.detach().clone()
    with pytest.raises(ValueError, match="a layer holds another parameter than the optimizer"):
        optimizer.step()
    assert torch.equal(model.norm.weight, before)


def test_states_follow_their_parameters_to_another_device() -> None:
    """torch's meta device stands for an accelerator."""
    here, there = nn.Parameter(torch.ones(64, 64)), nn.Parameter(torch.ones(64, 64, device="meta"))
    optimizer = LowBitAdamW([here, there])
    optimizer.state[there] = optimizer.state[here]
    optimizer.follow_weight(there)
    parts = [part for name in ("exp_avg", "exp_avg_sq") for part in optimizer.state[there][name].values()]
    assert {part.device.type for part in parts} == {"meta"}
