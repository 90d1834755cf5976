"""Random lives by a plain generator: few in `make test`, 10⁵ transitions in the matrix, 10⁶ by `make chaos`."""

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import update
from sqlalchemy.orm import Session

from octet.api_schemas import AttemptRef, JobState
from octet.service import store
from octet.service.db.engine import Database
from octet.service.db.tables import AttemptRow, JobRow
from octet.service.dispatcher import release
from octet.service.dispatcher.context import DispatcherContext
from octet.service.jobs import attempts
from tests.chaos.transitions import LIFE, RULES, LifeBroken, live, live_in_processes, live_on, slices_of, sqlite_url
from tests.service.test_stateful import ControlPlane


@pytest.fixture
def url() -> Iterator[str]:
    with sqlite_url() as url:
        database = Database(url)
        database.migrate()
        database.close()
        yield url


def test_random_lives_break_no_invariant(url: str) -> None:
    counts = live_on(url, 11, 3 * LIFE)
    assert counts.total() == 3 * LIFE
    assert counts.keys() == RULES.keys()


@pytest.mark.matrix
@pytest.mark.timeout(7200)
def test_many_random_lives_break_no_invariant() -> None:
    slices = live_in_processes(slices_of("sqlite", 11, 100_000, 10_000), os.cpu_count() or 1)
    counts = sum((Counter(ended.counts) for ended in slices), Counter[str]())
    assert counts.total() == 100_000
    assert counts.keys() == RULES.keys()


def test_the_rules_are_those_that_hypothesis_draws() -> None:
    assert RULES.keys() == {rule.function.__name__ for rule in ControlPlane.setup_state().rules}


def test_the_slices_hold_each_life_once() -> None:
    slices = slices_of("sqlite", 7, 10 * LIFE + 1, 4 * LIFE)
    assert [(slice_.seed, slice_.transitions) for slice_ in slices] == [(7, 4 * LIFE), (11, 4 * LIFE), (15, 3 * LIFE)]


@pytest.mark.system
def test_each_slice_is_a_line_of_the_file_of_progress(tmp_path: Path) -> None:
    """A later run adds its lines to those of an earlier one."""
    progress = tmp_path / "lives.jsonl"
    for seed, num_lives in ((11, 2), (13, 1)):
        for _ in live_in_processes(slices_of("sqlite", seed, num_lives * LIFE, LIFE), 1, progress):
            pass
    lines = [json.loads(line) for line in progress.read_text().splitlines()]
    assert sorted(line["seed"] for line in lines) == [11, 12, 13]
    assert all(sum(line["counts"].values()) == LIFE and line["broken"] is None for line in lines)


def double_an_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots are freed, and the next attempt starts, without the processes of the former one being stopped."""

    def free_the_slots(context: DispatcherContext, ref: AttemptRef) -> None:
        with context.write() as (session, now):
            locked = store.jobs.lock_attempt(session, ref.attempt_id)
            assert locked is not None
            locked[1].released_at = now

    monkeypatch.setattr(release, "_release", free_the_slots)


def reserve_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that is placed gets two attempts."""
    reserve = attempts.reserve

    def twice(session: Session, job: JobRow, now: datetime, workers: int, free: int, *, is_lent: bool) -> None:
        reserve(session, job, now, workers, free, is_lent=is_lent)
        job.state = JobState.QUEUED
        reserve(session, job, now, workers, free, is_lent=is_lent)

    monkeypatch.setattr(attempts, "reserve", twice)


def lose_an_event(monkeypatch: pytest.MonkeyPatch) -> None:
    """The event of a retry gets its number and is not written."""
    add_event = store.jobs.add_event

    def add_or_lose(session: Session, job: JobRow, at: datetime, type_: str, message: str, **more: Any) -> None:
        if type_ == "job.queued":
            job.last_event_seq += 1
        else:
            add_event(session, job, at, type_, message, **more)

    monkeypatch.setattr(store.jobs, "add_event", add_or_lose)


def renew_a_lease_after_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lease of an attempt that is over is renewed once more, when its slots are freed."""
    free_the_slots = release._release

    def renew_and_free(context: DispatcherContext, ref: AttemptRef) -> None:
        with context.write() as (session, now):
            renewed = update(AttemptRow).where(AttemptRow.id == ref.attempt_id)
            session.execute(renewed.values(lease_expires_at=now + timedelta(seconds=60)))
        free_the_slots(context, ref)

    monkeypatch.setattr(release, "_release", renew_and_free)


@pytest.mark.parametrize(
    ("plant", "found"),
    [
        pytest.param(double_an_attempt, "two attempts of a job may train at once|not settled", marks=pytest.mark.system),
        (reserve_twice, "UNIQUE constraint failed: attempts.job_id"),
        (lose_an_event, "event numbers have gaps"),
        (renew_a_lease_after_its_end, "a lease was renewed after its attempt's end"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_fault_of_the_service_is_found(
    url: str, plant: Callable[[pytest.MonkeyPatch], None], found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    with pytest.raises(LifeBroken, match=found):
        live_on(url, 11, 20 * LIFE)


def test_a_life_that_breaks_names_its_seed(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One event is skipped; the invariants notice, and the message says how to live that life again."""

    def skip_an_event(machine: ControlPlane, seconds: float) -> None:
        with machine.world.database.write() as session:
            session.execute(update(JobRow).values(last_event_seq=JobRow.last_event_seq + 1))

    monkeypatch.setattr(ControlPlane, "time_passes", skip_an_event)
    with pytest.raises(LifeBroken, match=r"the life of seed 12 broke after \d+ transitions, at last \[.*'time_passes'\]"):
        live(url, 12)
