"""The fused optimizer step against the plain-torch one: the same bits in weights, scales and states, for every format."""

import copy
import itertools
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from octet.worker.fp8.gradient import Float8Gradient
from octet.worker.fp8.rounding_position import RoundingPosition
from octet.worker.fp8.weight import Float8Weight
from octet.worker.kernels.cuda import language
from octet.worker.optim import OPTIMIZERS, Hyperparameters, LowBitAdamW
from octet.worker.optim.origin import Origin
from tests.kit.stored_weights import parts_of, stored_weight, values_of_codes

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of the interpreter
DEVICE = "cpu" if language.INTERPRETED.value else "cuda"
E4M3 = torch.float8_e4m3fn
WEIGHTS = ("fp32", "bf16", "fp16", "fp16-scaled", "split", "master")
GRADIENTS = ("fp32", "bf16", "fp16", "fp8")
SHAPES = ((129,), (33, 128), (8300,))
SMALL_SHAPES = SHAPES[:2]
"""A part of one turn of the kernel, and a whole turn with a part of one: all but a second chunk."""
BY_RULE = {optimizer.rule.name: optimizer for optimizer in OPTIMIZERS}


def rows(optimizer: str, num_rows: int, shift: int) -> list[tuple[str, ...]]:
    """(weight, gradient, codecs of the states): combinations of codecs in turn, each with another weight and gradient."""
    codecs = list(itertools.product(*BY_RULE[optimizer].rule.state_codecs.values()))
    found = []
    for row in range(num_rows):
        gradient = GRADIENTS[(row + row // len(WEIGHTS) + shift) % len(GRADIENTS)]
        found.append((WEIGHTS[row % len(WEIGHTS)], gradient, *codecs[row % len(codecs)]))
    return found


ADAM_ROWS, LION_ROWS, SGD_ROWS = rows("adam", 12, shift=0), rows("lion", 6, shift=1), rows("sgd", 6, shift=2)
"""Every combination of Adam's codecs, every weight with three of the four gradients, every rule with every weight."""


def first(num_rows: int, of: list[tuple[str, ...]]) -> list[Any]:
    """Return parameters of a test: these rows, and the others only in `make test-matrix`."""
    return [pytest.param(*row, marks=() if number < num_rows else pytest.mark.matrix) for number, row in enumerate(of)]


def uneven(*shape: int, seed: int) -> Tensor:
    """Gaussian numbers; each run of 64 has its own magnitude, from 1e-6 to 1. Some are zero."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator).view(-1)
    magnitudes = 10.0 ** (-6 * torch.rand(values.numel() // 64 + 1, generator=generator))
    values = (
        values * magnitudes.repeat_interleave(64)[: values.numel()] * (torch.rand(values.shape, generator=generator) > 0.02)
    )
    return values.view(shape).to(DEVICE)


class Model:
    """Parameters of such shapes in one format, and an optimizer of them."""

    def __init__(
        self, held: str, *, fused: bool, rule: str = "adam", shapes: Iterable[tuple[int, ...]] = SHAPES, **options: object
    ) -> None:
        self.held, self.parameters = held, []
        for number, shape in enumerate(shapes):
            self.parameters.append(self.make(uneven(*shape, seed=number)))
        made = BY_RULE[rule]
        self.optimizer = made(self.parameters, made.rule.defaults(**options), seed=2**40 + 5, fused=fused)

    def make(self, values: Tensor) -> nn.Parameter:
        plain = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
        if self.held in plain:
            return nn.Parameter(values.to(plain[self.held]))
        return stored_weight(values, self.held.removesuffix("-scaled"))

    def step(self, arrives: str, seed: int, bad: float | None = None) -> None:
        for number, parameter in enumerate(self.parameters):
            parameter.grad_dtype = None
            values = uneven(*parameter.shape, seed=100 * seed + number)
            if bad is not None and number == 1:
                values.view(-1)[77] = bad
            parameter.grad = gradient_of(values, arrives)
        self.optimizer.step()

    def tensors(self) -> list[Tensor]:
        found = [part for held in self.parameters for part in (parts_of(held) if type(held) is Float8Weight else [held])]
        for parameter in self.parameters:
            state = self.optimizer.state[parameter]
            found += [torch.as_tensor(state["step"], device=DEVICE)]
            found += [part for name in state if isinstance(state[name], dict) for part in state[name].values()]
        return [bits(tensor) for tensor in found]


def gradient_of(values: Tensor, arrives: str) -> Tensor:
    if arrives == "fp8":
        return Float8Gradient.quantize(values, RoundingPosition(0, 0))
    return values.to({"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[arrives])


def bits(tensor: Tensor) -> Tensor:
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.detach().view(integers[tensor.dtype.itemsize]).clone()


def check(held: str, arrives: str, **options: object) -> None:
    fused, plain = (Model(held, fused=fused, **options) for fused in (True, False))
    for step in range(2):
        fused.step(arrives, seed=step + 1)
        plain.step(arrives, seed=step + 1)
        for number, (actual, expected) in enumerate(zip(fused.tensors(), plain.tensors(), strict=True)):
            assert torch.equal(actual, expected), f"step {step}, tensor {number}: {int((actual != expected).sum())} differ"


@pytest.mark.parametrize(("held", "arrives", "exp_avg_codec", "exp_avg_sq_codec"), first(6, ADAM_ROWS))
def test_adam(held: str, arrives: str, exp_avg_codec: str, exp_avg_sq_codec: str) -> None:
    check(held, arrives, lr=0.01, exp_avg_codec=exp_avg_codec, exp_avg_sq_codec=exp_avg_sq_codec)


@pytest.mark.system
@pytest.mark.parametrize(("held", "arrives", "exp_avg_codec"), first(3, LION_ROWS))
def test_lion(held: str, arrives: str, exp_avg_codec: str) -> None:
    check(held, arrives, rule="lion", lr=0.01, weight_decay=0.1, exp_avg_codec=exp_avg_codec)


@pytest.mark.parametrize(("held", "arrives", "exp_avg_codec"), first(2, SGD_ROWS))
def test_sgd(held: str, arrives: str, exp_avg_codec: str) -> None:
    check(held, arrives, rule="sgd", lr=0.01, weight_decay=0.1, max_gradient=0.5, exp_avg_codec=exp_avg_codec)


@pytest.mark.parametrize(
    "options",
    [
        {"decoupled_weight_decay": False, "weight_decay": 0.1, "betas": (0.95, 0.9)},
        {"weight_decay": 0.0, "maximize": True, "eps": 0.0},
        {"betas": (0.0, 0.5), "eps": 1e-3},
        {"rule": "sgd", "maximize": True, "momentum": 0.5, "max_gradient": 1e-3},
        {"rule": "lion", "maximize": True, "betas": (0.0, 0.5), "weight_decay": 0.3},
    ],
    ids=str,
)
def test_hyperparameters(options: dict[str, object]) -> None:
    check("split", "fp32", lr=3e-3, shapes=SMALL_SHAPES, **options)


@pytest.mark.parametrize(("bad", "arrives"), [(float("nan"), "fp32"), (float("inf"), "fp8")])
def test_a_nonfinite_gradient_changes_nothing(bad: float, arrives: str) -> None:
    model = Model("master", fused=True, shapes=SMALL_SHAPES)
    model.step(arrives, seed=1)
    before = model.tensors()
    model.step(arrives, seed=2, bad=bad)
    assert all(torch.equal(now, then) for now, then in zip(model.tensors(), before, strict=True))
    assert model.optimizer.num_skipped_steps == 1
    model.step(arrives, seed=3)
    assert not torch.equal(model.tensors()[0], before[0])
    assert int(model.optimizer.state[model.parameters[0]]["step"]) == 2


@pytest.mark.parametrize(
    ("held", "rule", "bad", "fused"),
    [
        *((held, "adam", "nan", fused) for held in ("fp16-scaled", "split", "master") for fused in (True, False)),
        *(("split", "lion", bad, False) for bad in ("nan", "inf", "-inf")),
        ("master", "lion", "inf", True),
    ],
)
def test_a_weight_that_is_not_finite_has_a_scale_that_says_so(held: str, rule: str, bad: str, fused: bool) -> None:
    """Its codes saturate; the layer that it belongs to computes NaN from here on, and the others do not."""
    model = Model(held, fused=fused, rule=rule, shapes=SMALL_SHAPES, exp_avg_codec="fp32")
    model.step("fp32", seed=1)
    model.optimizer.state[model.parameters[0]]["exp_avg"]["codes"][70] = float(bad)
    for seed in (2, 3):
        model.step("fp32", seed=seed)
        assert [bool(weight.dequant_scale.isnan()) for weight in model.parameters] == [True, False]
        assert not values_of_codes(model.parameters[0]).isfinite().any()
        assert values_of_codes(model.parameters[1]).isfinite().all()


def test_groups_learning_rates_and_resume() -> None:
    """Groups have their own rates, a rate may be a tensor, and a state is continued by either implementation."""
    ends = []
    for order in ((True, False), (False, True)):
        model = Model("fp16-scaled", fused=order[0], shapes=SMALL_SHAPES)
        parameters = model.parameters
        for part, fused in enumerate(order):
            groups = [{"params": parameters[:1], "lr": torch.tensor(0.03, device=DEVICE)}, {"params": parameters[1:]}]
            optimizer = LowBitAdamW(groups, Hyperparameters(lr=1e-3), fused=fused)
            if part:
                optimizer.load_state_dict(copy.deepcopy(model.optimizer.state_dict()))
            model.optimizer = optimizer
            model.step("bf16", seed=part)
            optimizer.param_groups[0]["lr"] = 0.02
            model.step("bf16", seed=part + 10)
        ends.append(model.tensors())
    assert all(torch.equal(one, other) for one, other in zip(*ends, strict=True))


def test_shards_draw_the_numbers_of_the_whole() -> None:
    values, gradient, cut = uneven(9000, seed=1).bfloat16(), uneven(9000, seed=2), 128 * 35
    results = []
    for fused, cuts in ((False, [0, 9000]), (True, [0, cut, 9000])):
        shards = [nn.Parameter(values[start:end].clone()) for start, end in itertools.pairwise(cuts)]
        optimizer = LowBitAdamW(shards, Hyperparameters(exp_avg_sq_codec="uint8-companded"), fused=fused)
        for shard, (start, end) in zip(shards, itertools.pairwise(cuts), strict=True):
            optimizer.hold(shard, shard, Origin(0, start, 9000), None, optimizer.state[shard])
            shard.grad_dtype = None
            shard.grad = gradient[start:end].clone()
        optimizer.step()
        squares = [optimizer.state[shard]["exp_avg_sq"]["codes"] for shard in shards]
        results.append((torch.cat([shard.detach() for shard in shards]), torch.cat(squares)))
    assert torch.equal(bits(results[0][0]), bits(results[1][0]))
    assert torch.equal(results[0][1], results[1][1])


def test_what_a_kernel_does_not_take_is_stepped_by_plain_torch() -> None:
    transposed = nn.Parameter(torch.randn(128, 64, device=DEVICE).t())
    optimizer = LowBitAdamW([transposed], fused=True)
    transposed.grad = torch.ones_like(transposed)
    before = transposed.detach().clone()
    optimizer.step()
    assert bool((transposed.detach() < before).all())
    assert not optimizer._stepper.fused_steps
