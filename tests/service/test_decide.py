"""Which jobs run next, and the reasons that the others are given."""

import itertools
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octet.api_schemas import FailureReason
from octet.api_schemas.resources import TenantConfig
from octet.service.scheduling.decide import Decision, PoolState, Space, decide, to_reclaim
from octet.service.store.queue import Loan, Use

NOW = datetime(2026, 1, 31, 12, 0, tzinfo=UTC)


@dataclass(frozen=True)
class Job:
    id: str
    workers: int = 1
    priority: int = 50
    pool: str = "cpu"
    tenant: str = "default"
    not_before: datetime | None = None
    former_attempt_at_large: bool = False
    former_lease_expires_at: datetime | None = None
    former_reason: FailureReason | None = None
    elastic_counts: tuple[int, ...] = ()

    @property
    def worker_counts(self) -> tuple[int, ...]:
        return self.elastic_counts or (self.workers,)


ONE, TWO = "one", "two"


def shared(*jobs: Job, slots: int = 8, used: dict[str, Use] | None = None, **tenants: TenantConfig) -> dict[str, Decision]:
    """Decide about the jobs of several tenants in one pool."""
    pool = PoolState("cpu", slots, slots, used or {}, tenants, backfills=False)
    return {each.job_id: each for each in decide(jobs, [pool], NOW, lease_grace_s=15)}


def decided(*jobs: Job, slots: int = 4, present: int | None = 4, used: int = 0) -> dict[str, Decision]:
    pool = PoolState("cpu", slots, present, {"default": Use(used, used)}, backfills=False)
    return {each.job_id: each for each in decide(jobs, [pool], NOW, lease_grace_s=15)}


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
    pools = [PoolState("cpu", 1, 1, {"default": Use(1, 1)}), PoolState("h100", 8, 8)]
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


def test_a_pool_that_promises_devices_which_its_nodes_do_not_have_says_so_in_every_job_that_waits() -> None:
    pool, lacks = PoolState("h100", 8, 3, without_device=5), "(5 of 8 are on nodes that have no GPU for them; ask the operator)"
    found = decide([Job("a", pool="h100", workers=8), Job("b", pool="h100", workers=4)], [pool], NOW, 15)
    assert [each.why for each in found] == [
        f"needs 8 slots of pool 'h100'; 3 of 3 are free {lacks}",
        f"behind a job that needs 8 slots of pool 'h100'; 3 of 3 are free {lacks}. It is a",
    ]


def test_nothing_is_placed_before_the_cluster_has_spoken() -> None:
    assert "has not yet said" in str(decided(Job("a"), present=None)["a"].why)


def test_a_pool_that_was_removed() -> None:
    assert "not configured any more" in str(decide([Job("a", pool="gone")], [], NOW, 15)[0].why)


def test_more_nodes_than_configured_do_not_raise_the_limit() -> None:
    assert started(decided(Job("a", workers=5), present=8)) == []


@pytest.mark.parametrize(("free_bytes", "starts"), [(99 << 20, False), (100 << 20, True)])
def test_a_job_that_found_the_disk_full_waits_for_space_and_holds_nobody_back(free_bytes: int, starts: bool) -> None:
    jobs = [Job("a", former_reason=FailureReason.STORAGE_FULL), Job("b", former_reason=FailureReason.CLUSTER_LOST)]
    full, other = decide(jobs, [PoolState("cpu", 4, 4)], NOW, 15, Space(free_bytes, needed_bytes=100 << 20))
    assert (full.why is None, other.why) == (starts, None)
    assert starts or str(full.why).startswith("found the disk full; 99 MiB are free there and 100 MiB have to be")


def jobs_of(tenant: str, count: int, first: str, **more: Any) -> list[Job]:
    return [Job(f"{first}{number}", tenant=tenant, **more) for number in range(count)]


def test_tenants_take_turns_by_the_slots_that_they_have() -> None:
    """One that has queued a hundred jobs first keeps nobody waiting."""
    flood, few = jobs_of(ONE, 100, "a", workers=1), jobs_of(TWO, 3, "b", workers=2)
    assert started(shared(*flood, *few)) == ["a0", "b0", "a1", "b1", "a10", "a11"]
    in_use = {ONE: Use(6, 6)}
    assert started(shared(*flood, *few, slots=14, used=in_use)) == ["b0", "b1", "b2", "a0", "a1"]


