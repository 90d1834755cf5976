"""The plan of a stored job: the prediction by which the dispatcher placed it, refused it, or chose its level."""

import math
from typing import Literal

from pydantic import Field

from octet.api_schemas.base import Contract
from octet.api_schemas.measured import Bytes
from octet.api_schemas.precision import AskedLevel, LevelName

Verdict = Literal["yes", "tight", "no", "unknown"]


class StepRange(Contract):
    """Seconds of a step: the least with favourable published rates and the most with unfavourable ones."""

    least_s: float
    most_s: float

    @property
    def middle_s(self) -> float:
        """The geometric mean of both ends, with which measured steps are compared."""
        return math.sqrt(self.least_s * self.most_s)


class JobPlan(Contract):
    """A job's plan, made once, before its first attempt. Bytes are of the rank that holds most.

    verdict: yes, it fits with all margins; tight, between the bounds; no, not even the lower bound fits; unknown, no peak.
    """

    asked_level: AskedLevel
    level: LevelName | None = Field(description="the level of all attempts; null if none could be chosen")
    verdict: Verdict
    reason: str | None = Field(default=None, description="why no peak is known")
    memory_per_device_bytes: Bytes
    micro_batch_size: int
    largest_micro_batch: int | None = Field(default=None, description="by the upper bound; null without a peak")
    states: dict[str, int] | None = Field(default=None, description="held at the update, by class of memory_report")
    peak_bytes: int | None = None
    lower_bytes: int | None = None
    upper_bytes: int | None = None
    states_agree: bool | None = Field(default=None, description="the trace holds what the closed form says")
    predicted_step: StepRange | None = Field(
        default=None, description="of a step's time by published rates; null without a device, or a closed form"
    )
    remedies: tuple[str, ...] = Field(
        default=(), description="of a job that does not fit: levels and options with which it would, each on its own"
    )
    possible_remedies: tuple[str, ...] = Field(
        default=(), description="where none is sure: levels and options with which it may fit"
    )
    planner_version: str = Field(description="of octet-fp8")

    def ratio(self, allocated_bytes: int | None, held: dict[str, int]) -> float | None:
        """Return measured over planned bytes: of peaks on CUDA, and where no peak is measured, of what is held.

        allocated_bytes: the device's peak, None on a CPU. held: by class, as memory_report counts them.
        """
        if allocated_bytes is not None:
            return quotient(allocated_bytes, self.peak_bytes)
        return quotient(sum(held.values()), sum((self.states or {}).values()))

    def step_ratio(self, step_time_s: float | None) -> float | None:
        """Return a measured step's time over the middle of the predicted range; None if one of both is not known."""
        return None if self.predicted_step is None else quotient(step_time_s, self.predicted_step.middle_s)


def quotient(measured: float | None, planned: float | None) -> float | None:
    """Divide what was measured by what was planned; None without one of them, or if no float holds the result."""
    if measured is None or not planned:
        return None
    try:
        found = measured / planned
    except OverflowError:  # of a count with hundreds of digits, which a rank may send
        return None
    return found if math.isfinite(found) else None
