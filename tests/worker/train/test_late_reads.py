"""On an accelerator steps are read late, and what is read is all there: every step, once, in order.

The CPU behaves as an accelerator here. `tests/chip/test_steps.py` shows that the host waits for no value in a step.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from octet.api_schemas import EventReport, JobSpec, PhaseReport, StepReport
from octet.worker import fp8_statistics, initialize
from octet.worker.common.config import RankEnv, resolve
from octet.worker.common.errors import Cancelled, Diverged, NonFiniteLoss
from octet.worker.fp8.accelerator import cpu_as_accelerator
from octet.worker.fp8.health import STEPS_LATE, LayerDemoted
from octet.worker.mesh import Mesh
from octet.worker.train.log import StepLog
from octet.worker.train.loop import Trainer
from tests.kit.ports import free_port
from tests.kit.ranks import run_ranks
from tests.kit.training import Recorder, with_training

pytestmark = pytest.mark.usefixtures("accelerator")


def make(document: dict[str, Any], folder: Path, mesh: Mesh, recorder: Recorder) -> Trainer:
    return Trainer(resolve(JobSpec.model_validate(document), RankEnv()), mesh, recorder, folder)


def run(document: dict[str, Any], folder: Path, recorder: Recorder, *checkpoints: Any) -> Any:
    with Mesh(RankEnv(), torch.device("cpu")) as mesh:
        return make(document, folder, mesh, recorder).run(checkpoints)


def test_the_curve_has_each_step_once_with_its_loss(tmp_path: Path, spec_document: dict[str, Any]) -> None:
    document = with_training(spec_document, "O2", steps=7, eval_every=5)
    summary = run(document, tmp_path / "late", late := Recorder())
    with Mesh(RankEnv(), torch.device("cpu")) as mesh:
        trainer = make(document, tmp_path / "at_once", mesh, at_once := Recorder())
        trainer.log = StepLog(mesh, is_late=False)
        expected = trainer.run()
    assert [report.step for report in late.of(StepReport)] == list(range(1, 8))
    assert late.losses() == at_once.losses()
    assert summary.evaluation_loss == expected.evaluation_loss
    assert summary.final_loss == expected.final_loss
    norms = [report.gradient_norm for report in late.of(StepReport)]
    assert norms == [report.gradient_norm for report in at_once.of(StepReport)]
    kinds = [type(report) for report in late.reports]
    assert kinds.index(StepReport) < kinds.index(PhaseReport, 1)  # the first step is reported before its phase


def test_steps_are_read_when_the_next_interval_ends(tmp_path: Path, spec_document: dict[str, Any]) -> None:
    with Mesh(RankEnv(), torch.device("cpu")) as mesh:
        trainer = make(with_training(spec_document, steps=100), tmp_path, mesh, recorder := Recorder())
        reported = []
        for _ in range(6):
            trainer.log.num_steps = 2
            trainer.step()
            reported.append([report.step for report in recorder.of(StepReport)])
        trainer.batches.close()
    assert reported == [[], [], [], [1, 2], [1, 2], [1, 2, 3, 4]]


def test_a_resumed_run_is_bit_identical(tmp_path: Path, spec_document: dict[str, Any]) -> None:
    document = with_training(spec_document, "O2", steps=9, checkpoint_every=4)
    document["precision"] = {"level": "O2", "statistics_every": 3, "demotion": {"patience": 1, "min_sqnr_db": 60}}
    run(document, tmp_path / "whole", whole := Recorder())
    interrupted = Recorder(stop_after_step=6)
    with pytest.raises(Cancelled):
        run(document, tmp_path / "parts", interrupted)
    assert [report.step for report in interrupted.of(StepReport)] == [1, 2, 3, 4, 5, 6]
    run(document, tmp_path / "parts", resumed := Recorder(), *interrupted.checkpoints())
    assert [report.step for report in resumed.of(StepReport)] == [5, 6, 7, 8, 9]
    assert resumed.losses() == whole.losses()[4:]
    assert any(event.type == "layer.demoted" for event in whole.of(EventReport))


def test_a_loss_that_stays_infinite_ends_the_run(tmp_path: Path, spec_document: dict[str, Any]) -> None:
    with Mesh(RankEnv(), torch.device("cpu")) as mesh:
        trainer = make(with_training(spec_document, steps=300), tmp_path, mesh, recorder := Recorder())
        with torch.no_grad():
            next(trainer.model.parameters()).fill_(torch.nan)
        with pytest.raises(NonFiniteLoss, match="up to step 10"):
            trainer.run()
    assert trainer.optimizer.num_skipped_steps == trainer.progress.step > 10
    assert recorder.of(StepReport)[0].loss is None


@pytest.mark.matrix
def test_a_job_that_diverges_fails_with_a_reason(tmp_path: Path, spec_document: dict[str, Any]) -> None:
    document = with_training(spec_document, steps=60, optimizer={"learning_rate": 10.0}, gradient_clip=None)
    with pytest.raises(Diverged, match="learning_rate"):
        run(document, tmp_path, Recorder())


def test_samples_are_read_some_steps_late_or_when_somebody_asks() -> None:
    torch.manual_seed(0)
    events: list[LayerDemoted] = []
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64))
    options = {"statistics_every": 100, "demotion": {"patience": 1, "min_sqnr_db": 60}, "on_event": events.append}
    model, optimizer = initialize(model, torch.optim.AdamW(model.parameters()), "O2", **options)

    def step() -> None:
        model(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    for _ in range(STEPS_LATE - 1):
        step()
        assert model.octet_report.health.samples == []
    step()
    assert {sample.step for sample in model.octet_report.health.samples} == {0}
    assert {event.step for event in events} == {STEPS_LATE}

    model, optimizer = initialize(
        model := torch.nn.Sequential(torch.nn.Linear(64, 64)), torch.optim.AdamW(model.parameters()), "O2", **options
    )
    step()
    assert len(fp8_statistics(model)) == 3


def stop_one_of_two(rank: int, port: int, document: dict[str, Any], folder: str) -> None:
    """Stop rank 1 at its fourth step. Saves how each rank ended."""
    torch.set_num_threads(1)
    env = RankEnv(rank=rank, world_size=2, master_port=port)
    config, recorder = resolve(JobSpec.model_validate(document), env), Recorder(stop_after_step=4 if rank else None)
    with cpu_as_accelerator(), Mesh(env, torch.device("cpu"), config.layout) as mesh:
        trainer = Trainer(config, mesh, recorder, Path(folder))
        with pytest.raises(Cancelled):
            trainer.run()
    found = {"step": trainer.progress.step, "reported": [report.step for report in recorder.of(StepReport)]}
    torch.save(found, Path(folder, f"{rank}.pt"))


@pytest.mark.matrix
def test_ranks_stop_at_the_same_step(tmp_path: Path, spec_document: dict[str, Any]) -> None:
    document = with_training(spec_document, "O2", steps=1000) | {"resources": {"workers": 2}}
    run_ranks(stop_one_of_two, (free_port(), document, str(tmp_path)), 2)
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert 4 <= first["step"] == second["step"] < 1000
    assert first["reported"] == list(range(1, first["step"] + 1))
