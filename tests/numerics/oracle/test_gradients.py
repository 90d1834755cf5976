"""Changes to gradients between backward and step, read as raw codes: clipping, and the sum of micro-batches."""

import numpy as np
import pytest
import torch
from torch import nn

from octet.api_schemas.levels import LEVELS
from octet.worker import initialize
from tests.numerics.oracle import held
from tests.numerics.oracle.layer import E5M2, products, worst_tile_db

OWN_LEVELS = tuple(name for name, level in LEVELS.items() if level.has_own_fp8)


def two_layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 48, bias=False))


def gradients(model: nn.Module) -> list[np.ndarray]:
    return [held.gradient(parameter) for parameter in model.parameters()]


@pytest.mark.parametrize(
    "level",
    [
        level if level in ("te", "O2", "O3-split") else pytest.param(level, marks=pytest.mark.matrix)
        for level in (*OWN_LEVELS, "fp32", "bf16-amp")
    ],
)
def test_clipping(level: str) -> None:
    """torch's own clip_grad_norm_ and clip_grad_value_ do to the values what they say, in fp64."""
    model = two_layers()
    model, _ = initialize(model, torch.optim.AdamW(model.parameters()), level)
    model(torch.randn(24, 64)).square().sum().backward()
    before = gradients(model)
    norm = float(np.sqrt(sum(np.sum(each**2) for each in before)))
    found = nn.utils.clip_grad_norm_(model.parameters(), norm / 3)
    assert float(found) == pytest.approx(norm, rel=1e-5)
    after = gradients(model)
    for one, other in zip(after, before, strict=True):
        np.testing.assert_allclose(one, other / 3, rtol=1e-5)
    limit = float(np.abs(after[0]).max() / 2)
    nn.utils.clip_grad_value_(model.parameters(), limit)
    for one, other in zip(gradients(model), after, strict=True):
        clipped = np.clip(other, -limit, limit)
        assert np.abs(one).max() <= np.abs(clipped).max() * (1 + 1e-6)
        step = np.abs(clipped) * 2.0**-3 + limit * 2.0**-17  # E4M3's distance between codes, and between the smallest
        assert np.all(np.abs(one - clipped) <= step)
        np.testing.assert_allclose(one[np.abs(other) >= limit], clipped[np.abs(other) >= limit], rtol=1e-6)


@pytest.mark.parametrize("accumulation", ["fp8", "fp32"])
@pytest.mark.parametrize(
    "level", ["O2", *(pytest.param(level, marks=pytest.mark.matrix) for level in ("O1", "O3", "O3-split"))]
)
def test_accumulation(level: str, accumulation: str) -> None:
    """One large micro-batch and 64 of a sixty-fourth: rounded to nearest, E4M3 would lose every one of the small ones."""
    model = nn.Sequential(nn.Linear(256, 128, bias=False))
    model, _ = initialize(
        model, torch.optim.AdamW(model.parameters()), level, gradient_accumulation=accumulation, statistics_every=0
    )
    rng = np.random.default_rng(0)
    weight_NK, total = held.operand_weight(model[0]), np.zeros((128, 256))
    input_TK, grad_TN = (rng.standard_normal(shape).astype(np.float32).astype(np.float64) for shape in ((32, 256), (32, 128)))
    parts = []
    for size in (1.0, *(1 / 64 for _ in range(64))):
        model(torch.from_numpy(input_TK).float()).backward(torch.from_numpy(grad_TN * size).float())
        parts.append(products(input_TK, weight_NK, grad_TN * size, "tensor", E5M2)[2])
        total += parts[-1]
    actual = held.gradient(model[0].weight)
    if accumulation == "fp32":
        assert worst_tile_db(actual, total) >= 90
        return
    small = total - parts[0]
    kept = float(np.sum((actual - parts[0]) * small) / np.sum(small**2))
    assert kept == pytest.approx(1.0, abs=0.05)
    assert np.linalg.norm(actual - total) / np.linalg.norm(total) <= 0.25


def test_adding_to_nearest_would_lose_the_small_ones() -> None:
    """The data of the test above can fail: E4M3 rounds a sum of 1 and 1/64 back to 1."""
    from tests.numerics.oracle.formats import rounded

    assert rounded(np.array([[1 + 1 / 64]]), "float8_e4m3fn", "tensor")[0, 0] == 1.0
