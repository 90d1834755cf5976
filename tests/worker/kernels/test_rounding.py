"""Philox against its published vectors, and stochastic rounding: two neighbours, no bias, the same bits for any sharding."""

import math
from functools import cache

import pytest
import torch
from torch import Tensor

from octet.worker import kernels
from octet.worker.kernels.formats import BF16, E4M3, E5M2, FP16, Format
from octet.worker.kernels.rounding import philox_4x32

FORMATS = (E4M3, E5M2, FP16, BF16)
CPU = torch.device("cpu")
NUM_DRAWS = 2000

# Random123's kat_vectors, philox4x32 with 7 rounds: counter, key, words.
KNOWN_ANSWERS = (
    ((0, 0, 0, 0), (0, 0), (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A),
    ),
)


def numbers(num_elements: int, step: int = 0) -> Tensor:
    return kernels.random_bits(1, step, 0, range(num_elements), CPU)


@cache
def draws_of_all_steps(num_elements: int) -> Tensor:
    """The numbers of NUM_DRAWS steps, a row for each."""
    return torch.stack([numbers(num_elements, step) for step in range(NUM_DRAWS)])


def neighbours(x: Tensor, format: Format) -> tuple[Tensor, Tensor]:
    """The largest value of the format that is not above x, and the smallest that is not below."""
    nearest = x.to(format.dtype)
    integer = torch.int16 if format.dtype.itemsize == 2 else torch.int8
    toward_zero = nearest.view(integer) - (nearest.float().abs() > x.abs()).to(integer)
    inner, outer = toward_zero.view(format.dtype).float(), (toward_zero + 1).view(format.dtype).float()
    outer = torch.where(inner == x, x, outer)
    return torch.minimum(inner, outer), torch.maximum(inner, outer)


class TestRandomBits:
    @pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
    def test_known_answers(self, counter: tuple[int, ...], key: tuple[int, int], expected: tuple[int, ...]) -> None:
        word0, word1, word2, word3 = (torch.tensor([word]) for word in counter)
        assert philox_4x32((word0, word1, word2, word3), key).flatten().tolist() == list(expected)

    def test_a_shard_draws_the_bits_of_the_whole(self) -> None:
        whole = kernels.random_bits(7, 3, 5, range(1000), CPU)
        for start, stop in ((0, 1), (1, 2), (3, 130), (128, 256), (997, 1000), (500, 500)):
            assert torch.equal(kernels.random_bits(7, 3, 5, range(start, stop), CPU), whole[start:stop])

    def test_far_elements_have_bits_of_their_own(self) -> None:
        far = 8 << 32  # the counter's draw needs more than 32 bits
        assert not torch.equal(kernels.random_bits(0, 0, 0, range(far, far + 8), CPU), numbers(8))

    def test_seed_step_and_stream_matter(self) -> None:
        draws = [
            kernels.random_bits(*key, range(64), CPU) for key in ((0, 0, 0), (1, 0, 0), (1 << 40, 0, 0), (0, 1, 0), (0, 0, 1))
        ]
        assert len({tuple(draw.tolist()) for draw in draws}) == len(draws)


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: str(format.dtype)[6:])
class TestStochasticRound:
    def values(self, format: Format) -> Tensor:
        """Normal and subnormal numbers, halves of the smallest, the largest, both signs, zero."""
        subnormal = 2.0 ** (format.min_exponent - format.mantissa_bits)
        x = torch.tensor([0.0, 0.3, 1.0, 1.01, 3.14159, 0.49 * subnormal, 1.7 * subnormal, 2.5 * subnormal, 0.999 * format.max])
        return torch.cat([x, -x])

    def test_gives_one_of_two_neighbours(self, format: Format) -> None:
        x = self.values(format).repeat(500)
        rounded = kernels.stochastic_round(x, format, numbers(x.numel())).float()
        low, high = neighbours(x, format)
        assert bool(((rounded == low) | (rounded == high)).all())

    def test_is_unbiased(self, format: Format) -> None:
        x = self.values(format)
        draws = kernels.stochastic_round(x.repeat(NUM_DRAWS, 1), format, draws_of_all_steps(x.numel())).double()
        low, high = neighbours(x, format)
        standard_error = (high - low).double() * 0.5 / math.sqrt(NUM_DRAWS)
        assert bool(((draws.mean(0) - x.double()).abs() <= 4 * standard_error).all())

    def test_what_the_format_holds_stays(self, format: Format) -> None:
        held = torch.randn(1000).to(format.dtype).float()
        assert torch.equal(kernels.stochastic_round(held, format, numbers(1000)).float(), held)

    def test_saturates_and_keeps_nan(self, format: Format) -> None:
        x = torch.tensor([3e38, -3e38, format.max, math.nan, math.inf, -math.inf]).repeat(200)
        rounded = kernels.stochastic_round(x, format, numbers(x.numel())).float().view(200, 6)
        assert bool((rounded[:, 2] == format.max).all())
        largest = min(format.max, 3e38)
        assert bool((rounded[:, 0] <= format.max).all() and (rounded[:, 0] >= 0.99 * largest).all())
        assert bool((rounded[:, 1] >= -format.max).all() and (rounded[:, 1] <= -0.99 * largest).all())
        assert bool(rounded[:, 3:].isnan().all())


class TestSplit:
    """E4M3 codes with an INT8 residual."""

    def values(self) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        return torch.randn(40_000, generator=generator) * torch.exp2(torch.randint(-12, 6, (40_000,), generator=generator))

    def test_error_is_that_of_eleven_mantissa_bits(self) -> None:
        x = self.values().clamp(-440, 440)
        normal = x[x.abs() >= 2.0**-6]
        error = (kernels.split_decode(*kernels.split_encode(normal, numbers(normal.numel()))) - normal) / normal
        assert float(error.abs().max()) < 2.0**-11
        assert float(error.square().mean().sqrt()) < 1.7e-4

    def test_codes_are_the_nearest_e4m3(self) -> None:
        x = self.values()
        codes, residual = kernels.split_encode(x, numbers(x.numel()))
        fine = kernels.split_decode(codes, residual)
        nearest = fine.clamp(-448, 448).to(torch.float8_e4m3fn).float()
        is_tie = residual == -128  # half-way: nearest even may be the other neighbour
        assert torch.equal(codes.float()[~is_tie], nearest[~is_tie])
        assert float(is_tie.float().mean()) < 0.02

    def test_is_unbiased(self) -> None:
        x = torch.tensor([1.00013, -3.3333, 200.1, 0.001234, 440.7])
        encoded = kernels.split_encode(x.repeat(NUM_DRAWS, 1), draws_of_all_steps(x.numel()))
        mean = kernels.split_decode(*encoded).double().mean(0)
        num_standard_errors = 2 / math.sqrt(NUM_DRAWS)  # 4 × half a step
        torch.testing.assert_close(mean, x.double(), rtol=2.0**-11 * num_standard_errors, atol=2.0**-17 * num_standard_errors)

    def test_a_residual_of_zero_is_the_code(self) -> None:
        codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
        decoded = kernels.split_decode(codes, torch.zeros(256, dtype=torch.int8))
        torch.testing.assert_close(decoded, kernels.dequantize(codes, torch.tensor(1.0)), rtol=0, atol=0, equal_nan=True)

    def test_nan_stays_nan(self) -> None:
        decoded = kernels.split_decode(*kernels.split_encode(torch.tensor([math.nan, math.inf, 1.0]), numbers(3)))
        assert decoded.isnan().tolist() == [True, True, False]
