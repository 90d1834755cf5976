"""SIGKILL of each part in the middle of a job: the job ends as it would have, and each step counts once.

`TestStorm` is a short run of what `make chaos` runs for long: random signals to every component, then the ledger.
"""

from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest

from octet.api_schemas import Attempt, FailureReason, Job, JobState
from tests.chaos.run import Plan, weather
from tests.e2e.octet_server import Server, losses
from tests.e2e.specs import on_ranks
from tests.kit.waiting import LONG_S
from tests.service.postgres_server import skipping_without_postgres


def kill_a_rank(server: Server) -> None:
    ranks = server.ranks()
    assert ranks
    ranks[0].kill()
    psutil.wait_procs(ranks[:1], timeout=LONG_S)


def assert_gapless_and_each_attempt_after_the_other(server: Server, job: Job) -> None:
    sequence = [event.seq for event in server.client.events(job.id)]
    assert sequence == list(range(1, len(sequence) + 1))
    attempts = attempts_of(server, job)
    assert [attempt.epoch for attempt in attempts] == list(range(1, len(attempts) + 1))
    for before, after in pairwise(attempts):
        assert before.finished_at is not None
        assert before.finished_at <= after.created_at


def train_undisturbed(server: Server, spec: dict[str, Any]) -> list[tuple[int, float | None, float | None]]:
    job = server.finish(server.client.submit(spec | {"name": "undisturbed"}).id)
    assert job.state is JobState.SUCCEEDED, job
    curve = losses(server, job)
    assert len(curve) == spec["training"]["steps"]
    return curve


def attempts_of(server: Server, job: Job) -> list[Attempt]:
    return sorted(server.client.attempts(job.id), key=lambda attempt: attempt.epoch)


def has_reached(server: Server, job: Job, epoch: int, step: int) -> bool:
    """Return True if this attempt has reported the step. Later attempts do not count, as they may end at any time."""
    return any(each.epoch == epoch and (each.last_step or 0) >= step for each in attempts_of(server, job))


def kill_the_core(server: Server) -> None:
    """Kill Ray's own two servers; the keeper and the ranks see that they are gone."""
    core = [process for name in ("gcs_server", "raylet") for process in server.processes_named(name)]
    assert len(core) == 2
    for process in core:
        process.kill()


@pytest.mark.system
class TestEverythingKilled:
    def test_a_job_outlives_its_rank_its_ray_its_machine_and_its_server(
        self, mortal_server: Server, long_job: dict[str, Any]
    ) -> None:
        """One job meets each death in turn, every time while it trains. Only its rank's is a failure of its own."""
        expected = train_undisturbed(mortal_server, long_job)
        job = mortal_server.client.submit(long_job | {"retry": {"max_failures": 1}})

        mortal_server.wait_for_step(job.id, 50)
        mortal_server.wait_for(lambda: list(mortal_server.client.checkpoints(job.id)))
        kill_a_rank(mortal_server)
        mortal_server.wait_for_attempt(job.id, 2)
        kill_the_core(mortal_server)
        mortal_server.wait_for_attempt(job.id, 3)
        mortal_server.kill()
        mortal_server.kill_the_cluster()
        mortal_server.start()
        mortal_server.wait_for_attempt(job.id, 4)
        mortal_server.kill()
        mortal_server.start()

        finished = mortal_server.finish(job.id)
        assert finished.state is JobState.SUCCEEDED, finished
        assert finished.num_attempts == 4, "the server that came back found this one still training"
        assert finished.num_failures == 3, "and yet max_failures is 1: it counts only the rank's own"
        attempts = attempts_of(mortal_server, finished)
        rank_killed, ray_killed, _, last = [attempt.reason for attempt in attempts]
        assert (rank_killed, ray_killed, last) == (FailureReason.WORKER_LOST, FailureReason.CLUSTER_LOST, None)
        for attempt in attempts[1:]:
            assert attempt.resumed_from_step is not None
            assert attempt.resumed_from_step >= 40
        assert losses(mortal_server, finished) == expected
        assert_gapless_and_each_attempt_after_the_other(mortal_server, finished)


