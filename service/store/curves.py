"""SQL about the curves of jobs: what each optimizer step reported, and the evaluations between steps.

A curve is stored in parts: one row holds the steps that an attempt reported together, as columns of numbers. A row for each
step took ten times as long to write. The parts of a job never overlap, so they are in the order of their last steps, which
are their keys. Nearly all steps come after the end of the curve, and `add_parts` stores them as they are. `put_points` takes
any steps, and makes the parts again into which they fall.
"""

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from datetime import UTC, datetime, timedelta
from itertools import groupby
from math import isnan, nan
from operator import attrgetter
from struct import pack, unpack, unpack_from
from sys import byteorder
from typing import Any, NamedTuple, Protocol

from sqlalchemy import Select, delete, func, select
from sqlalchemy.orm import Session

from octet.api_schemas.report import MAX_REPORTS_PER_BATCH
from octet.service.db.bulk import Lookup, Rows, Transaction
from octet.service.db.tables import AttemptRow, Base, CurvePartRow, EvaluationRow, JobRow

MAX_STEPS_PER_PART = MAX_REPORTS_PER_BATCH
_PARTS_AT_ONCE = 100
_LAST_STEP = 2**53
_PARTS, _EVALUATIONS = Base.metadata.tables[CurvePartRow.__tablename__], Base.metadata.tables[EvaluationRow.__tablename__]
ADDED_PARTS, _EVALUATED = Rows(_PARTS), Rows(_EVALUATIONS, replaces=True)
_EPOCH, _MICROSECOND = datetime(1970, 1, 1, tzinfo=UTC), timedelta(microseconds=1)

_INTEGERS = ("step", "at", "tokens")
_FLOATS = ("loss", "gradient_norm", "learning_rate", "step_time_s", "data_wait_s")
_FORMS = "q" * len(_INTEGERS) + "d" * len(_FLOATS)
_BYTES = 8
"""The size of a number. A part has a column of little-endian 64-bit integers or floats for each of these names, in this order.
`at` is in microseconds since 1970; NaN is a loss or norm that was not finite.
"""
_HAS_ALL = "part.last_step - part.first_step + 1 = part.num_steps AND given.last_step > part.first_step"
_LOSSES_AT = Lookup(
    [_PARTS.c.job_id, _PARTS.c.last_step],
    f"SELECT given.job_id, given.last_step, substr(part.packed, CAST(1 + {_BYTES} * ({len(_INTEGERS)} * part.num_steps"
    f" + CASE WHEN {_HAS_ALL} THEN given.last_step - part.first_step ELSE 0 END) AS INTEGER), {_BYTES})"
    " FROM given JOIN curve_parts AS part ON part.job_id = given.job_id AND part.last_step ="
    " (SELECT MIN(last_step) FROM curve_parts WHERE job_id = given.job_id AND last_step >= given.last_step)",
)
_Get = Callable[[Any], Any]
_STEP, _TOKENS = attrgetter("step"), attrgetter("tokens")
_MAY_BE_NONE: tuple[_Get, ...] = (attrgetter("loss"), attrgetter("gradient_norm"))
_OTHERS: tuple[_Get, ...] = (attrgetter("learning_rate"), attrgetter("step_time_s"), attrgetter("data_wait_s"))


class Measured(Protocol):
    """The numbers that a step reports."""

    @property
    def step(self) -> int: ...
    @property
    def loss(self) -> float | None: ...
    @property
    def gradient_norm(self) -> float | None: ...
    @property
    def learning_rate(self) -> float: ...
    @property
    def tokens(self) -> int: ...
    @property
    def step_time_s(self) -> float: ...
    @property
    def data_wait_s(self) -> float: ...


class Point(NamedTuple):
    """One step of a curve. It was evaluated if `evaluation_metrics` is not None."""

    step: int
    at: datetime
    attempt_id: str
    loss: float | None
    gradient_norm: float | None
    learning_rate: float
    tokens: int
    step_time_s: float
    data_wait_s: float
    evaluation_loss: float | None = None
    evaluation_metrics: Mapping[str, float | None] | None = None


class Columns(NamedTuple):
    """Steps that follow each other, by column. `at` is in microseconds since 1970; NaN is what was not finite."""

    step: Sequence[int]
    at: Sequence[int]
    tokens: Sequence[int]
    loss: Sequence[float]
    gradient_norm: Sequence[float]
    learning_rate: Sequence[float]
    step_time_s: Sequence[float]
    data_wait_s: Sequence[float]


