"""SQL about the records of a running job, but for its curve: checkpoints, log lines, report streams and exporters."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple, TypeVar

from sqlalchemy import ColumnElement, delete, func, insert, or_, select
from sqlalchemy.orm import Session

from octet.api_schemas import AttemptState
from octet.api_schemas.training import KeepSpec
from octet.service.db.tables import (
    AttemptRow,
    CheckpointRow,
    DeletedFilesRow,
    EvaluationRow,
    ExporterRow,
    ExportRow,
    JobRow,
    LogLineRow,
    MeasurementRow,
)
from octet.service.store import curves

Saved = TypeVar("Saved", CheckpointRow, ExportRow)
"""A row of a folder that a job saves."""


def put_exporter(session: Session, attempt_id: str, rank: int, address: str) -> None:
    session.merge(ExporterRow(attempt_id=attempt_id, rank=rank, address=address))


def live_exporters(session: Session) -> list[tuple[ExporterRow, AttemptRow, JobRow]]:
    """List where the ranks of live attempts say that they serve their metrics, each with its attempt and job."""
    live = [state for state in AttemptState if not state.is_terminal]
    query = (
        select(ExporterRow, AttemptRow, JobRow)
        .join(AttemptRow, AttemptRow.id == ExporterRow.attempt_id)
        .join(JobRow, JobRow.id == AttemptRow.job_id)
        .where(AttemptRow.state.in_(live))
        .order_by(ExporterRow.attempt_id, ExporterRow.rank)
    )
    return [(exporter, attempt, job) for exporter, attempt, job in session.execute(query)]


def drop_after(session: Session, job_id: str, step: int) -> None:
    """Delete the curve, the checkpoints and the exports after `step`, because an attempt trains those steps again."""
    curves.drop_after(session, job_id, step)
    for table in (CheckpointRow, ExportRow):
        session.execute(delete(table).where(table.job_id == job_id, table.step > step))


def last_checkpoints(session: Session, job_ids: Sequence[str]) -> dict[str, CheckpointRow]:
    """Find the newest checkpoint of each job; by job id."""
    newest = (
        select(CheckpointRow.job_id, func.max(CheckpointRow.step).label("step"))
        .where(CheckpointRow.job_id.in_(job_ids))
        .group_by(CheckpointRow.job_id)
        .subquery()
    )
    rows = select(CheckpointRow).join(newest, (newest.c.job_id == CheckpointRow.job_id) & (newest.c.step == CheckpointRow.step))
    return {row.job_id: row for row in session.scalars(rows)}


def put_checkpoint(session: Session, row: CheckpointRow) -> None:
    """Add a checkpoint. A checkpoint of the same step is replaced."""
    session.execute(delete(CheckpointRow).where(CheckpointRow.job_id == row.job_id, CheckpointRow.step == row.step))
    session.add(row)


def remove_surplus(session: Session, job_id: str, keep: KeepSpec) -> list[int]:
    """Delete the checkpoints that a job does not keep. Returns their steps. A loop of the dispatcher deletes their files."""
    steps = list(session.scalars(select(CheckpointRow.step).where(CheckpointRow.job_id == job_id)))
    is_evaluated = (EvaluationRow.job_id == job_id, EvaluationRow.step.in_(steps), EvaluationRow.loss.is_not(None))
    evaluated = session.execute(select(EvaluationRow.step, EvaluationRow.loss).where(*is_evaluated))
    losses = {step: loss for step, loss in evaluated if loss is not None}
    surplus = keep.surplus(steps, losses)
    if surplus:
        session.execute(delete(CheckpointRow).where(CheckpointRow.job_id == job_id, CheckpointRow.step.in_(surplus)))
    return surplus


def names_of(
    session: Session, table: type[CheckpointRow | ExportRow], job_ids: Sequence[str]
) -> dict[str, dict[str, datetime]]:
    """List the folders of jobs' checkpoints or exports with the times at which they were complete, by job, then by step."""
    found: dict[str, dict[str, datetime]] = {}
    query = select(table.job_id, table.name, table.created_at).where(table.job_id.in_(job_ids))
    for job_id, name, created_at in session.execute(query.order_by(table.step)):
        found.setdefault(job_id, {})[name] = created_at
    return found


def checkpoints_after(session: Session, job_id: str, step: int, limit: int) -> list[CheckpointRow]:
    query = select(CheckpointRow).where(CheckpointRow.job_id == job_id, CheckpointRow.step > step)
    return list(session.scalars(query.order_by(CheckpointRow.step).limit(limit)))


def newest_checkpoints(session: Session, job_id: str, limit: int) -> list[CheckpointRow]:
    query = select(CheckpointRow).where(CheckpointRow.job_id == job_id).order_by(CheckpointRow.step.desc()).limit(limit)
    return list(session.scalars(query))


def find_saved(session: Session, table: type[Saved], job_id: str, name: str) -> Saved | None:
    """Find a checkpoint or an export of a job by the name of its folder or by its id."""
    return session.scalar(select(table).where(table.job_id == job_id, or_(table.name == name, table.id == name)))


