"""SQL of the dispatcher: the queue, slots in use, attempts to launch, watch and release, and the leader's lease."""

import json
import secrets
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

from sqlalchemy import (
    BindParameter,
    ColumnElement,
    Integer,
    ScalarSelect,
    Select,
    Text,
    bindparam,
    case,
    cast,
    delete,
    func,
    literal_column,
    null,
    or_,
    select,
    union_all,
    update,
)
from sqlalchemy.orm import Session, aliased, load_only

from octet.api_schemas import AttemptRef, AttemptState, DesiredState, FailureReason, JobSpec, PoolCapacity
from octet.service.db.bulk import Transaction, connection_of
from octet.service.db.tables import AttemptRow, CheckpointRow, JobRow, LastStartRow, LeaseRow, PoolCapacityRow

LEADER = "dispatcher"
HEAD_OF_QUEUE = 200
SHORTEST_HEAD = 20
"""Jobs of each tenant that are looked at, however many tenants wait."""
FEW_BEHIND = 1000
LOOP_PRECISION = timedelta(seconds=10)
_LOOP = "loop:"
# The literal lets SQLite use the index of queued jobs; it does not for a bound parameter.
_IS_QUEUED = JobRow.state == literal_column("'queued'")
_LIVE = [state for state in AttemptState if not state.is_terminal]
_OVER = [state for state in AttemptState if state.is_terminal]


class QueuedJob(NamedTuple):
    """A job in the queue.

    `former_attempt_at_large` is true until the last attempt's processes are known to be gone; `former_lease_expires_at` is
    the end of that attempt's lease. `former_reason` is why the last attempt failed, if there was one. `worker_counts`: the
    numbers of ranks that its next attempt may have, largest first.
    """

    id: str
    pool: str
    tenant: str
    workers: int
    priority: int
    not_before: datetime | None
    former_attempt_at_large: bool
    former_lease_expires_at: datetime | None
    former_reason: FailureReason | None
    is_planned: bool
    worker_counts: tuple[int, ...]


class ShrunkAttempt(NamedTuple):
    """An attempt that trains with fewer ranks than its job may have. checkpoint_at: of the newest that it has written.

    remaining_s: the time that it still needs, if it is known. start_s: the time that it took from its slots to its first step.
    """

    ref: AttemptRef
    job_id: str
    pool: str
    workers: int
    worker_counts: tuple[int, ...]
    checkpoint_at: datetime | None
    remaining_s: float | None
    start_s: float


class Use(NamedTuple):
    """The slots that a tenant's attempts take of a pool until they are released, the number of these attempts, and the moment
    when its last one was placed. hours: slot hours that it has taken this month, where the pool limits them.
    """

    slots: int = 0
    jobs: int = 0
    started_at: datetime | None = None
    hours: float = 0.0


