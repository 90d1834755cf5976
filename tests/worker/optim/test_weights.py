"""Weights in few bits under the optimizer: FP16 with a scale, E4M3 with a residual or a master, plain 16 bits, shards."""

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from octet.worker import kernels
from octet.worker.fp8.gradient import Float8Gradient
from octet.worker.fp8.rounding_position import RoundingPosition
from octet.worker.fp8.weight import Float8Weight
from octet.worker.optim import Hyperparameters, LowBitAdamW
from octet.worker.optim.origin import Origin
from octet.worker.optim.rules.adam import Adam
from tests.kit.stored_weights import KINDS, parts_of, stored_weight, values_of_codes
from tests.numerics.measure import peak_bytes, relative_error

E4M3 = torch.float8_e4m3fn
FP32_STATES = {"exp_avg_codec": "fp32", "exp_avg_sq_codec": "fp32"}
GPT_LAYER = ((384, 128), (128, 128), (512, 128), (128, 512))


kinds = pytest.mark.parametrize("kind", KINDS)


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.02


@kinds
class TestStoredWeight:
    def test_follows_an_fp32_weight(self, kind: str) -> None:
        values = gaussian(100, 70)
        weight, wide = stored_weight(values, kind), nn.Parameter(values.clone())
        optimizer = LowBitAdamW([weight], Hyperparameters(**FP32_STATES))
        reference = torch.optim.AdamW([wide])
        for step in range(10):
            weight.grad = wide.grad = gaussian(100, 70, seed=step)
            optimizer.step()
            reference.step()
        assert relative_error(weight.dequantize() - values, wide.detach() - values) < 5e-3

    def test_keeps_a_steady_drift(self, kind: str) -> None:
        """A relative update of 1e-5 per step is a hundredth of FP16's step between numbers; on average none of it is lost."""
        values = gaussian(128, 256)
        lr = 1e-5 * float(values.square().mean().sqrt())
        weight = stored_weight(values, kind)
        defaults = Hyperparameters(lr=lr, weight_decay=0.0, eps=1e-20, **FP32_STATES)
        optimizer = LowBitAdamW([weight], defaults)
        start = weight.dequantize().double().mean()
        for _ in range(100):
            weight.grad = -torch.ones_like(values)
            optimizer.step()
        kept = float(weight.dequantize().double().mean() - start) / (100 * lr)
        assert 0.95 <= kept <= 1.05, f"kept {kept:.3f} of the drift"

    def test_keeps_what_is_written_between_steps(self, kind: str) -> None:
        """Decay by hand, a tenth of half a code a step; rounded to nearest, all of it is lost."""
        weight = stored_weight(gaussian(128, 256), kind)
        optimizer = LowBitAdamW([weight], Hyperparameters(lr=0.0, weight_decay=0.0))
        start = weight.dequantize()
        for _ in range(100):
            weight.data = weight.data * (1 - 2e-5)
            weight.grad = torch.zeros(128, 256)
            optimizer.step()
            assert weight.state.wide is None
        kept = 1 - float((weight.dequantize() * start).sum() / start.square().sum())
        assert kept == pytest.approx(100 * 2e-5, rel=0.05)

    def test_scale_follows_the_values(self, kind: str) -> None:
        weight = stored_weight(gaussian(64, 128), kind)
        before, same_tensor = float(weight.dequant_scale), weight.dequant_scale
        optimizer = LowBitAdamW([weight], Hyperparameters(lr=1.0))
        weight.grad = -torch.ones(64, 128)
        optimizer.step()
        assert weight.dequant_scale is same_tensor
        assert float(weight.dequant_scale) >= 8 * before
        torch.testing.assert_close(values_of_codes(weight), torch.ones(64, 128), rtol=0.07, atol=0.07)

    def test_resume_is_bit_equal(self, kind: str) -> None:
        def step(weight: Float8Weight, optimizer: LowBitAdamW, seed: int) -> None:
            weight.grad = gaussian(64, 128, seed=seed)
            optimizer.step()

        weight = stored_weight(gaussian(64, 128), kind)
        optimizer = LowBitAdamW([weight], seed=3)
        step(weight, optimizer, seed=1)
        saved = copy.deepcopy((parts_of(weight), optimizer.state_dict()))
        step(weight, optimizer, seed=2)
        resumed_weight: Any = nn.Parameter(Float8Weight(*saved[0]))
        resumed = LowBitAdamW([resumed_weight])
        resumed.load_state_dict(saved[1])
        step(resumed_weight, resumed, seed=2)
        assert torch.equal(values_of_codes(resumed_weight), values_of_codes(weight))
        assert torch.equal(resumed_weight.dequantize(), weight.dequantize())