class Evaluation(NamedTuple):
    """The evaluation after a step."""

    step: int
    loss: float | None
    metrics: Mapping[str, float | None]


class CurvePlace(NamedTuple):
    """A place in a curve, up to which it was read: the number of the attempt that trained it, step and last evaluation.

    Places compare as the curve grows, also where a later attempt resumed from an earlier step.
    """

    epoch: int
    step: int
    evaluated: int


class NewPoints(NamedTuple):
    """The steps and evaluations behind a place. Of what was read before, those after `after` and `evaluated_after` are gone."""

    epoch: int
    after: int
    evaluated_after: int
    parts: list[Columns]
    evaluations: list[Evaluation]

    @property
    def end(self) -> CurvePlace:
        """The place behind these points."""
        step = self.parts[-1].step[-1] if self.parts else self.after
        return CurvePlace(self.epoch, step, self.evaluations[-1].step if self.evaluations else self.evaluated_after)


class Part(NamedTuple):
    """A row of the table, with its columns in their order."""

    job_id: str
    last_step: int
    first_step: int
    num_steps: int
    attempt_id: str
    packed: bytes


def pack_curve(job_id: str, attempt_id: str, moments: Sequence[datetime], steps: Sequence[Measured]) -> Part:
    """Pack steps that rise into a part of a curve. moments: when each was reported."""
    count = len(steps)
    packed = pack(
        f"<{len(_INTEGERS) * count}q{len(_FLOATS) * count}d",
        *map(_STEP, steps),
        *[(at - _EPOCH) // _MICROSECOND for at in moments],
        *map(_TOKENS, steps),
        *[nan if value is None else value for get in _MAY_BE_NONE for value in map(get, steps)],
        *[value for get in _OTHERS for value in map(get, steps)],
    )
    return Part(job_id, steps[-1].step, steps[0].step, count, attempt_id, packed)


def add_parts(transaction: Transaction, parts: Sequence[Part]) -> None:
    """Add parts that begin after the ends of their jobs' curves."""
    ADDED_PARTS.execute(transaction, parts)


def put_points(session: Session, job_id: str, points: Iterable[Point]) -> None:
    """Add steps of one job. A step that is there already is replaced, together with its evaluation."""
    new = {point.step: point for point in points}
    if not new:
        return
    within = (_PARTS.c.job_id == job_id, _PARTS.c.last_step >= min(new), _PARTS.c.first_step <= max(new))
    touched = _read(session, select(*_PARTS.c).where(*within))
    if touched:
        replaced = (_EVALUATIONS.c.job_id == job_id, _EVALUATIONS.c.step.in_(new))
        session.connection().execute(delete(_EVALUATIONS).where(*replaced))
        session.connection().execute(delete(_PARTS).where(*within))
    old = {point.step: point for part in touched for point in _points(part)}
    _add(session, job_id, (old | new).values())
    evaluated = [point for point in new.values() if point.evaluation_metrics is not None]
    rows = [(job_id, point.step, point.evaluation_loss, dict(point.evaluation_metrics or {})) for point in evaluated]
    _EVALUATED.execute(session, rows)


def put_evaluation(session: Session, job_id: str, step: int, loss: float | None, metrics: Mapping[str, float | None]) -> bool:
    """Write the evaluation of a step. Returns False if the curve has no such step."""
    around = _read(session, _of(job_id).where(_PARTS.c.last_step >= step, _PARTS.c.first_step <= step))
    if not any(_place(part, step) is not None for part in around):
        return False
    _EVALUATED.execute(session, [(job_id, step, loss, dict(metrics))])
    return True


def drop_after(session: Session, job_id: str, step: int) -> None:
    """Delete the curve after `step`."""
    later = (_PARTS.c.job_id == job_id, _PARTS.c.last_step > step)
    divided = _read(session, select(*_PARTS.c).where(*later, _PARTS.c.first_step <= step))
    session.connection().execute(delete(_PARTS).where(*later))
    _add(session, job_id, [point for part in divided for point in _points(part) if point.step <= step])
    session.connection().execute(delete(_EVALUATIONS).where(_EVALUATIONS.c.job_id == job_id, _EVALUATIONS.c.step > step))


def points_after(session: Session, job_id: str, step: int, limit: int) -> list[Point]:
    """Read the curve after `step`, at most so many steps of it."""
    before = func.sum(_PARTS.c.num_steps).over(order_by=_PARTS.c.last_step) - _PARTS.c.num_steps
    of_job = (_PARTS.c.job_id == job_id, _PARTS.c.last_step > step)
    counted = select(_PARTS.c.last_step, before.label("before")).where(*of_job).order_by(_PARTS.c.last_step).limit(limit)
    sizes = counted.subquery()
    # Of the first part perhaps only the last step comes after `step`.
    ends = select(func.max(sizes.c.last_step)).where(sizes.c.before < limit + MAX_STEPS_PER_PART).scalar_subquery()
    parts = _read(session, select(*_PARTS.c).where(*of_job, _PARTS.c.last_step <= ends).order_by(_PARTS.c.last_step))
    points = [point for part in parts for point in _points(part) if point.step > step][:limit]
    if not points:
        return []
    evaluations = select(EvaluationRow).where(EvaluationRow.job_id == job_id)
    within = EvaluationRow.step.between(points[0].step, points[-1].step)
    found = {row.step: row for row in session.scalars(evaluations.where(within))}
    return [
        point._replace(evaluation_loss=row.loss, evaluation_metrics=row.metrics) if (row := found.get(point.step)) else point
        for point in points
    ]


def last_loss(session: Session, job_id: str) -> float | None:
    """The loss of the last step; None before the first."""
    parts = _read(session, _of(job_id).order_by(_PARTS.c.last_step.desc()).limit(1))
    return _point(parts[0], parts[0].num_steps - 1).loss if parts else None


def columns_between(session: Session, job_id: str, after: int, until: int) -> Generator[Columns]:
    """Read the steps after `after` up to `until`, part by part, so that a long curve is never in memory as a whole."""
    query = _of(job_id).where(_PARTS.c.last_step > after, _PARTS.c.first_step <= until).order_by(_PARTS.c.last_step)
    with session.connection().execute(query, execution_options={"yield_per": _PARTS_AT_ONCE}) as rows:
        for row in rows:
            columns = _columns(Part(*row))
            begin, end = bisect_right(columns.step, after), bisect_right(columns.step, until)
            is_whole = (begin, end) == (0, len(columns.step))
            yield columns if is_whole else Columns(*[column[begin:end] for column in columns])


def ends(session: Session, job_id: str) -> tuple[int, int] | None:
    """Find the first and the last step of a curve; None for one without steps."""
    first, last = session.execute(
        select(func.min(_PARTS.c.first_step), func.max(_PARTS.c.last_step)).where(_PARTS.c.job_id == job_id)
    ).one()
    return None if last is None else (first, last)


def evaluations_between(session: Session, job_id: str, after: int, until: int, limit: int | None = None) -> list[Evaluation]:
    """Read the evaluations after `after` up to `until`, in the order of their steps."""
    columns = (EvaluationRow.step, EvaluationRow.loss, EvaluationRow.metrics)
    within = (EvaluationRow.job_id == job_id, EvaluationRow.step > after, EvaluationRow.step <= until)
    rows = session.execute(select(*columns).where(*within).order_by(EvaluationRow.step).limit(limit))
    return [Evaluation(*row) for row in rows]


def trained_epoch(session: Session, job_id: str) -> int:
    """Return the number of the last attempt that trained; 0 before the first."""
    return session.scalar(_TRAINED.where(AttemptRow.job_id == job_id)) or 0


def points_behind(session: Session, job_id: str, place: CurvePlace, limit: int) -> NewPoints | None:
    """Read at most so many steps, and so many evaluations, behind a place; None if there is nothing new.

    Attempts that have started since dropped all steps after those that they resumed from, and begin there.
    """
    since = (AttemptRow.job_id == job_id, AttemptRow.epoch > place.epoch, AttemptRow.resumed_from_step.is_not(None))
    resumed = list(session.execute(select(AttemptRow.epoch, AttemptRow.resumed_from_step).where(*since)))
    epoch = max([place.epoch, *(epoch for epoch, _ in resumed)])
    after = min([place.step, *(step for _, step in resumed)])
    evaluated_after = min(place.evaluated, after)
    parts: list[Columns] = []
    num_left = limit
    with closing(columns_between(session, job_id, after, _LAST_STEP)) as read:
        for columns in read:
            parts.append(Columns(*[column[:num_left] for column in columns]))
            num_left -= len(parts[-1].step)
            if not num_left:
                break
    until = parts[-1].step[-1] if parts else after
    evaluations = evaluations_between(session, job_id, evaluated_after, until, limit)
    found = NewPoints(epoch, after, evaluated_after, parts, evaluations)
    return None if found.end == place else found


def losses_at(transaction: Transaction, places: Sequence[tuple[str, int]]) -> dict[tuple[str, int], float | None]:
    """Read the losses of steps, each given by its job and number. Of a step that was not reported the next one's is read."""
    found = _LOSSES_AT.execute(transaction, places)
    losses = {(job_id, step): unpack("<d", packed)[0] for job_id, step, packed in found}
    return {place: None if isnan(loss) else loss for place, loss in losses.items()}


def best_evaluation_loss(session: Session, job_id: str) -> float | None:
    """The least loss of the job's evaluations; None without a finite one."""
    return session.scalar(select(func.min(EvaluationRow.loss)).where(EvaluationRow.job_id == job_id))


def current_points(session: Session, job_ids: Sequence[str]) -> dict[str, Point]:
    """Find the point of the step that each job is at, without its evaluation; by job id."""
    is_around = (_PARTS.c.first_step <= JobRow.step) & (_PARTS.c.last_step >= JobRow.step)
    query = select(*_PARTS.c, JobRow.step).join(JobRow, (JobRow.id == _PARTS.c.job_id) & is_around)
    found: dict[str, Point] = {}
    for *columns, step in session.connection().execute(query.where(_PARTS.c.job_id.in_(job_ids))):
        part = Part(*columns)
        place = _place(part, step)
        if place is not None:
            found[part.job_id] = _point(part, place)
    return found


def last_evaluations(session: Session, job_ids: Sequence[str]) -> dict[str, EvaluationRow]:
    """Find each job's last evaluation whose loss was finite; by job id."""
    newest = (
        select(EvaluationRow.job_id, func.max(EvaluationRow.step).label("step"))
        .where(EvaluationRow.job_id.in_(job_ids), EvaluationRow.loss.is_not(None))
        .group_by(EvaluationRow.job_id)
        .subquery()
    )
    rows = select(EvaluationRow).join(newest, (newest.c.job_id == EvaluationRow.job_id) & (newest.c.step == EvaluationRow.step))
    return {row.job_id: row for row in session.scalars(rows)}


_TRAINED = select(func.max(AttemptRow.epoch)).where(AttemptRow.resumed_from_step.is_not(None))


def _of(job_id: str) -> Select[Any]:
    return select(*_PARTS.c).where(_PARTS.c.job_id == job_id)


def _read(session: Session, query: Select[Any]) -> list[Part]:
    return [Part(*row) for row in session.connection().execute(query)]


def _add(session: Session, job_id: str, points: Iterable[Point]) -> None:
    """Make parts of points. A part is of one attempt."""
    parts = []
    for attempt_id, of_attempt in groupby(sorted(points, key=_STEP), attrgetter("attempt_id")):
        run = list(of_attempt)
        for begin in range(0, len(run), MAX_STEPS_PER_PART):
            steps = run[begin : begin + MAX_STEPS_PER_PART]
            parts.append(pack_curve(job_id, attempt_id, [point.at for point in steps], steps))
    add_parts(session, parts)


def _columns(part: Part) -> Columns:
    width = _BYTES * part.num_steps
    columns = [array(form, part.packed[width * number : width * (number + 1)]) for number, form in enumerate(_FORMS)]
    if byteorder == "big":
        for column in columns:
            column.byteswap()
    return Columns(*columns)


def _points(part: Part) -> Iterator[Point]:
    count = part.num_steps
    numbers = unpack(f"<{len(_INTEGERS) * count}q{len(_FLOATS) * count}d", part.packed)
    columns = [numbers[begin : begin + count] for begin in range(0, len(numbers), count)]
    for values in zip(*columns, strict=True):
        yield _as_point(part.attempt_id, values)


def _point(part: Part, place: int) -> Point:
    offsets = range(_BYTES * place, len(part.packed), _BYTES * part.num_steps)
    values = [unpack_from(f"<{form}", part.packed, offset)[0] for form, offset in zip(_FORMS, offsets, strict=True)]
    return _as_point(part.attempt_id, values)


def _as_point(attempt_id: str, values: Sequence[Any]) -> Point:
    step, at, tokens, loss, gradient_norm, learning_rate, step_time_s, data_wait_s = values
    return Point(
        step,
        _EPOCH + timedelta(microseconds=at),
        attempt_id,
        None if isnan(loss) else loss,
        None if isnan(gradient_norm) else gradient_norm,
        learning_rate,
        tokens,
        step_time_s,
        data_wait_s,
    )


def _place(part: Part, step: int) -> int | None:
    """Find a step in a part."""
    if step == part.last_step:
        return part.num_steps - 1
    steps = unpack_from(f"<{part.num_steps}q", part.packed)
    place = bisect_left(steps, step)
    return place if place < len(steps) and steps[place] == step else None
