"""Run the training loop of one rank in this process, with a reporter that keeps what it is sent."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from octet.api_schemas import ANY_FILE, CheckpointRef, CheckpointReport, Files, JobSpec, ReportBody, StepReport
from octet.worker.common.config import RankEnv, resolve
from octet.worker.common.errors import Cancelled, Stopped
from octet.worker.mesh import Mesh
from octet.worker.train.loop import Trainer


class Recorder:
    """A reporter that keeps all reports and can stop the run after a chosen number of steps."""

    def __init__(self, stop_after_step: int | None = None, stop: Callable[[str], Stopped] = Cancelled) -> None:
        self.reports: list[ReportBody] = []
        self._num_steps_left = stop_after_step
        self._stop = stop

    def send(self, body: ReportBody, at: object = None) -> None:
        self.reports.append(body)

    def check(self) -> None:
        if self._num_steps_left is not None:
            self._num_steps_left -= 1
            if self._num_steps_left <= 0:
                raise self._stop("the test says so")

    def of(self, kind: type[Any]) -> list[Any]:
        return [report for report in self.reports if isinstance(report, kind)]

    def losses(self) -> list[float]:
        return [report.loss for report in self.of(StepReport)]

    def checkpoints(self) -> tuple[CheckpointRef, ...]:
        """Return the checkpoints that were reported, newest first."""
        found = [CheckpointRef(step=r.step, name=r.name, sha256=r.sha256) for r in self.of(CheckpointReport)]
        return tuple(reversed(found))


def train(
    document: dict[str, Any],
    job_dir: Path,
    checkpoints: tuple[CheckpointRef, ...] = (),
    recorder: Recorder | None = None,
    files: Files = ANY_FILE,
) -> tuple[Recorder, Any]:
    recorder = recorder or Recorder()
    config = resolve(JobSpec.model_validate(document), RankEnv(), files)
    with Mesh(config.env, torch.device("cpu")) as mesh:
        return recorder, Trainer(config, mesh, recorder, job_dir).run(checkpoints)


def with_training(document: dict[str, Any], level: str = "fp32", **training: Any) -> dict[str, Any]:
    return document | {"precision": {"level": level}, "training": document["training"] | training}
