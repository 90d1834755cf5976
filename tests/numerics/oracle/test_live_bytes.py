"""Bytes are counted from the storages that are alive, found without asking the worker, and not from a table."""

import gc

import pytest
import torch
from torch import Tensor, nn

from octet.api_schemas.levels import LEVELS
from octet.worker import initialize, memory_report

BY_DEFAULT = ("te", "O2", "O3", "O3-split-8bit")


class ThreeLayers(nn.Module):
    """A layer that is trained, one that is frozen, and one that is in no optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.trained, self.frozen, self.unused = (nn.Linear(128, 128, bias=False) for _ in range(3))
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.unused(self.frozen(self.trained(x)))


def live_storages() -> dict[int, int]:
    """Return the bytes of every storage that a tensor in this process sees, by address."""
    gc.collect()
    storages = {}
    for tensor in gc.get_objects():
        if type(tensor) not in (Tensor, nn.Parameter):
            continue
        try:
            address = tensor.untyped_storage().data_ptr()
        except RuntimeError:  # a tensor of torch's tracing that another test left: it has a shape, but no memory
            continue
        storages[address] = tensor.untyped_storage().nbytes()
    return storages


@pytest.mark.parametrize(
    "level", [level if level in BY_DEFAULT else pytest.param(level, marks=pytest.mark.matrix) for level in LEVELS]
)
def test_the_report_counts_all_that_is_alive(level: str) -> None:
    before = live_storages()
    model = ThreeLayers()
    optimizer = torch.optim.AdamW([*model.trained.parameters(), *model.frozen.parameters()])
    model, optimizer = initialize(model, optimizer, opt_level=level, tokens=16)
    model(torch.ones(16, 128)).sum().backward()
    optimizer.step()
    model.zero_grad()
    ports_and_counters = 8 + (4 + 8) * (3 if LEVELS[level].weight != "fp32" else 0)
    alive = sum(num_bytes for address, num_bytes in live_storages().items() if address not in before)
    assert alive == sum(memory_report(model, optimizer).values()) + ports_and_counters
