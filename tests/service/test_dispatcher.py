"""The way of a job through the dispatcher on a fake cluster: place, launch, watch, release, and what can go wrong."""

import pytest
from sqlalchemy import event
from sqlalchemy.orm import Session

from octet.api_schemas import (
    AttemptState,
    DesiredState,
    EventReport,
    FailureReason,
    FinishedReport,
    JobState,
    PhaseReport,
)
from octet.api_schemas.export import EXPORT_PROGRESS
from octet.api_schemas.tracking import MlflowTracker, TensorBoardTracker, TrackersSpec
from octet.service import store
from octet.service.cluster.launcher import LauncherError
from octet.service.db.tables import JobRow
from octet.service.dispatcher import launch, place, watch
from octet.service.dispatcher.context import NotLeading, Outage
from octet.service.errors import StaleAttempt, Unauthenticated
from tests.service.databases import ON_SQLITE
from tests.service.world import Rank, World


@ON_SQLITE
def test_a_job_goes_from_queued_to_succeeded_and_its_slot_is_free_again(world: World) -> None:
    job_id, rank = world.start()
    assert world.job(job_id).state is JobState.RUNNING
    rank.train(1, 2, 3, 4)
    rank.succeed()
    job = world.job(job_id)
    assert (job.state, job.num_attempts, job.num_failures) == (JobState.SUCCEEDED, 1, 0)
    world.dispatch()
    assert world.launcher.orders == {}
    assert world.attempts(job_id)[0].released_at is not None
    assert [event.type for event in world.events(job_id)] == [
        "job.accepted",
        "job.placed",
        "attempt.launched",
        "attempt.started",
        "attempt.succeeded",
        "job.succeeded",
    ]


@ON_SQLITE
def test_the_order_carries_what_the_attempt_needs(world: World) -> None:
    job_id = world.submit()
    world.dispatch()
    order = world.launcher.started[0]
    assert order.job_id == job_id
    assert order.epoch == 1
    assert order.spec.name == "small"
    assert order.report_url == "http://127.0.0.1:8000"
    assert order.job_dir == str(world.settings.data_dir / "jobs" / job_id)
    assert len(order.token) >= 43  # 256 bits
    assert order.token.encode() not in (world.attempts(job_id)[0].token_hash or b"")


@ON_SQLITE
def test_the_order_has_the_operators_trackers_beside_the_jobs(world: World) -> None:
    operators = TrackersSpec(mlflow=MlflowTracker(online=True))
    world.settings = world.settings.model_copy(update={"trackers": operators})
    world.restart()
    world.submit(trackers={"tensorboard": {}, "mlflow": {"experiment": "mine"}})
    world.dispatch()
    (order,) = world.launcher.orders.values()
    assert order.trackers == TrackersSpec(tensorboard=TensorBoardTracker(), mlflow=MlflowTracker(online=True))


@ON_SQLITE
def test_a_dead_rank_is_given_three_seconds_for_its_last_report(world: World) -> None:
    job_id, rank = world.start()
    world.launcher.exit(rank.ref, FailureReason.WORKER_LOST, "rank 0 was killed by SIGKILL")
    world.dispatch()
    assert world.job(job_id).state is JobState.RUNNING
    world.turn(3)
    world.dispatch()
    job = world.job(job_id)
    assert (job.state, job.reason) == (JobState.FAILED, FailureReason.WORKER_LOST)
    assert job.message == "rank 0 was killed by SIGKILL"
    assert job.hint == FailureReason.WORKER_LOST.hint


@ON_SQLITE
def test_a_last_report_beats_the_exit_of_its_processes(world: World) -> None:
    job_id, rank = world.start()
    world.launcher.exit(rank.ref)
    world.dispatch()
    rank.succeed()
    world.turn(3)
    world.dispatch()
    assert world.job(job_id).state is JobState.SUCCEEDED


