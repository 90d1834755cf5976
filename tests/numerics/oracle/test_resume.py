"""A run that is saved and continued in a new process ends with the bits of a run that was never interrupted, at every level."""

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from octet.api_schemas.levels import LEVELS
from octet.worker import exact_state_dict, initialize
from tests.kit.ranks import run_ranks

NUM_STEPS_BEFORE, NUM_STEPS_AFTER = 5, 3


def build(level: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64, bias=False))
    return initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-2), level, seed=7)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    """Two micro-batches a step, so that gradients are added, and a norm that clips."""
    for step in steps:
        for part in range(2):
            generator = torch.Generator().manual_seed(2 * step + part)
            model(torch.randn(16, 64, generator=generator)).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()


def tensors(value: Any) -> list[Tensor]:
    """All tensors of a nested state, in order; numbers as tensors."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict | list | tuple):
        return [tensor for each in (value.values() if isinstance(value, dict) else value) for tensor in tensors(each)]
    return [torch.tensor(value)] if isinstance(value, int | float) else []


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Return a hash of every byte that model and optimizer hold."""
    found = hashlib.sha256()
    for tensor in tensors([exact_state_dict(model), optimizer.state_dict()]):
        found.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def continue_(_rank: int, levels: list[str], folder: str) -> None:
    for level in levels:
        saved = torch.load(Path(folder) / f"{level}.pt", weights_only=True)
        model, optimizer = build(level)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        train(model, optimizer, range(NUM_STEPS_BEFORE, NUM_STEPS_BEFORE + NUM_STEPS_AFTER))
        (Path(folder) / f"{level}.digest").write_text(digest(model, optimizer))


@pytest.mark.filterwarnings("ignore:.*torchao.*")
@pytest.mark.parametrize(
    "levels",
    [
        pytest.param(("te", "O2", "O3-split-8bit"), marks=pytest.mark.system),
        pytest.param(tuple(LEVELS), marks=pytest.mark.matrix),
    ],
    ids=["some", "all"],
)
def test_a_new_process_continues_to_the_bit(levels: tuple[str, ...], tmp_path: Path) -> None:
    expected = {}
    for level in levels:
        model, optimizer = build(level)
        train(model, optimizer, range(NUM_STEPS_BEFORE))
        torch.save({"model": exact_state_dict(model), "optimizer": optimizer.state_dict()}, tmp_path / f"{level}.pt")
        before = digest(model, optimizer)
        train(model, optimizer, range(NUM_STEPS_BEFORE, NUM_STEPS_BEFORE + NUM_STEPS_AFTER))
        expected[level] = digest(model, optimizer)
        assert expected[level] != before
    run_ranks(continue_, (list(levels), str(tmp_path)), num_ranks=1)
    found = {level: (tmp_path / f"{level}.digest").read_text() for level in levels}
    assert {level: found[level] == expected[level] for level in levels} == dict.fromkeys(levels, True)
