"""The progress of a run, and checks that its loss still makes sense. The checkpoint holds all of it."""

import math
import statistics
from collections import deque
from collections.abc import Iterable
from copy import copy
from dataclasses import dataclass, field
from typing import Self

from octet.worker.common.errors import Diverged, NonFiniteLoss

MAX_NON_FINITE_STEPS = 10
DIVERGED_FACTOR = 2.0
"""A step diverges if its loss exceeds the first loss by this factor: the model is far worse than its initial values."""
WARN_AFTER_STEPS = 10
STOP_AFTER_STEPS = 100
_ADVICE = "Lower training.optimizer.learning_rate or lengthen training.schedule.warmup_steps."
_MIN_LOSSES_KEPT = 10
_STEP_TIMES_KEPT = 1000


class StepTimes:
    """The seconds of a run's newest steps, without the first steps of each attempt, in which kernels load and graphs compile.

    A throughput is their mean: a median would hide the steps that sample statistics, which no plan predicts.
    """

    def __init__(self, num_skipped: int) -> None:
        """num_skipped: steps at the start of this attempt that are left out."""
        self.kept: deque[float] = deque(maxlen=_STEP_TIMES_KEPT)
        self._num_skipped = num_skipped

    def add(self, seconds: float) -> None:
        """Take the time of the next step."""
        if self._num_skipped:
            self._num_skipped -= 1
        else:
            self.kept.append(seconds)

    def resume(self, kept: Iterable[float]) -> None:
        """Go on from those of an earlier attempt."""
        self.kept.extend(kept)

    def copy(self) -> Self:
        """Return one that goes on by itself."""
        other = copy(self)
        other.kept = self.kept.copy()
        return other

    def mean(self, progress: "Progress") -> float:
        """Return the mean in seconds; that of all the run's steps where none was kept."""
        return sum(self.kept) / len(self.kept) if self.kept else progress.train_time_s / max(1, progress.step)

    def median(self) -> float | None:
        """Return the median in seconds, which a plan's step is compared with; None where none was kept."""
        return statistics.median(self.kept) if self.kept else None


@dataclass
class Progress:
    """Counters of a run. Losses are means over the global batch, in nats."""

    step: int = 0
    position: int = 0
    train_time_s: float = 0.0
    num_non_finite: int = 0
    recent_losses: list[float] = field(default_factory=list)
    memory_bytes: dict[str, int] = field(default_factory=dict)
    converted_memory_bytes: dict[str, int] = field(default_factory=dict)
    host_memory_bytes: int = 0
    first_loss: float | None = None
    num_diverging: int = 0
    evaluated: dict[str, float] = field(default_factory=dict)
    """The last evaluation by name, and its `step`."""
    best_loss: float | None = None
    best_saved_step: int | None = None
    """The checkpoint with the lowest evaluation loss, and that loss."""

    @property
    def last_loss(self) -> float | None:
        """The newest finite loss, or None before there is one."""
        return self.recent_losses[-1] if self.recent_losses else None

    @property
    def is_sound(self) -> bool:
        """False while losses are not finite, or far above the first."""
        return not self.num_non_finite and not self.num_diverging

    def copy(self) -> Self:
        """Return one that takes losses by itself."""
        other = copy(self)
        other.recent_losses = self.recent_losses.copy()
        return other

    def note_loss(self, step: int, loss: float, num_steps: int, *, stops: bool = True) -> str | None:
        """Take the loss of one step of `num_steps`, in order. Returns a warning when one is due, else None.

        The run may be at a later step already: losses are read when the device has computed them.

        Raises NonFiniteLoss after 10 non-finite losses in a row, and Diverged after 100 losses in a row far above the first,
        unless `stops` is False.
        """
        if not math.isfinite(loss):
            self.num_non_finite += 1
            if self.num_non_finite < MAX_NON_FINITE_STEPS:
                return None
            message = f"the loss was not finite for {MAX_NON_FINITE_STEPS} steps in a row, up to step {step}. {_ADVICE}"
            if stops:
                raise NonFiniteLoss(message)
            return message if self.num_non_finite == MAX_NON_FINITE_STEPS else None
        self.num_non_finite = 0
        self.recent_losses.append(loss)
        del self.recent_losses[: -max(_MIN_LOSSES_KEPT, num_steps // 10)]
        if self.first_loss is None:
            self.first_loss = loss
        self.num_diverging = self.num_diverging + 1 if self._is_diverging(loss) else 0
        if stops and self.num_diverging >= STOP_AFTER_STEPS:
            raise Diverged(self._explain(step, loss))
        return self._explain(step, loss) if self.num_diverging == WARN_AFTER_STEPS else None

    def note_saved(self) -> None:
        """Take that a checkpoint of this step begins, which the last evaluation may be of."""
        loss = self.evaluated.get("loss", math.nan)
        if self.evaluated.get("step") == self.step and (loss < self.best_loss if self.best_loss is not None else loss == loss):
            self.best_loss, self.best_saved_step = loss, self.step

    def check_end(self, evaluation_loss: float, *, stops: bool = True) -> None:
        """Check the evaluation loss after the last step.

        Raises NonFiniteLoss if it is not finite, or no loss was; Diverged if it is still far above the first training loss,
        unless `stops` is False.
        """
        if self.last_loss is None or not math.isfinite(evaluation_loss):
            raise NonFiniteLoss(f"the loss is not finite at the end, after step {self.step}. {_ADVICE}")
        if stops and self._is_diverging(evaluation_loss):
            raise Diverged(self._explain(self.step, evaluation_loss))

    def _is_diverging(self, loss: float) -> bool:
        return self.first_loss is not None and not loss <= DIVERGED_FACTOR * self.first_loss

    def _explain(self, step: int, loss: float) -> str:
        return (
            f"the loss is {loss:.4g} at step {step}, more than {DIVERGED_FACTOR:g} times the loss of the first step, "
            f"{self.first_loss:.4g}. Lower training.optimizer.learning_rate, lengthen training.schedule.warmup_steps or set "
            "training.gradient_clip."
        )