@ON_SQLITE
def test_a_failure_with_retries_left_resumes_in_a_new_attempt(world: World) -> None:
    job_id, rank = world.start(max_failures=1)
    rank.train(1, 2)
    rank.send(FinishedReport(outcome="failed", reason=FailureReason.WORKER_LOST, message="gone"))
    job = world.job(job_id)
    assert (job.state, job.num_failures) == (JobState.QUEUED, 1)
    world.dispatch()
    assert len(world.launcher.started) == 1, "backs off for a second first"
    world.turn(1)
    world.dispatch()
    world.dispatch()
    second = world.rank_of(job_id)
    assert second.order.epoch == 2
    assert second.order.token != rank.order.token
    second.begin()
    second.send(FinishedReport(outcome="failed", reason=FailureReason.WORKER_LOST))
    assert world.job(job_id).state is JobState.FAILED


@ON_SQLITE
def test_a_reason_that_cannot_change_is_not_retried(world: World) -> None:
    job_id, rank = world.start(max_failures=5)
    rank.send(FinishedReport(outcome="failed", reason=FailureReason.OUT_OF_MEMORY))
    assert world.job(job_id).state is JobState.FAILED


@ON_SQLITE
def test_failures_of_the_platform_have_their_own_budget(world: World) -> None:
    job_id = world.submit()
    for _ in range(10):
        world.turn(61)
        world.dispatch()
        world.dispatch()
        world.launcher.lose_everything()
        world.dispatch()
        world.turn(4)
        world.dispatch()
    assert world.job(job_id).state is JobState.QUEUED
    (counted,) = world.job(job_id).failures
    assert (counted.reason, counted.count, counted.retries) == (FailureReason.CLUSTER_LOST, 10, 10)
    world.turn(61)
    world.dispatch()
    world.dispatch()
    world.launcher.lose_everything()
    world.dispatch()
    world.turn(4)
    world.dispatch()
    job = world.job(job_id)
    assert (job.state, job.reason) == (JobState.FAILED, FailureReason.CLUSTER_LOST)


@ON_SQLITE
def test_a_lease_that_ran_out_fails_the_attempt_and_fences_it(world: World) -> None:
    job_id, rank = world.start()
    world.launcher.reachable = False
    world.turn(world.settings.lease_s + world.settings.lease_grace_s - 1)
    world.dispatch()
    assert world.job(job_id).state is JobState.RUNNING
    world.turn(1)
    world.dispatch()
    job = world.job(job_id)
    assert job.state is JobState.QUEUED, "a failure of the platform is tried again"
    assert world.attempts(job_id)[0].reason is FailureReason.LEASE_EXPIRED
    with pytest.raises(StaleAttempt):
        rank.train(1)


@ON_SQLITE
def test_a_report_in_the_grace_saves_the_attempt(world: World) -> None:
    job_id, rank = world.start()
    world.turn(world.settings.lease_s + 5)
    rank.train(1)
    world.turn(world.settings.lease_grace_s)
    world.dispatch()
    assert world.job(job_id).state is JobState.RUNNING


@ON_SQLITE
def test_after_a_long_absence_a_new_leader_lets_workers_report_first(world: World) -> None:
    """The control plane was away for an hour; a worker that finished meanwhile still has its last report to deliver."""
    job_id, rank = world.start()
    world.clock.turn(3600)
    world.restart()
    world.dispatch()
    assert world.job(job_id).state is JobState.RUNNING
    rank.train(1, 2, 3, 4)
    rank.succeed()
    assert world.job(job_id).state is JobState.SUCCEEDED


TEN_YEARS_S = 10 * 365 * 86_400.0


@ON_SQLITE
def test_a_clock_that_is_set_forward_ends_no_attempt(world: World) -> None:
    """One trains, in steps of minutes, and one starts. Their ranks go on, and are heard as before."""
    trains, rank = world.start(name="trains")
    starts = world.submit(name="starts")
    world.dispatch()
    world.clock.turn(TEN_YEARS_S)
    with pytest.raises(NotLeading):
        watch.step(world.context)  # the leader's lease is over too: nobody ends anything before it leads again
    world.renew()
    for _ in range(3):
        rank.send()
        world.dispatch()
        world.turn(world.settings.lease_grace_s)
    assert world.job(trains).state is JobState.RUNNING
    assert world.job(starts).state is JobState.STARTING
    other = world.rank_of(starts)
    for each in (rank, other):
        if each is other:
            each.begin()
        each.train(1, 2, 3, 4)
        each.succeed()
    assert [world.job(job_id).num_attempts for job_id in (trains, starts)] == [1, 1]
    assert [world.job(job_id).state for job_id in (trains, starts)] == 2 * [JobState.SUCCEEDED]


