"""Save the state of a run in a checkpoint, and go on from one.

Training goes on while the device still computes the losses of the newest steps. The thread that
writes a checkpoint takes them as the loop does when it reports them, on copies of its own.
"""

from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

from octet.api_schemas import CheckpointRef, EventReport
from octet.worker import checkpoint
from octet.worker.checkpoint.resume import random_state, resume, set_random_state
from octet.worker.common.config import TrainConfig, trained_job
from octet.worker.mesh import Mesh
from octet.worker.metrics.readback import DeferredValue
from octet.worker.prepare.adapters import trained_state, with_frozen
from octet.worker.train.build import JobModel, Tell
from octet.worker.train.log import UnreadSteps
from octet.worker.train.progress import Progress, StepTimes


class SavedProgress:
    """A run's counters and step times after the step of a checkpoint. One thread reads it."""

    def __init__(self, progress: Progress, step_times: StepTimes, unread: UnreadSteps, num_steps: int, *, stops: bool) -> None:
        """unread: the steps up to the checkpoint's that `progress` and `step_times` lack.

        num_steps: of the run. stops: see `Progress.note_loss`.
        """
        self._before, self._unread = (progress.copy(), step_times.copy()), unread
        self._num_steps, self._stops = num_steps, stops

    def deferred(self) -> dict[str, Any]:
        """Return what a checkpoint holds of it, by name; the values are read when the checkpoint is
        written.
        """
        return {"progress": DeferredValue(self.counters), "step_times_s": DeferredValue(self.step_times_s)}

    def counters(self) -> dict[str, Any]:
        """The fields of `Progress`.

        Waits for the device; raises, as all here, what `Progress.note_loss` raises.
        """
        return asdict(self._after[0])

    def step_times_s(self) -> list[float]:
        """The seconds of the newest steps."""
        return list(self._after[1].kept)

    def last_loss(self) -> float | None:
        """The newest finite loss, in nats."""
        return self._after[0].last_loss

    @cached_property
    def _after(self) -> tuple[Progress, StepTimes]:
        progress, step_times = self._before
        for step in self._unread.read():
            progress.train_time_s += step.step_time_s
            step_times.add(step.step_time_s)
            progress.note_loss(step.step, step.loss, self._num_steps, stops=self._stops)
        return progress, step_times


def state_of_run(job: JobModel, config: TrainConfig, mesh: Mesh, progress: SavedProgress) -> dict[str, Any]:
    """Return what a checkpoint holds: each rank what it alone holds. All ranks call it together."""
    model, optimizer = job.parallel.state_dicts()
    return {
        "job": trained_job(config),
        "model": trained_state(job.model, model),
        "optimizer": optimizer,
        **progress.deferred(),
        "average": job.average.state_dict(),
        "random": random_state(mesh.world),
    }


def load_newest(
    job: JobModel,
    mesh: Mesh,
    folder: Path,
    checkpoints: tuple[CheckpointRef, ...],
    step_times: StepTimes,
    tell: Tell,
    *,
    level: str,
) -> Progress:
    """Load the first of `checkpoints` that passes its check into a job's model and its optimizer.

    All ranks call it together. level: of this attempt. A checkpoint of another level is loaded only
    if the loss was finite and did not diverge there.

    Returns the progress at that checkpoint, whose step times are added to `step_times`; without a
    checkpoint, no progress.
    """
    for ref in checkpoints:
        try:
            state = checkpoint.load_together(folder, ref, mesh.world, mesh.tensor)
        except checkpoint.BadCheckpoint as error:
            message = f"{error}; trying the previous checkpoint"
            tell(EventReport(type="checkpoint.rejected", message=message, data={"step": ref.step}))
            continue
        progress = Progress(**state["progress"])
        former = state["job"]["precision"]["level"] if "job" in state else level  # the oldest checkpoints do not say it
        if former != level and not progress.is_sound:
            message = f"{ref.name}: at level {former} the loss was off there; trying the previous checkpoint"
            tell(EventReport(type="checkpoint.rejected", message=message, data={"step": ref.step}))
            continue
        own = job.parallel.own_part(with_frozen(job.model, state["model"]), state["optimizer"])
        resume(job.model, job.optimizer, *own, dtypes=job.parallel.dtypes())
        job.average.load_state_dict(state.get("average", {}))
        step_times.resume(state["step_times_s"])
        set_random_state(state["random"], mesh.world)
        return progress
    return Progress()