@pytest.mark.system
class TestRankKilled:
    def test_without_retries_the_job_fails_with_the_reason(self, mortal_server: Server, long_job: dict[str, Any]) -> None:
        job = mortal_server.client.submit(long_job)
        mortal_server.wait_for_step(job.id, 5)
        kill_a_rank(mortal_server)
        failed = mortal_server.finish(job.id)
        assert failed.state is JobState.FAILED
        assert failed.reason is FailureReason.WORKER_LOST
        assert failed.hint is not None
        assert "retry.max_failures" in failed.hint


@pytest.mark.system
class TestOneOfSeveralRanksKilled:
    def test_the_job_resumes_each_time_with_the_losses_of_one_that_goes_through(
        self, mortal_server: Server, long_job: dict[str, Any]
    ) -> None:
        spec = on_ranks(long_job, 2, 600, 20)
        expected = train_undisturbed(mortal_server, spec)
        job = mortal_server.client.submit(spec | {"retry": {"max_failures": 2}})
        for epoch, (step, rank) in enumerate(((25, 1), (65, 0)), start=1):
            mortal_server.wait_for(partial(has_reached, mortal_server, job, epoch, step))
            ranks = mortal_server.ranks()
            assert len(ranks) == 2
            ranks[rank].kill()
        finished = mortal_server.finish(job.id)
        assert finished.state is JobState.SUCCEEDED, finished
        attempts = attempts_of(mortal_server, finished)
        assert [attempt.reason for attempt in attempts] == [FailureReason.WORKER_LOST, FailureReason.WORKER_LOST, None]
        for attempt in attempts[:2]:
            assert attempt.message is not None
            assert " of 2" in attempt.message
            assert "closed by peer" not in attempt.message
        assert losses(mortal_server, finished) == expected


@pytest.mark.system
class TestServerStopped:
    def test_a_server_that_was_suspended_while_its_ray_died_goes_on_by_itself(
        self, mortal_server: Server, spec_document: dict[str, Any]
    ) -> None:
        """Ray's client answers the loss of its raylet with SystemExit, and after a minute ends the whole process."""
        jobs = [mortal_server.client.submit(spec_document | {"name": f"small-{number}"}) for number in range(3)]
        mortal_server.wait_for(lambda: mortal_server.processes_named("raylet"))
        for raylet in mortal_server.processes_named("raylet"):
            raylet.kill()
        server = psutil.Process(mortal_server.pid)
        server.suspend()
        try:
            mortal_server.wait_for(lambda: not mortal_server.processes_named("gcs_server"))
        finally:
            server.resume()
        for job in jobs:
            finished = mortal_server.finish(job.id)
            assert finished.state is JobState.SUCCEEDED, finished
        assert mortal_server.client.is_ready()


@pytest.mark.system
class TestStorm:
    def test_random_signals_to_every_component_lose_nothing(self, tmp_path: Path) -> None:
        plan = Plan(seed=11, signals=35, jobs=4, minutes=12, gap_s=2)
        outcome = weather(plan, tmp_path)
        assert {kind: found for kind, found in outcome.findings.items() if found} == {}
        assert outcome.is_complete, outcome
        assert outcome.jobs["succeeded"] >= 1, outcome

    @pytest.mark.postgres
    def test_random_signals_to_every_part_of_a_cluster_lose_nothing(self, tmp_path: Path) -> None:
        plan = Plan(seed=11, signals=15, jobs=2, minutes=12, gap_s=2, cluster=True)
        with skipping_without_postgres():
            outcome = weather(plan, tmp_path)
        assert {kind: found for kind, found in outcome.findings.items() if found} == {}
        assert outcome.is_complete, outcome
        assert outcome.jobs["succeeded"] >= 1, outcome