@ON_SQLITE
def test_deadlines_hold_after_a_clock_was_ahead(world: World) -> None:
    world.clock.turn(TEN_YEARS_S)
    world.renew()
    world.clock.turn(-TEN_YEARS_S)
    job_id = world.submit()
    world.dispatch()
    for _ in range(2):
        world.turn(world.settings.start_timeout_s)
        world.dispatch()
    assert world.attempts(job_id)[0].reason is FailureReason.START_TIMEOUT


@ON_SQLITE
def test_no_new_attempt_while_the_former_may_live(world: World) -> None:
    job_id, rank = world.start(max_failures=1)
    world.launcher.reachable = False
    rank.send(FinishedReport(outcome="failed", reason=FailureReason.WORKER_LOST))
    world.turn(30)
    world.dispatch()
    assert world.job(job_id).num_attempts == 1
    world.launcher.reachable = True
    world.dispatch()
    assert world.job(job_id).num_attempts == 1, "this pass stops the former attempt"
    world.dispatch()
    assert world.job(job_id).num_attempts == 2
    assert rank.ref in world.launcher.stopped


@ON_SQLITE
def test_start_timeout_and_stall(world: World) -> None:
    slow = world.submit()
    world.dispatch()
    world.turn(world.settings.start_timeout_s)
    world.dispatch()
    assert world.attempts(slow)[0].reason is FailureReason.START_TIMEOUT

    stuck, rank = world.start(name="stuck")
    heartbeats = int(world.settings.stall_timeout_s / 50) + 1
    for _ in range(heartbeats):
        world.turn(50)
        rank.send()
    world.dispatch()
    assert world.attempts(stuck)[0].reason is FailureReason.STALLED


def test_an_export_that_goes_on_is_no_stall(world: World) -> None:
    """It takes no steps; a large model takes longer than the timeout to be compared."""
    job_id, rank = world.start()
    for _ in range(int(world.settings.stall_timeout_s / 50) + 1):
        world.turn(50)
        rank.send(EventReport(type=EXPORT_PROGRESS, message="exporting step 4: 7 held-out samples are compared"))
    world.dispatch()
    assert world.attempts(job_id)[0].reason is None


@ON_SQLITE
def test_cancelling_a_queued_job_is_immediate(world: World) -> None:
    job_id = world.submit()
    world.cancel(job_id)
    assert world.job(job_id).state is JobState.CANCELLED
    world.dispatch()
    assert world.launcher.started == []


@ON_SQLITE
def test_a_running_job_hears_of_its_cancellation_and_stops(world: World) -> None:
    job_id, rank = world.start()
    world.cancel(job_id)
    assert world.job(job_id).state is JobState.CANCELLING
    assert rank.train(1).desired is DesiredState.CANCEL
    rank.send(FinishedReport(outcome="cancelled"))
    assert world.job(job_id).state is JobState.CANCELLED
    world.dispatch()
    assert world.launcher.orders == {}


@ON_SQLITE
def test_a_job_whose_rank_fails_while_it_stops_is_cancelled(world: World) -> None:
    job_id, rank = world.start()
    world.cancel(job_id)
    rank.send(FinishedReport(outcome="failed", reason=FailureReason.OUT_OF_MEMORY))
    assert world.job(job_id).state is JobState.CANCELLED
    assert world.job(job_id).reason is None


@ON_SQLITE
def test_a_job_that_does_not_stop_is_ended_after_the_grace(world: World) -> None:
    job_id, rank = world.start()
    world.cancel(job_id, saves=False)
    world.turn(world.settings.cancel_grace_s - 1)
    world.dispatch()
    assert world.job(job_id).state is JobState.CANCELLING
    world.turn(1)
    world.dispatch()
    assert world.job(job_id).state is JobState.CANCELLED
    world.dispatch()
    assert world.launcher.stopped == [rank.ref]


