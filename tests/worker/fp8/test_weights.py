"""A weight as a level holds it: rounded to nearest, without a bias."""

import pytest
import torch

from octet.api_schemas.levels import LEVELS
from octet.worker.fp8 import weights
from octet.worker.fp8.weight import Float8Weight
from octet.worker.fp8.weights import decode_values, encode_weight
from octet.worker.kernels import dequantize, split_dequantize

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


@pytest.mark.parametrize("level", ["O1", "O3", "O3-split"])
def test_pieces_of_a_weight_are_the_bits_of_the_whole(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.randn(24, 40, generator=torch.Generator().manual_seed(0)).t()
    values[3, 5] = 100.0  # the scale is the whole weight's, whichever piece it lies in
    whole = encode_weight(values, LEVELS[level])
    monkeypatch.setattr(weights, "PIECE_ELEMENTS", 7)
    parts = encode_weight(values, LEVELS[level])
    assert whole is not None
    assert parts is not None
    for one, other in zip(whole, parts, strict=True):
        assert (one is None) == (other is None)
        assert one is None or other is None or (one.shape == other.shape and torch.equal(as_bytes(one), as_bytes(other)))
    for dtype in (torch.float32, torch.bfloat16):
        codes, dequant_scale, _, residual = whole
        if residual is None:
            expected = dequantize(codes, dequant_scale, dtype)
        else:
            expected = split_dequantize(codes, residual, dequant_scale, dtype)
        assert torch.equal(decode_values(codes, dequant_scale, residual, dtype), expected)


def test_a_value_that_is_not_finite_marks_the_weight_in_whichever_piece_it_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "PIECE_ELEMENTS", 4)
    values = torch.ones(10)
    values[6] = torch.nan
    encoded = encode_weight(values, LEVELS["O3"])
    assert encoded is not None
    assert encoded.amax.isnan()
    assert bool(dequantize(encoded.codes, encoded.dequant_scale)[6].isnan())


def test_what_a_weight_cannot_be_is_refused() -> None:
    one = torch.ones(())
    with pytest.raises(ValueError, match=r"codes of torch\.float32; allowed: float16, float8_e4m3fn"):
        Float8Weight(torch.zeros(16), one, one)
    with pytest.raises(ValueError, match="a residual refines float8_e4m3fn codes by int8"):
        Float8Weight(torch.zeros(16).half(), one, one, torch.zeros(16, dtype=torch.int8))


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)
