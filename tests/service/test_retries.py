"""Budgets of failures by reason, crash loops and back-off: the decision as properties, and what becomes of a job."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octet.api_schemas import Blame, FailureReason, FinishedReport, JobSpec, JobState, RetrySpec
from octet.api_schemas.planned_states import validated
from octet.service import store
from octet.service.jobs.retries import CRASH_LOOP, LONGEST_BACKOFF_S, FailedAttempt, budget_of, judge
from tests.service.databases import ON_SQLITE
from tests.service.world import Rank, World

RETRYABLE = [reason for reason in FailureReason if reason.retryable]
PLATFORM = [reason for reason in RETRYABLE if reason.blame is Blame.PLATFORM]
OF_JOB = [reason for reason in RETRYABLE if reason.blame is Blame.JOB]

retry_specs = st.builds(
    RetrySpec,
    max_failures=st.integers(0, 5),
    by_reason=st.dictionaries(st.sampled_from(RETRYABLE), st.integers(0, 5), max_size=3),
)
counts_of_failures = st.dictionaries(st.sampled_from([*FailureReason]), st.integers(0, 30))
draws = st.floats(0, 1)


def alone(reason: FailureReason) -> list[FailedAttempt]:
    return [FailedAttempt(reason, None, None)]


@given(retry_specs, counts_of_failures, st.sampled_from(RETRYABLE), draws)
def test_a_reason_with_a_budget_of_its_own_is_tried_again_exactly_so_often(
    retry: RetrySpec, counts: dict[FailureReason, int], reason: FailureReason, draw: float
) -> None:
    retry = retry.model_copy(update={"by_reason": retry.by_reason | {reason: 3}})
    for count in range(1, 7):
        verdict = judge(retry, counts | {reason: count}, alone(reason), draw)
        assert (verdict.wait_s is not None) == (count <= 3)


@given(retry_specs, counts_of_failures, counts_of_failures, st.sampled_from(OF_JOB), draws)
def test_faults_of_the_platform_use_up_nothing_of_the_job(
    retry: RetrySpec, counts: dict[FailureReason, int], others: dict[FailureReason, int], reason: FailureReason, draw: float
) -> None:
    counts = counts | {reason: counts.get(reason, 0) + 1}
    more = counts | {each: count for each, count in others.items() if each.blame is Blame.PLATFORM}
    before, after = judge(retry, counts, alone(reason), draw), judge(retry, more, alone(reason), draw)
    assert (before.wait_s is None, before.why) == (after.wait_s is None, after.why)


@given(retry_specs, counts_of_failures, st.sampled_from(PLATFORM), draws)
def test_each_fault_of_the_platform_counts_alone(
    retry: RetrySpec, counts: dict[FailureReason, int], reason: FailureReason, draw: float
) -> None:
    assert (judge(retry, counts | {reason: 1}, alone(reason), draw).wait_s is None) == (budget_of(reason, retry) == 0)


@given(retry_specs, counts_of_failures, st.sampled_from(RETRYABLE), draws)
def test_the_back_off_is_between_half_of_a_power_of_two_and_all_of_it(
    retry: RetrySpec, counts: dict[FailureReason, int], reason: FailureReason, draw: float
) -> None:
    counts = counts | {reason: counts.get(reason, 0) + 1}
    wait_s = judge(retry, counts, alone(reason), draw).wait_s
    longest_s = min(LONGEST_BACKOFF_S, 2.0 ** min(sum(counts.values()) - 1, 10))
    assert wait_s is None or longest_s / 2 <= wait_s <= longest_s


@given(
    st.lists(
        st.builds(
            FailedAttempt,
            st.sampled_from(OF_JOB),
            st.none() | st.integers(0, 2),
            st.none() | st.integers(2, 4),
        ),
        min_size=1,
        max_size=5,
    ),
    draws,
)
def test_a_crash_loop_is_so_many_failures_in_one_step_for_one_reason(latest: list[FailedAttempt], draw: float) -> None:
    reason = latest[0].reason
    assert reason is not None
    verdict = judge(RetrySpec(max_failures=1000), {reason: len(latest)}, latest, draw)
    newest = latest[:CRASH_LOOP]
    is_alike = len({(each.reason, each.failed_in_step) for each in newest}) == 1 and newest[0].failed_in_step is not None
    assert (verdict.wait_s is None) == (len(newest) == CRASH_LOOP and is_alike)
    assert ("crash loop" in verdict.why) == (verdict.wait_s is None)


def test_a_reason_that_would_occur_again_is_never_tried_again_and_has_no_budget() -> None:
    for reason in FailureReason:
        if not reason.retryable:
            assert judge(RetrySpec(max_failures=1000), {reason: 1}, alone(reason), 0).wait_s is None
            assert budget_of(reason, RetrySpec(max_failures=1000)) == 0
            with pytest.raises(ValueError, match=rf"got {reason.value}; allowed: wrong_node, .*Remove it"):
                RetrySpec(by_reason={reason: 1})
    with pytest.raises(ValueError, match="less than or equal to 1000"):
        RetrySpec(by_reason={FailureReason.WORKER_LOST: 1001})


def fail(world: World, rank: Rank, reason: FailureReason, message: str = "") -> None:
    rank.send(FinishedReport(outcome="failed", reason=reason, message=message))
    world.dispatch()
    world.turn(61)
    world.dispatch()
    world.dispatch()


def test_a_job_that_fails_in_the_same_step_again_ends_early_and_says_so(world: World) -> None:
    job_id, rank = world.start(max_failures=100, steps=10)
    rank.train(1, 2, 3)
    for epoch in range(1, 4):
        if epoch > 1:
            rank = world.rank_of(job_id)
            rank.begin(2)
            rank.train(3)
        assert world.job(job_id).num_attempts == epoch
        fail(world, rank, FailureReason.WORKER_ERROR, "rank 0: IndexError: list index out of range")
    job = world.job(job_id)
    assert (job.state, job.reason, job.num_failures) == (JobState.FAILED, FailureReason.WORKER_ERROR, 3)
    assert job.message == (
        "it is in a crash loop: it has failed in step 4 3 times in a row with worker_error, so it is not tried again. Remove "
        "the cause, then retry the job; rank 0: IndexError: list index out of range"
    )
    world.retry(job_id)
    world.dispatch()
    world.dispatch()
    rank = world.rank_of(job_id)
    rank.begin(2)
    rank.train(3)
    fail(world, rank, FailureReason.WORKER_ERROR)
    assert world.job(job_id).state is JobState.STARTING, "a job that is retried begins with its whole budgets"


def test_failures_between_steps_are_no_crash_loop(world: World) -> None:
    job_id, rank = world.start(max_failures=100, steps=10)
    for last_step in (1, 2, 3, 4):
        rank.train(last_step)
        fail(world, rank, FailureReason.WORKER_LOST)
        rank = world.rank_of(job_id)
        rank.begin(last_step)
    for _ in range(4):  # killed before its first step: anything may have done it
        fail(world, rank, FailureReason.WORKER_LOST)
        rank = world.rank_of(job_id)
        rank.begin(4)
    assert world.job(job_id).state is JobState.RUNNING


def test_a_reason_takes_its_number_from_the_spec_and_the_job_shows_all(world: World) -> None:
    retry = {"max_failures": 1, "by_reason": {"worker_lost": 2}}
    job_id, rank = world.start(retry=retry, steps=10)
    for reason in (FailureReason.WORKER_LOST, FailureReason.WORKER_ERROR, FailureReason.LEASE_EXPIRED):
        fail(world, rank, reason)
        rank = world.rank_of(job_id)
        rank.begin()
    assert [(each.reason.value, each.count, each.retries) for each in world.job(job_id).failures] == [
        ("worker_lost", 1, 2),
        ("worker_error", 1, 1),
        ("lease_expired", 1, 10),
    ]
    fail(world, rank, FailureReason.STALLED)
    job = world.job(job_id)
    assert (job.state, job.message) == (JobState.FAILED, "it is failure 2 of its own, and 1 are tried again")


def test_a_job_backs_off_with_jitter(world: World) -> None:
    job_id, rank = world.start(max_failures=5)
    rank.send(FinishedReport(outcome="failed", reason=FailureReason.WORKER_LOST))
    with world.database.read() as session:
        job = store.jobs.find_job(session, job_id)
        assert job is not None
        assert job.not_before is not None
        wait_s = (job.not_before - world.clock.now()).total_seconds()
    assert 0.5 <= wait_s <= 1


def test_a_spec_from_before_has_the_budgets_by_default(world: World) -> None:
    document = world.spec.model_dump(mode="json")
    document["retry"] = {"max_failures": 2}
    retry = JobSpec.read_stored(document).retry
    assert (budget_of(FailureReason.WORKER_LOST, retry), budget_of(FailureReason.STORAGE_FULL, retry)) == (2, None)


def test_a_lost_node_is_no_failure_of_the_job_and_has_a_budget_of_its_own(world: World) -> None:
    jobs = [world.submit(), world.submit(retry={"by_reason": {"node_lost": 0}})]
    world.dispatch()
    for job_id in jobs:
        rank = world.rank_of(job_id)
        rank.begin()
        rank.train(1)
        world.launcher.exit(rank.ref, FailureReason.NODE_LOST, "lost from the cluster: 192.0.2.1 (11111111), with rank 1 of 2")
    world.turn(10)
    world.dispatch()
    world.turn(10)
    world.dispatch()
    plain, never = (world.job(job_id) for job_id in jobs)
    assert (plain.state, plain.num_attempts, never.state, never.reason) == ("starting", 2, "failed", FailureReason.NODE_LOST)
    assert [(each.reason, each.retries) for each in plain.failures] == [(FailureReason.NODE_LOST, 10)]
    assert never.hint == FailureReason.NODE_LOST.hint


@ON_SQLITE
def test_a_job_out_of_memory_says_what_its_states_take_and_what_they_would_take_at_a_level_with_less(world: World) -> None:
    job_id, rank = world.start(model={"preset": "gpt-13b"}, precision={"level": "bf16-amp"})
    fail(world, rank, FailureReason.OUT_OF_MEMORY, "CUDA out of memory")
    job = world.job(job_id)
    found = re.fullmatch(
        r"weights, gradients and optimizer states alone take (\d+) GB at bf16-amp and ([\d.]+) GB at (\S+); CUDA out of memory",
        str(job.message),
    )
    assert found is not None, job.message
    assert float(found[2]) < 0.8 * float(found[1])
    document = job.spec.model_dump(mode="json")
    for level, shown in (("bf16-amp", found[1]), (found[3], found[2])):
        states = validated(JobSpec.model_validate(document | {"precision": {"level": level}})).states
        assert states is not None
        assert f"{sum(states.values()) / 1e9:.3g}" == shown


@ON_SQLITE
def test_states_that_nobody_can_compute_are_left_out(world: World) -> None:
    job_id, rank = world.start(precision={"level": "O2", "norms": "bf16"})
    fail(world, rank, FailureReason.OUT_OF_MEMORY, "CUDA out of memory")
    assert world.job(job_id).message == "CUDA out of memory"
