"""The fused optimizer step against the plain-torch one: the same bits in weights, scales and states, for every format."""

import copy
import itertools

import pytest
import torch
from torch import Tensor, nn

from worker import kernels
from worker.fp8.gradient import Float8Gradient, RoundingPosition
from worker.kernels.cuda import language
from worker.optim import Hyperparameters, LowBitAdamW, QuantizedWeight
from worker.optim.adamw import MOMENT_CODECS

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of the interpreter
DEVICE = "cpu" if language.INTERPRETED.value else "cuda"
E4M3 = torch.float8_e4m3fn
WEIGHTS = ("fp32", "bf16", "fp16", "fp16-scaled", "split", "master")
GRADIENTS = ("fp32", "bf16", "fp16", "fp8-tensor", "fp8-block")
SHAPES = ((33, 128), (1, 4100), (129,), (5000,))  # whole blocks, a last block that is short, small, two chunks and a bit


def uneven(*shape: int, seed: int) -> Tensor:
    """Gaussian numbers of which each run of 64 has its own magnitude, from 1e-6 to 1; some are zero."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator).view(-1)
    magnitudes = 10.0 ** (-6 * torch.rand(values.numel() // 64 + 1, generator=generator))
    values = (
        values * magnitudes.repeat_interleave(64)[: values.numel()] * (torch.rand(values.shape, generator=generator) > 0.02)
    )
    return values.view(shape).to(DEVICE)


class Model:
    """Parameters of the shapes above in one format, and an optimizer of them."""

    def __init__(self, held: str, *, fused: bool, **options: object) -> None:
        self.held, self.parameters, self.quantized = held, [], []
        for number, shape in enumerate(SHAPES):
            self.parameters.append(self.make(uneven(*shape, seed=number)))
        self.optimizer = LowBitAdamW(
            self.parameters, Hyperparameters(**options), quantized=self.quantized, seed=2**40 + 5, fused=fused
        )

    def make(self, values: Tensor) -> nn.Parameter:
        plain = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
        if self.held in plain:
            return nn.Parameter(values.to(plain[self.held]))
        codes, dequant_scale = kernels.quantize(values, torch.float16 if self.held == "fp16-scaled" else E4M3)
        residual = torch.zeros_like(values, dtype=torch.int8) if self.held == "split" else None
        parameter = nn.Parameter(codes)
        parameter.grad_dtype = torch.float32
        initial = values if self.held == "master" else None
        self.quantized.append(QuantizedWeight(parameter, dequant_scale, residual, initial_values=initial))
        return parameter

    def step(self, arrives: str, seed: int, bad: float | None = None) -> None:
        for number, parameter in enumerate(self.parameters):
            parameter.grad_dtype = None
            values = uneven(*parameter.shape, seed=100 * seed + number)
            if bad is not None and number == 1:
                values.view(-1)[77] = bad
            parameter.grad = gradient_of(values, arrives)
        self.optimizer.step()

    def tensors(self) -> list[Tensor]:
        found = list(self.parameters)
        for weight in self.quantized:
            found += [part for part in (weight.dequant_scale, weight.amax, weight.residual) if part is not None]
        for parameter in self.parameters:
            state = self.optimizer.state[parameter]
            found += [torch.as_tensor(state["step"], device=DEVICE)]
            found += [part for name in state if isinstance(state[name], dict) for part in state[name].values()]
        return [bits(tensor) for tensor in found]


def gradient_of(values: Tensor, arrives: str) -> Tensor:
    if arrives == "fp8-tensor":
        return Float8Gradient.quantize(values, RoundingPosition(0, 0))
    if arrives == "fp8-block":
        flat_codes, dequant_scale = kernels.quantize(values.view(-1), E4M3, "block")
        return Float8Gradient(flat_codes.view_as(values), dequant_scale, RoundingPosition(0, 0))
    return values.to({"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[arrives])


def bits(tensor: Tensor) -> Tensor:
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.detach().view(integers[tensor.dtype.itemsize]).clone()


def check(held: str, arrives: str, **options: object) -> None:
    fused, plain = (Model(held, fused=fused, **options) for fused in (True, False))
    for step in range(3):
        fused.step(arrives, seed=step + 1)
        plain.step(arrives, seed=step + 1)
        for number, (actual, expected) in enumerate(zip(fused.tensors(), plain.tensors(), strict=True)):
            assert torch.equal(actual, expected), f"step {step}, tensor {number}: {int((actual != expected).sum())} differ"


@pytest.mark.parametrize("held", WEIGHTS)
@pytest.mark.parametrize("arrives", GRADIENTS)
def test_weights_and_gradients(held: str, arrives: str) -> None:
    check(held, arrives, lr=0.01)


PAIRS = [pair for pair in itertools.product(*MOMENT_CODECS.values()) if not any(codec.endswith("-tensor") for codec in pair)]


@pytest.mark.parametrize(("exp_avg_codec", "exp_avg_sq_codec"), PAIRS)
def test_codecs(exp_avg_codec: str, exp_avg_sq_codec: str) -> None:
    check("fp16-scaled", "fp8-tensor", exp_avg_codec=exp_avg_codec, exp_avg_sq_codec=exp_avg_sq_codec)


@pytest.mark.parametrize(
    "options",
    [
        {"decoupled_weight_decay": False, "weight_decay": 0.1},
        {"weight_decay": 0.0, "maximize": True},
        {"betas": (0.0, 0.5), "eps": 1e-3},
        {"betas": (0.95, 0.9)},
        {"eps": 0.0},
    ],
    ids=str,
)
def test_hyperparameters(options: dict[str, object]) -> None:
    check("split", "fp32", lr=3e-3, **options)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("arrives", ["fp32", "fp8-tensor"])
def test_a_nonfinite_gradient_changes_nothing(bad: float, arrives: str) -> None:
    model = Model("master", fused=True)
    model.step(arrives, seed=1)
    before = model.tensors()
    model.step(arrives, seed=2, bad=bad)
    assert all(torch.equal(now, then) for now, then in zip(model.tensors(), before, strict=True))
    assert model.optimizer.num_skipped_steps == 1
    model.step(arrives, seed=3)
    assert not torch.equal(model.tensors()[0], before[0])
    assert int(model.optimizer.state[model.parameters[0]]["step"]) == 2


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("held", ["fp16-scaled", "split", "master"])
def test_a_weight_that_is_not_finite_has_a_scale_that_says_so(held: str, fused: bool) -> None:
    """Its codes saturate; the layer that it belongs to computes NaN from here on, and the others do not."""
    model = Model(held, fused=fused, exp_avg_codec="fp32")
    model.step("fp32", seed=1)
    model.optimizer.state[model.parameters[0]]["exp_avg"]["codes"][70] = float("nan")
    for seed in (2, 3):
        model.step("fp32", seed=seed)
        assert [bool(weight.dequant_scale.isnan()) for weight in model.quantized] == [True, False, False, False]
        assert not model.quantized[0].values().isfinite().any()
        assert model.quantized[1].values().isfinite().all()


def test_groups_learning_rates_and_resume() -> None:
    """Groups have their own rates, a rate may be a tensor, and a state is continued by either implementation."""
    ends = []
    for order in ((True, False), (False, True)):
        model = Model("fp16-scaled", fused=order[0])
        parameters, quantized = model.parameters, model.quantized
        for part, fused in enumerate(order):
            groups = [{"params": parameters[:2], "lr": torch.tensor(0.03, device=DEVICE)}, {"params": parameters[2:]}]
            optimizer = LowBitAdamW(groups, Hyperparameters(lr=1e-3), quantized=quantized, fused=fused)
            if part:
                optimizer.load_state_dict(copy.deepcopy(model.optimizer.state_dict()))
            model.optimizer = optimizer
            model.step("bf16", seed=part)
            optimizer.param_groups[0]["lr"] = 0.02
            model.step("bf16", seed=part + 10)
        ends.append(model.tensors())
    assert all(torch.equal(one, other) for one, other in zip(*ends, strict=True))


def test_shards_draw_the_numbers_of_the_whole() -> None:
    values, gradient, cut = uneven(5000, seed=1).bfloat16(), uneven(5000, seed=2), 128 * 20
    results = []
    for fused, cuts in ((False, [0, 5000]), (True, [0, cut, 5000])):
        shards = [nn.Parameter(values[start:end].clone()) for start, end in itertools.pairwise(cuts)]
        optimizer = LowBitAdamW(shards, Hyperparameters(exp_avg_codec="bf16-sr", exp_avg_sq_codec="bf16-sr"), fused=fused)
        for shard, (start, end) in zip(shards, itertools.pairwise(cuts), strict=True):
            optimizer.set_origin(shard, 0, start)
            shard.grad_dtype = None
            shard.grad = gradient[start:end].clone()
        optimizer.step()
        results.append(torch.cat([shard.detach() for shard in shards]))
    assert torch.equal(bits(results[0])[:cut], bits(results[1])[:cut])


def test_what_a_kernel_does_not_take_is_stepped_by_plain_torch() -> None:
    check("fp32", "fp32", exp_avg_codec="fp8-tensor", exp_avg_sq_codec="fp16-tensor")
    transposed = nn.Parameter(torch.randn(128, 64, device=DEVICE).t())
    optimizer = LowBitAdamW([transposed], fused=True)
    transposed.grad = torch.ones_like(transposed)
    before = transposed.detach().clone()
    optimizer.step()
    assert bool((transposed.detach() < before).all())
