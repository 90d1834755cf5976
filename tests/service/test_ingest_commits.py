"""Batches that arrive together are applied together, each as if it were alone."""

import threading
from typing import Any

import anyio
import pytest

from octet.api_schemas import FinishedReport, JobState
from octet.service.app import create_app
from octet.service.db.group_commit import GroupCommit
from octet.service.errors import InvalidRequest, StaleAttempt, Unauthenticated
from octet.service.ingest import app
from octet.service.ingest.app import AttemptTokens, Ingest
from octet.service.ingest.apply import Applied
from octet.service.ingest.batches import SentBatch
from tests.kit.waiting import LONG_S
from tests.service.invariants import check_invariants
from tests.service.simulation import curve
from tests.service.world import Rank, World, step

Commits = GroupCommit[SentBatch, Applied]


@pytest.fixture
def commits(world: World) -> Commits:
    ingest: Ingest = create_app(world.settings, database=world.database).state.ingest
    return ingest.commits


class Gate:
    """Holds the first transaction back until others wait for the next one, and counts transactions."""

    def __init__(self, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        self.began, self.let_go, self.num_transactions = threading.Event(), threading.Event(), 0
        turn = world.database._turn_to_write

        def held() -> Any:
            self.num_transactions += 1
            self.began.set()
            assert self.let_go.wait(LONG_S)
            return turn()

        monkeypatch.setattr(world.database, "_turn_to_write", held)


def sent(rank: Rank, *bodies: Any, token: str | None = None) -> SentBatch:
    made = rank.sent(rank.batch(*bodies))
    return made._replace(token=token) if token else made


def test_each_is_answered_for_itself(world: World, commits: Commits, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs, ranks = zip(*(world.start(name=f"job-{number}", pool="h100") for number in range(3)), strict=True)
    gate = Gate(world, monkeypatch)
    first = commits.submit(sent(ranks[0], step(1)))
    assert gate.began.wait(LONG_S)
    good = [commits.submit(sent(rank, step(2 if rank is ranks[0] else 1))) for rank in ranks[:2]]
    in_the_middle = commits.submit(sent(ranks[2], step(1), FinishedReport(outcome="succeeded"), step(2)))
    wrong = commits.submit(sent(ranks[1], token="wrong"))
    beat = commits.submit(sent(ranks[1]))
    cancelled = commits.submit(sent(ranks[1]))
    assert cancelled.cancel()
    gate.let_go.set()
    assert [future.result(LONG_S).acknowledged_seq for future in (first, *good, beat)] == [2, 3, 2, 2]
    with pytest.raises(InvalidRequest, match="after 'finished'"):
        in_the_middle.result(LONG_S)
    with pytest.raises(Unauthenticated):
        wrong.result(LONG_S)
    assert gate.num_transactions == 2
    assert [curve(world, job) for job in jobs] == [[1, 2], [1], []]
    assert [world.job(job).state for job in jobs] == [JobState.RUNNING] * 3
    check_invariants(world)


def test_what_comes_after_the_end_in_the_same_transaction_is_stale(
    world: World, commits: Commits, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, rank = world.start()
    gate = Gate(world, monkeypatch)
    first = commits.submit(sent(rank, step(1)))
    assert gate.began.wait(LONG_S)
    later = [commits.submit(sent(rank, step(2), FinishedReport(outcome="succeeded"))), commits.submit(sent(rank, step(3)))]
    gate.let_go.set()
    first.result(LONG_S)
    later[0].result(LONG_S)
    with pytest.raises(StaleAttempt):
        later[1].result(LONG_S)
    assert curve(world, job) == [1, 2]
    assert world.job(job).state is JobState.SUCCEEDED


def test_a_transaction_has_a_limit(world: World, commits: Commits, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commits, "_max_weight", 50)
    job, rank = world.start()
    gate = Gate(world, monkeypatch)
    first = commits.submit(sent(rank))
    assert gate.began.wait(LONG_S)
    rest = [commits.submit(sent(rank, *(step(number) for number in range(10 * part + 1, 10 * part + 11)))) for part in range(5)]
    gate.let_go.set()
    for future in (first, *rest):
        future.result(LONG_S)
    assert gate.num_transactions == 1 + 3  # each batch of ten weighs 30
    assert curve(world, job) == list(range(1, 51))


def test_a_token_is_remembered_once_it_was_right(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "TOKENS_KEPT", 2)
    known = AttemptTokens(world.database)
    ranks = [world.start(name=f"job-{number}", pool="h100")[1] for number in range(3)]
    attempt_id, token = ranks[0].order.attempt_id, ranks[0].order.token

    def verify(attempt_id: str, token: str) -> bool:
        return anyio.run(known.verify, attempt_id, token)

    assert not known.is_remembered(attempt_id, token)
    assert not verify(attempt_id, "wrong")
    assert not known.is_remembered(attempt_id, "wrong")
    assert not verify("att_nobody", token)
    assert verify(attempt_id, token)
    assert known.is_remembered(attempt_id, token)
    assert not known.is_remembered(attempt_id, "wrong")
    for rank in ranks[1:]:
        assert verify(rank.order.attempt_id, rank.order.token)
    assert [known.is_remembered(rank.order.attempt_id, rank.order.token) for rank in ranks] == [False, True, True]
