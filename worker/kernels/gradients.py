"""What is done to FP8 gradients without making them wide: their norm, adding to them, and the mean of several ranks' shards.

R ranks, S elements of one rank's shard.
"""

from collections.abc import Sequence

from torch import Tensor

from worker.kernels.dispatch import implementation


def norms(gradients: Sequence[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """The 2-norms, fp32 (), of the values of E4M3 codes with one scale () each. The order of summation is the device's."""
    return implementation(gradients[0][0].device).norms(gradients) if gradients else []


def accumulate_(codes: Tensor, dequant_scale: Tensor, other: Tensor, alpha: float, draw: tuple[int, int, int]) -> None:
    """codes × dequant_scale += alpha · other, with a new scale () and stochastic rounding, in place.

    codes: E4M3, contiguous. other: fp32, bf16 or fp16 of the same shape. draw: seed, step and stream of the random numbers.
    The scale becomes NaN where the sum is not finite.
    """
    implementation(codes.device).accumulate_(codes, dequant_scale, other, alpha, draw)


def mean_of_shards(codes_RS: Tensor, scales_R: Tensor) -> tuple[Tensor, Tensor]:
    """The fp32 mean over ranks (S,) of E4M3 codes, summed in the ranks' order, and its amax ()."""
    return implementation(codes_RS.device).mean_of_shards(codes_RS, scales_R)
