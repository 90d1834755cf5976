"""SQL of compact rows: which jobs a list has, in which order, and what of each is shown.

The jobs of a page are found by their ids first, in an index that has all columns that a list is filtered by. Only those of
the page are then read, because a row of `jobs` has some KB of spec.
"""

from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple

from sqlalchemy import BigInteger, ColumnElement, Select, String, Text, cast, func, nulls_last, or_, select, tuple_, type_coerce
from sqlalchemy.orm import Session

from octet.api_schemas import FailureReason, JobState
from octet.api_schemas.rows import RowOrder
from octet.service.db.tables import JobLabelRow, JobRow
from octet.service.store import tallies

FEW_JOBS = 2000
"""So many are sorted faster than more are walked in order until a page is full."""


class ListedRow(NamedTuple):
    """The columns of a job that a row shows. `steps`: as a rank said, or else as the spec says."""

    id: str
    name: str
    tenant: str
    pool: str
    level: str
    state: JobState
    priority: int
    reason: FailureReason | None
    message: str | None
    step: int | None
    steps: int | None
    loss: float | None
    best_evaluation_loss: float | None
    tokens_per_s: float | None
    remaining_s: float | None
    created_at: datetime
    started_at: datetime | None
    finished_at: datetime | None
    current_attempt_id: str | None


@dataclass(frozen=True)
class RowFilter:
    """Which jobs to list. An empty field does not restrict. text: a part of the name, in upper or lower case."""

    ids: tuple[str, ...] = ()
    states: tuple[JobState, ...] = ()
    pool: str | None = None
    level: str | None = None
    tenant: str | None = None
    text: str | None = None
    labels: tuple[tuple[str, str], ...] = ()

    @property
    def is_tallied(self) -> bool:
        """True if the tallies know how many jobs these are."""
        return not (self.ids or self.level or self.tenant or self.text or self.labels)


def list_rows(
    session: Session, wanted: RowFilter, order: RowOrder, limit: int, offset: int, after: str | None
) -> list[ListedRow]:
    """List jobs in an order, from the one `offset` places behind the job `after`, or behind the beginning."""
    found = _tallied(session, wanted)
    conditions = _conditions(wanted, by_index=found <= FEW_JOBS)
    if after is not None:
        conditions.append(_behind(session, order, after, wanted.tenant))
    query = select(JobRow.id).where(*conditions).order_by(*_ORDERS[order]).limit(limit).offset(offset)
    ids = list(session.scalars(query))
    rows = {row[0]: ListedRow(*row) for row in session.connection().execute(_SHOWN.where(JobRow.id.in_(ids)))}
    return [rows[id_] for id_ in ids]


def count_rows(session: Session, wanted: RowFilter) -> int:
    """Count the jobs of a list: from the tallies, where they know, or else in the index."""
    found = _tallied(session, wanted)
    if wanted.is_tallied:
        return found
    query = select(func.count()).select_from(JobRow).where(*_conditions(wanted, by_index=found <= FEW_JOBS))
    return session.scalar(query) or 0


def _tallied(session: Session, wanted: RowFilter) -> int:
    """Count the jobs in these states and this pool."""
    counts = tallies.read(session).jobs.items()
    return sum(
        count
        for (pool, state), count in counts
        if (wanted.pool in (None, pool)) and (not wanted.states or state in wanted.states)
    )


def _conditions(wanted: RowFilter, *, by_index: bool) -> list[ColumnElement[bool]]:
    """Write the filter as SQL. by_index: let states and pool choose the index, because they leave few jobs."""
    state, pool = (_STATE, _POOL) if by_index else (cast(_STATE, Text), cast(_POOL, Text))
    found: list[ColumnElement[bool]] = []
    if wanted.ids:
        found.append(JobRow.id.in_(wanted.ids))
    if wanted.states:
        found.append(state.in_([each.value for each in wanted.states]))
    if wanted.pool is not None:
        found.append(pool == wanted.pool)
    if wanted.level is not None:
        found.append(JobRow.level == wanted.level)
    if wanted.tenant is not None:
        found.append(JobRow.tenant == wanted.tenant)
    if wanted.text is not None:
        found.append(JobRow.name.icontains(wanted.text, autoescape=True))
    for key, value in wanted.labels:
        of_label = select(JobLabelRow.job_id).where(JobLabelRow.key == key, JobLabelRow.value == value)
        found.append(JobRow.id.in_(of_label))
    return found


def _behind(session: Session, order: RowOrder, after: str, tenant: str | None) -> ColumnElement[bool]:
    """Select the jobs that follow the job `after` in an order.

    With a tenant, another tenant's job has the place of one that is not there: the list would show its name and its loss.
    """
    if order == "-created":
        return JobRow.id < after
    if order == "created":
        return JobRow.id > after
    is_after = [JobRow.id == after, *([] if tenant is None else [JobRow.tenant == tenant])]
    if order == "name":
        name = select(JobRow.name).where(*is_after).scalar_subquery()
        return tuple_(JobRow.name, JobRow.id) > tuple_(name, after)
    best = session.scalar(select(_BEST).where(*is_after))
    if best is None:
        return _BEST.is_(None) & (JobRow.id > after)
    return or_(_BEST.is_(None), best < _BEST, _BEST.is_not_distinct_from(best) & (JobRow.id > after))


_STATE, _POOL, _BEST = type_coerce(JobRow.state, String), type_coerce(JobRow.pool, String), JobRow.best_evaluation_loss
_ORDERS: dict[RowOrder, tuple[ColumnElement[Any], ...]] = {
    "-created": (JobRow.id.desc(),),
    "created": (JobRow.id.asc(),),
    "name": (JobRow.name.asc(), JobRow.id.asc()),
    "evaluation": (nulls_last(_BEST.asc()), JobRow.id.asc()),
}
_STEPS_OF_SPEC = cast(JobRow.spec[("training", "steps")].as_string(), BigInteger)
_OTHERS: dict[str, Any] = {"steps": func.coalesce(JobRow.steps, _STEPS_OF_SPEC)}
"""Columns that have another value than the one in their table."""
_SHOWN: Select[Any] = select(*[_OTHERS[name] if name in _OTHERS else getattr(JobRow, name) for name in ListedRow._fields])