@kinds
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.9, 0.95), (0.0, 0.5), (0.95, 0.9)])
@pytest.mark.parametrize("zero", [False, True], ids=["gaussian", "from-zero"])
def test_one_pass_never_saturates(kind: str, betas: tuple[float, float], zero: bool) -> None:
    """The scale is chosen before the values are known, from a bound on them; gradients that grow 40-fold in a step test it."""
    values = gaussian(16, 256) * (0 if zero else 1)
    weight, wide = stored_weight(values, kind), nn.Parameter(values.clone())
    defaults = Hyperparameters(lr=0.02, betas=betas, **FP32_STATES)
    optimizer = LowBitAdamW([weight], defaults)
    reference = LowBitAdamW([wide], defaults)
    for step in range(12):
        gradient = gaussian(16, 256, seed=step) * 40.0 ** (step % 5)
        weight.grad, wide.grad = gradient, gradient.clone()
        optimizer.step()
        reference.step()
        assert torch.isclose(weight.values_amax, wide.detach().abs().amax(), rtol=1e-2)
        limit = float(wide.detach().abs().amax()) / float(weight.dequant_scale)
        assert limit <= (448 if weight.codes.dtype == E4M3 else 65504), f"step {step} saturated"
    torch.testing.assert_close(weight.dequantize(), wide.detach(), rtol=5e-3, atol=1e-3)


def test_bound_is_reached_by_the_worst_gradients() -> None:
    """Gradients that grow as (beta2 / beta1)^i make the largest update there is: the bound is above it, but not by much."""
    beta1, beta2, num_steps = 0.9, 0.999, 60
    group = {"betas": (beta1, beta2), "lr": 1.0, "weight_decay": 0.0, "decoupled_weight_decay": True}
    group |= {"maximize": False, "eps": 0.0}
    values, states = torch.zeros(1), {"exp_avg": torch.zeros(1), "exp_avg_sq": torch.zeros(1)}
    for step in range(1, num_steps + 1):
        before = values.clone()
        Adam().step_(values, torch.tensor([(beta1 / beta2) ** (num_steps - step)]), states, step, group)
        bound = float(Adam().bound_after_step(torch.zeros(()), step, group))
        assert float((values - before).abs()) <= bound
    assert float((values - before).abs()) >= bound / 1.5


def test_round_to_nearest_loses_the_drift() -> None:
    """Why weights are rounded stochastically (docs/log.md)."""
    values = gaussian(512, 256)
    update = 1e-5 * float(values.square().mean().sqrt())
    codes, dequant_scale = kernels.quantize(values, torch.float16)
    start = kernels.dequantize(codes, dequant_scale).double().mean()
    for _ in range(100):
        codes, dequant_scale = kernels.quantize(kernels.dequantize(codes, dequant_scale) + update, torch.float16)
    kept = float(kernels.dequantize(codes, dequant_scale).double().mean() - start) / (100 * update)
    assert kept < 0.2


class TestMaster:
    def test_starts_from_the_values_before_rounding_and_releases_them(self) -> None:
        values = gaussian(64, 128)
        weight = stored_weight(values, "master")
        LowBitAdamW([weight])
        assert relative_error(weight.dequantize(), values) < 3e-4
        assert weight.state.wide is None

    def test_weight_is_the_nearest_rounding_of_the_master(self) -> None:
        weight = stored_weight(gaussian(130, 100), "master")
        optimizer = LowBitAdamW([weight], Hyperparameters(lr=0.01))
        for step in range(3):
            weight.grad = gaussian(130, 100, seed=step)
            optimizer.step()
        master = weight.dequantize()
        codes = kernels.encode(master, weight.dequant_scale, E4M3)
        assert torch.equal(weight.codes.view(torch.uint8), codes.view(torch.uint8))
        smallest_scale = kernels.quantize(master, E4M3)[1]
        assert weight.dequant_scale in (smallest_scale, 2 * smallest_scale)