@ON_SQLITE
def test_cancel_before_the_workers_are_up_needs_no_grace(world: World) -> None:
    job_id = world.submit()
    world.dispatch()
    world.cancel(job_id)
    world.dispatch()
    world.dispatch()
    assert world.job(job_id).state is JobState.CANCELLED
    assert world.launcher.orders == {}


@ON_SQLITE
def test_a_job_that_succeeds_while_it_is_cancelled_has_succeeded(world: World) -> None:
    job_id, rank = world.start()
    world.cancel(job_id)
    rank.succeed()
    assert world.job(job_id).state is JobState.SUCCEEDED


def test_a_launch_that_the_cluster_refuses_for_good_fails_with_its_words(world: World) -> None:
    world.launcher.refuse_launches = LauncherError("no such image", retryable=False)
    job_id = world.submit()
    world.dispatch()
    attempt = world.attempts(job_id)[0]
    assert (attempt.state, attempt.reason) == (AttemptState.FAILED, FailureReason.LAUNCH_FAILED)
    assert attempt.message == "no such image"
    assert world.job(job_id).state is JobState.QUEUED


@ON_SQLITE
def test_a_users_own_model_is_not_launched_where_the_pool_does_not_allow_it_any_more(world: World) -> None:
    job_id = world.submit(model={"family": "python", "entrypoint": "never_imported:build"})
    world.dispatch()
    attempt = world.attempts(job_id)[0]
    assert attempt.reason is FailureReason.LAUNCH_FAILED
    assert attempt.message == "pool 'cpu' allows no code of users (allows_entrypoints) any more"
    assert world.launcher.started == []


@ON_SQLITE
def test_a_launch_that_may_succeed_later_is_repeated_with_the_same_attempt(world: World) -> None:
    world.launcher.refuse_launches = LauncherError("busy", retryable=True)
    job_id = world.submit()
    world.dispatch()
    world.launcher.refuse_launches = None
    world.dispatch()
    assert world.launcher.started == [], "waits two seconds"
    world.turn(2)
    world.dispatch()
    assert [order.epoch for order in world.launcher.started] == [1]
    assert world.job(job_id).num_attempts == 1


@ON_SQLITE
def test_a_launch_that_never_succeeds_has_a_deadline(world: World) -> None:
    world.launcher.refuse_launches = LauncherError("busy", retryable=True)
    job_id = world.submit()
    world.dispatch()
    world.turn(world.settings.launch_timeout_s)
    world.dispatch()
    assert world.attempts(job_id)[0].reason is FailureReason.LAUNCH_FAILED


@ON_SQLITE
def test_a_lost_cluster_is_told_apart_from_a_lost_worker(world: World) -> None:
    job_id, _ = world.start()
    world.launcher.lose_everything()
    world.dispatch()
    world.turn(3)
    world.dispatch()
    assert world.attempts(job_id)[0].reason is FailureReason.CLUSTER_LOST


@ON_SQLITE
def test_an_unreachable_cluster_fails_nothing(world: World) -> None:
    job_id, rank = world.start()
    world.launcher.reachable = False
    for _ in range(10):
        world.turn(30)
        rank.train(1)
        world.dispatch()
    assert world.job(job_id).state is JobState.RUNNING