def test_shares_are_weights() -> None:
    jobs = [*jobs_of(ONE, 30, "a"), *jobs_of(TWO, 30, "b")]
    decisions = shared(*jobs, slots=12, one=TenantConfig(share=3))
    of_one = [job_id for job_id in started(decisions) if job_id.startswith("a")]
    assert (len(of_one), len(started(decisions))) == (9, 12)


def test_slots_that_nobody_else_wants_are_borrowed() -> None:
    assert len(started(shared(*jobs_of(ONE, 30, "a"), slots=12, two=TenantConfig(share=100)))) == 12


def test_priority_comes_before_shares() -> None:
    jobs = [Job("a", tenant=ONE, priority=60), Job("b", tenant=TWO)]
    assert started(shared(*jobs, slots=9, used={ONE: Use(8, 8)})) == ["a"]


def test_a_limit_of_slots_holds_back_its_tenant_alone() -> None:
    jobs = [Job("a", 3, tenant=ONE), Job("b", 1, tenant=ONE), Job("c", 4, tenant=TWO), Job("d", 2, tenant=TWO, priority=10)]
    decisions = shared(*jobs, used={ONE: Use(2, 1)}, one=TenantConfig(slots=4))
    assert started(decisions) == ["c", "d"]
    assert decisions["a"].why == "needs 3 slots; tenant 'one' has 2 of the 4 that it may take in pool 'cpu'"
    assert decisions["b"].why == "a of the same tenant is ahead in pool 'cpu' and waits for the tenant's limit"
    assert {name: each.position for name, each in decisions.items()} == {"c": 1, "a": 2, "d": 3, "b": 4}
    assert not any(each.holds_back for each in decisions.values())


def test_a_limit_of_jobs() -> None:
    decisions = shared(*jobs_of(ONE, 3, "a"), used={ONE: Use(4, 2)}, one=TenantConfig(jobs=3))
    assert started(decisions) == ["a0"]
    assert decisions["a1"].why == "tenant 'one' has 3 jobs in pool 'cpu', which is its limit"


def test_an_elastic_job_takes_no_more_than_its_tenant_may() -> None:
    elastic = Job("a", workers=8, tenant=ONE, elastic_counts=(8, 4, 2))
    assert shared(elastic, one=TenantConfig(slots=5))["a"].workers == 4


def test_a_tenant_is_not_told_whose_job_is_ahead() -> None:
    jobs = [Job("a", 8, tenant=ONE), Job("b", 1, tenant=TWO), Job("c", 1, tenant=ONE)]
    decisions = shared(*jobs, used={"three": Use(4, 1), TWO: Use(1, 1)})
    assert decisions["b"].why == "behind a job that needs 8 slots of pool 'cpu'; 3 of 8 are free. It is of another tenant"
    assert decisions["c"].why == "behind a job that needs 8 slots of pool 'cpu'; 3 of 8 are free. It is a"


TENANTS = (ONE, TWO, "three")
JOBS = st.lists(
    st.builds(
        lambda tenant, workers, priority, fewest: (tenant, workers, priority, min(fewest, workers)),
        st.sampled_from(TENANTS),
        st.integers(1, 8),
        st.sampled_from((50, 50, 50, 90)),
        st.integers(1, 8),
    ),
    max_size=30,
)
CONFIGS = st.dictionaries(
    st.sampled_from(TENANTS),
    st.builds(
        TenantConfig,
        share=st.sampled_from((0.5, 1.0, 3.0)),
        slots=st.none() | st.integers(1, 12),
        jobs=st.none() | st.integers(1, 5),
    ),
)
USES = st.dictionaries(st.sampled_from(TENANTS), st.builds(Use, st.integers(0, 6), st.integers(0, 6), st.none()))