class TestPlainSixteenBits:
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_is_trained_and_keeps_a_drift(self, dtype: torch.dtype) -> None:
        weight = nn.Parameter((gaussian(128, 256) + 1).to(dtype))
        start = weight.detach().double().mean()
        optimizer = LowBitAdamW([weight], Hyperparameters(lr=1e-4, weight_decay=0.0, **FP32_STATES))
        for _ in range(50):
            weight.grad = -torch.ones_like(weight)
            optimizer.step()
        assert weight.dtype == dtype
        assert float(weight.detach().double().mean() - start) / (50 * 1e-4) == pytest.approx(1, abs=0.05)


@pytest.mark.parametrize(
    ("exp_avg_codec", "exp_avg_sq_codec"), [("fp8-dre", "fp16-block"), ("int8-companded", "uint8-companded")]
)
def test_shards_have_the_bits_of_the_whole(exp_avg_codec: str, exp_avg_sq_codec: str) -> None:
    def train(shards: list[nn.Parameter], origins: list[int]) -> Tensor:
        defaults = Hyperparameters(exp_avg_codec=exp_avg_codec, exp_avg_sq_codec=exp_avg_sq_codec)
        optimizer = LowBitAdamW(shards, defaults, seed=9)
        for shard, first_element in zip(shards, origins, strict=True):
            optimizer.hold(shard, shard, Origin(0, first_element, 100_000), None, optimizer.state[shard])
        for step in range(3):
            gradient = gaussian(100_000, seed=step)
            for shard, first_element in zip(shards, origins, strict=True):
                shard.grad = gradient[first_element : first_element + shard.numel()].to(shard.dtype)
            optimizer.step()
        return torch.cat([shard.detach() for shard in shards])

    values = gaussian(100_000, seed=7).bfloat16()
    cut = 128 * 300
    whole = train([nn.Parameter(values.clone())], [0])
    sharded = train([nn.Parameter(values[:cut].clone()), nn.Parameter(values[cut:].clone())], [0, cut])
    assert torch.equal(whole, sharded)


@dataclass
class StoredLayers:
    """The weights of a four-layer GPT in the formats of a level, with FP8 gradients and an optimizer that has stepped."""

    weights: list[Float8Weight]
    optimizer: LowBitAdamW
    num_parameters: int

    @classmethod
    def make(cls, kind: str, exp_avg_codec: str, exp_avg_sq_codec: str) -> "StoredLayers":
        weights = [stored_weight(gaussian(*shape), kind) for _ in range(4) for shape in GPT_LAYER]
        for weight in weights:
            codes, dequant_scale = kernels.quantize(gaussian(*weight.codes.shape), E4M3)
            weight.grad = Float8Gradient(codes, dequant_scale, RoundingPosition(0, 0))
        defaults = Hyperparameters(exp_avg_codec=exp_avg_codec, exp_avg_sq_codec=exp_avg_sq_codec)
        optimizer = LowBitAdamW(weights, defaults)
        optimizer.step()
        return cls(weights, optimizer, sum(weight.codes.numel() for weight in weights))

    def num_bytes(self) -> int:
        """Live storage, scales and gradients included."""
        tensors = [tensor for state in self.optimizer.state.values() for part in state.values() for tensor in tensors_of(part)]
        for weight in self.weights:
            gradient = weight.grad
            assert isinstance(gradient, Float8Gradient)
            tensors += [*parts_of(weight), gradient.codes, gradient.dequant_scale]
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
        return sum(storages.values())


def tensors_of(part: object) -> list[Tensor]:
    return list(part.values()) if isinstance(part, dict) else []


@pytest.mark.parametrize(
    ("kind", "exp_avg_codec", "exp_avg_sq_codec", "max_bytes_per_parameter"),
    [
        pytest.param("fp16", "fp32", "fp32", 11.1, id="O1"),
        pytest.param("master", "fp8-dre", "fp16-block", 7.2, id="O3"),
        pytest.param("split", "int8-companded", "uint8-companded", 5.2, id="O3-split-8bit"),
    ],
)
def test_memory(kind: str, exp_avg_codec: str, exp_avg_sq_codec: str, max_bytes_per_parameter: float) -> None:
    """Every kind of weight and codec of the levels: bytes per parameter, and a step whose peak is at most two of four layers.

    tests/worker/metrics/test_memory.py counts the bytes of every level.
    """
    layers = StoredLayers.make(kind, exp_avg_codec, exp_avg_sq_codec)
    assert layers.num_bytes() / layers.num_parameters <= max_bytes_per_parameter
    assert peak_bytes(layers.optimizer.step) <= layers.num_bytes() / 2
