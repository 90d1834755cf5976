"""Delayed scaling over 18 steps with Inf in them, against a window in NumPy: what the layer computes at every step."""

import numpy as np
import pytest
import torch
from torch import nn

from octet.worker import initialize
from tests.numerics.oracle import held
from tests.numerics.oracle.layer import E4M3, E5M2, Window, worst_tile_db

NUM_STEPS, LENGTH = 18, 4
INF_IN_INPUT, INF_IN_GRADIENT = (7, 13), (13,)
EVALUATED, IN_TWO_PARTS = (3, 9), (8, 16)
SHAPE_TK, SHAPE_TN, SHAPE_NK = (32, 64), (32, 48), (48, 64)


def values_of_step(rng: np.random.Generator, shape: tuple[int, int], *, with_inf: bool) -> np.ndarray:
    """Normal values at a magnitude that moves by up to 2^20 from step to step: a stale scale saturates, or flushes to zero."""
    values = (rng.standard_normal(shape) * 2.0 ** rng.integers(-10, 11)).astype(np.float32).astype(np.float64)
    if with_inf:
        values[3, 5] = np.inf
    return values


def tensor(values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(values).float()


@pytest.mark.parametrize(
    ("level", "algorithm", "interval", "margin"),
    [
        ("te", "max", 1, 0),
        ("O2", "most_recent", 1, 0),
        ("O3-split", "max", 3, 2),
        *(
            pytest.param(level, algorithm, interval, margin, marks=pytest.mark.matrix)
            for level in ("te", "O1", "O2", "O3", "O3-split", "O2-8bit", "O3-split-8bit")
            for algorithm, interval, margin in (("max", 1, 1), ("max", 3, 0), ("most_recent", 2, 0))
        ),
    ],
)
def test_every_step_is_scaled_by_the_window(level: str, algorithm: str, interval: int, margin: int) -> None:
    rng = np.random.default_rng(0)
    model = nn.Sequential(nn.Linear(SHAPE_NK[1], SHAPE_NK[0], bias=False))
    recipe = {
        "scaling": "delayed", "amax_history_length": LENGTH, "amax_compute_algorithm": algorithm,
        "interval": interval, "margin": margin,
    }  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
    model, optimizer = initialize(
        model,
        optimizer,
        level,
        recipe=recipe,
        statistics_every=0,
        **({} if level == "te" else {"gradient_accumulation": "fp32"}),
    )
    inputs, gradients = (Window(LENGTH, algorithm, interval, margin) for _ in range(2))
    num_stale = 0
    for step in range(NUM_STEPS):
        expected_grad = np.zeros(SHAPE_NK)
        weight_NK = weight_operand(model[0], margin)
        for _part in range(2 if step in IN_TWO_PARTS else 1):
            input_TK = values_of_step(rng, SHAPE_TK, with_inf=step in INF_IN_INPUT)
            grad_TN = values_of_step(rng, SHAPE_TN, with_inf=step in INF_IN_GRADIENT)
            x = tensor(input_TK).requires_grad_()
            output = model(x)
            output.backward(tensor(grad_TN))
            rounded_TK, rounded_TN = inputs.round(input_TK, E4M3), gradients.round(grad_TN, E5M2)
            expected_grad += rounded_TN.T @ rounded_TK
            assert worst_tile_db(output.detach().numpy(), rounded_TK @ weight_NK.T) >= 90, step
            assert x.grad is not None
            assert worst_tile_db(x.grad.numpy(), rounded_TN @ weight_NK) >= 90, step
            for given, rounded, dtype in ((input_TK, rounded_TK, E4M3), (grad_TN, rounded_TN, E5M2)):
                num_stale += worst_tile_db(Window(LENGTH, margin=margin).round(given, dtype), rounded) < 60
        assert worst_tile_db(held.gradient(model[0].weight), expected_grad) >= 90, step
        optimizer.step()
        optimizer.zero_grad()
        inputs.close_step()
        gradients.close_step()
        if step in EVALUATED:  # far larger than anything before: the window must not hear of it
            large_TK = values_of_step(rng, SHAPE_TK, with_inf=False) * 2.0**10
            with torch.no_grad():
                output = model.eval()(tensor(large_TK))
            model.train()
            assert worst_tile_db(output.numpy(), inputs.round(large_TK, E4M3, is_training=False) @ weight_NK.T) >= 90, step
    assert num_stale >= 6, "a layer that ignores its window would pass"


def weight_operand(layer: nn.Module, margin: int) -> np.ndarray:
    """The weight in E4M3, as it is held or rounded. It never changes, so that its window has its own amax, if any."""
    values = held.operand_weight(layer)
    codes = getattr(layer.weight, "codes", layer.weight)
    return values if codes.dtype == torch.float8_e4m3fn else Window(LENGTH, margin=margin).round(values, E4M3)
