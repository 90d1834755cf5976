"""On an accelerator the host waits for no value to begin a checkpoint, and the checkpoint has every step before it.

The device is the chip of tests/chip, and the thread that writes is held until the training thread has gone on.
"""

import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from octet.api_schemas import CheckpointReport, JobSpec, StepReport
from octet.api_schemas.levels import LEVELS
from octet.worker import checkpoint
from octet.worker.checkpoint import write
from octet.worker.common.config import RankEnv, resolve
from octet.worker.common.errors import NonFiniteLoss
from octet.worker.mesh import Mesh
from octet.worker.metrics.readback import HostCopy
from octet.worker.train.loop import Trainer
from tests.chip.device import Chip
from tests.chip.lies import chip_of
from tests.chip.nccl import communicators
from tests.chip.test_steps import DIVISIONS, GPU, REFUSED, is_refused, job
from tests.kit.ports import free_port
from tests.kit.ranks import run_ranks
from tests.kit.training import Recorder, with_training
from tests.kit.waiting import LONG_S
from tests.worker.train.test_late_reads import make, run

pytestmark = pytest.mark.usefixtures("accelerator")
MARKS: dict[str, Any] = {"fp32": (), "fp16-amp": pytest.mark.system, "O2": pytest.mark.system}
"""One level in every run; those that are in neither are in the matrix."""
READS_OF_SAMPLES = 1
"""Reads of statistics sampled in the newest four steps. They decide which layers multiply in bf16, as the checkpoint says."""
LATE_READ = "event.synchronize at worker/metrics/readback.py"
"""Reads of copies in flight, which are counted in another way."""
STAGES_SAY = "worker/mesh/axis.py"
"""By its functions stages of a pipeline read what the others hold: as text, after they agree on its length."""


@contextmanager
def held_writer() -> Iterator[threading.Event]:
    """Inside, threads write no checkpoint before the event is set."""
    may_write, write_own = threading.Event(), write.write_own

    def wait_and_write(*arguments: Any) -> Any:
        assert may_write.wait(LONG_S)
        return write_own(*arguments)

    with mock.patch("octet.worker.checkpoint.writer.write_own", wait_and_write):
        yield may_write


def waits_of_saves(
    chip: Chip, make_trainer: Callable[[Recorder], Trainer], num_saves: int
) -> tuple[dict[str, int], int, list[list[int]]]:
    """Count what the training thread waits for while it saves, and in the step before and the step after each checkpoint.

    Returns the waits, the reads of copies in flight during the first save, and the steps reported by the end of each save.
    """
    reads, read, training_thread = Counter[bool](), HostCopy.read, threading.current_thread()
    is_saving, told, found = False, list[list[int]](), Counter[str]()

    def count_read(copy: HostCopy) -> Any:
        reads[is_saving and threading.current_thread() is training_thread] += 1
        return read(copy)

    with held_writer() as may_write, mock.patch.object(HostCopy, "read", count_read):
        trainer = make_trainer(recorder := Recorder())
        trainer.step()
        trainer.log.num_steps = 100  # no interval ends until then
        for _ in range(num_saves):
            chip.begin_step()
            trainer.step()
            is_saving = not told
            trainer.save()
            is_saving = False
            told.append([report.step for report in recorder.of(StepReport)])
            trainer.step()
            found.update({name: count for name, count in chip.waits.items() if not name.startswith(LATE_READ)})
            may_write.set()
        trainer.batches.close()
        trainer.writer.finish()
    return dict(found), reads[True], told


@pytest.mark.system
@pytest.mark.filterwarnings("ignore:.*scales must be:UserWarning")
@pytest.mark.parametrize("level", [pytest.param(name, marks=MARKS.get(name, pytest.mark.matrix)) for name in LEVELS])
def test_no_checkpoint_waits(tmp_path: Path, spec_document: dict[str, Any], level: str) -> None:
    """With accumulation, clipping, statistics and a moving average of the weights."""
    document = job(spec_document, level, ema_decay=0.9, cuda_graph="off")
    with chip_of() as chip, Mesh(RankEnv(), GPU) as mesh:
        found, num_reads, told = waits_of_saves(chip, lambda recorder: make(document, tmp_path, mesh, recorder), 2)
    assert found == {}
    assert num_reads == READS_OF_SAMPLES * LEVELS[level].has_own_fp8
    assert told == [[], [1, 2]]  # the second checkpoint waits for the first, and so has what the first waited for


def save_on_two_ranks(rank: int, port: int, document: dict[str, Any], folder: str) -> None:
    torch.set_num_threads(1)
    env = RankEnv(rank=rank, world_size=2, master_port=port)
    config = resolve(JobSpec.model_validate(document), env)
    with chip_of() as chip, communicators(chip), Mesh(env, GPU, config.layout) as mesh:
        found = waits_of_saves(chip, lambda recorder: Trainer(config, mesh, recorder, Path(folder)), 1)
    Path(folder, f"{rank}.json").write_text(json.dumps(found))


@pytest.mark.matrix
@pytest.mark.filterwarnings("ignore:.*scales must be:UserWarning")
@pytest.mark.parametrize("division", DIVISIONS)
@pytest.mark.parametrize("level", LEVELS)
def test_no_checkpoint_of_several_ranks_waits(tmp_path: Path, spec_document: dict[str, Any], level: str, division: str) -> None:
    """The next checkpoint, which first ends this one, has the ranks that hold pieces tell each other what they have written."""
    document = job(spec_document, level, global_batch_size=4)
    document["model"] = document["model"] | {"hidden_size": 32, "num_layers": 2}
    document |= {"resources": {"workers": 2}, "parallelism": DIVISIONS[division]}
    if is_refused(document):
        assert (division.split(",")[0], level) in REFUSED
        return
    run_ranks(save_on_two_ranks, (free_port(), document, str(tmp_path)), 2)
    for rank in range(2):
        found, num_reads, _ = json.loads((tmp_path / f"{rank}.json").read_text())
        assert num_reads == READS_OF_SAMPLES * LEVELS[level].has_own_fp8
        assert [name for name in found if division != "pipeline" or STAGES_SAY not in name] == []


def test_a_checkpoint_has_the_losses_of_all_steps_before_it(tmp_path: Path, spec_document: dict[str, Any]) -> None:
    run(with_training(spec_document, "O2", steps=7, checkpoint_every=3), tmp_path, recorder := Recorder())
    losses, reports = recorder.losses(), recorder.of(CheckpointReport)
    assert [report.step for report in reports] == [3, 6, 7]
    for report in reports:
        state = checkpoint.load_folder(tmp_path / "checkpoints" / report.name)
        assert state["progress"]["recent_losses"] == losses[: report.step]
        assert state["progress"]["first_loss"] == losses[0]
        assert len(state["step_times_s"]) == report.step - 1  # the first one loads kernels
        assert report.loss == losses[report.step - 1]


def test_a_run_whose_losses_stay_infinite_leaves_no_checkpoint_of_them(tmp_path: Path, spec_document: dict[str, Any]) -> None:
    document = with_training(spec_document, steps=300, checkpoint_every=12)
    with Mesh(RankEnv(), torch.device("cpu")) as mesh:
        trainer = make(document, tmp_path, mesh, Recorder())
        with torch.no_grad():
            next(trainer.model.parameters()).fill_(torch.nan)
        with pytest.raises(NonFiniteLoss, match="up to step 10"):
            trainer.run()
    assert list(tmp_path.glob("checkpoints/*")) == []