def delete_saved(session: Session, row: CheckpointRow | ExportRow) -> None:
    """Delete a checkpoint or an export, and note that its folder has to go too."""
    session.merge(DeletedFilesRow(job_id=row.job_id, kind=row.__tablename__, name=row.name))
    session.delete(row)


def deleted_files(session: Session, limit: int, job_id: str | None = None) -> list[DeletedFilesRow]:
    """List deleted checkpoints and exports that may still have a folder, of all jobs or of one."""
    query = select(DeletedFilesRow).limit(limit)
    return list(session.scalars(query if job_id is None else query.where(DeletedFilesRow.job_id == job_id)))


def forget_deleted_files(session: Session, gone: Sequence[DeletedFilesRow]) -> None:
    """Forget deleted checkpoints and exports whose folders are gone."""
    for row in gone:
        where = (DeletedFilesRow.job_id == row.job_id, DeletedFilesRow.kind == row.kind, DeletedFilesRow.name == row.name)
        session.execute(delete(DeletedFilesRow).where(*where))


def checkpoint_step(session: Session, job_id: str, checkpoint_id: str) -> int | None:
    where = (CheckpointRow.id == checkpoint_id, CheckpointRow.job_id == job_id)
    return session.scalar(select(CheckpointRow.step).where(*where))


def put_export(session: Session, row: ExportRow) -> bool:
    """Add an export in the place of one of the same name. Returns whether it is another than that one, or at another address.

    An export that is reported without an address keeps the one that it has.
    """
    before = find_saved(session, ExportRow, row.job_id, row.name)
    if before is not None and before.sha256 == row.sha256:
        if row.address in (None, before.address):
            return False
        before.address = row.address
        return True
    session.execute(delete(ExportRow).where(ExportRow.job_id == row.job_id, ExportRow.name == row.name))
    session.add(row)
    return True


def exports_of(session: Session, job_id: str) -> list[ExportRow]:
    query = select(ExportRow).where(ExportRow.job_id == job_id).order_by(ExportRow.step, ExportRow.name)
    return list(session.scalars(query))


def last_exports(session: Session, job_ids: Sequence[str]) -> dict[str, ExportRow]:
    """Find the newest export of each job; by job id."""
    rows = session.scalars(select(ExportRow).where(ExportRow.job_id.in_(job_ids)).order_by(ExportRow.created_at, ExportRow.id))
    return {row.job_id: row for row in rows}


COUNTS = ("num_parameters", "num_layers_converted", "num_layers_filtered", "num_layers_skipped")


def put_size(session: Session, job_id: str, attempt_id: str, at: datetime, step: int, counts: Mapping[str, int]) -> None:
    """Write the size of a job whose attempt starts. counts: by the names of `COUNTS`. Measurements of before stay."""
    session.merge(MeasurementRow(job_id=job_id, attempt_id=attempt_id, at=at, step=step, **counts))


def put_measured(
    session: Session, job_id: str, at: datetime, step: int, memory: dict[str, Any] | None, layers: list[Any] | None
) -> None:
    """Write measurements of a job that has started. None leaves what was there."""
    row = session.get(MeasurementRow, job_id)
    if row is None:  # a version without measurements has started the attempt
        return
    row.at, row.step = at, step
    row.memory, row.layers = memory or row.memory, layers if layers is not None else row.layers


def find_measurements(session: Session, job_id: str) -> MeasurementRow | None:
    return session.get(MeasurementRow, job_id)


def add_log_lines(session: Session, rows: Sequence[dict[str, Any]]) -> None:
    if rows:
        session.execute(insert(LogLineRow), list(rows))


class LogFilter(NamedTuple):
    """The log lines that are wanted: of a rank, of an attempt, logged at a time or later; None: of all."""

    rank: int | None = None
    attempt_id: str | None = None
    since: datetime | None = None

    def conditions(self) -> list[ColumnElement[bool]]:
        """Return the conditions on rows of lines."""
        found: list[ColumnElement[bool]] = []
        if self.rank is not None:
            found.append(LogLineRow.rank == self.rank)
        if self.attempt_id is not None:
            found.append(LogLineRow.attempt_id == self.attempt_id)
        if self.since is not None:
            found.append(LogLineRow.at >= self.since)
        return found


EVERY_LINE = LogFilter()


def log_lines_after(session: Session, job_id: str, seq: int, limit: int, wanted: LogFilter = EVERY_LINE) -> list[LogLineRow]:
    query = select(LogLineRow).where(LogLineRow.job_id == job_id, LogLineRow.seq > seq, *wanted.conditions())
    return list(session.scalars(query.order_by(LogLineRow.seq).limit(limit)))


def before_last_log_lines(session: Session, job_id: str, number: int, wanted: LogFilter = EVERY_LINE) -> int:
    """Return the place after which the last lines follow; 0 if there are no more lines than that."""
    query = select(LogLineRow.seq).where(LogLineRow.job_id == job_id, *wanted.conditions())
    seq = session.scalar(query.order_by(LogLineRow.seq.desc()).offset(number).limit(1))
    return 0 if seq is None else seq
