"""The log of a rank for people: the run in a few lines, then steps, and the reasons why a job file is refused."""

import json
import logging
import os
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import torch

from octet.api_schemas import JobSpec, StepReport
from octet.api_schemas.report import ReportBody
from octet.worker.common.config import RankEnv, resolve
from octet.worker.rank.main import TRACE_VARIABLE, enter_trace, main, run_lines
from octet.worker.reporting.reporter import StepLines

SPEC: dict[str, Any] = {
    "name": "first",
    "model": "gpt-tiny",
    "precision": "O2",
    "data": {"path": "/data/corpus"},
    "training": {"steps": 200, "sequence_length": 64},
}


class Kept:
    """A reporter that keeps what it is sent."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def send(self, body: ReportBody, at: datetime | None = None) -> None:
        assert isinstance(body, StepReport)
        self.steps.append(body.step)

    def check(self) -> None:
        return None


def step(number: int, loss: float | None = 2.5) -> StepReport:
    return StepReport(
        step=number, loss=loss, gradient_norm=1.0, learning_rate=3e-4, tokens=1000, step_time_s=0.5, data_wait_s=0.0
    )


def test_a_rank_begins_with_the_run_in_a_few_lines() -> None:
    lines = run_lines(resolve(JobSpec.model_validate(SPEC), RankEnv()), torch.device("cpu"))
    shown = "\n".join(lines)
    assert len(lines) <= 8
    assert len(shown) < 800
    for words in ("gpt-tiny (gpt)", "parameters", "level: O2", "text, /data/corpus", "16 samples of 64", "200 steps", "on cpu"):
        assert words in shown


def test_the_other_ranks_log_their_place() -> None:
    document = SPEC | {"resources": {"workers": 2}}
    config = resolve(JobSpec.model_validate(document), RankEnv(rank=1, world_size=2))
    assert run_lines(config, torch.device("cpu")) == ("rank 1 of 2 on cpu",)


def test_steps_are_logged_ever_less_often_and_all_reported(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    now, kept = [0.0], Kept()
    lines = StepLines(kept, clock=lambda: now[0])
    for number in range(1, 4001):
        lines.send(step(number, None if number == 1 else 2.5))
        now[0] += 0.5
    messages = [record.message for record in caplog.records]
    assert kept.steps == list(range(1, 4001))
    assert messages[0] == "step 1: loss not finite, learning rate 0.0003, 2,000 tokens/s"
    assert messages[1] == "step 3: loss 2.5000, learning rate 0.0003, 2,000 tokens/s"
    assert messages[2].startswith("step 5:")
    assert 300 < len(messages) < 500


def test_a_wrong_job_file_is_answered_by_the_table_of_intents(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "job.json").write_text(json.dumps(SPEC | {"precision": "fp8", "lr": 0.1}))
    assert main([str(tmp_path / "job.json"), "--job-dir", str(tmp_path / "run")]) == 2
    assert "O2: O1 with an FP8 first" in caplog.text
    assert "Set training.optimizer.learning_rate: 0.1." in caplog.text


def test_the_environment_has_the_span_of_the_job_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TRACE_VARIABLE, "of the shell that started the server")
    of_job = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    enter_trace(of_job)
    assert os.environ[TRACE_VARIABLE] == of_job
    enter_trace(None)
    assert TRACE_VARIABLE not in os.environ
