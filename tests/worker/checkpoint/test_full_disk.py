"""A full disk is distinguished from an error of the job, and the files of before stay whole."""

import errno
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from octet.api_schemas import CheckpointRef, FailureReason, JobSpec
from octet.worker import checkpoint
from octet.worker.common.config import RankEnv
from octet.worker.common.errors import StorageFull, is_storage_full
from octet.worker.metrics.table import Metrics
from octet.worker.rank.main import Run, _train
from octet.worker.reporting.reporter import LogReporter
from octet.worker.reporting.spool import Spool
from tests.kit.small_disk import SmallDisk, small_disk
from tests.worker.reporting.test_spool import report

STATE = {"model": {"w": torch.arange(32_768, dtype=torch.float32)}}  # 128 KiB


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    with small_disk(tmp_path / "disk", 400_000) as disk:
        yield disk


def test_a_checkpoint_that_does_not_fit_leaves_the_earlier_one_and_the_space_it_took(disk: SmallDisk) -> None:
    folder = disk.path / "checkpoints"
    saved = checkpoint.save(folder, 1, STATE)
    checkpoint.save(folder, 2, STATE)
    with pytest.raises(StorageFull, match="checkpoint of step 3 does not fit on the disk"):
        checkpoint.save(folder, 3, STATE)
    assert sorted(path.name for path in folder.iterdir()) == ["step_0000000001", "step_0000000002"]
    loaded = checkpoint.load(folder, CheckpointRef(step=1, name=saved.name, sha256=saved.sha256))
    assert torch.equal(loaded["model"]["w"], STATE["model"]["w"])


def test_the_job_is_not_blamed_for_a_full_disk(disk: SmallDisk, spec_document: dict[str, Any]) -> None:
    disk.fill()
    outcome = _train(JobSpec.model_validate(spec_document), RankEnv(), Run(LogReporter(), Metrics(), disk.path))
    assert outcome.finished is not None
    assert (outcome.finished.outcome, outcome.finished.reason) == ("failed", FailureReason.STORAGE_FULL)


def test_reports_are_kept_in_order_while_the_disk_is_full(disk: SmallDisk) -> None:
    spool = Spool(disk.path / "spool.jsonl", max_in_memory=2)
    expected = list(range(1, 31))
    for seq in expected:
        if seq == 10:
            disk.fill()
        if seq == 20:
            disk.free()
        spool.append(report(seq))
    assert len(spool) == 30
    found = []
    while head := spool.peek(7):
        found += [item.seq for item in head]
        spool.drop(head[-1].seq)
    assert found == expected
    spool.close()


def test_only_full_disks_are_full_disks() -> None:
    wrapped = RuntimeError("could not write")
    wrapped.__cause__ = OSError(errno.EDQUOT, "Disk quota exceeded")
    assert is_storage_full(wrapped)
    assert not is_storage_full(OSError(errno.EACCES, "Permission denied"))
    assert not is_storage_full(RuntimeError("28"))
