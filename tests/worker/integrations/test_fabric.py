"""Lightning Fabric's loop with a converted model and optimizer: setup, backward, clip, save, and continue from it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning_fabric import Fabric
from torch import nn

from octet import initialize
from octet.api_schemas.levels import LEVELS
from tests.kit.small_model import Small
from tests.worker.integrations.bits import assert_same_bits


def made(level: str) -> tuple[Fabric, Any, Any]:
    """Return Fabric, and the model and optimizer that it wraps around those of `initialize`."""
    fabric = Fabric(accelerator="cpu", devices=1)
    torch.manual_seed(0)
    model: nn.Module = Small()
    model, optimizer = initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-2), level, convert_heads=True)
    return fabric, *fabric.setup(model, optimizer)


def train(fabric: Fabric, model: Any, optimizer: Any, seeds: range) -> list[float]:
    losses = []
    for seed in seeds:
        inputs = torch.randn(16, 32, generator=torch.Generator().manual_seed(seed))
        loss = (model(inputs) - inputs[:, :16]).square().mean()
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.matrix
@pytest.mark.parametrize("level", LEVELS)
def test_it_trains_and_continues_bit_for_bit(level: str, tmp_path: Path) -> None:
    fabric, model, optimizer = made(level)
    first = train(fabric, model, optimizer, range(4))
    fabric.save(tmp_path / "state.ckpt", {"model": model, "optimizer": optimizer})
    rest = train(fabric, model, optimizer, range(4, 8))
    assert rest[-1] < first[0]

    fabric, other, other_optimizer = made(level)
    fabric.load(tmp_path / "state.ckpt", {"model": other, "optimizer": other_optimizer})
    assert train(fabric, other, other_optimizer, range(4, 8)) == rest
    assert_same_bits(other.state_dict(), model.state_dict())
    assert_same_bits(other_optimizer.state_dict(), optimizer.state_dict())
