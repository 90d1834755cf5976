"""A device copies a checkpoint while it computes the next step, and changes nothing before it is copied.

The CPU copies as late as CUDA may here: when `hold_back` is called, which is the last moment at which the device's stream may
still do what it was told before. So whatever a step changes too early is in the checkpoint.
"""

import threading
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from api_schemas import JobSpec
from tests.ports import free_port
from tests.ranks import run_ranks
from tests.waiting import LONG_S
from tests.worker.test_train import Recorder, train, with_training
from worker.checkpoint import host_copies
from worker.checkpoint.host_copies import Copy, HostCopies
from worker.config import RankEnv, resolve
from worker.mesh import Mesh
from worker.train import Trainer

LEVELS = ("bf16-amp", "O2", "O3-split")
SAVINGS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "gradient release": {"gradient_release": True, "gradient_clip": None},
    "accumulation": {"micro_batch_size": 1},
}
SMALL_BYTES = 256
"""Of models this small, each weight is larger."""


class Latest:
    """A stream that copies when it may not wait any longer."""

    num_late = 0

    def __init__(self) -> None:
        self._copies: list[Copy] = []
        self._made = threading.Event()

    def start(self, copies: list[Copy]) -> None:
        self._copies = list(copies)
        self._made.clear()

    def hold_back(self) -> None:
        for host, tensor in self._copies:
            host.copy_(tensor)
        Latest.num_late += len(self._copies)
        self._copies = []
        self._made.set()

    def wait(self) -> None:
        assert self._made.wait(LONG_S)


def copy_late() -> Any:
    Latest.num_late = 0
    return mock.patch.multiple(host_copies, stream_of=lambda _: Latest(), SMALL_BYTES=SMALL_BYTES)


def files_of(folder: Path) -> dict[str, bytes]:
    """The tensors of the checkpoints, which depend on nothing but the run."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*.safetensors"))}


def document_of(document: dict[str, Any], level: str, saving: str) -> dict[str, Any]:
    options = {"steps": 5, "checkpoint_every": 2, "global_batch_size": 2, **SAVINGS[saving]}
    return with_training(document, level, **options)


@pytest.mark.parametrize("saving", SAVINGS)
@pytest.mark.parametrize("level", LEVELS)
def test_a_step_changes_nothing_before_it_is_copied(
    tmp_path: Path, spec_document: dict[str, Any], level: str, saving: str
) -> None:
    document = document_of(spec_document, level, saving)
    train(document, tmp_path / "at_once")
    with copy_late():
        train(document, tmp_path / "late")
    assert Latest.num_late > 0
    expected = files_of(tmp_path / "at_once")
    assert len(expected) == 3
    assert files_of(tmp_path / "late") == expected


def train_two_ranks(rank: int, port: int, document: dict[str, Any], folder: str, is_late: bool) -> None:
    torch.set_num_threads(1)
    env = RankEnv(rank=rank, world_size=2, master_port=port)
    config = resolve(JobSpec.model_validate(document), env)
    with copy_late() if is_late else mock.patch.object(host_copies, "SMALL_BYTES", SMALL_BYTES):
        with Mesh(env, torch.device("cpu"), config.layout) as mesh:
            Trainer(config, mesh, Recorder(), Path(folder)).run()
        assert Latest.num_late > 0 or not is_late


@pytest.mark.matrix
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("level", LEVELS)
def test_no_rank_changes_its_pieces_before_they_are_copied(
    tmp_path: Path, spec_document: dict[str, Any], level: str, stage: int
) -> None:
    document = document_of(spec_document, level, "nothing")
    document |= {"resources": {"workers": 2}, "parallelism": {"zero_stage": stage}}
    for name in ("at_once", "late"):
        run_ranks(train_two_ranks, (free_port(), document, str(tmp_path / name), name == "late"), 2)
    expected = files_of(tmp_path / "at_once")
    assert len(expected) == 9  # the whole tensors and the pieces of two ranks, three times
    assert files_of(tmp_path / "late") == expected
