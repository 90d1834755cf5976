"""SIGKILL of each part in the middle of a job: the job ends as it would have, and each step counts once."""

from itertools import pairwise
from typing import Any

import psutil
import pytest

from api_schemas import FailureReason, Job, JobState
from tests.e2e.octet_server import Server, losses
from tests.waiting import LONG_S


@pytest.fixture(scope="module")
def undisturbed_curve() -> dict[str, Any]:
    """The curve of an undisturbed `long_job`. The first test that needs it runs the job."""
    return {}


def expected_losses(server: Server, spec: dict[str, Any], known: dict[str, Any]) -> Any:
    if "losses" not in known:
        job = server.finish(server.client.submit(spec | {"name": "undisturbed"}).id)
        assert job.state is JobState.SUCCEEDED, job
        known["losses"] = losses(server, job)
        assert len(known["losses"]) == spec["training"]["steps"]
    return known["losses"]


def kill_a_rank(server: Server) -> None:
    ranks = [process for process in server.processes() if "RankActor" in " ".join(process.cmdline())]
    assert ranks
    ranks[0].kill()
    psutil.wait_procs(ranks[:1], timeout=LONG_S)


def assert_gapless_and_each_attempt_after_the_other(server: Server, job: Job) -> None:
    sequence = [event.seq for event in server.client.events(job.id)]
    assert sequence == list(range(1, len(sequence) + 1))
    attempts = sorted(server.client.attempts(job.id), key=lambda attempt: attempt.epoch)
    assert [attempt.epoch for attempt in attempts] == list(range(1, len(attempts) + 1))
    for before, after in pairwise(attempts):
        assert before.finished_at is not None
        assert before.finished_at <= after.created_at


@pytest.mark.slow
class TestServerKilled:
    def test_a_server_that_comes_back_finds_its_job_still_training(
        self, mortal_server: Server, long_job: dict[str, Any], undisturbed_curve: dict[str, Any]
    ) -> None:
        expected = expected_losses(mortal_server, long_job, undisturbed_curve)
        job = mortal_server.client.submit(long_job)
        mortal_server.wait_for_step(job.id, 30)
        mortal_server.kill()
        mortal_server.start()
        finished = mortal_server.finish(job.id)
        assert finished.state is JobState.SUCCEEDED, finished
        assert finished.num_attempts == 1
        assert losses(mortal_server, finished) == expected
        assert_gapless_and_each_attempt_after_the_other(mortal_server, finished)

    def test_after_a_power_cut_the_job_resumes_from_its_checkpoint(
        self, mortal_server: Server, long_job: dict[str, Any], undisturbed_curve: dict[str, Any]
    ) -> None:
        expected = expected_losses(mortal_server, long_job, undisturbed_curve)
        job = mortal_server.client.submit(long_job)
        mortal_server.wait_for_step(job.id, 50)
        mortal_server.kill()
        mortal_server.kill_the_cluster()
        mortal_server.start()
        finished = mortal_server.finish(job.id)
        assert finished.state is JobState.SUCCEEDED, finished
        assert finished.num_attempts == 2
        last = max(mortal_server.client.attempts(job.id), key=lambda attempt: attempt.epoch)
        assert last.resumed_from_step is not None
        assert last.resumed_from_step >= 40
        assert losses(mortal_server, finished) == expected
        assert_gapless_and_each_attempt_after_the_other(mortal_server, finished)


@pytest.mark.slow
class TestRayKilled:
    def test_it_is_started_again_and_the_job_resumes_without_a_failure_of_its_own(
        self, mortal_server: Server, long_job: dict[str, Any], undisturbed_curve: dict[str, Any]
    ) -> None:
        expected = expected_losses(mortal_server, long_job, undisturbed_curve)
        job = mortal_server.client.submit(long_job)
        mortal_server.wait_for_step(job.id, 50)
        core = [process for process in mortal_server.processes() if process.name() in {"gcs_server", "raylet"}]
        assert len(core) == 2
        for process in core:
            process.kill()
        finished = mortal_server.finish(job.id)
        assert finished.state is JobState.SUCCEEDED, finished
        attempts = sorted(mortal_server.client.attempts(job.id), key=lambda attempt: attempt.epoch)
        assert [attempt.reason for attempt in attempts] == [FailureReason.CLUSTER_LOST, None]
        assert losses(mortal_server, finished) == expected
        assert_gapless_and_each_attempt_after_the_other(mortal_server, finished)


@pytest.mark.slow
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

    def test_with_retries_a_new_attempt_resumes_and_the_curve_is_the_same(
        self, mortal_server: Server, long_job: dict[str, Any], undisturbed_curve: dict[str, Any]
    ) -> None:
        expected = expected_losses(mortal_server, long_job, undisturbed_curve)
        job = mortal_server.client.submit(long_job | {"retry": {"max_failures": 1}})
        mortal_server.wait_for_step(job.id, 50)
        kill_a_rank(mortal_server)
        finished = mortal_server.finish(job.id)
        assert finished.state is JobState.SUCCEEDED, finished
        assert (finished.num_attempts, finished.num_failures) == (2, 1)
        attempts = sorted(mortal_server.client.attempts(job.id), key=lambda attempt: attempt.epoch)
        assert [attempt.reason for attempt in attempts] == [FailureReason.WORKER_LOST, None]
        assert losses(mortal_server, finished) == expected
        assert_gapless_and_each_attempt_after_the_other(mortal_server, finished)


@pytest.mark.slow
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