@given(JOBS, CONFIGS, USES, st.integers(1, 16))
def test_no_decision_takes_more_than_there_is(
    given_jobs: list[tuple[str, int, int, int]], tenants: dict[str, TenantConfig], used: dict[str, Use], slots: int
) -> None:
    """Every job is decided about once; gangs are whole; neither the pool nor a tenant gets more than it may have."""
    jobs = [
        Job(f"{number:02}", workers, priority, tenant=tenant, elastic_counts=tuple(range(workers, fewest - 1, -1)))
        for number, (tenant, workers, priority, fewest) in enumerate(given_jobs)
    ]
    decisions = shared(*jobs, slots=slots, used=used, **tenants)
    assert sorted(decisions) == [job.id for job in jobs]
    assert [each.position for each in decisions.values()] == list(range(1, len(jobs) + 1))
    by_id, taken = {job.id: job for job in jobs}, dict.fromkeys(TENANTS, (0, 0))
    for job_id in started(decisions):
        job, workers = by_id[job_id], decisions[job_id].workers
        assert workers in job.worker_counts
        taken[job.tenant] = taken[job.tenant][0] + workers, taken[job.tenant][1] + 1
    new = sum(slots for slots, _ in taken.values())
    assert new == 0 or new + sum(use.slots for use in used.values()) <= slots
    for tenant, (new_slots, new_jobs) in taken.items():
        config, use = tenants.get(tenant, TenantConfig()), used.get(tenant, Use())
        assert new_slots == 0 or config.slots is None or new_slots + use.slots <= config.slots
        assert new_jobs == 0 or config.jobs is None or new_jobs + use.jobs <= config.jobs
    assert sum(each.holds_back for each in decisions.values()) <= 1


@given(st.lists(st.integers(1, 3), min_size=2, max_size=4), st.integers(8, 40))
def test_tenants_that_all_want_more_get_their_shares_within_a_gang(shares: list[int], slots: int) -> None:
    tenants = {f"tenant{number}": TenantConfig(share=share) for number, share in enumerate(shares)}
    jobs = [job for tenant in tenants for job in jobs_of(tenant, slots, f"{tenant}-", workers=1)]
    decisions = shared(*jobs, slots=slots, **tenants)
    got = {tenant: sum(job_id.startswith(f"{tenant}-") for job_id in started(decisions)) for tenant in tenants}
    assert sum(got.values()) == slots
    for one, other in itertools.permutations(tenants, 2):
        # Without its last job, nobody would have more for its share than anybody else has.
        assert (got[one] - 1) / tenants[one].share <= got[other] / tenants[other].share


@pytest.mark.system
@given(st.lists(st.integers(0, 7), min_size=50, max_size=50))
def test_neither_large_nor_small_jobs_starve(ends: list[int]) -> None:
    """One tenant has sixty small jobs. They are older than those of the other one, which take the whole pool each.

    One job ends at a time. A tenant without any slot gets some as soon as those of the other have ended.
    """
    queue = [*jobs_of(ONE, 60, "a"), *jobs_of(TWO, 60, "b", workers=8)]
    running: list[Job] = []
    last_starts: dict[str, datetime] = {}
    idle = dict.fromkeys((ONE, TWO), 0)
    for number, end in enumerate(ends):
        if running:
            running.pop(end % len(running))
        used = {
            tenant: Use(sum(job.workers for job in running if job.tenant == tenant), 0, last_starts.get(tenant))
            for tenant in (ONE, TWO)
        }
        decisions = shared(*queue, used=used)
        starting = [job for job in queue if decisions[job.id].why is None]
        queue = [job for job in queue if job not in starting]
        running += starting
        last_starts |= {job.tenant: NOW + timedelta(seconds=number) for job in starting}
        for tenant in idle:
            idle[tenant] = 0 if any(job.tenant == tenant for job in running) else idle[tenant] + 1
        assert max(idle.values()) <= 9


def lending(*jobs: Job, own: int = 0, lent: int = 0, leaving: int = 0) -> dict[str, Decision]:
    """Decide in a pool of eight slots. own: slots of attempts that keep them. leaving: of attempts that end."""
    loans = tuple(Loan(f"lent-{number}", "cpu", 1) for number in range(lent))
    pool = PoolState("cpu", 8, 8, {"default": Use(own + lent + leaving, 1)}, loans=loans, leaving=leaving)
    return {each.job_id: each for each in decide(jobs, [pool], NOW, lease_grace_s=15)}


def test_slots_that_the_job_ahead_cannot_use_yet_are_lent() -> None:
    large, *small = Job("a", 8), Job("b", 2), Job("c", 2), Job("d", 1)
    decisions = lending(large, *small, own=5)
    assert {each.job_id: each.borrows for each in decisions.values() if each.why is None} == {"b": True, "d": True}
    assert (decisions["a"].holds_back, decisions["a"].reclaims) == (True, ())
    assert decisions["c"].why == "behind a job that needs 8 slots of pool 'cpu'; 1 of 8 are free. It is a"
    assert not lending(*small, own=5)["b"].borrows


