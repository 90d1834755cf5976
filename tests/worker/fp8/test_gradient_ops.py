"""A training loop's ops on `.grad`: on an FP8 gradient they do what they do on the decoded values in fp32."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from octet.worker import initialize
from octet.worker.fp8.gradient import Float8Gradient
from octet.worker.fp8.rounding_position import RoundingPosition

SHAPE = (24, 48)
ONE_CODE = 2**-3
"""The distance of two E4M3 codes, relative to the smaller."""


def random_values(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def make(seed: int = 0) -> Float8Gradient:
    return Float8Gradient.quantize(random_values(*SHAPE, seed=seed), RoundingPosition(seed=0, stream=seed))


OTHER = random_values(*SHAPE, seed=9)
SCALING: dict[str, Callable[[Tensor], object]] = {
    "mul_": lambda g: g.mul_(0.3),
    "mul_ by a tensor": lambda g: g.mul_(torch.tensor(0.3)),
    "mul_ by one element": lambda g: g.mul_(torch.tensor([0.3])),
    "*=": lambda g: g.__imul__(3),
    "mul_(-1)": lambda g: g.mul_(-1),
    "neg_": lambda g: g.neg_(),
    "div_": lambda g: g.div_(3.0),
    "div_ by a tensor": lambda g: g.div_(torch.tensor(3.0)),
    "/=": lambda g: g.__itruediv__(7),
    "data": lambda g: g.data.mul_(0.5),
    "_foreach_mul_": lambda g: torch._foreach_mul_([g], 0.3),
    "_foreach_mul_ by a tensor": lambda g: torch._foreach_mul_([g], torch.tensor(0.3)),
    "_foreach_mul_ by a list": lambda g: torch._foreach_mul_([g], [0.3]),
    "_foreach_mul_ by tensors": lambda g: torch._foreach_mul_([g], [torch.tensor(0.3)]),
    "_foreach_div_": lambda g: torch._foreach_div_([g], 3.0),
    "_foreach_div_ by a list": lambda g: torch._foreach_div_([g], [3.0]),
    "_foreach_neg_": lambda g: torch._foreach_neg_([g]),
    "zero_": lambda g: g.zero_(),
    "_foreach_zero_": lambda g: torch._foreach_zero_([g]),
}
WRITING: dict[str, Callable[[Tensor], object]] = {
    "+=": lambda g: g.__iadd__(OTHER),
    "+= of a number": lambda g: g.__iadd__(1),
    "+= of fp64": lambda g: g.add_(OTHER.double()),
    "+= of a row": lambda g: g.add_(OTHER[0]),
    "add_ with alpha": lambda g: g.add_(OTHER, alpha=0.1),
    "-=": lambda g: g.__isub__(OTHER),
    "-= of another": lambda g: g.sub_(make(3) if isinstance(g, Float8Gradient) else make(3).dequantize()),
    "*= of a tensor": lambda g: g.__imul__(OTHER),
    "addcmul_": lambda g: g.addcmul_(OTHER, OTHER, value=0.5),
    "lerp_": lambda g: g.lerp_(OTHER, 0.5),
    "copy_": lambda g: g.copy_(OTHER),
    "copy_ of itself": lambda g: g.copy_(g * 2),
    "fill_": lambda g: g.fill_(0.5),
    "masked_fill_": lambda g: g.masked_fill_(OTHER > 0, 0.0),
    "clamp_": lambda g: g.clamp_(-0.3, 0.7),
    "clamp_ to tensors": lambda g: g.clamp_(-OTHER.abs(), OTHER.abs()),
    "clamp_min_": lambda g: g.clamp_min_(0.0),
    "nan_to_num_": lambda g: g.nan_to_num_(),
    "an element": lambda g: g.__setitem__((0, 0), 2.0),
    "a row": lambda g: g.__setitem__(3, OTHER[3]),
    "a view": lambda g: g.view(-1).mul_(OTHER.view(-1)),
    "a view of a view": lambda g: g.t()[5:].unsqueeze(0).add_(1.0),
    "a part": lambda g: g.chunk(2)[1].zero_(),
    "views in a list": lambda g: torch._foreach_mul_(list(g.unbind()), 2.0),
    "_foreach_add_": lambda g: torch._foreach_add_([g], [OTHER], alpha=0.5),
    "_foreach_add_ of a number": lambda g: torch._foreach_add_([g], 1.0),
    "_foreach_sub_": lambda g: torch._foreach_sub_([g], [OTHER]),
    "_foreach_copy_": lambda g: torch._foreach_copy_([g], [OTHER]),
    "_foreach_clamp_max_": lambda g: torch._foreach_clamp_max_([g], 0.5),
    "_foreach_lerp_": lambda g: torch._foreach_lerp_([g], [OTHER], 0.5),
    "out": lambda g: torch.add(OTHER, 1, out=g),
}
READING: dict[str, Callable[[Tensor], Tensor]] = {
    "a new tensor": lambda g: g / 2,
    "flat": lambda g: torch.cat([g.view(-1), g.flatten(), g.t().reshape(-1)]),
    "a row": lambda g: g[2].clone(),
    "a norm": lambda g: g.norm() + g[2].norm() + torch._foreach_norm([g[3]])[0],
    "another tensor": lambda g: torch.zeros(SHAPE).add_(g, alpha=0.5),
    "a list of others": lambda g: torch._foreach_lerp([OTHER], [g], 0.5)[0],
    "isfinite": lambda g: torch.isfinite(g).all(),
    "an index": lambda g: g[OTHER > 0],
}  # fmt: skip


@pytest.mark.parametrize("change", SCALING.values(), ids=SCALING)
def test_a_factor_goes_into_the_scale(change: Callable[[Tensor], object]) -> None:
    gradient, others = make(), [make(1), random_values(5)]
    expected, codes = gradient.dequantize(), gradient.codes.clone().view(torch.uint8)
    change(gradient)
    change(expected)
    torch.testing.assert_close(gradient.dequantize(), expected, rtol=2**-22, atol=0)
    if expected.any():
        assert torch.equal(gradient.codes.view(torch.uint8), codes)
    torch.testing.assert_close(torch._foreach_norm([gradient, *others])[0], expected.norm())


@pytest.mark.parametrize("change", WRITING.values(), ids=WRITING)
def test_what_is_written_arrives(change: Callable[[Tensor], object]) -> None:
    gradient = make()
    expected = gradient.dequantize()
    change(gradient)
    change(expected)
    smallest = expected.abs().max().item() * 2**-15
    torch.testing.assert_close(gradient.dequantize(), expected, rtol=ONE_CODE, atol=smallest)
    assert abs(gradient.dequantize().mean() - expected.mean()) < 0.01


@pytest.mark.parametrize("read", READING.values(), ids=READING)
def test_what_is_read_are_the_values(read: Callable[[Tensor], Tensor]) -> None:
    gradient = make()
    found = read(gradient)
    assert type(found) is Tensor
    torch.testing.assert_close(found, read(gradient.dequantize()))


def test_in_place_ops_return_the_gradient_itself() -> None:
    gradient = make()
    assert all(result is gradient for result in (gradient.mul_(2), gradient.add_(OTHER), gradient.clamp_(-1, 1)))
    assert gradient.lerp_(OTHER, 0.5) is gradient


def test_a_list_of_both_kinds_changes_as_a_whole() -> None:
    gradients = [make(), random_values(5), make(1), random_values(3, seed=2)]
    expected = [gradient + 0 for gradient in gradients]
    for change in (
        lambda tensors: torch._foreach_mul_(tensors, [1.0, 2.0, 3.0, 4.0]),
        lambda tensors: torch._foreach_div_(tensors, 3.0),
        lambda tensors: torch._foreach_addcdiv_(
            tensors, [tensor * 0 + 1 for tensor in tensors], [tensor * 0 + 1 for tensor in tensors]
        ),
        lambda tensors: torch._foreach_add_([tensors[1], tensors[3]], 1.0),
    ):
        change(gradients)
        change(expected)
    for gradient, values in zip(gradients, expected, strict=True):
        torch.testing.assert_close(gradient + 0, values, rtol=ONE_CODE, atol=1e-3)
    plain = torch.zeros(SHAPE)
    torch._foreach_add_([plain], [gradients[0]], alpha=-1.0)
    assert torch.equal(plain, -gradients[0].dequantize())


def test_a_view_follows_its_gradient() -> None:
    gradient = make()
    row = gradient[1]
    gradient.mul_(2)
    assert torch.equal(row + 0, gradient.dequantize()[1])


@pytest.mark.parametrize("foreach", [None, True, False])
def test_clipping_by_value_is_exact_for_what_it_clips(foreach: bool | None) -> None:
    parameters = [nn.Parameter(torch.zeros(SHAPE)), nn.Parameter(torch.zeros(SHAPE)), nn.Parameter(torch.zeros(5))]
    gradients = [make(), make(1).mul_(2**-9), random_values(5)]
    before = [gradient + 0 for gradient in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    untouched = gradients[1].codes.clone()
    nn.utils.clip_grad_value_(parameters, 0.3, foreach=foreach)
    is_clipped, values = before[0].abs() > 0.3, parameters[0].grad.dequantize()
    assert 0.5 < is_clipped.float().mean() < 0.9
    assert torch.equal(values[is_clipped], before[0][is_clipped].sign() * torch.tensor(0.3))
    assert values.abs().max() <= 0.3 + 1e-8
    torch.testing.assert_close(values[~is_clipped], before[0][~is_clipped], rtol=ONE_CODE, atol=1e-4)
    assert abs(values[~is_clipped].mean() - before[0][~is_clipped].mean()) < 1e-3
    assert torch.equal(parameters[1].grad.codes.view(torch.uint8), untouched.view(torch.uint8))
    assert torch.equal(parameters[1].grad + 0, before[1])
    assert torch.equal(parameters[2].grad, before[2].clamp(-0.3, 0.3))


def test_clipping_by_value_does_not_hide_a_non_finite_gradient() -> None:
    values = random_values(*SHAPE)
    values[0, 0] = torch.inf
    gradient = Float8Gradient.quantize(values, RoundingPosition(seed=0, stream=0))
    assert not torch.isfinite(gradient.clamp_(-1, 1)).all()


@pytest.mark.parametrize("level", ["fp32", "bf16-amp", "te", "O1", "O2", "O3", "O3-split", "O2-8bit"])
def test_grad_scaler_unscales_and_skips(level: str) -> None:
    """A power of two as the loss scale changes nothing: the weights are those of a run without one."""

    def train(scaler: torch.amp.GradScaler, *, unscales: bool = False) -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 48))
        model, optimizer = initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-2), opt_level=level)
        for step in range(4):
            optimizer.zero_grad()
            loss = model(random_values(8, 32, seed=step)).square().mean()
            is_bad = step == 2
            scaler.scale(loss * torch.inf if is_bad else loss).backward()
            if unscales and not is_bad:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 1e6)
            before = [parameter.detach().clone() for parameter in model.parameters()]
            scaler.step(optimizer)
            scaler.update()
            same = [torch.equal(now, old) for now, old in zip(model.parameters(), before, strict=True)]
            assert all(same) == is_bad
        return model

    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    scaled, plain = train(scaler, unscales=True), train(torch.amp.GradScaler("cpu", enabled=False))
    assert scaler.get_scale() == 2.0**7
    for one, other in zip(scaled.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("level", ["te", "O2", "O3"])
def test_a_gradient_that_was_zeroed_or_dropped_is_none_of_the_next_step(level: str) -> None:
    def gradient_after(reset: Callable[[nn.Module], object]) -> Tensor:
        torch.manual_seed(0)
        model, _ = initialize(nn.Linear(32, 64), opt_level=level)
        for seed in (0, 1):
            reset(model)
            model(random_values(8, 32, seed=seed)).square().mean().backward()
        return model.weight.grad + 0

    dropped = gradient_after(lambda model: model.zero_grad())
    assert torch.equal(gradient_after(lambda model: model.zero_grad(set_to_none=False)), dropped) == (level == "te")
    torch.testing.assert_close(
        gradient_after(lambda model: model.zero_grad(set_to_none=False)), dropped, rtol=ONE_CODE, atol=1e-4
    )
    assert torch.equal(gradient_after(lambda model: setattr(model.weight, "grad", None)), dropped)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_torchs_fused_optimizers_step_as_those_of_lists_do(kind: type[torch.optim.Optimizer]) -> None:
    """Some of their lists are empty."""
    found = []
    for way in ("foreach", "fused"):
        torch.manual_seed(0)
        model, _ = initialize(nn.Sequential(nn.Linear(32, 32)), None, "O2", auto_filter=False)
        optimizer = kind(model.parameters(), lr=1e-2, **{way: True})
        model(torch.ones(4, 32)).sum().backward()
        assert type(model[0].weight.grad) is Float8Gradient
        optimizer.step()
        found.append(model[0].weight + 0)
    torch.testing.assert_close(*found, rtol=1e-6, atol=1e-7)
