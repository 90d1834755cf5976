"""The error of the mean of ranks' FP8 gradients against the mean in fp32, on simulated ranks, over five seeds.

Each rank has two micro-batches. A gradient is a part that all of them share, plus a quarter of noise of its own. The second
micro-batch is added with stochastic rounding. The mean is that of `GradientBuckets`: it adds up the codes' values in fp32 and
rounds once.
"""

from functools import cache
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from octet.worker import kernels
from octet.worker.fp8.gradient import Float8Gradient
from octet.worker.fp8.rounding_position import RoundingPosition
from octet.worker.kernels.formats import E4M3
from tests.numerics.measure import relative_error

SEEDS, NUM_ELEMENTS, NOISE = range(5), 2048, 0.25
LARGEST = {8: 0.035, 64: 0.03}


def gradients(num_ranks: int, seed: int) -> Tensor:
    """Each rank's two micro-batches, fp32 (R, 2, S)."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(num_ranks, 2, NUM_ELEMENTS, generator=generator)
    return torch.randn(NUM_ELEMENTS, generator=generator) + NOISE * noise


def accumulated(values_2S: Tensor, seed: int, share: int, num_shares: int) -> Float8Gradient:
    """Return the gradient of a rank's layer after its micro-batches."""
    held = Float8Gradient.quantize(values_2S[0], RoundingPosition(seed, 0, share=share, num_shares=num_shares))
    held += values_2S[1]
    return held


def mean_of_ranks(micro_batches_R2S: Tensor, seed: int, *, draws_are_own: bool = True) -> Tensor:
    """The mean before it is rounded, fp32 (S)."""
    num_ranks = len(micro_batches_R2S)
    held = [
        accumulated(values_2S, seed, rank if draws_are_own else 0, num_ranks)
        for rank, values_2S in enumerate(micro_batches_R2S)
    ]
    codes_RS = torch.stack([each.codes.view(torch.uint8) for each in held]).view(E4M3.dtype)
    return kernels.mean_of_shards(codes_RS, torch.stack([each.dequant_scale for each in held]))[0]


def rounded(mean_S: Tensor) -> Tensor:
    return Float8Gradient.quantize(mean_S, RoundingPosition(0, 0)).dequantize()


def summed_in_fp8(sums_RS: Tensor) -> Tensor:
    """The mean as a collective that adds FP8 numbers has it: one scale at which no sum can overflow, each sum rounded.

    sums_RS: each rank's gradient, fp32, which it rounds once.
    """
    dequant_scale = sums_RS.abs().max() * len(sums_RS) / E4M3.max
    total_S = torch.zeros(NUM_ELEMENTS)
    for sum_S in sums_RS:
        total_S = (total_S + (sum_S / dequant_scale).to(E4M3.dtype).float()).to(E4M3.dtype).float()
    return total_S * dequant_scale / len(sums_RS)


class Errors(NamedTuple):
    """Relative errors of one seed's mean: rounded; before that; with the same draws on all ranks; and summed in FP8."""

    rounded: float
    unrounded: float
    of_shared_draws: float
    summed_in_fp8: float


@cache
def measured(num_ranks: int) -> list[Errors]:
    """The errors for each seed."""
    found = []
    for seed in SEEDS:
        micro_batches_R2S = gradients(num_ranks, seed)
        own_S = mean_of_ranks(micro_batches_R2S, seed)
        shared_S = mean_of_ranks(micro_batches_R2S, seed, draws_are_own=False)
        means = (rounded(own_S), own_S, shared_S, summed_in_fp8(micro_batches_R2S.sum(1)))
        expected_S = micro_batches_R2S.sum(1).mean(0)
        found.append(Errors(*(relative_error(mean_S, expected_S) for mean_S in means)))
    return found


NUMBERS_OF_RANKS = pytest.mark.parametrize("num_ranks", [8, pytest.param(64, marks=pytest.mark.matrix)])


@NUMBERS_OF_RANKS
def test_the_mean_is_as_close_as_its_own_rounding(num_ranks: int) -> None:
    assert max(errors.rounded for errors in measured(num_ranks)) <= LARGEST[num_ranks]


@NUMBERS_OF_RANKS
def test_a_collective_that_adds_fp8_numbers_is_worse(num_ranks: int) -> None:
    assert all(errors.summed_in_fp8 > 1.5 * errors.rounded for errors in measured(num_ranks))


@NUMBERS_OF_RANKS
def test_errors_of_ranks_average_out_because_each_draws_numbers_of_its_own(num_ranks: int) -> None:
    assert all(errors.unrounded < 0.8 * errors.of_shared_draws for errors in measured(num_ranks))
