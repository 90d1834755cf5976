"""Which jobs run next, and the reasons that the others are given."""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import pytest

from octet.api_schemas import FailureReason
from octet.service.scheduling.decide import Decision, PoolState, Space, decide

NOW = datetime(2026, 1, 31, 12, 0, tzinfo=UTC)


@dataclass(frozen=True)
class Job:
    id: str
    workers: int = 1
    priority: int = 50
    pool: str = "cpu"
    not_before: datetime | None = None
    former_attempt_at_large: bool = False
    former_lease_expires_at: datetime | None = None
    former_reason: FailureReason | None = None
    elastic_counts: tuple[int, ...] = ()

    @property
    def worker_counts(self) -> tuple[int, ...]:
        return self.elastic_counts or (self.workers,)


def decided(*jobs: Job, slots: int = 4, present: int | None = 4, used: int = 0) -> dict[str, Decision]:
    return {each.job_id: each for each in decide(jobs, [PoolState("cpu", slots, present, used)], NOW, lease_grace_s=15)}


def started(decisions: dict[str, Decision]) -> list[str]:
    return [job_id for job_id, decision in decisions.items() if decision.why is None]


def test_priority_then_age() -> None:
    decisions = decided(Job("b"), Job("a"), Job("c", priority=90), slots=2, present=2)
    assert started(decisions) == ["c", "a"]
    assert {job_id: decision.position for job_id, decision in decisions.items()} == {"c": 1, "a": 2, "b": 3}


def test_all_workers_or_none() -> None:
    decisions = decided(Job("a", workers=3), used=2)
    assert decisions["a"].why == "needs 3 slots of pool 'cpu'; 2 of 4 are free"


def test_an_elastic_job_takes_the_most_that_is_free_and_waits_for_the_least() -> None:
    elastic = Job("a", workers=4, elastic_counts=(4, 2))
    for used, workers in ((0, 4), (1, 2), (2, 2)):
        decisions = decided(elastic, Job("b"), used=used)
        assert (decisions["a"].why, decisions["a"].workers, decisions["a"].free) == (None, workers, 4 - used)
        assert (decisions["b"].why is None) == (4 - used > workers)
    decisions = decided(elastic, Job("b"), used=3)
    assert decisions["a"].why == "needs 2 slots of pool 'cpu'; 1 of 4 are free"
    assert decisions["b"].why == "behind a job that needs 2 slots of pool 'cpu'; 1 of 4 are free. It is a"


def test_a_large_job_is_not_overtaken() -> None:
    decisions = decided(Job("a", workers=4), Job("b"), used=1)
    assert started(decisions) == []
    assert decisions["b"].why == "behind a job that needs 4 slots of pool 'cpu'; 3 of 4 are free. It is a"


def test_pools_do_not_hold_each_other_back() -> None:
    pools = [PoolState("cpu", 1, 1, 1), PoolState("h100", 8, 8, 0)]
    decisions = decide([Job("a"), Job("b", pool="h100")], pools, NOW, 15)
    assert [each.job_id for each in decisions if each.why is None] == ["b"]


@pytest.mark.parametrize(
    ("job", "words"),
    [
        (Job("a", not_before=NOW + timedelta(seconds=3)), "backs off after a failure, for another 3 s"),
        (Job("a", former_attempt_at_large=True), "not certain to be over"),
        (Job("a", former_attempt_at_large=True, former_lease_expires_at=NOW - timedelta(seconds=15)), "not certain to be over"),
    ],
)
def test_a_job_that_waits_for_itself_holds_back_nobody(job: Job, words: str) -> None:
    decisions = decided(job, Job("b", workers=4))
    assert words in str(decisions["a"].why)
    assert started(decisions) == ["b"]


def test_a_lease_that_is_over_for_certain_frees_the_job() -> None:
    dead = Job("a", former_attempt_at_large=True, former_lease_expires_at=NOW - timedelta(seconds=16))
    assert started(decided(dead)) == ["a"]


def test_nodes_that_are_away_are_named() -> None:
    decisions = decided(Job("a", workers=3), present=2)
    assert decisions["a"].why == "needs 3 slots of pool 'cpu'; 2 of 2 are free (2 of 4 are away)"


def test_nothing_is_placed_before_the_cluster_has_spoken() -> None:
    assert "has not yet said" in str(decided(Job("a"), present=None)["a"].why)


def test_a_pool_that_was_removed() -> None:
    assert "not configured any more" in str(decide([Job("a", pool="gone")], [], NOW, 15)[0].why)


def test_more_nodes_than_configured_do_not_raise_the_limit() -> None:
    assert started(decided(Job("a", workers=5), present=8)) == []


@pytest.mark.parametrize(("free_bytes", "starts"), [(99 << 20, False), (100 << 20, True)])
def test_a_job_that_found_the_disk_full_waits_for_space_and_holds_nobody_back(free_bytes: int, starts: bool) -> None:
    jobs = [Job("a", former_reason=FailureReason.STORAGE_FULL), Job("b", former_reason=FailureReason.CLUSTER_LOST)]
    full, other = decide(jobs, [PoolState("cpu", 4, 4, 0)], NOW, 15, Space(free_bytes, needed_bytes=100 << 20))
    assert (full.why is None, other.why) == (starts, None)
    assert starts or str(full.why).startswith("found the disk full; 99 MiB are free there and 100 MiB have to be")
