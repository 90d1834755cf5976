"""A small model with what `initialize` meets: converted layers with and without bias, nested, a norm, a head of its own."""

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from octet.api_schemas.levels import LEVELS
from octet.worker import initialize
from octet.worker.fp8.linear import Float8Linear

FP8_LEVELS = tuple(name for name, level in LEVELS.items() if level.has_own_fp8)
SPREAD = ("te", "O2", "O3", "O3-split-8bit")
"""One level for each way of holding a weight, and both kinds of states."""
LEVELS_OF_CODES = tuple(name for name in FP8_LEVELS if LEVELS[name].weight != "fp32")


def spread(levels: Iterable[str]) -> list[Any]:
    """Parameters of a test: the levels of SPREAD; the others only in `make test-matrix`."""
    return [level if level in SPREAD else pytest.param(level, marks=pytest.mark.matrix) for level in levels]


class Small(nn.Module):
    """32 -> 64 -> 64 -> 16."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32, 64)
        self.norm = nn.LayerNorm(64)
        self.inner = nn.Sequential(nn.Linear(64, 64, bias=False), nn.GELU(), nn.Linear(64, 32))
        self.last = nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.inner(self.norm(self.first(x))))


def make(level: str, lr: float = 0.01, seed: int = 0) -> tuple[Small, torch.optim.Optimizer]:
    """The model, the same for each seed, and AdamW, at a level."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Small()
    model, optimizer = initialize(model, torch.optim.AdamW(model.parameters(), lr=lr), level, convert_heads=True)
    return model, optimizer


def values_of_weights(model: nn.Module) -> dict[str, Tensor]:
    """The fp32 values of all FP8 layers' weights."""
    return {name: layer.weight.detach() + 0 for name, layer in model.named_modules() if isinstance(layer, Float8Linear)}
