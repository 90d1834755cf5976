"""The training loop learns, resumes bit-identically at every level, accumulates, and skips a damaged checkpoint."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from octet.api_schemas import (
    EvaluationReport,
    EventReport,
    FailureReason,
    JobSpec,
    StepReport,
)
from octet.api_schemas.levels import LEVELS
from octet.worker.common.config import RankEnv, resolve
from octet.worker.common.errors import Cancelled, Diverged, LimitsBroken, NonFiniteLoss
from octet.worker.fp8.fallback import Fallback
from octet.worker.fp8.linear import Float8Linear
from octet.worker.mesh import Mesh
from octet.worker.optim.schedule import learning_rate_at
from octet.worker.train.loop import Trainer
from tests.kit.small_model import SPREAD
from tests.kit.training import Recorder, train, with_training


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


KINDS = ("fp32", "fp16-amp", "ao", *SPREAD)
"""The reference, a loss that is scaled, torchao's layers, and each way of holding a weight."""


@pytest.mark.parametrize("level", [pytest.param(level, marks=() if level in KINDS else pytest.mark.matrix) for level in LEVELS])
def test_a_resumed_run_is_bit_identical(tmp_path: Path, spec_document: dict[str, Any], level: str) -> None:
    document = with_training(spec_document, level, steps=6, checkpoint_every=3)
    whole, whole_summary = train(document, tmp_path / "whole")
    interrupted = Recorder(stop_after_step=5)
    with pytest.raises(Cancelled):
        train(document, tmp_path / "parts", recorder=interrupted)
    resumed, resumed_summary = train(document, tmp_path / "parts", interrupted.checkpoints())
    assert [report.step for report in resumed.of(StepReport)] == [4, 5, 6]
    assert resumed.losses() == whole.losses()[3:]
    assert resumed_summary.evaluation_loss == whole_summary.evaluation_loss
    assert resumed_summary.final_loss == whole_summary.final_loss
    assert resumed_summary.memory_bytes == whole_summary.memory_bytes
    assert resumed.checkpoints()[0].sha256 != ""


def test_a_run_that_ended_goes_on_with_more_steps_as_if_it_had_had_them_before(
    tmp_path: Path, spec_document: dict[str, Any]
) -> None:
    """To the bit where the schedule does not depend on the number of steps."""
    constant = {"schedule": {"name": "constant"}}
    whole, whole_summary = train(with_training(spec_document, steps=6, **constant), tmp_path / "whole")
    first, _ = train(with_training(spec_document, steps=4, **constant), tmp_path / "parts")
    longer = with_training(spec_document, steps=6, **constant)
    rest, rest_summary = train(longer, tmp_path / "parts", first.checkpoints())
    assert [report.step for report in rest.of(StepReport)] == [5, 6]
    assert first.losses() + rest.losses() == whole.losses()
    assert rest_summary.final_loss == whole_summary.final_loss
    assert rest_summary.evaluation_loss == whole_summary.evaluation_loss


@pytest.mark.parametrize("stopped_at", [3, 4, 5])
def test_a_run_that_may_save_first_goes_on_after_the_step_at_which_it_stopped(
    tmp_path: Path, spec_document: dict[str, Any], stopped_at: int
) -> None:
    """It evaluates and saves what an undisturbed run does at that step, and saves it once."""
    document = with_training(spec_document, steps=6, checkpoint_every=3, eval_every=2)
    whole, whole_summary = train(document, tmp_path / "whole")
    paused = Recorder(stopped_at, partial(Cancelled, saves=True))
    with pytest.raises(Cancelled):
        train(document, tmp_path / "parts", recorder=paused)
    assert [saved.step for saved in reversed(paused.checkpoints())] == sorted({3, stopped_at})
    resumed, summary = train(document, tmp_path / "parts", paused.checkpoints())
    assert paused.losses() + resumed.losses() == whole.losses()
    evaluations = [(report.step, report.loss) for each in (paused, resumed) for report in each.of(EvaluationReport)]
    assert evaluations == [(report.step, report.loss) for report in whole.of(EvaluationReport)]
    assert summary.final_loss == whole_summary.final_loss