def head_of_queue(transaction: Transaction, pool: str) -> list[QueuedJob]:
    """List the first jobs of each tenant in a pool's queue, by priority and age: enough to fill the pool, and few to read.

    The index of the queue is in the order of priorities, but within one priority it would be read from the wrong end, so
    sorting would read the whole queue. Instead: all jobs above the priority of the last job in the head, and as many as
    needed of that priority.
    """
    connection = connection_of(transaction)
    tenants = tenants_waiting(transaction, pool)
    length = max(HEAD_OF_QUEUE // max(1, len(tenants)), SHORTEST_HEAD)
    rows: list[Any] = []
    for tenant in tenants:
        parameters = {"pool": pool, "tenant": tenant, "head": length, "others": length - 1}
        lowest = connection.scalar(_LOWEST_IN_HEAD, parameters)
        query = _WHOLE_QUEUE if lowest is None else _HEAD_OF_QUEUE
        rows += connection.execute(query, parameters | {"lowest": lowest}).all()
    counts = _counts_of(connection, [row.id for row in rows if row.min_workers is not None])
    jobs = [QueuedJob._make((*row[:-1], counts.get(row.id, (row.workers,)))) for row in rows]
    return jobs if len(tenants) == 1 else sorted(jobs, key=lambda job: (-job.priority, job.id))


def tenants_waiting(transaction: Transaction, pool: str) -> list[str]:
    """List the tenants that have jobs in a pool's queue. It reads one entry of the index for each."""
    return list(connection_of(transaction).scalars(_TENANTS_WAITING, {"pool": pool}))


def specs_of(transaction: Transaction, job_ids: Sequence[str]) -> dict[str, str]:
    """Read the specs of jobs, as text, by id."""
    query = select(JobRow.id, cast(JobRow.spec, Text)).where(JobRow.id.in_(job_ids))
    return {job_id: spec for job_id, spec in connection_of(transaction).execute(query)}


def _counts_of(transaction: Transaction, job_ids: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """The numbers of ranks that elastic jobs may have. Only these need their specs."""
    if not job_ids:
        return {}
    return {job_id: _worker_counts(spec) for job_id, spec in specs_of(transaction, job_ids).items()}


@lru_cache(maxsize=1024)
def _worker_counts(spec: str) -> tuple[int, ...]:
    return JobSpec.read_stored(json.loads(spec)).worker_counts


def _in_order(
    *conditions: ColumnElement[bool],
) -> Select[str, str, str, int, int, datetime | None, bool, datetime | None, FailureReason | None, bool, int | None]:
    last = aliased(AttemptRow)
    return (
        select(
            JobRow.id,
            JobRow.pool,
            JobRow.tenant,
            JobRow.workers,
            JobRow.priority,
            JobRow.not_before,
            AttemptRow.id.is_not(None),
            AttemptRow.lease_expires_at,
            last.reason,
            JobRow.plan.is_not(null()),
            JobRow.min_workers,
        )
        .outerjoin(AttemptRow, (AttemptRow.id == JobRow.current_attempt_id) & AttemptRow.released_at.is_(None))
        .outerjoin(last, last.id == JobRow.current_attempt_id)
        .where(*conditions)
        .order_by(JobRow.priority.desc(), JobRow.id)
        .limit(_HEAD)
    )


# All statements below are built once: to build them costs more than to execute them.
_HEAD: BindParameter[int] = bindparam("head", type_=Integer)
_OF_POOL = (_IS_QUEUED, JobRow.pool == bindparam("pool"))
_OF_TENANT = (*_OF_POOL, JobRow.tenant == bindparam("tenant"))
_LOWEST: BindParameter[int] = bindparam("lowest", type_=Integer)
_LOWEST_IN_HEAD = (
    select(JobRow.priority)
    .where(*_OF_TENANT)
    .order_by(JobRow.priority.desc())
    .limit(1)
    .offset(bindparam("others", type_=Integer))
)
_OLDEST_OF_LOWEST = select(JobRow.id).where(*_OF_TENANT, JobRow.priority == _LOWEST).order_by(JobRow.id).limit(_HEAD).subquery()
_ABOVE_LOWEST = select(JobRow.id).where(*_OF_TENANT, JobRow.priority > _LOWEST)
_WHOLE_QUEUE = _in_order(*_OF_TENANT)
_HEAD_OF_QUEUE = _in_order(JobRow.id.in_(union_all(select(_OLDEST_OF_LOWEST.c.id), _ABOVE_LOWEST)))
_FIRST_TENANT = select(func.min(JobRow.tenant).label("tenant")).where(*_OF_POOL).cte("waiting", recursive=True)
_NEXT_TENANT = select(func.min(JobRow.tenant)).where(*_OF_POOL, JobRow.tenant > _FIRST_TENANT.c.tenant).scalar_subquery()
_EACH_TENANT = _FIRST_TENANT.union_all(select(_NEXT_TENANT).where(_FIRST_TENANT.c.tenant.is_not(None)))
_TENANTS_WAITING = select(_EACH_TENANT.c.tenant).where(_EACH_TENANT.c.tenant.is_not(None))


class Place(Protocol):
    """The columns that decide about a queued job's position."""

    @property
    def id(self) -> str: ...
    @property
    def pool(self) -> str: ...
    @property
    def priority(self) -> int: ...


def positions(transaction: Transaction, jobs: Iterable[Place], num_queued: Mapping[str, int]) -> dict[str, int]:
    """Find the position of each of these queued jobs in the queue of its pool, counted from 1.

    num_queued: the jobs of each pool's queue, as the tallies have them. Those behind the last of the jobs of one priority are
    counted if they are few, as they are for new jobs, or else those ahead of the first; the others are counted from there.
    """
    together: dict[tuple[str, int], list[str]] = {}
    for job in jobs:
        together.setdefault((job.pool, job.priority), []).append(job.id)
    found: dict[str, int] = {}
    connection = connection_of(transaction)  # without the ORM's part of an execution, which takes longer than the statement
    for (pool, priority), ids in together.items():
        part = {"pool": pool, "priority": priority, "first": min(ids), "last": max(ids), "few": FEW_BEHIND + 1}
        rows = connection.execute(_FROM_FIRST_TO_LAST, part).all() if len(ids) > 1 else [(ids[0], 1)]
        num_behind = connection.execute(_NUM_BEHIND, part).scalar_one()
        if num_behind <= FEW_BEHIND:
            num_ahead = num_queued[pool] - num_behind - len(rows)
        else:
            num_ahead = connection.execute(_NUM_AHEAD, part).scalar_one()
        found |= {job_id: num_ahead + number for job_id, number in rows}
    return {job_id: found[job_id] for ids in together.values() for job_id in ids}


def _counted(*conditions: ColumnElement[bool]) -> ScalarSelect[int]:
    query = select(func.count()).select_from(JobRow).where(*_OF_POOL, *conditions)
    return query.scalar_subquery()


def _counted_if_few(*conditions: ColumnElement[bool]) -> ScalarSelect[int]:
    few = select(JobRow.id).where(*_OF_POOL, *conditions).limit(bindparam("few", type_=Integer)).subquery()
    return select(func.count()).select_from(few).scalar_subquery()


_PRIORITY: BindParameter[int] = bindparam("priority", type_=Integer)
_OF_PRIORITY = JobRow.priority == _PRIORITY
_NUM_AHEAD = select(_counted(JobRow.priority > _PRIORITY) + _counted(_OF_PRIORITY, JobRow.id < bindparam("first")))
_NUM_BEHIND = select(
    _counted_if_few(JobRow.priority < _PRIORITY) + _counted_if_few(_OF_PRIORITY, JobRow.id > bindparam("last"))
)
_FROM_FIRST_TO_LAST = select(JobRow.id, func.row_number().over(order_by=JobRow.id)).where(
    *_OF_POOL, _OF_PRIORITY, JobRow.id.between(bindparam("first"), bindparam("last"))
)


def use_by_tenant(transaction: Transaction) -> dict[str, dict[str, Use]]:
    """Count what attempts hold, by pool and tenant. An attempt holds its slots until its processes are known to be gone."""
    found: dict[str, dict[str, Use]] = {}
    connection = connection_of(transaction)
    for pool, tenant, started_at in connection.execute(_LAST_STARTS):
        found.setdefault(pool, {})[tenant] = Use(started_at=started_at)
    for pool, tenant, slots, jobs in connection.execute(_USE):
        of_pool = found.setdefault(pool, {})
        of_pool[tenant] = of_pool.get(tenant, Use())._replace(slots=int(slots), jobs=jobs)
    return found


def note_starts(session: Session, started: Iterable[tuple[str, str]], now: datetime) -> None:
    """Write that jobs of these pools and tenants were placed."""
    for pool, tenant in started:
        session.merge(LastStartRow(pool=pool, tenant=tenant, started_at=now))


class Release(NamedTuple):
    """The slots of an attempt, and the seconds until they are free. in_s: None before its steps were measured."""

    slots: int
    in_s: float | None


class Loan(NamedTuple):
    """An attempt that makes way for the job ahead: on slots that were lent (priority None), or for one of a higher priority."""

    attempt_id: str
    pool: str
    workers: int
    priority: int | None = None

    def makes_way_for(self, priority: int) -> bool:
        return self.priority is None or self.priority < priority


def loans(transaction: Transaction, preempting: Iterable[str] = ()) -> list[Loan]:
    """List the attempts on lent slots that nobody has asked to end, in the order in which they give them back.

    preempting: pools whose other attempts are listed too, with their priorities.
    """
    return [Loan(*row) for row in connection_of(transaction).execute(_LOANS, {"preempting": list(preempting)})]


def slots_leaving(transaction: Transaction) -> dict[str, int]:
    """Count the slots of attempts that have ended or were asked to, by pool. They are free soon."""
    return {pool: int(slots) for pool, slots in connection_of(transaction).execute(_LEAVING)}


def releases(transaction: Transaction, pools: Iterable[str], now: datetime) -> dict[str, list[Release]]:
    """List the attempts that hold slots, by pool, each with the time that its training still takes."""
    found: dict[str, list[Release]] = {}
    rows = connection_of(transaction).execute(_RELEASES, {"pools": list(pools)})
    for pool, slots, goes_on, last_step, remaining_s, reported_at in rows:
        left_s = None
        if last_step is not None and remaining_s is not None and reported_at is not None:
            left_s = max(0.0, remaining_s - (now - reported_at).total_seconds())
        found.setdefault(pool, []).append(Release(slots, left_s if goes_on else 0.0))
    return found


def end_loans(session: Session, pool: str) -> None:
    """Give the attempts of a pool the slots that they were lent: nobody waits ahead of them."""
    session.execute(update(AttemptRow).where(AttemptRow.pool == pool, AttemptRow.is_lent, _HOLDS_SLOTS).values(is_lent=False))


def slots_used(transaction: Transaction) -> dict[str, int]:
    """Count the slots that attempts hold, by pool."""
    return {pool: sum(use.slots for use in uses.values()) for pool, uses in use_by_tenant(transaction).items()}


def slots_present(transaction: Transaction) -> dict[str, int]:
    """The slots of each pool, as the cluster last counted them."""
    return {pool: slots for pool, slots in connection_of(transaction).execute(_SLOTS_PRESENT)}


def capacities(transaction: Transaction) -> list[PoolCapacity]:
    """Return what the cluster last had for each pool."""
    rows = connection_of(transaction).execute(_CAPACITIES)
    return [
        PoolCapacity(pool=pool, slots_present=slots, nodes=tuple(nodes or ()), slots_without_device=missing)
        for pool, slots, nodes, missing in rows
    ]


def set_capacities(session: Session, capacities: Iterable[PoolCapacity], now: datetime) -> None:
    for each in capacities:
        fields = each.model_dump() | {"nodes": list(each.nodes)}
        session.merge(PoolCapacityRow(**fields, observed_at=now))


def attempts_to_launch(session: Session, now: datetime) -> list[AttemptRow]:
    """Attempts that are reserved, or whose launch claim expired; oldest first."""
    return list(session.scalars(_TO_LAUNCH, {"now": now}))


def live_attempts(session: Session) -> list[tuple[AttemptRef, AttemptState]]:
    """List the attempts that are not over, with their states; oldest first."""
    rows = session.execute(_LIVE_ATTEMPTS)
    return [(AttemptRef(attempt_id=attempt_id, epoch=epoch), state) for attempt_id, epoch, state in rows]


def shrunk_attempts(session: Session) -> list[ShrunkAttempt]:
    """List the attempts that train with fewer ranks than their elastic jobs may have, and that nobody has cancelled."""
    return [
        ShrunkAttempt(
            AttemptRef(attempt_id=row.id, epoch=row.epoch),
            row.job_id,
            row.pool,
            row.workers,
            _worker_counts(row.spec),
            row.checkpoint_at,
            row.remaining_s,
            (row.first_step_at - row.created_at).total_seconds() if row.first_step_at is not None else 0.0,
        )
        for row in session.execute(_SHRUNK)
    ]


class Limits(NamedTuple):
    """The limits that a job sets itself, each None if it has none."""

    max_slot_hours: float | None
    max_hours: float | None
    max_cost: float | None


class Taken(NamedTuple):
    """The hours for which a job's attempts had slots: for each slot, and for all together."""

    slot_hours: float
    hours: float


class Limited(NamedTuple):
    """A live job with a limit, and what it has taken."""

    job_id: str
    pool: str
    limits: Limits
    taken: Taken


def limited_jobs(session: Session, now: datetime) -> list[Limited]:
    """List the jobs with a limit that have a live attempt, and that nobody has asked to stop."""
    rows = session.execute(_LIMITED)
    return [Limited(job_id, pool, Limits(*limits), taken_by(session, job_id, now)) for job_id, pool, *limits in rows]


def limits_of(job: JobRow) -> Limits:
    """Read the limits of a job."""
    return Limits(*(job.spec["resources"].get(field) for field in Limits._fields))


def taken_by(session: Session, job_id: str, now: datetime) -> Taken:
    """Add up what a job's attempts have taken."""
    attempts = [(slots, begin, end) for slots, begin, end in session.execute(_ATTEMPTS_OF_JOB, {"job_id": job_id})]
    return Taken(hours_of_slots(attempts, now), hours_of_slots([(1, begin, end) for _, begin, end in attempts], now))


def hours_of_slots(attempts: Iterable[tuple[int, datetime, datetime | None]], now: datetime) -> float:
    """Add up the hours of attempts, each for its slots. attempts: slots, begin, and end or None."""
    return sum(slots * ((end or now) - begin).total_seconds() for slots, begin, end in attempts) / 3600


def attempts_to_judge(session: Session, attempt_ids: Sequence[str]) -> list[tuple[AttemptRow, JobRow]]:
    """Find attempts and their jobs. Of the jobs only what is asked of them and since when is read."""
    return [(attempt, job) for attempt, job in session.execute(_TO_JUDGE, {"ids": attempt_ids})]


def count_leases(session: Session, now: datetime) -> tuple[int, int]:
    """Count the leases of live attempts: those that still run, and those that are over."""
    is_held = AttemptRow.lease_expires_at > now
    query = select(func.count().filter(is_held), func.count().filter(~is_held))
    held, overdue = session.execute(query.where(AttemptRow.state.in_(_LIVE), AttemptRow.lease_expires_at.is_not(None))).one()
    return held, overdue


def attempts_to_release(session: Session, now: datetime) -> list[AttemptRow]:
    """Attempts that are over, may still have processes, and are not claimed by a launch that is under way."""
    return list(session.scalars(_TO_RELEASE, {"now": now}))


# The loops of the dispatcher execute these every half second.
_IS_UNCLAIMED = or_(AttemptRow.claim_expires_at.is_(None), AttemptRow.claim_expires_at <= bindparam("now"))
_IS_DUE = or_(AttemptRow.launch_after.is_(None), AttemptRow.launch_after <= bindparam("now"))
_TO_LAUNCH = (
    select(AttemptRow)
    .where(AttemptRow.state.in_([AttemptState.RESERVED, AttemptState.LAUNCHING]), _IS_UNCLAIMED, _IS_DUE)
    .order_by(AttemptRow.id)
)
_TO_RELEASE = (
    select(AttemptRow)
    .where(AttemptRow.state.in_(_OVER), AttemptRow.released_at.is_(None), _IS_UNCLAIMED)
    .order_by(AttemptRow.id)
)
_LIVE_ATTEMPTS = (
    select(AttemptRow.id, AttemptRow.epoch, AttemptRow.state).where(AttemptRow.state.in_(_LIVE)).order_by(AttemptRow.id)
)
_TO_JUDGE = (
    select(AttemptRow, JobRow)
    .join(JobRow, JobRow.id == AttemptRow.job_id)
    .where(AttemptRow.id.in_(bindparam("ids", expanding=True)))
    .options(load_only(JobRow.desired, JobRow.stop_requested_at, raiseload=True))
    .order_by(AttemptRow.id)
)
_LIMITS = [JobRow.spec["resources"][field].as_float() for field in Limits._fields]
_LIMITED = (
    select(JobRow.id, JobRow.pool, *_LIMITS)
    .join(AttemptRow, AttemptRow.job_id == JobRow.id)
    .where(AttemptRow.state.in_(_LIVE), JobRow.desired == DesiredState.RUN, or_(*(each.is_not(None) for each in _LIMITS)))
    .order_by(JobRow.id)
)
_ATTEMPTS_OF_JOB = select(AttemptRow.workers, AttemptRow.created_at, AttemptRow.finished_at).where(
    AttemptRow.job_id == bindparam("job_id")
)
_NEWEST = select(func.max(CheckpointRow.created_at)).where(CheckpointRow.attempt_id == AttemptRow.id).scalar_subquery()
_SHRUNK = (
    select(
        *(AttemptRow.id, AttemptRow.epoch, AttemptRow.job_id, AttemptRow.pool, AttemptRow.workers),
        *(cast(JobRow.spec, Text).label("spec"), _NEWEST.label("checkpoint_at"), JobRow.remaining_s),
        *(AttemptRow.first_step_at, AttemptRow.created_at),
    )
    .join(JobRow, JobRow.id == AttemptRow.job_id)
    .where(AttemptRow.state == AttemptState.RUNNING, JobRow.min_workers.is_not(None))
    .where(AttemptRow.workers < JobRow.workers, JobRow.desired == DesiredState.RUN)
    .order_by(AttemptRow.id)
)
_SLOTS_PRESENT = select(PoolCapacityRow.pool, PoolCapacityRow.slots_present)
_CAPACITIES = select(
    PoolCapacityRow.pool, PoolCapacityRow.slots_present, PoolCapacityRow.nodes, PoolCapacityRow.slots_without_device
)
_HOLDS_SLOTS = AttemptRow.released_at.is_(None)
_LAST_STARTS = select(LastStartRow.pool, LastStartRow.tenant, LastStartRow.started_at)
_USE = (
    select(AttemptRow.pool, JobRow.tenant, func.sum(AttemptRow.workers), func.count())
    .join(JobRow, JobRow.id == AttemptRow.job_id)
    .where(_HOLDS_SLOTS)
    .group_by(AttemptRow.pool, JobRow.tenant)
)
_GOES_ON = AttemptRow.state.in_(_LIVE) & (JobRow.desired == DesiredState.RUN)
_LOANS = (
    select(AttemptRow.id, AttemptRow.pool, AttemptRow.workers, case((AttemptRow.is_lent, null()), else_=JobRow.priority))
    .join(JobRow, JobRow.id == AttemptRow.job_id)
    .where(_HOLDS_SLOTS, _GOES_ON, or_(AttemptRow.is_lent, AttemptRow.pool.in_(bindparam("preempting", expanding=True))))
    .order_by(JobRow.priority, JobRow.id.desc())
)
_RELEASES = (
    select(AttemptRow.pool, AttemptRow.workers, _GOES_ON, AttemptRow.last_step, JobRow.remaining_s, JobRow.reported_at)
    .join(JobRow, JobRow.id == AttemptRow.job_id)
    .where(_HOLDS_SLOTS, AttemptRow.pool.in_(bindparam("pools", expanding=True)))
)
_LEAVING = (
    select(AttemptRow.pool, func.sum(AttemptRow.workers))
    .join(JobRow, JobRow.id == AttemptRow.job_id)
    .where(_HOLDS_SLOTS, ~_GOES_ON)
    .group_by(AttemptRow.pool)
)


def unreleased_among(session: Session, attempt_ids: Iterable[str]) -> set[str]:
    """Select the attempts that may still have processes."""
    query = select(AttemptRow.id).where(AttemptRow.id.in_(list(attempt_ids)), AttemptRow.released_at.is_(None))
    return set(session.scalars(query))


def take_lease(session: Session, name: str, holder: str, token: str | None, lease_s: float, now: datetime) -> str | None:
    """Renew the lease held with `token`, or take it if it is free or over.

    Returns the token to use from now on, or None if another holder leads.
    """
    lease = session.scalars(_LEASE_TO_WRITE, {"name": name}).one_or_none()
    expires_at = now + timedelta(seconds=lease_s)
    if lease is None:
        lease = LeaseRow(name=name, holder=holder, token=secrets.token_hex(16), expires_at=expires_at)
        session.add(lease)
        session.flush()
        return lease.token
    if lease.token == token and lease.expires_at > now:
        lease.expires_at = expires_at
        return lease.token
    if lease.expires_at > now:
        return None
    lease.holder, lease.token, lease.expires_at = holder, secrets.token_hex(16), expires_at
    return lease.token


def holds_lease(session: Session, name: str, token: str, now: datetime) -> bool:
    """True if the holder of `token` leads; the row is locked, so that it leads until this transaction ends."""
    lease = session.scalars(_LEASE_TO_HOLD, {"name": name}).one_or_none()
    return lease is not None and lease.token == token and lease.expires_at > now


def give_up_lease(session: Session, name: str, token: str, now: datetime) -> None:
    session.execute(update(LeaseRow).where(LeaseRow.name == name, LeaseRow.token == token).values(expires_at=now))


def end_lease_of(session: Session, name: str, holder: str, now: datetime) -> None:
    held = (LeaseRow.name == name, LeaseRow.holder == holder, LeaseRow.expires_at > now)
    session.execute(update(LeaseRow).where(*held).values(expires_at=now))


def lease_until(session: Session, name: str) -> datetime | None:
    """Return the end of a lease, which may be over; None if nobody ever held it."""
    lease = session.get(LeaseRow, name)
    return lease.expires_at if lease is not None else None


def lease_is_held(session: Session, name: str, now: datetime) -> bool:
    until = lease_until(session, name)
    return until is not None and until > now


def note_loops(session: Session, holder: str, token: str, seconds_left: Mapping[str, float], now: datetime) -> None:
    """Write until when each loop of the leader has to make progress, each as a lease of its own.

    A row is up to `LOOP_PRECISION` later than that, so that it need not move with every step.
    """
    rows = {row.name: row for row in session.scalars(_LOOPS)}
    for name, left_s in seconds_left.items():
        until, row = now + timedelta(seconds=left_s) + LOOP_PRECISION, rows.get(_LOOP + name)
        if row is None:
            session.add(LeaseRow(name=_LOOP + name, holder=holder, token=token, expires_at=until))
        elif until < row.expires_at or until >= row.expires_at + LOOP_PRECISION:
            row.expires_at = until


def forget_loops(session: Session) -> None:
    session.connection().execute(_FORGET_LOOPS)


def loops_until(session: Session) -> dict[str, datetime]:
    """Return the moment by which each loop of the leader has to make progress; it is over for a loop that stalls."""
    return {row.name.removeprefix(_LOOP): row.expires_at for row in session.scalars(_LOOPS)}


def loops_stalled(session: Session, now: datetime) -> dict[str, bool]:
    """The loops of the leader; true for a loop that has made no progress for too long."""
    return {name: until <= now for name, until in loops_until(session).items()}


_LEASE = select(LeaseRow).where(LeaseRow.name == bindparam("name")).execution_options(populate_existing=True)
_LEASE_TO_WRITE, _LEASE_TO_HOLD = _LEASE.with_for_update(), _LEASE.with_for_update(read=True)
_LOOPS = select(LeaseRow).where(LeaseRow.name.startswith(_LOOP)).order_by(LeaseRow.name)
_FORGET_LOOPS = delete(LeaseRow).where(LeaseRow.name.startswith(_LOOP))
_BREAK_CLAIMS = update(AttemptRow).where(AttemptRow.claim_token.is_not(None)).values(claim_token=None, claim_expires_at=None)


def break_claims(session: Session) -> None:
    """Free everything that the former leader had claimed. Its late results are then discarded."""
    session.connection().execute(_BREAK_CLAIMS)
