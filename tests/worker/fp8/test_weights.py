"""A weight as a level holds it: rounded to nearest, without a bias."""

import pytest
import torch

from api_schemas.levels import LEVELS
from worker.fp8.weights import encode_weight
from worker.kernels import dequantize, split_dequantize

MANTISSA_BITS = {"O1": 10, "O2": 10, "O3": 3, "O3-split": 11}
"""FP16, E4M3, and E4M3 with the eight bits of its residual."""


@pytest.mark.parametrize("level", MANTISSA_BITS)
def test_initial_weights_are_rounded_to_nearest(level: str) -> None:
    """Truncation would show as a mean error: at O3-split it was -1.7e-4, relative to the values."""
    values = torch.rand(1 << 20, generator=torch.Generator().manual_seed(0)) + 0.25  # between two codes of every format
    encoded = encode_weight(values, LEVELS[level])
    assert encoded is not None
    if encoded.residual is None:
        stored = dequantize(encoded.codes, encoded.dequant_scale)
    else:
        stored = split_dequantize(encoded.codes, encoded.residual, encoded.dequant_scale)
    error = stored.double() - values.double()
    half_a_step = 2.0 ** -(MANTISSA_BITS[level] + 1)  # of the largest values
    assert float((error / values).abs().max()) <= half_a_step
    assert abs(float(error.mean())) <= 5 * half_a_step / len(values) ** 0.5  # five deviations of an unbiased mean