def test_checkpoints_are_written_by_time_too(tmp_path: Path, spec_document: dict[str, Any]) -> None:
    for minutes, steps in ((1e-9, [1, 2, 3, 4]), (0, [4]), (15, [4])):
        document = with_training(spec_document, steps=4, checkpoint_every=0, checkpoint_every_minutes=minutes)
        recorder, _ = train(document, tmp_path / str(minutes))
        assert [saved.step for saved in reversed(recorder.checkpoints())] == steps


def test_a_run_that_is_stopped_at_its_last_step_has_succeeded(tmp_path: Path, spec_document: dict[str, Any]) -> None:
    recorder = Recorder(4, partial(Cancelled, saves=True))
    _, summary = train(with_training(spec_document, steps=4), tmp_path, recorder=recorder)
    assert summary.steps == 4


def test_it_learns_and_measures_it(tmp_path: Path, spec_document: dict[str, Any]) -> None:
    """Every level learns as fp32 does: test_training_parity.py."""
    document = with_training(spec_document, steps=40, optimizer={"learning_rate": 1e-2})
    recorder, summary = train(document, tmp_path)
    assert summary.evaluation_loss < 0.7 * recorder.losses()[0]
    assert summary.evaluation_loss == recorder.of(EvaluationReport)[-1].loss
    assert set(summary.evaluation_metrics) == {"token_accuracy"}  # what the family says
    assert 0.3 < summary.evaluation_metrics["token_accuracy"] <= 1.0  # a third of the text is the same in every line


def test_micro_batches_give_the_gradients_of_the_whole_batch(tmp_path: Path, spec_document: dict[str, Any]) -> None:
    whole, _ = train(with_training(spec_document, global_batch_size=8), tmp_path / "a")
    parts, _ = train(with_training(spec_document, global_batch_size=8, micro_batch_size=2), tmp_path / "b")
    assert parts.losses() == pytest.approx(whole.losses(), rel=1e-5)


def test_a_damaged_checkpoint_is_passed_over_with_an_event(tmp_path: Path, spec_document: dict[str, Any]) -> None:
    document = with_training(spec_document, steps=9, checkpoint_every=3)
    whole, _ = train(document, tmp_path)
    newest, older = whole.checkpoints()[1:]
    (tmp_path / "checkpoints" / newest.name / "tensors.safetensors").write_bytes(b"not tensors")
    resumed, _ = train(document, tmp_path, (newest, older))
    assert [report.step for report in resumed.of(StepReport)] == list(range(4, 10))
    (event,) = resumed.of(EventReport)
    assert event.type == "checkpoint.rejected"
    assert newest.name in event.message


def test_resuming_after_the_last_step_only_evaluates(tmp_path: Path, spec_document: dict[str, Any]) -> None:
    whole, summary = train(spec_document, tmp_path)
    resumed, again = train(spec_document, tmp_path, whole.checkpoints())
    assert resumed.of(StepReport) == []
    assert again.evaluation_loss == summary.evaluation_loss
    assert again.memory_bytes == summary.memory_bytes


def test_a_loss_that_stays_infinite_ends_the_run(tmp_path: Path, spec_document: dict[str, Any]) -> None:
    document = with_training(spec_document, steps=100, optimizer={"learning_rate": 10.0}, gradient_clip=None)
    config = resolve(JobSpec.model_validate(document), RankEnv())
    with Mesh(config.env, torch.device("cpu")) as mesh:
        trainer = Trainer(config, mesh, Recorder(), tmp_path)
        with torch.no_grad():
            next(trainer.model.parameters()).fill_(torch.nan)
        with pytest.raises(NonFiniteLoss, match="learning_rate"):
            trainer.run()
    assert trainer.progress.step == 10


DIVERGES = {
    "steps": 60,
    "checkpoint_every": 2,
    "optimizer": {"learning_rate": 10.0},
    "schedule": {"warmup_steps": 30},
    "gradient_clip": None,
}


