"""A job on a real cluster that is paused, retried or continued trains what an undisturbed one trains; a deleted one is gone."""

import os
import signal
from typing import Any

import pytest

from octet.api_schemas import AttemptState, FailureReason, JobState
from octet.client import ApiError
from tests.e2e.octet_server import Server, losses
from tests.e2e.test_chaos import attempts_of, train_undisturbed


@pytest.mark.system
def test_a_paused_job_goes_on_to_the_bit_and_holds_no_slots(mortal_server: Server, long_job: dict[str, Any]) -> None:
    server = mortal_server
    spec = long_job | {"training": long_job["training"] | {"checkpoint_every": 0}, "resources": {"workers": 2}}
    expected = train_undisturbed(server, spec)
    job = server.client.submit(spec)
    server.wait_for_step(job.id, 50)
    ranks = server.ranks()
    for rank in ranks:
        rank.suspend()  # they hear of the pause from the next server alone, and could end before it answers
    assert server.client.pause(job.id).state is JobState.PAUSING
    server.kill()
    server.start()
    for rank in ranks:
        rank.resume()
    server.wait_for(lambda: server.client.job(job.id).state is JobState.PAUSED)
    (saved,) = server.client.checkpoints(job.id)
    other = server.client.submit(spec | {"name": "other", "training": spec["training"] | {"steps": 20}})
    assert server.finish(other.id).state is JobState.SUCCEEDED, "the paused job's slots are free"
    server.client.resume(job.id)
    finished = server.finish(job.id)
    assert (finished.state, finished.num_failures) == (JobState.SUCCEEDED, 0), finished
    first, second = attempts_of(server, finished)
    assert (first.state, second.resumed_from_step) == (AttemptState.CANCELLED, saved.step)
    assert losses(server, finished) == expected


@pytest.mark.system
def test_a_server_that_stops_has_its_jobs_save_and_the_next_one_goes_on_to_the_bit(
    mortal_server: Server, long_job: dict[str, Any]
) -> None:
    server = mortal_server
    spec = long_job | {"training": long_job["training"] | {"checkpoint_every": 0}, "resources": {"workers": 2}}
    expected = train_undisturbed(server, spec)
    job = server.client.submit(spec)
    server.wait_for_step(job.id, 50)
    server.interrupt()
    assert _times_said(server, "1 job will go on") == 1
    server.start()
    server.wait_for_attempt(job.id, 2)
    for rank in server.ranks():
        rank.suspend()  # so that it saves nothing
    os.kill(server.pid, signal.SIGINT)
    server.wait_for(lambda: _times_said(server, "1 job will go on") == 2)
    server.interrupt()
    assert _times_said(server, "stopping at once") == 1
    server.start()
    finished = server.finish(job.id)
    assert finished.state is JobState.SUCCEEDED, finished
    first, second, third = attempts_of(server, finished)
    assert (first.state, second.reason) == (AttemptState.CANCELLED, FailureReason.CLUSTER_LOST)
    assert (second.resumed_from_step, third.resumed_from_step) == (first.last_step, first.last_step)
    assert losses(server, finished) == expected


@pytest.mark.system
def test_a_cancelled_job_leaves_a_checkpoint_unless_it_need_not(mortal_server: Server, long_job: dict[str, Any]) -> None:
    spec = long_job | {"training": long_job["training"] | {"steps": 100_000, "checkpoint_every": 0}}
    for save in (True, False):
        job = mortal_server.client.submit(spec)
        mortal_server.wait_for_step(job.id, 5)
        mortal_server.client.cancel(job.id, save=save)
        finished = mortal_server.finish(job.id)
        assert finished.state is JobState.CANCELLED
        assert finished.progress is not None
        steps = [checkpoint.step for checkpoint in mortal_server.client.checkpoints(job.id)]
        assert steps == ([finished.progress.step] if save else [])


@pytest.mark.system
def test_a_job_is_cancelled_retried_and_continued_to_the_bit_and_its_deletion_survives_a_kill(
    mortal_server: Server, long_job: dict[str, Any]
) -> None:
    server = mortal_server
    training = long_job["training"] | {"checkpoint_every": 0, "schedule": {"name": "constant"}}
    spec = long_job | {"training": training}
    expected = train_undisturbed(server, spec)
    job = server.client.submit(spec | {"training": training | {"steps": training["steps"] - training["eval_every"]}})
    server.wait_for_step(job.id, 10)
    server.client.cancel(job.id)
    assert server.finish(job.id).state is JobState.CANCELLED
    server.client.retry(job.id)
    assert server.finish(job.id).state is JobState.SUCCEEDED
    server.client.retry(job.id, steps=training["steps"])
    finished = server.finish(job.id)
    assert (finished.state, finished.num_attempts) == (JobState.SUCCEEDED, 3)
    assert losses(server, finished) == expected
    folder = server.data_dir / "jobs" / job.id
    assert (folder / "checkpoints").is_dir()
    server.wait_for(lambda: _is_deleted(server, job.id))
    server.kill()
    server.start()
    server.wait_for(lambda: not folder.exists())


def _times_said(server: Server, words: str) -> int:
    return (server.data_dir / "server.log").read_text().count(words)


def _is_deleted(server: Server, job_id: str) -> bool:
    """Delete a job. Returns False while its processes are being stopped."""
    try:
        server.client.delete(job_id)
    except ApiError as refused:
        if refused.problem.status != 409:
            raise
        return False
    return True
