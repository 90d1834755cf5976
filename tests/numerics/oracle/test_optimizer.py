"""Adam at every level against Adam in fp64, and what is kept of a drift that is far smaller than a weight's rounding."""

import numpy as np
import pytest
import torch
from torch import nn

from octet.api_schemas.levels import LEVELS
from octet.worker import initialize
from tests.numerics.oracle import held
from tests.numerics.oracle.adam import Adam64

MOMENT_ERRORS = {"fp32": 2e-3, "fp8-dre": 0.035, "int8-companded": 0.055}
"""NUMERICS.md, section 7, by the first moment's codec. With fp32 moments what is left is how weights are rounded."""
BY_DEFAULT = ("te", "O2", "O3-split-8bit")
LAYER_NK = (64, 128)  # smaller tensors than 4096 elements keep fp32 moments
NUM_STEPS, LEARNING_RATE = 40, 1e-2


def levels(*by_default: str) -> list[object]:
    return [level if level in by_default else pytest.param(level, marks=pytest.mark.matrix) for level in LEVELS]


def one_layer(shape: tuple[int, int], std: float) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(shape[1], shape[0], bias=False))
    values = np.random.default_rng(0).standard_normal(shape) * std
    model[0].weight.data = torch.from_numpy(values).float()
    return model


@pytest.mark.parametrize(
    ("optimizer_class", "options", "decoupled"),
    [
        (torch.optim.AdamW, {"betas": (0.9, 0.95), "weight_decay": 0.1}, True),
        pytest.param(
            torch.optim.Adam, {"betas": (0.8, 0.999), "weight_decay": 0.1, "eps": 1e-4}, False, marks=pytest.mark.matrix
        ),
        pytest.param(torch.optim.AdamW, {"betas": (0.9, 0.999), "weight_decay": 0.0}, True, marks=pytest.mark.matrix),
    ],
)
@pytest.mark.parametrize("level", levels(*BY_DEFAULT))
def test_adam(level: str, optimizer_class: type[torch.optim.Optimizer], options: dict[str, object], decoupled: bool) -> None:
    """The way that the weights have gone after 40 steps; rows differ in the size of their gradients, as an embedding's do."""
    model = one_layer(LAYER_NK, std=0.05)
    model, optimizer = initialize(model, optimizer_class(model.parameters(), lr=LEARNING_RATE, **options), level)
    layer = model[0]
    parameter = layer.weight
    exact = Adam64(start := held.trained_weight(layer, optimizer), LEARNING_RATE, decoupled=decoupled, **options)
    rng = np.random.default_rng(1)
    signal, size_of_row = rng.standard_normal(LAYER_NK), 10.0 ** rng.uniform(-4, 0, (LAYER_NK[0], 1))
    for _ in range(NUM_STEPS):
        gradient = ((signal + rng.standard_normal(LAYER_NK)) * size_of_row).astype(np.float32)
        parameter.grad = torch.from_numpy(gradient)
        optimizer.step()
        exact.step(gradient.astype(np.float64))
    way, exact_way = held.trained_weight(layer, optimizer) - start, exact.weight - start
    row = LEVELS[level]
    limit = 1e-5 if row.weight == row.exp_avg == "fp32" else MOMENT_ERRORS[row.exp_avg]
    assert np.linalg.norm(way - exact_way) / np.linalg.norm(exact_way) <= limit


@pytest.mark.parametrize("level", levels("O3-split"))
def test_a_drift_of_a_hundred_thousandth_is_kept(level: str) -> None:
    """A constant gradient moves every weight by lr a step: 1e-5 of the weights' RMS, a fiftieth of an FP16 code."""
    std, num_steps = 0.02, 100
    model = one_layer((256, 256), std)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5 * std, weight_decay=0.0)
    model, optimizer = initialize(model, optimizer, level)
    signs = np.sign(np.random.default_rng(2).standard_normal((256, 256)))
    start = held.trained_weight(model[0], optimizer)
    for _ in range(num_steps):
        model[0].weight.grad = torch.from_numpy(signs).float()
        optimizer.step()
    way = held.trained_weight(model[0], optimizer) - start
    kept = -float(np.mean(way * signs)) / (num_steps * 1e-5 * std)
    assert kept == pytest.approx(1.0, abs=0.05)
