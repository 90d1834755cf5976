"""A job's curve in columns.

`GET /v1/jobs/{id}/curve` answers with a curve of any length in about a hundred KB, and `GET /v1/stream` with what is added.
"""

from typing import Literal

from pydantic import Field

from octet.api_schemas.base import Contract

MAX_BUCKETS = 800
MAX_BUCKETS_OF_A_WIDTH = 10_000

Column = tuple[float | None, ...]


class CurveEvaluations(Contract):
    """Evaluations, as buckets of the same width. Where a bucket has several, `loss` and metrics are those of the last."""

    step: tuple[int, ...]
    loss: Column
    loss_least: Column
    loss_greatest: Column
    metrics: dict[str, Column] = Field(description="other values that the model's family measures, by name")


class Curve(Contract):
    """A job's curve in buckets of `step_by` steps, as columns of equal length. A bucket without steps is left out.

    Bucket k has the steps from k × step_by + 1 to (k + 1) × step_by, so a curve that grows keeps its buckets as long as
    `step_by` stays. Numbers are rounded to six digits.
    """

    object: Literal["curve"] = "curve"
    job_id: str
    step_by: int = Field(ge=1)
    first_step: int | None = Field(description="of the whole curve; null before the first step")
    last_step: int | None
    has_more: bool = Field(description="true if steps follow that are not here: ask with after=<the last of `step`>")
    cursor: str = Field(description="where a stream of the job's points goes on: `Last-Event-ID` of /v1/stream")
    step: tuple[int, ...] = Field(description="the last step in the bucket")
    at: tuple[float, ...] = Field(description="when that was reported, in seconds since 1970")
    num_steps: tuple[int, ...] = Field(description="steps in the bucket")
    num_not_finite: tuple[int, ...] = Field(description="steps in the bucket whose loss was not finite")
    loss: Column = Field(description="mean of those that were finite; null if none was")
    loss_least: Column
    loss_greatest: Column
    gradient_norm: Column = Field(description="mean of those that were finite")
    gradient_norm_greatest: Column
    learning_rate: Column = Field(description="of the last step")
    tokens: tuple[int, ...] = Field(description="sum over the bucket")
    step_time_s: tuple[float, ...] = Field(description="sum over the bucket; tokens / step_time_s is its throughput")
    data_wait_s: tuple[float, ...] = Field(description="sum over the bucket")
    evaluations: CurveEvaluations


class Points(Contract):
    """New steps of a curve, one by one, as columns. First drop every step after `after`: they are trained again.

    The same holds for evaluations and `evaluated_after`. An evaluation never comes before its step.
    """

    object: Literal["points"] = "points"
    job_id: str
    epoch: int = Field(description="number of the attempt that trains")
    after: int
    step: tuple[int, ...]
    at: tuple[float, ...] = Field(description="seconds since 1970")
    loss: Column
    gradient_norm: Column
    learning_rate: tuple[float, ...]
    tokens: tuple[int, ...]
    step_time_s: tuple[float, ...]
    data_wait_s: tuple[float, ...]
    evaluated_after: int
    evaluation_step: tuple[int, ...]
    evaluation_loss: Column
    evaluation_metrics: dict[str, Column]
