"""The steps of a run on their way to the reports. On an accelerator they are read one reporting interval late.

A step's loss and norm are values that the device still computes when the host has gone on to the next step. The log keeps them
there. At the end of an interval it adds the losses of all ranks, starts to copy them to the host, and reads what it copied at
the end of the interval before. With the losses travels what ranks must agree on: whether one of them has to stop, and may save
a checkpoint first, whether one still writes a checkpoint, whether it is time for the next one, and the length of the next
interval. On the CPU there is nothing to wait for: an interval is one step and is read at once.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime

import torch
from torch import Tensor

from octet.worker.common.errors import Stopped
from octet.worker.mesh import Mesh
from octet.worker.mesh.waits import DEVICE
from octet.worker.metrics.readback import HostCopy, HostNumbers, Mark

INTERVAL_S = 0.5
MAX_STEPS = 100
"""Steps of the longest interval."""


@dataclass(frozen=True)
class TakenStep:
    """A step that the host has issued and the device may still compute."""

    step: int
    learning_rate: float
    data_wait_s: float
    began: Mark
    ended: Mark
    at: datetime


@dataclass(frozen=True)
class FinishedStep:
    """A step with its numbers. loss: the mean over the global batch, in nats. at: when the host had issued the step."""

    step: int
    loss: float
    gradient_norm: float
    learning_rate: float
    step_time_s: float
    data_wait_s: float
    at: datetime


@dataclass(frozen=True)
class Reading:
    """Steps that the log has read. num_stopping: ranks that have to stop. num_saving: those that save a checkpoint first.

    all_written: no rank's thread still wrote then. is_save_due: it is time for a checkpoint, and none has begun since.
    """

    steps: tuple[FinishedStep, ...] = ()
    num_stopping: int = 0
    num_saving: int = 0
    all_written: bool = False
    is_save_due: bool = False


@dataclass(frozen=True)
class _UnderWay:
    """An interval on its way to the host: its losses, its norms and, unless a rank is alone, what the ranks agree on."""

    steps: list[TakenStep]
    copy: HostCopy | HostNumbers
    told: list[float] | None = None
    is_before_save: bool = False
    """It was sent before the newest checkpoint began, so the threads that it counts write an older one."""

    def finished(self, numbers: list[float], num_replicas: int) -> list[FinishedStep]:
        """The steps with what the copy holds."""
        losses, norms = numbers[: len(self.steps)], numbers[len(self.steps) :][: len(self.steps)]
        return [
            FinishedStep(
                step=step.step,
                loss=loss / num_replicas,
                gradient_norm=norm,
                learning_rate=step.learning_rate,
                step_time_s=step.began.seconds_until(step.ended),
                data_wait_s=step.data_wait_s,
                at=step.at,
            )
            for step, loss, norm in zip(self.steps, losses, norms, strict=True)
        ]


@dataclass(frozen=True)
class UnreadSteps:
    """Steps on their way to the host, for the thread that writes a checkpoint. The log will read them, too."""

    intervals: tuple[_UnderWay, ...]
    num_replicas: int

    def read(self) -> list[FinishedStep]:
        """Return the steps in order. Waits for the device."""
        return [step for sent in self.intervals for step in sent.finished(sent.copy.read(), self.num_replicas)]


class StepLog:
    """All ranks use it alike: they add the same steps, and end intervals at the same steps."""

    def __init__(
        self,
        mesh: Mesh,
        *,
        is_late: bool,
        is_writing: Callable[[], bool] = lambda: False,
        is_save_due: Callable[[], bool] = lambda: False,
    ) -> None:
        """is_late: read an interval when the next one ends, and not when it ends itself.

        is_writing: True while this rank's thread writes. is_save_due: see `Reading`; the first rank's counts.
        """
        self.is_late = is_late
        self.num_steps = 1
        """The length of the interval that is open."""
        self._mesh, self._is_writing, self._is_save_due = mesh, is_writing, is_save_due
        self._open: list[tuple[TakenStep, Tensor, Tensor]] = []
        self._under_way: list[_UnderWay] = []
        self._spans: dict[int, list[tuple[Mark, Mark]]] = {}
        if mesh.world.size > 1:
            mesh.waits.device = mesh.device
        self._proposed_num_steps = 1.0

    @property
    def is_due(self) -> bool:
        """True if the open interval is complete."""
        return len(self._open) >= self.num_steps

    def add(self, step: TakenStep, rank_loss: Tensor, gradient_norm: Tensor) -> None:
        """Add a step. rank_loss: this rank's mean loss, (). gradient_norm: over all ranks, ()."""
        self._mesh.waits.step = step.step
        self._spans[step.step] = self._mesh.waits.take_spans()
        self._open.append((step, rank_loss, gradient_norm))

    def end_interval(self, stop: Stopped | None) -> Reading:
        """End the open interval. Returns what was read: the interval before, or, unless the log is late, this one.

        stop: why this rank has to stop.
        """
        self._send(stop)
        return self._read(num_kept=1 if self.is_late else 0)

    def flush(self) -> Reading:
        """Read all steps that were added, and wait for those that the device still computes."""
        if self._open:
            self._send(None)
        return self._read(num_kept=0)

    def begin_save(self) -> UnreadSteps:
        """Return the steps that were added and not read, which stay in the log. A checkpoint begins now, on all ranks."""
        if self._open:
            self._send(None)
        self._under_way = [replace(sent, is_before_save=True) for sent in self._under_way]
        return UnreadSteps(tuple(self._under_way), self._mesh.replicas.size)

    def read_saved(self) -> Reading:
        """Read the steps up to the newest checkpoint's. They have arrived once this is written."""
        return self._read(num_kept=sum(not sent.is_before_save for sent in self._under_way))

    @torch.no_grad()
    def _send(self, stop: Stopped | None) -> None:
        opened, self._open = self._open, []
        steps = [step for step, _, _ in opened]
        is_first = self._mesh.world.is_first
        proposal, is_save_due = (self._proposed_num_steps, self._is_save_due()) if is_first else (0.0, False)
        is_saving = stop is not None and stop.saves
        told = [float(stop is not None), float(is_saving), float(self._is_writing()), float(is_save_due), proposal]
        if self._mesh.world.size == 1 and not self.is_late:
            numbers = [loss.item() for _, loss, _ in opened] + [norm.item() for _, _, norm in opened]
            self._under_way.append(_UnderWay(steps, HostNumbers(numbers), told))
            return
        losses = torch.stack([loss for _, loss, _ in opened])
        norms = torch.stack([norm for _, _, norm in opened]).to(losses.device)
        if self._mesh.world.size == 1:  # nobody to agree with: this rank's decisions stay on the host
            self._under_way.append(_UnderWay(steps, HostCopy(torch.cat((losses, norms))), told))
            return
        losses = losses.double()
        if not self._mesh.owns_loss:
            losses.zero_()
        agreed = torch.tensor(told, dtype=torch.float64, pin_memory=losses.is_cuda).to(losses.device, non_blocking=True)
        summed = self._mesh.world.sum_(torch.cat((losses, agreed)))
        losses, agreed = summed[: len(steps)], summed[len(steps) :]
        self._under_way.append(_UnderWay(steps, HostCopy(torch.cat((losses, norms.double(), agreed)))))

    def _read(self, num_kept: int) -> Reading:
        """Read all that is under way but the last `num_kept` intervals."""
        found: list[FinishedStep] = []
        num_stopping, num_saving, all_written, is_save_due = 0, 0, False, False
        taken: list[TakenStep] = []
        while len(self._under_way) > num_kept:
            sent = self._under_way.pop(0)
            with self._mesh.waits.call("reading of the losses", DEVICE):
                numbers = sent.copy.read()
            stopping, saving, writing, due, proposal = sent.told or numbers[2 * len(sent.steps) :]
            taken += sent.steps
            num_stopping, num_saving = num_stopping + round(stopping), num_saving + round(saving)
            all_written = writing == 0 and not sent.is_before_save
            is_save_due |= due > 0 and not sent.is_before_save
            if self.is_late:
                self.num_steps = max(1, min(MAX_STEPS, round(proposal)))
            found += sent.finished(numbers, self._mesh.replicas.size)
        if found:
            self._count_busy(found, taken)
            mean_s = sum(step.step_time_s for step in found) / len(found)
            self._proposed_num_steps = INTERVAL_S / max(mean_s, INTERVAL_S / MAX_STEPS)
        return Reading(tuple(found), num_stopping, num_saving, all_written, is_save_due)

    def _count_busy(self, found: list[FinishedStep], taken: list[TakenStep]) -> None:
        """Add the time that this rank computed in each step: the step without the waits since it began."""
        for finished, step in zip(found, taken, strict=True):
            spans = self._spans.pop(step.step)
            waited_s = sum(began.seconds_until(ended) for began, ended in spans if step.began.seconds_until(began) >= 0)
            self._mesh.waits.add_busy(max(0.0, finished.step_time_s - waited_s))


def now() -> datetime:
    """The time of a report."""
    return datetime.now(UTC)
