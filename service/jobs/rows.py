"""Renders compact rows of jobs, with a small picture of each curve.

A picture has the losses of the steps s, 2s, 3s, … where s is the least power of two that leaves at most 32. As a job goes on,
only the new ones are read, until every second one is dropped.
"""

from collections.abc import Sequence
from typing import NamedTuple

from sqlalchemy.orm import Session

from octet.api_schemas import JobState, QueuePlace
from octet.api_schemas.rows import MAX_SPARK_POINTS, MAX_WHY_CHARACTERS, Row
from octet.service import store
from octet.service.db.bulk import Transaction
from octet.service.store.rows import ListedRow, RowFilter

_MOST_KEPT = 4096
_MOST_TOTALS = 256
_DIGITS_OF_A_PICTURE = 3


class _Kept(NamedTuple):
    """The losses that are known of one attempt's curve, by step. A later attempt may train the same steps again."""

    attempt_id: str | None
    losses: dict[int, float | None]


class Sparklines:
    """The pictures that one process has drawn. Any thread may draw: a picture is replaced as a whole."""

    def __init__(self) -> None:
        self._kept: dict[str, _Kept] = {}

    def read(self, transaction: Transaction, rows: Sequence[ListedRow]) -> dict[str, tuple[float | None, ...]]:
        """Draw the curves of jobs, by id."""
        wanted = {row.id: spark_steps(row.step or 0) for row in rows}
        known = {row.id: self._known(row) for row in rows}
        missing = [(id_, step) for id_, steps in wanted.items() for step in steps if step not in known[id_]]
        for (id_, step), loss in store.curves.losses_at(transaction, missing).items():
            known[id_][step] = short(loss, _DIGITS_OF_A_PICTURE)
        if len(self._kept) > _MOST_KEPT:
            self._kept.clear()
        drawn: dict[str, tuple[float | None, ...]] = {}
        for row in rows:
            losses = {step: known[row.id][step] for step in wanted[row.id] if step in known[row.id]}
            if row.state is not JobState.STARTING:  # its attempt has not dropped the steps yet that it will train again
                self._kept[row.id] = _Kept(row.current_attempt_id, losses)
            drawn[row.id] = tuple(losses.values())
        return drawn

    def _known(self, row: ListedRow) -> dict[int, float | None]:
        kept = self._kept.get(row.id)
        return dict(kept.losses) if kept is not None and kept.attempt_id == row.current_attempt_id else {}


class RowTotals:
    """The lengths of lists that one process has counted.

    A list is counted again once there are other jobs, or, where it is filtered by states, once a state has changed. One that
    is filtered by labels, which change without either, is counted each time.
    """

    def __init__(self) -> None:
        self._counted: dict[RowFilter, tuple[object, int]] = {}

    def read(self, session: Session, wanted: RowFilter) -> int:
        """Return how many jobs a list has."""
        if wanted.labels:
            return store.rows.count_rows(session, wanted)
        tallies = store.tallies.read(session)
        # Ids grow: where as many jobs have the same newest one, none was added and none deleted.
        version = tallies.version if wanted.states else (sum(tallies.jobs.values()), store.jobs.newest_job(session).id)
        known = self._counted.get(wanted)
        if known is not None and known[0] == version:
            return known[1]
        total = store.rows.count_rows(session, wanted)
        if len(self._counted) >= _MOST_TOTALS:
            self._counted.clear()
        self._counted[wanted] = version, total
        return total


def spark_steps(last_step: int) -> range:
    """Choose the steps of a picture."""
    width = 1
    while last_step // width > MAX_SPARK_POINTS:
        width *= 2
    return range(width, last_step + 1, width)


def row_json(row: ListedRow, place: QueuePlace | None, sparkline: tuple[float | None, ...]) -> str:
    """Render a row without checking again what was checked when it was stored."""
    why = place.why if place is not None else row.message if row.state is JobState.FAILED else None
    shown = Row.model_construct(
        id=row.id,
        name=row.name,
        tenant=row.tenant,
        pool=row.pool,
        level=row.level,
        state=row.state,
        reason=row.reason,
        why=why if why is None or len(why) <= MAX_WHY_CHARACTERS else f"{why[: MAX_WHY_CHARACTERS - 1]}…",
        position=place.position if place is not None else None,
        missing_slots=place.missing_slots if place is not None else None,
        starts_at=place.starts_at if place is not None else None,
        step=row.step,
        steps=row.steps,
        loss=short(row.loss),
        best_evaluation_loss=short(row.best_evaluation_loss),
        tokens_per_s=short(row.tokens_per_s),
        remaining_s=short(row.remaining_s),
        created_at=row.created_at,
        started_at=row.started_at,
        finished_at=row.finished_at,
        sparkline=sparkline,
    )
    return shown.model_dump_json()


def short(value: float | None, digits: int = 6) -> float | None:
    """Round to so many digits."""
    return None if value is None else float(f"{value:.{digits}g}")
