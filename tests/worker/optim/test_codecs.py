"""State codecs: what each stores, how near it comes, and its values against formulas written down again in NumPy."""

import math

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor

from octet.worker import kernels
from octet.worker.optim.codecs import CODECS, Codec, Parts, StoredState, zeros
from tests.numerics.measure import relative_error

CPU = torch.device("cpu")
NAMES = list(CODECS)
# Mean relative error of a Gaussian block; the theory of each rounding plus a tenth.
MAX_ERROR = {
    "fp32": 0.0,
    "fp16-block": 2.5e-4,
    "fp8-dre": 0.018,
    "int8-companded": 0.012,
    "uint8-companded": 0.0085,
}
BYTES_PER_BLOCK = {
    "fp32": 512,
    "fp16-block": 260,
    "fp8-dre": 134,
    "int8-companded": 132,
    "uint8-companded": 132,
}


def draw(elements: range) -> Tensor:
    return kernels.random_bits(0, 0, 0, elements, CPU)


def state(num_elements: int, codec: Codec, blocks_differ: bool = True) -> Tensor:
    """Gaussian, each block of its own magnitude; without sign for a codec that holds none."""
    generator = torch.Generator().manual_seed(num_elements)
    values = torch.randn(num_elements, generator=generator)
    if blocks_differ:
        exponents = torch.randint(-40, 20, (num_elements // 128 + 1,), generator=generator)
        values *= torch.exp2(exponents.float()).repeat_interleave(128)[:num_elements]
    return values.abs() if codec is CODECS["uint8-companded"] else values


def stored(values: Tensor, codec: Codec) -> StoredState:
    result = StoredState(codec, zeros(codec, values.numel(), CPU), draw)
    result.write(range(values.numel()), values)
    return result


def round_trip(values: Tensor, codec: Codec) -> Tensor:
    return stored(values, codec).read(range(values.numel())).clone()


@pytest.mark.parametrize("name", NAMES)
class TestEveryCodec:
    def test_starts_at_zero(self, name: str) -> None:
        codec = CODECS[name]
        assert not StoredState(codec, zeros(codec, 300, CPU), draw).read(range(300)).any()

    @pytest.mark.parametrize("num_elements", [0, 1, 127, 128, 129, 5000])
    def test_any_size(self, name: str, num_elements: int) -> None:
        values = state(num_elements, CODECS[name], blocks_differ=False)
        torch.testing.assert_close(round_trip(values, CODECS[name]), values, rtol=0.2, atol=0.01)

    def test_zeros_stay_zero_beside_anything(self, name: str) -> None:
        values = state(256, CODECS[name])
        values[::3] = 0
        assert not round_trip(values, CODECS[name])[::3].any()

    def test_one_huge_element(self, name: str) -> None:
        values = state(512, CODECS[name], blocks_differ=False)
        values[7] = 1e30
        decoded = round_trip(values, CODECS[name])
        assert float(decoded[7]) == pytest.approx(1e30, rel=0.04)
        assert relative_error(decoded[128:], values[128:]) < 0.03  # the other blocks do not notice

    def test_nonfinite_is_never_hidden(self, name: str) -> None:
        for bad in (math.nan, math.inf):
            values = state(256, CODECS[name], blocks_differ=False)
            values[3] = bad
            assert not round_trip(values, CODECS[name])[:128].isfinite().all()

    def test_num_bytes_is_that_of_the_storage(self, name: str) -> None:
        codec = CODECS[name]
        for num_elements in (1, 128, 129, 5000):
            parts = zeros(codec, num_elements, CPU).values()
            assert codec.num_bytes(num_elements) == sum(part.untyped_storage().nbytes() for part in parts)
        assert codec.num_bytes(128) == BYTES_PER_BLOCK[name]

    def test_error(self, name: str) -> None:
        values = state(64 * 128, CODECS[name])
        errors = [
            relative_error(got, block) if float(block.norm()) else 0.0
            for got, block in zip(round_trip(values, CODECS[name]).view(-1, 128), values.view(-1, 128), strict=True)
        ]
        assert sum(errors) / len(errors) <= MAX_ERROR[name]

    def test_runs_make_no_difference(self, name: str) -> None:
        """Written by runs or at once, the bits are the same: so a shard has the bits of the whole."""
        codec, values = CODECS[name], state(1000, CODECS[name])
        whole, by_runs = stored(values, codec), StoredState(codec, zeros(codec, 1000, CPU), draw)
        for start, stop in ((0, 128), (128, 640), (640, 1000)):
            by_runs.write(range(start, stop), values[start:stop])
        for part in codec.parts:
            assert torch.equal(whole.parts[part].float(), by_runs.parts[part].float())


def numpy_parts(parts: Parts) -> dict[str, np.ndarray]:
    return {name: part.view(torch.uint8).numpy() if part.itemsize == 1 else part.numpy() for name, part in parts.items()}


def logarithm(x: np.ndarray) -> np.ndarray:
    """Base 2, and linear between powers of two: what a floating-point number's bits say. Of |x|; -1000 for zero."""
    mantissa, exponent = np.frexp(np.abs(x.astype(float)))
    return np.where(mantissa > 0, exponent + 2 * mantissa - 2, -1000.0)


def power_of_two(x: np.ndarray) -> np.ndarray:
    """The inverse of `logarithm`."""
    return np.ldexp(1 + x - np.floor(x), np.floor(x).astype(int))


class TestFormulas:
    def test_dynamic_range_expansion(self) -> None:
        values = state(64 * 128, CODECS["fp8-dre"])
        parts = numpy_parts(stored(values, CODECS["fp8-dre"]).parts)
        blocks = values.double().numpy().reshape(-1, 128)
        np.testing.assert_array_equal(parts["dequant_scale"], np.abs(blocks).max(1).astype(np.float32))
        below_amax = logarithm(blocks).max(1, keepdims=True) - logarithm(blocks)  # in binades
        steps = np.clip(np.ceil(below_amax.max(1) * 2**17 / 142), 514, 2**14)[:, None]  # of 2^-17 binades
        np.testing.assert_array_equal(parts["steps"], steps[:, 0])
        assert len(set(parts["steps"])) > 40
        largest = logarithm(np.array(448.0))
        expanded = np.sign(blocks) * power_of_two(largest - below_amax * 2**14 / steps)
        codes = parts["codes"].reshape(-1, 128).view(ml_dtypes.float8_e4m3fn)
        nearest = expanded.astype(np.float32).astype(ml_dtypes.float8_e4m3fn)
        # Eleven bits of a mantissa are dropped, and a factor has 11 to 16: that moves a value across a tie now and then.
        assert np.mean(codes != nearest) < 3e-3
        depth = largest - logarithm(np.abs(codes.astype(float)))
        decoded = power_of_two(logarithm(parts["dequant_scale"][:, None]) - depth * steps / 2**14)
        decoded *= np.sign(codes.astype(float))
        np.testing.assert_allclose(round_trip(values, CODECS["fp8-dre"]).view(-1, 128).numpy(), decoded, rtol=2e-5)

    def test_dynamic_range_expansion_at_the_largest_step_is_e4m3(self) -> None:
        """A block that spans as much as E4M3 does is stored as E4M3 would."""
        every_code = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
        values = torch.cat([every_code, -every_code[:1]])
        parts = stored(values, CODECS["fp8-dre"]).parts
        assert parts["steps"].item() == 2**14
        assert torch.equal(parts["codes"].float(), values)
        assert torch.equal(round_trip(values, CODECS["fp8-dre"]), values)

    def test_dynamic_range_expansion_loses_no_element_to_the_others_gain(self) -> None:
        values = state(64 * 128, CODECS["fp8-dre"], blocks_differ=False).view(-1, 128)
        for binades in (4, 8, 12, 16):
            values[:, 5] = 2.0**-binades
            decoded = round_trip(values.flatten(), CODECS["fp8-dre"]).view(-1, 128)[:, 5]
            torch.testing.assert_close(decoded, values[:, 5], rtol=0.5, atol=0)  # its last code

    @pytest.mark.parametrize(("name", "num_levels"), [("int8-companded", 127), ("uint8-companded", 255)])
    def test_companding(self, name: str, num_levels: int) -> None:
        values = state(64 * 128, CODECS[name])
        parts = numpy_parts(stored(values, CODECS[name]).parts)
        blocks = values.double().numpy().reshape(-1, 128)
        amax = np.abs(blocks).max(1, keepdims=True)
        levels = np.sign(blocks) * num_levels * (np.abs(blocks) / amax) ** 0.25
        codes = parts["codes"].view(np.int8 if name == "int8-companded" else np.uint8).reshape(-1, 128).astype(float)
        assert np.abs(codes - levels).max() < (0.5001 if name == "int8-companded" else 1.0001)
        decoded = np.sign(codes) * (codes / num_levels) ** 4 * parts["dequant_scale"][:, None]
        np.testing.assert_allclose(round_trip(values, CODECS[name]).view(-1, 128).numpy(), decoded, rtol=1e-6)
