"""Training goes on while a checkpoint is written, and whatever ends the run, a checkpoint is whole or it is none.

The gate in these tests is in the thread, before its first file: conditions hold it there, never times.
"""

import errno
import hashlib
import multiprocessing
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from octet.api_schemas import CheckpointRef, CheckpointReport, JobSpec, ReportBody, StepReport
from octet.worker import checkpoint
from octet.worker.checkpoint import write
from octet.worker.common.config import RankEnv, resolve
from octet.worker.common.errors import Cancelled, LeaseLost, StorageFull
from octet.worker.mesh import Axis, Mesh
from octet.worker.train.loop import Trainer
from tests.kit.ports import free_port
from tests.kit.ranks import run_ranks
from tests.kit.training import Recorder, train, with_training

FULL = OSError(errno.ENOSPC, "No space left on device")
TIMEOUT_S = 60


class Gate:
    """Holds the threads that write checkpoints until it is opened, then lets them write, or raises in them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch | None = None, error: Exception | None = None) -> None:
        self._is_open = threading.Event()
        self._error = error
        self._save_file = write.save_file
        if monkeypatch is None:
            vars(write)["save_file"] = self._save  # in a process of its own
        else:
            monkeypatch.setattr(write, "save_file", self._save)

    def open(self) -> None:
        self._is_open.set()

    def _save(self, *arguments: Any) -> None:
        assert self._is_open.wait(TIMEOUT_S)
        if self._error is not None:
            raise self._error
        self._save_file(*arguments)


class Watcher(Recorder):
    """A recorder that opens a gate when it hears of a step, and looks at the folder when it hears of a checkpoint."""

    def __init__(self, gate: Gate, opens_at_step: int, folder: Path, waits: bool = False, **options: Any) -> None:
        """waits: for the thread, once the gate is open."""
        super().__init__(**options)
        self.gate, self.opens_at_step, self.folder, self.waits = gate, opens_at_step, folder, waits
        self.were_whole: list[bool] = []

    def send(self, body: ReportBody, at: object = None) -> None:
        super().send(body, at)
        if isinstance(body, StepReport) and body.step == self.opens_at_step:
            writing = writing_thread() if self.waits else None  # it may end as soon as the gate is open
            self.gate.open()
            if writing is not None:
                writing.join(TIMEOUT_S)
        if isinstance(body, CheckpointReport):
            self.were_whole.append((self.folder / "checkpoints" / body.name / "manifest.json").is_file())

    def order(self) -> list[str]:
        return [f"{report.kind} {report.step}" for report in self.reports if isinstance(report, StepReport | CheckpointReport)]


def writing_thread() -> threading.Thread:
    [thread] = [thread for thread in threading.enumerate() if thread.name == "octet-checkpoint"]
    return thread


def test_steps_go_on_and_the_next_checkpoint_waits(
    tmp_path: Path, spec_document: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint has no change from two later steps, and it is reported once it is on disk."""
    document = with_training(spec_document, "O2", steps=6, checkpoint_every=3)
    whole, _ = train(document, tmp_path / "whole")
    gate = Gate(monkeypatch)
    held = Watcher(gate, 5, tmp_path / "held")
    train(document, tmp_path / "held", recorder=held)
    order = held.order()
    assert order.index("step 5") < order.index("checkpoint 3") < order.index("checkpoint 6")
    assert held.were_whole == [True, True]
    resumed, _ = train(document, tmp_path / "held", held.checkpoints()[1:])
    assert held.losses() == whole.losses()
    assert resumed.losses() == whole.losses()[3:]


