"""Brings a curve of any length to a few hundred buckets. No spike of one step is lost: a bucket has its least and its greatest.

Parts of the curve come one after another, and only the buckets are held, so memory does not grow with the curve.
"""

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from octet.api_schemas.curve import Column, CurveEvaluations, Points
from octet.service.jobs.rows import short
from octet.service.store.curves import Columns, Evaluation, NewPoints


def width_for(num_steps: int, num_buckets: int) -> int:
    """Return a width of buckets so that `num_buckets`, at least 2, hold so many steps wherever the first one begins."""
    return 1 if num_steps <= num_buckets else math.ceil(num_steps / (num_buckets - 1))


@dataclass
class _Bucket:
    """The steps of a bucket so far. Sums and counts of losses and norms are of the finite ones."""

    number: int
    step: int = 0
    at: float = 0.0
    num_steps: int = 0
    losses: "_Spread" = field(default_factory=lambda: _Spread())
    norms: "_Spread" = field(default_factory=lambda: _Spread())
    learning_rate: float = 0.0
    tokens: int = 0
    step_time_s: float = 0.0
    data_wait_s: float = 0.0

    def add(self, part: Columns, begin: int, end: int) -> None:
        """Add steps of a part."""
        self.step, self.at = part.step[end - 1], part.at[end - 1] / 1e6
        self.num_steps += end - begin
        self.losses.add(part.loss[begin:end])
        self.norms.add(part.gradient_norm[begin:end])
        self.learning_rate = part.learning_rate[end - 1]
        self.tokens += sum(part.tokens[begin:end])
        self.step_time_s += sum(part.step_time_s[begin:end])
        self.data_wait_s += sum(part.data_wait_s[begin:end])


@dataclass
class _Spread:
    """The mean, the least and the greatest of numbers, without those that are not finite."""

    count: int = 0
    total: float = 0.0
    least: float = math.inf
    greatest: float = -math.inf

    def add(self, values: Sequence[float]) -> None:
        finite = [value for value in values if value == value]  # the store has NaN for what was not finite
        if finite:
            self.count += len(finite)
            self.total += sum(finite)
            self.least, self.greatest = min(self.least, min(finite)), max(self.greatest, max(finite))

    @property
    def mean(self) -> float | None:
        return self.total / self.count if self.count else None

    @property
    def ends(self) -> tuple[float | None, float | None]:
        return (self.least, self.greatest) if self.count else (None, None)


def buckets_of(parts: Iterable[Columns], step_by: int) -> Iterator[_Bucket]:
    """Yield the buckets of steps, in order."""
    bucket: _Bucket | None = None
    for part in parts:
        begin = 0
        while begin < len(part.step):
            number = (part.step[begin] - 1) // step_by
            if bucket is None or bucket.number != number:
                if bucket is not None:
                    yield bucket
                bucket = _Bucket(number)
            end = bisect_right(part.step, (number + 1) * step_by, begin)
            bucket.add(part, begin, end)
            begin = end
    if bucket is not None:
        yield bucket


def columns_of(buckets: Sequence[_Bucket]) -> dict[str, tuple[float | None, ...]]:
    """Return the fields of `Curve` that are columns."""
    losses, norms = [bucket.losses for bucket in buckets], [bucket.norms for bucket in buckets]
    return {
        "step": tuple(bucket.step for bucket in buckets),
        "at": tuple(round(bucket.at, 2) for bucket in buckets),
        "num_steps": tuple(bucket.num_steps for bucket in buckets),
        "num_not_finite": tuple(bucket.num_steps - bucket.losses.count for bucket in buckets),
        "loss": _rounded(spread.mean for spread in losses),
        "loss_least": _rounded(spread.ends[0] for spread in losses),
        "loss_greatest": _rounded(spread.ends[1] for spread in losses),
        "gradient_norm": _rounded(spread.mean for spread in norms),
        "gradient_norm_greatest": _rounded(spread.ends[1] for spread in norms),
        "learning_rate": _rounded(bucket.learning_rate for bucket in buckets),
        "tokens": tuple(bucket.tokens for bucket in buckets),
        "step_time_s": _rounded(bucket.step_time_s for bucket in buckets),
        "data_wait_s": _rounded(bucket.data_wait_s for bucket in buckets),
    }


def evaluations_of(rows: Sequence[Evaluation], step_by: int) -> CurveEvaluations:
    """Bring evaluations, in the order of their steps, into buckets of the same width."""
    together = [list(group) for _, group in groupby(rows, lambda row: (row.step - 1) // step_by)]
    spreads = [_Spread() for _ in together]
    for spread, group in zip(spreads, together, strict=True):
        spread.add([row.loss for row in group if row.loss is not None])
    last = [group[-1] for group in together]
    names = sorted({name for row in last for name in row.metrics})
    return CurveEvaluations.model_construct(
        step=tuple(row.step for row in last),
        loss=_rounded(row.loss for row in last),
        loss_least=_rounded(spread.ends[0] for spread in spreads),
        loss_greatest=_rounded(spread.ends[1] for spread in spreads),
        metrics={name: _rounded(row.metrics.get(name) for row in last) for name in names},
    )


def points_of(job_id: str, read: NewPoints) -> Points:
    """Show new steps one by one."""
    names = sorted({name for row in read.evaluations for name in row.metrics})
    parts = read.parts

    def joined(name: str) -> list[float]:
        return [value for part in parts for value in getattr(part, name)]

    return Points.model_construct(
        job_id=job_id,
        epoch=read.epoch,
        after=read.after,
        step=tuple(joined("step")),
        at=tuple(round(at / 1e6, 2) for at in joined("at")),
        loss=_finite(joined("loss")),
        gradient_norm=_finite(joined("gradient_norm")),
        learning_rate=_rounded(joined("learning_rate")),
        tokens=tuple(joined("tokens")),
        step_time_s=_rounded(joined("step_time_s")),
        data_wait_s=_rounded(joined("data_wait_s")),
        evaluated_after=read.evaluated_after,
        evaluation_step=tuple(row.step for row in read.evaluations),
        evaluation_loss=_rounded(row.loss for row in read.evaluations),
        evaluation_metrics={name: _rounded(row.metrics.get(name) for row in read.evaluations) for name in names},
    )


def _finite(values: Iterable[float]) -> Column:
    return _rounded(value if value == value else None for value in values)


def _rounded(values: Iterable[float | None]) -> tuple[float | None, ...]:
    return tuple(short(value) for value in values)