@pytest.mark.parametrize(
    ("own", "lent", "leaving", "short", "borrow"),
    [
        (5, 3, 0, 0, False),  # it does not fit with all that is lent: nobody makes way
        (2, 4, 0, 4, False),  # two are free and it needs six
        (2, 5, 0, 5, False),  # one is free and five are needed
        (2, 3, 3, 3, False),  # none is free and three leave
        (2, 0, 6, 0, False),  # those that leave are enough
        (1, 1, 1, 0, False),  # five are free and one leaves
        (0, 0, 4, 0, True),  # of the four that are free, two are left over
        (1, 0, 5, 0, True),  # of the two that are free one is
        (4, 0, 0, 0, True),  # it has to wait for others: all four are lent
    ],
)
def test_lent_slots_come_back_once_the_job_ahead_fits(own: int, lent: int, leaving: int, short: int, borrow: bool) -> None:
    decisions = lending(Job("a", 6), Job("b", 1), own=own, lent=lent, leaving=leaving)
    assert (decisions["a"].why is None, len(decisions["a"].reclaims), decisions["b"].borrows) == (False, short, borrow)


def preempting(*jobs: Job, running: dict[str, tuple[int, int]]) -> dict[str, Decision]:
    """Decide in a pool of eight slots that preempts. running: attempts by name, each with its slots and its priority."""
    loans = tuple(Loan(name, "cpu", *each) for name, each in sorted(running.items(), key=lambda item: item[1][1]))
    used = {"default": Use(sum(slots for slots, _ in running.values()), len(running))}
    pool = PoolState("cpu", 8, 8, used, loans=loans)
    return {each.job_id: each for each in decide(jobs, [pool], NOW, lease_grace_s=15)}


@pytest.mark.parametrize(
    ("needs", "priority", "make_way"),
    [
        (1, 80, ""),  # one slot is free
        (3, 80, "b"),  # two are missing: the least urgent goes
        (4, 80, "ab"),
        (5, 80, "ab"),
        (6, 80, ""),  # it would not fit if all below it made way
        (3, 20, "b"),
        (4, 20, ""),  # an equal keeps its slots
        (3, 10, ""),
    ],
)
def test_what_is_less_urgent_makes_way_where_the_pool_preempts(needs: int, priority: int, make_way: str) -> None:
    running = {"a": (2, 20), "b": (2, 10), "c": (3, 80)}
    job = preempting(Job("job", needs, priority), running=running)["job"]
    assert "".join(sorted(loan.attempt_id for loan in job.reclaims)) == make_way
    assert (job.why is None) == (needs == 1)


def test_as_few_make_way_as_are_needed() -> None:
    loans = [Loan(name, "cpu", workers) for name, workers in (("a", 1), ("b", 2), ("c", 4))]
    chosen = {short: "".join(loan.attempt_id for loan in to_reclaim(loans, short)) for short in range(8)}
    assert chosen == {0: "", 1: "a", 2: "b", 3: "ab", 4: "c", 5: "bc", 6: "bc", 7: "abc"}


@given(st.integers(2, 8), st.lists(st.integers(1, 3), min_size=1, max_size=8), st.integers(1, 3))
def test_a_loan_delays_the_job_ahead_by_nothing_but_its_own_end(needs: int, own: list[int], rounds_to_end: int) -> None:
    """In each round one attempt that keeps its slots ends. Those on loan take some rounds for their checkpoints."""
    own = [workers for number, workers in enumerate(own) if sum(own[: number + 1]) <= 8]
    queue = [Job("a", needs), *jobs_of("default", 40, "b")]
    lent: list[Loan] = []
    leaving: list[int] = []  # the rounds that each still takes
    fits_since: int | None = None
    for number in range(40):
        if own:
            own.pop()
        leaving = [left - 1 for left in leaving if left > 1]
        if fits_since is None and sum(own) + needs <= 8:
            fits_since = number
        decisions = lending(*queue, own=sum(own), lent=len(lent), leaving=len(leaving))
        if decisions["a"].why is None:
            assert fits_since is not None
            assert number <= fits_since + rounds_to_end
            return
        borrowing = [job_id for job_id, each in decisions.items() if each.borrows]
        ends = {int(loan.attempt_id.removeprefix("lent-")) for loan in decisions["a"].reclaims}
        leaving += [rounds_to_end] * len(ends)
        lent = [loan for number, loan in enumerate(lent) if number not in ends]
        lent += [Loan(job_id, "cpu", 1) for job_id in borrowing]
        queue = [job for job in queue if job.id not in borrowing]
    raise AssertionError("the job ahead never started")