@ON_SQLITE
def test_an_outage_is_told_once_and_how_long_it_was(world: World, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    world.context.outage = Outage(clock=lambda: world.clock.moment.timestamp())
    for reachable in (False, True) * 2:
        world.launcher.reachable = reachable
        for _ in range(10):
            world.dispatch()
            world.turn(3)
    told = [record.getMessage() for record in caplog.records if "cluster answers" in record.getMessage()]
    away = "nothing is placed until the cluster answers: the fake cluster is switched off"
    assert told == [away, "the cluster answers again, after 30.0 s"] * 2


@ON_SQLITE
def test_orphans_are_ended(world: World) -> None:
    job_id, rank = world.start()
    stranger = rank.order.model_copy(update={"attempt_id": "att_0123456789abcdefghjkmnpqrs"})
    world.launcher.launch(stranger)
    world.tidy()
    assert [order.job_id for order in world.launcher.orders.values()] == [job_id]
    assert list(world.launcher.orders) == [rank.ref]


def test_phases_of_the_start_are_kept(world: World) -> None:
    job_id = world.submit()
    world.dispatch()
    rank = world.rank_of(job_id)
    for phase in ("placed", "process_up", "torch_imported", "model_built"):
        world.turn(0.5)
        rank.send(PhaseReport(phase=phase))
    start = world.job(job_id).start
    assert start is not None
    assert start.model_built_at is not None
    assert (start.model_built_at - start.accepted_at).total_seconds() == 2.0


def test_a_worker_that_reports_before_the_launch_returns_is_heard(world: World) -> None:
    """The call that launches may take longer than the worker needs to come up."""
    world.launcher.refuse_launches = LauncherError("timed out, and yet it runs", retryable=True)
    job_id = world.submit()
    world.dispatch()
    world.launcher.refuse_launches = None
    world.turn(2)
    world.context.launcher = _LaunchesThenFails(world.launcher)  # type: ignore[assignment]
    world.dispatch()
    assert world.attempts(job_id)[0].state is AttemptState.LAUNCHING
    rank = world.rank_of(job_id)
    rank.begin()
    assert world.job(job_id).state is JobState.RUNNING
    world.context.launcher = world.launcher
    world.turn(2)
    world.dispatch()
    assert world.job(job_id).state is JobState.RUNNING
    assert len(world.launcher.started) == 1


class _LaunchesThenFails:
    def __init__(self, launcher: object) -> None:
        self._launcher = launcher

    def __getattr__(self, name: str) -> object:
        return getattr(self._launcher, name)

    def launch(self, order: object) -> None:
        self._launcher.launch(order)  # type: ignore[attr-defined]
        raise LauncherError("no answer in time", retryable=True)


@ON_SQLITE
def test_a_wrong_token_is_refused(world: World) -> None:
    _, rank = world.start()
    forged = Rank(world, rank.order.model_copy(update={"token": "guess"}))
    with pytest.raises(Unauthenticated):
        forged.train(1)


@ON_SQLITE
def test_the_ranks_get_the_data_roots(world: World) -> None:
    world.submit()
    world.dispatch()
    (order,) = world.launcher.started
    assert order.data_roots == tuple(map(str, world.settings.named_roots))
    assert order.stores == world.settings.store_access
    assert order.files.roots == order.data_roots
    assert order.files.stores == order.stores


@ON_SQLITE
def test_loops_lock_several_jobs_in_the_order_of_their_ids(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A comparison that is cancelled locks its jobs so: in another order, PostgreSQL would end one of the two transactions."""
    first, second = world.submit(priority=40), world.submit(priority=60)
    locked: list[str] = []
    lock_job = store.jobs.lock_job

    def noted(session: Session, job_id: str) -> JobRow | None:
        locked.append(job_id)
        return lock_job(session, job_id)

    monkeypatch.setattr(store.jobs, "lock_job", noted)
    for step in (place.step, launch.step):
        locked.clear()
        step(world.context)
        assert list(dict.fromkeys(locked)) == [first, second]
    statements: list[str] = []
    event.listen(world.database._engine, "before_cursor_execute", lambda *given: statements.append(given[2]))
    with world.database.write() as session:  # reports of several jobs share a transaction, too
        store.reporting.lock_jobs(session, [world.attempts(job_id)[0].id for job_id in (first, second)])
    assert all("ORDER BY jobs.id" in statement for statement in statements if "FOR UPDATE" in statement)


@ON_SQLITE
def test_slots_without_a_device_are_told_at_the_start_and_hold_no_job_in_starting(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.launcher.slots_present["h100"], world.launcher.slots_without_device = 0, {"h100": 8}
    job_id = world.submit(pool="h100", workers=2)
    for _ in range(3):
        world.dispatch()
    world.restart()
    world.dispatch()
    warnings = [record.getMessage() for record in caplog.records if "no GPU" in record.getMessage()]
    assert len(warnings) == 2, "once by each dispatcher"
    assert world.job(job_id).state is JobState.QUEUED
    with world.database.read() as session:
        (decision,) = place.decisions(world.context, session, world.clock.now())
    assert decision.why is not None
    assert "8 of 8 are on nodes that have no GPU for them" in decision.why
