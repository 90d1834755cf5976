"""Submissions that arrive together are stored together, each exactly once."""

import threading
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from fastapi.testclient import TestClient
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session

from octet.api_schemas import Job, JobSpec
from octet.service import store
from octet.service.db.bulk import Transaction
from octet.service.deps import AppContext
from octet.service.errors import IdempotencyMismatch
from octet.service.jobs import submissions
from octet.service.jobs.requests import Request, Submission
from octet.service.jobs.submissions import Shown, Stored, Submissions
from octet.service.store.ids import is_id, new_id, new_ids
from tests.kit.waiting import LONG_S
from tests.service.databases import ON_SQLITE
from tests.service.invariants import check_invariants
from tests.service.statements import counted
from tests.service.world import World


def show(_transaction: Transaction, pairs: Sequence[tuple[Request, Submission]]) -> list[Shown]:
    return [Shown(submission.job.id, "", starts_soon=False) for _, submission in pairs]


class Gate:
    """Holds the writer's first transaction back until others wait for the next one, and counts transactions."""

    def __init__(self, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        self.began, self.let_go, self.num_transactions = threading.Event(), threading.Event(), 0
        write = submissions.commands.submit_all

        def held(*arguments: Any) -> Any:
            self.num_transactions += 1
            self.began.set()
            assert self.let_go.wait(LONG_S)
            return write(*arguments)

        monkeypatch.setattr(submissions.commands, "submit_all", held)


@ON_SQLITE
def test_what_waits_is_written_in_one_transaction(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, commits = Gate(world, monkeypatch), Submissions(world.database, show)
    other = world.spec.model_copy(update={"priority": 1})
    first = commits.submit(Request(world.spec))
    assert gate.began.wait(LONG_S)
    plain = [commits.submit(Request(world.spec)) for _ in range(5)]
    keyed = [commits.submit(Request(world.spec, "one")) for _ in range(3)]
    mismatched = commits.submit(Request(other, "one"))
    elsewhere = commits.submit(Request(other, "one", "another tenant"))
    cancelled = commits.submit(Request(world.spec))
    assert cancelled.cancel()
    gate.let_go.set()
    ids = [future.result(LONG_S).job.job_id for future in [first, *plain, keyed[0], elsewhere]]
    assert gate.num_transactions == 2
    assert [future.result(LONG_S).replayed for future in keyed] == [False, True, True]
    assert {future.result(LONG_S).job.job_id for future in keyed} == {keyed[0].result().job.job_id}
    with pytest.raises(IdempotencyMismatch):
        mismatched.result(LONG_S)
    assert sorted(row.id for row in world.all_jobs()) == sorted(set(ids))
    for job_id in ids:
        assert [event.type for event in world.events(job_id)] == ["job.accepted"]
    check_invariants(world)


@ON_SQLITE
def test_many_take_a_few_statements_and_one_commit(world: World) -> None:
    commits = Submissions(world.database, show)
    labelled = world.spec.model_copy(update={"labels": {"team": "research"}})
    with counted(world) as counts:
        stored = commits._store([Request(world.spec), Request(labelled), Request(labelled)])
    assert len({answer.job.job_id for answer in stored if not isinstance(answer, Exception)}) == 3
    # What is there, with the id to sort after, then jobs, labels and events, which are one statement on PostgreSQL.
    assert counts == {"statements": 4 if world.database.is_sqlite else 2, "commits": 1}


@ON_SQLITE
def test_the_keys_of_a_group_are_two_statements(world: World) -> None:
    """One forgets keys that have expired, one takes those that are free, however many there are."""
    commits = Submissions(world.database, show)
    (first,) = commits._store([Request(world.spec, "used")])
    world.clock.turn((store.jobs.IDEMPOTENCY_KEPT - timedelta(seconds=1)).total_seconds())
    requests = [Request(world.spec, key) for key in ("b", "a", "c", "a")]
    with counted(world) as counts:
        stored = commits._store(requests)
    assert isinstance(first, Stored)
    assert [answer.replayed for answer in stored if isinstance(answer, Stored)] == [False, False, False, True]
    lookups = counts.pop("statements") - (5 if world.database.is_sqlite else 4)
    assert (counts, lookups) == ({"commits": 1}, 1)  # the job of the repeated request is looked for
    world.clock.turn(2)
    again = commits._store([Request(world.spec, "used"), *requests])
    assert [answer.replayed for answer in again if isinstance(answer, Stored)] == [False, True, True, True, True]
    assert len(world.all_jobs()) == 5
    check_invariants(world)


@ON_SQLITE
def test_one_that_fails_does_not_fail_the_others(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(world, monkeypatch)

    def show_some(transaction: Transaction, pairs: Sequence[tuple[Request, Submission]]) -> list[Shown]:
        if any(request.spec.name == "bad" for request, _ in pairs):
            raise RuntimeError("cannot be shown")
        return show(transaction, pairs)

    commits = Submissions(world.database, show_some)
    first = commits.submit(Request(world.spec))
    assert gate.began.wait(LONG_S)
    bad = commits.submit(Request(JobSpec.model_validate(world.spec.model_dump() | {"name": "bad"})))
    good = commits.submit(Request(world.spec))
    gate.let_go.set()
    with pytest.raises(RuntimeError, match="cannot be shown"):
        bad.result(LONG_S)
    assert {row.id for row in world.all_jobs()} == {first.result(LONG_S).job.job_id, good.result(LONG_S).job.job_id}


@ON_SQLITE
def test_a_database_that_may_have_committed_is_not_asked_twice(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def lose(_session: Session, requests: Sequence[Request], *_: Any) -> Any:
        tried.append(len(requests))
        raise OperationalError("COMMIT", {}, Exception("the connection was lost"))

    gate = Gate(world, monkeypatch)
    commits = Submissions(world.database, show)
    first = commits.submit(Request(world.spec))
    assert gate.began.wait(LONG_S)
    lost = [commits.submit(Request(world.spec)) for _ in range(2)]
    monkeypatch.setattr(submissions.commands, "submit_all", lose)
    gate.let_go.set()
    first.result(LONG_S)
    for future in lost:
        with pytest.raises(OperationalError):
            future.result(LONG_S)
    assert tried == [2]


def test_positions_are_those_of_the_whole_queue(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    for priority in (50, 10, 90, 50, 10, 50, 90, 50):
        world.clock.turn(0.01)
        world.submit(priority=priority)
    jobs = sorted(world.all_jobs(), key=lambda job: (-job.priority, job.id))
    expected = {job.id: number for number, job in enumerate(jobs, start=1)}
    for few in (1000, 3, 0):
        monkeypatch.setattr(store.queue, "FEW_BEHIND", few)
        with world.database.read() as session:
            for chosen in (jobs, jobs[::2], jobs[3:4], jobs[1:6:3], []):
                assert store.queue.positions(session, chosen, {"cpu": 8}) == {job.id: expected[job.id] for job in chosen}


def test_the_head_is_the_beginning_of_the_queue(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    for priority in (50, 10, 90, 50, 10, 50, 90, 50):
        world.clock.turn(0.01)
        world.submit(priority=priority)
    in_order = [job.id for job in sorted(world.all_jobs(), key=lambda job: (-job.priority, job.id))]
    for length in range(1, 10):
        for name in ("HEAD_OF_QUEUE", "SHORTEST_HEAD"):
            monkeypatch.setattr(store.queue, name, length)
        with world.database.read() as session:
            assert [job.id for job in store.queue.head_of_queue(session, "cpu")] == in_order[:length]


@ON_SQLITE
@pytest.mark.parametrize("level", ["O2", "fp32"])
def test_the_answer_is_the_job_as_it_is_read_later(client: TestClient, spec_document: dict[str, Any], level: str) -> None:
    """The answer is not rendered by the contract; a field that is missing, or in another order, would show here."""
    document = spec_document | {"precision": {"level": level}, "labels": {"team": 'ü "quoted"'}, "priority": 7}
    answer = client.post("/v1/jobs", json=document)
    read = client.get(answer.headers["Location"])
    assert answer.text == read.text == Job.model_validate_json(read.text).model_dump_json()


def test_new_ids_sort_after_each_other_and_after_the_last() -> None:
    now = datetime(2026, 1, 2, tzinfo=UTC)
    last = new_id("job", now + timedelta(hours=1))
    ids = new_ids("job", now, 50, after=last)
    assert sorted({last, *ids}) == [last, *ids]
    assert all(is_id("job", id_) for id_ in ids)
    assert len(new_ids("evt", now, 1)) == 1
    assert new_ids("evt", now, 0) == []


@ON_SQLITE
def test_the_queue_is_read_once_for_a_group(client: TestClient, world: World) -> None:
    """The places of many new jobs take as many statements as those of a few."""
    context: AppContext = client.app.state.context  # type: ignore[attr-defined]
    counted_by_size = []
    for size in (1, 3, 12):
        with counted(world) as counts:
            context.submissions._store([Request(world.spec) for _ in range(size)])
        counted_by_size.append(counts)
    assert counted_by_size[1] == counted_by_size[2]
    assert counted_by_size[1]["commits"] == 1


@ON_SQLITE
@pytest.mark.parametrize("num_workers", [1, 2], ids=["all-start", "one-waits"])
def test_new_jobs_learn_what_a_reader_of_the_whole_queue_learns(
    client: TestClient, world: World, spec_document: dict[str, Any], num_workers: int
) -> None:
    for number in range(12):
        workers = num_workers if number % 3 == 1 else 1
        changes = {"priority": 50 + number % 4 * 10, "resources": {"pool": "cpu", "workers": workers}}
        answer = client.post("/v1/jobs", json=spec_document | changes)
        assert answer.json()["queue"] == client.get(answer.headers["Location"]).json()["queue"]
