"""A list of jobs in compact rows (`GET /v1/rows`), for whoever shows many jobs at once.

A row has 350 to 600 bytes, where a `Job` has 2,400 to 3,900, most of them its spec.
"""

from typing import Literal

from pydantic import Field

from octet.api_schemas.base import Contract, Page, Timestamp
from octet.api_schemas.states import FailureReason, JobState

MAX_SPARK_POINTS = 32
MAX_WHY_CHARACTERS = 120

RowOrder = Literal["-created", "created", "name", "evaluation"]


def _is_none(value: object) -> bool:
    return value is None


class Row(Contract):
    """One job at a glance. Losses are in nats per target; numbers have six digits, in `sparkline` three."""

    object: Literal["row"] = "row"
    id: str
    name: str
    tenant: str
    pool: str
    level: str
    state: JobState
    reason: FailureReason | None = Field(description="why it failed")
    why: str | None = Field(description=f"why it waits, or the message of its failure; at most {MAX_WHY_CHARACTERS} characters")
    position: int | None = Field(description="place in the queue of its pool, 1 is next; null unless queued")
    missing_slots: int | None = Field(
        default=None, exclude_if=_is_none, description="slots that have to come back before it starts; left out if not known"
    )
    starts_at: Timestamp | None = Field(
        default=None, exclude_if=_is_none, description="by then it starts, as is estimated; left out if not known"
    )
    step: int | None
    steps: int | None = Field(description="the last step; null until epochs are counted")
    loss: float | None = Field(description="of the last step")
    best_evaluation_loss: float | None = Field(description="the least so far; steps that were trained again do not count")
    tokens_per_s: float | None
    remaining_s: float | None
    created_at: Timestamp
    started_at: Timestamp | None
    finished_at: Timestamp | None
    sparkline: tuple[float | None, ...] = Field(
        max_length=MAX_SPARK_POINTS,
        description="training loss at evenly spaced steps, oldest first: 16 to 32 of them from step 16 on, all before; "
        "null if not finite",
    )


class RowPage(Page[Row]):
    """A part of the list, and how many jobs the whole list has."""

    total: int
