"""The progress that a checkpoint holds, while the device still computes the losses of its newest steps.

The training thread goes on without them. The thread that writes takes them as `Trainer._report` does, on copies of its own.
"""

from dataclasses import asdict
from functools import cached_property
from typing import Any

from worker.metrics.readback import Late
from worker.progress import Progress, StepTimes
from worker.step_log import UnreadSteps


class SavedProgress:
    """A run's counters and step times after the step of a checkpoint. One thread reads it."""

    def __init__(self, progress: Progress, step_times: StepTimes, unread: UnreadSteps, num_steps: int) -> None:
        """unread: the steps up to the checkpoint's that `progress` and `step_times` lack. num_steps: of the run."""
        self._before, self._unread, self._num_steps = (progress.copy(), step_times.copy()), unread, num_steps

    def late(self) -> dict[str, Any]:
        """What a checkpoint holds of it, by name, to be read when the checkpoint is written."""
        return {"progress": Late(self.counters), "step_times_s": Late(self.step_times_s)}

    def counters(self) -> dict[str, Any]:
        """The fields of `Progress`. Waits for the device; raises, as all here, what `Progress.note_loss` raises."""
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
            progress.note_loss(step.step, step.loss, self._num_steps)
        return progress, step_times