def test_a_job_that_diverges_is_warned_of_and_fails_with_a_reason_and_the_checkpoint_before(
    tmp_path: Path, spec_document: dict[str, Any]
) -> None:
    recorder = Recorder()
    with pytest.raises(Diverged, match="learning_rate") as raised:
        train(with_training(spec_document, **DIVERGES), tmp_path, recorder=recorder)
    (warning,) = recorder.of(EventReport)
    assert warning.type == "training.diverging"
    assert raised.value.reason is FailureReason.DIVERGED
    assert not FailureReason.DIVERGED.retryable
    losses = recorder.losses()
    saved = [checkpoint.step for checkpoint in recorder.checkpoints()]
    sound = [step for step, loss in enumerate(losses, start=1) if loss <= 2 * losses[0]]
    assert 2 <= saved[0] <= sound[-1] < 50, "no checkpoint is of a step whose loss was off"
    assert set(saved) <= set(sound)


def test_a_job_that_may_diverge_trains_to_its_end_and_saves_all_the_same(tmp_path: Path, spec_document: dict[str, Any]) -> None:
    recorder, summary = train(with_training(spec_document, **DIVERGES, on_divergence="continue"), tmp_path)
    assert [event.type for event in recorder.of(EventReport)] == ["training.diverging"]
    assert [checkpoint.step for checkpoint in recorder.checkpoints()] == list(range(60, 0, -2))
    assert summary.evaluation_loss > 2 * recorder.losses()[0]


def test_the_schedule_warms_up_and_ends_at_its_fraction(spec_document: dict[str, Any]) -> None:
    training = {"steps": 100, "optimizer": {"learning_rate": 1.0}, "schedule": {"warmup_steps": 10, "final_fraction": 0.1}}
    config = resolve(JobSpec.model_validate(with_training(spec_document, **training)), RankEnv())
    rates = [learning_rate_at(step, 1.0, config.schedule, 100) for step in range(100)]
    assert rates[:10] == pytest.approx([0.1 * (step + 1) for step in range(10)])
    assert max(rates) == 1.0
    assert rates[-1] == pytest.approx(0.1)
    assert rates[10:] == sorted(rates[10:], reverse=True)


def test_a_world_of_another_size_is_refused(spec_document: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"resources\.workers"):
        resolve(JobSpec.model_validate(spec_document), RankEnv(world_size=2))


@pytest.mark.parametrize("ladder", [["te"], []])
def test_a_job_whose_layers_leave_fp8_ends_where_it_has_another_level(
    tmp_path: Path, spec_document: dict[str, Any], ladder: list[str]
) -> None:
    document = with_training(spec_document, steps=4)
    limits = {"patience": 2, "min_sqnr_db": 60, "max_layers": 0.5}
    document["precision"] = {"level": "O2", "ladder": ladder, "statistics_every": 1, "demotion": limits}
    if ladder:
        with pytest.raises(LimitsBroken, match=r"precision.demotion.max_layers allows \(50%\)"):
            train(document, tmp_path)
    else:
        recorder, _ = train(document, tmp_path)
        assert [report.step for report in recorder.of(StepReport)] == [1, 2, 3, 4]


def test_a_layer_that_comes_back_is_reported_and_leaves_no_step_in_the_curve(
    tmp_path: Path, spec_document: dict[str, Any]
) -> None:
    losses = []
    for is_demoted in (False, True):
        document = with_training(spec_document, steps=8)
        document["precision"] = {"level": "O2", "statistics_every": 1, "demotion": {"recovery": 3}}
        with Mesh(RankEnv(), torch.device("cpu")) as mesh:
            config = resolve(JobSpec.model_validate(document), RankEnv())
            trainer = Trainer(config, mesh, recorder := Recorder(), tmp_path / str(is_demoted))
            layers = [layer for layer in trainer.model.modules() if isinstance(layer, Float8Linear)]
            layers[0].fallback = Fallback.DEMOTED if is_demoted else Fallback.NONE
            trainer.run(())
        losses.append(torch.tensor(recorder.losses()))
        events = [event.data["step"] for event in recorder.of(EventReport) if event.type == "layer.recovered"]
        assert events == ([2] if is_demoted else [])
        assert layers[0].fallback is Fallback.NONE
    assert not torch.equal(*losses)
    torch.testing.assert_close(*losses, rtol=2e-3, atol=0)