def test_an_error_of_the_thread_ends_the_run_at_the_next_step(
    tmp_path: Path, spec_document: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    document = with_training(spec_document, steps=9, checkpoint_every=4)
    recorder = Watcher(Gate(monkeypatch, FULL), 5, tmp_path, waits=True)
    with pytest.raises(StorageFull, match="the checkpoint of step 4 does not fit on the disk"):
        train(document, tmp_path, recorder=recorder)
    assert recorder.order()[-1] in ("step 5", "step 6")
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_a_job_that_is_stopped_waits_for_its_checkpoint(
    tmp_path: Path, spec_document: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    document = with_training(spec_document, steps=9, checkpoint_every=3)
    recorder = Watcher(Gate(monkeypatch), 4, tmp_path, stop_after_step=4)
    with pytest.raises(Cancelled):
        train(document, tmp_path, recorder=recorder)
    assert recorder.order()[-2:] == ["step 4", "checkpoint 3"]
    assert recorder.were_whole == [True]


def test_an_attempt_without_its_lease_completes_nothing(
    tmp_path: Path, spec_document: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    document = with_training(spec_document, steps=9, checkpoint_every=3)
    gate, recorder = Gate(monkeypatch), Recorder(stop_after_step=4, stop=LeaseLost)
    with pytest.raises(LeaseLost):
        train(document, tmp_path, recorder=recorder)
    thread = writing_thread()  # nobody has waited for it
    gate.open()
    thread.join(TIMEOUT_S)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == [".unfinished_step_0000000003"]
    assert recorder.checkpoints() == ()


def train_until_killed(document: dict[str, Any], folder: Path) -> None:
    """Die when the second checkpoint has its tensors and no manifest."""
    save_file, num_saved = write.save_file, 0

    def save(*arguments: Any) -> None:
        nonlocal num_saved
        save_file(*arguments)
        num_saved += 1
        if num_saved == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    vars(write)["save_file"] = save
    torch.set_num_threads(1)  # the threads of OpenMP are not forked, and work for them would never end
    train(document, folder)


def test_a_kill_before_the_manifest_leaves_the_checkpoint_before(tmp_path: Path, spec_document: dict[str, Any]) -> None:
    document = with_training(spec_document, "O3-split", steps=6, checkpoint_every=2)
    whole, _ = train(document, tmp_path / "whole")
    rank = multiprocessing.get_context("fork").Process(target=train_until_killed, args=(document, tmp_path / "killed"))
    rank.start()
    rank.join(TIMEOUT_S)
    assert rank.exitcode == -signal.SIGKILL
    folder = tmp_path / "killed" / "checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == [".unfinished_step_0000000004", "step_0000000002"]
    manifest = (folder / "step_0000000002" / "manifest.json").read_bytes()
    ref = CheckpointRef(step=2, name="step_0000000002", sha256=hashlib.sha256(manifest).hexdigest())
    resumed, _ = train(document, tmp_path / "killed", (ref,))
    assert resumed.losses() == whole.losses()[2:]
    assert sorted(path.name for path in folder.iterdir()) == [checkpoint.checkpoint_name(step) for step in (2, 4, 6)]


def test_what_killed_attempts_left_half_written_is_removed(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, 2, {"a": torch.ones(1)})
    for step in (3, 4):
        (tmp_path / f".unfinished_{checkpoint.checkpoint_name(step)}").mkdir()
    with checkpoint.CheckpointWriter(tmp_path, Axis("world", 2, 1, torch.device("cpu"))):
        assert len(list(tmp_path.iterdir())) == 3  # the first rank removes for all
    with checkpoint.CheckpointWriter(tmp_path, Axis("world", 2, 0, torch.device("cpu"))):
        assert [path.name for path in tmp_path.iterdir()] == [checkpoint.checkpoint_name(2)]


class Counter(Recorder):
    """Opens a gate at a call of `check`: every rank makes one for each step, and only the first hears of steps."""

    def __init__(self, gate: Gate, opens_at_step: int) -> None:
        super().__init__()
        self.gate, self.opens_at_step, self.num_steps = gate, opens_at_step, 0

    def check(self) -> None:
        self.num_steps += 1
        if self.num_steps == self.opens_at_step:
            self.gate.open()


def train_two_ranks(rank: int, ports: list[int], document: dict[str, Any], folder: str) -> None:
    """Train twice: at its fifth step rank 1 writes its pieces, in the second run it cannot.

    Saves the error, the reports and the last step of each rank.
    """
    torch.set_num_threads(1)
    save_file, found = write.save_file, []
    for number, error in enumerate((None, FULL)):
        env = RankEnv(rank=rank, world_size=2, master_port=ports[number])
        config = resolve(JobSpec.model_validate(document), env)
        vars(write)["save_file"] = save_file
        recorder: Recorder = Counter(Gate(error=error), 5) if rank else Recorder()
        raised = ""
        with Mesh(env, torch.device("cpu"), config.layout) as mesh:
            trainer = Trainer(config, mesh, recorder, Path(folder, str(number)))
            try:
                trainer.run()
            except StorageFull as failure:
                raised = str(failure)
        reports = [report for report in recorder.reports if isinstance(report, StepReport | CheckpointReport)]
        found.append((raised, [f"{report.kind} {report.step}" for report in reports], trainer.progress.step))
    torch.save(found, Path(folder, f"{rank}.pt"))


@pytest.mark.matrix
def test_ranks_meet_when_all_have_written_their_pieces(tmp_path: Path, spec_document: dict[str, Any]) -> None:
    document = with_training(spec_document, "O2", steps=8, checkpoint_every=3)
    document |= {"resources": {"workers": 2}, "parallelism": {"zero_stage": 1}}
    run_ranks(train_two_ranks, ([free_port(), free_port()], document, str(tmp_path)), 2)
    (written, failed), (_, failed_on_1) = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    order = written[1]
    assert order.index("step 4") < order.index("checkpoint 3") < order.index("checkpoint 6") < order.index("checkpoint 8")
    assert sorted(path.name for path in (tmp_path / "0" / "checkpoints").iterdir()) == [
        checkpoint.checkpoint_name(step) for step in (3, 6, 8)
    ]
    assert "rank 1 could not write its part of the checkpoint: its disk is full" in failed[0]
    assert "No space left on device" in failed_on_1[0]
    assert 5 <= failed[2] == failed_on_1[2] <= 6  # both ranks raise at the same step
    assert list((tmp_path / "1" / "checkpoints").iterdir()) == []
