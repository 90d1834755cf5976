"""The plan of a stored job: the prediction by which the dispatcher placed it, refused it, or chose its level."""

from typing import Literal

from pydantic import Field

from octet.api_schemas.base import Contract
from octet.api_schemas.measured import Bytes
from octet.api_schemas.precision import AskedLevel, LevelName

Verdict = Literal["yes", "tight", "no", "unknown"]


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
            return allocated_bytes / self.peak_bytes if self.peak_bytes else None
        planned = sum(self.states.values()) if self.states else 0
        return sum(held.values()) / planned if planned else None
