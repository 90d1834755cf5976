"""An elastic job on a real cluster starts on the slot that is free, and grows at a checkpoint when another job has ended."""

from collections.abc import Iterator
from typing import Any

import pytest

from octet.api_schemas import AttemptState, JobState
from tests.e2e.conftest import served
from tests.e2e.octet_server import Server, losses
from tests.e2e.test_chaos import attempts_of, train_undisturbed


@pytest.fixture
def eager_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of two slots that lets a job grow a second after slots came free."""
    yield from served(Server(tmp_path_factory.mktemp("elastic"), variables={"OCTET_ELASTIC_GROW_AFTER_S": "1"}))


@pytest.mark.system
def test_a_job_grows_into_the_slot_that_another_leaves(eager_server: Server, long_job: dict[str, Any]) -> None:
    server = eager_server
    training = long_job["training"] | {"micro_batch_size": 4, "steps": 1500, "checkpoint_every": 25}
    expected = train_undisturbed(server, long_job | {"training": training})
    short = server.client.submit(long_job | {"training": long_job["training"] | {"steps": 200}})
    server.wait_for_attempt(short.id, 1)
    elastic = server.client.submit(long_job | {"training": training, "resources": {"workers": {"min": 1, "max": 2}}})
    server.wait_for_attempt(elastic.id, 1)
    assert server.client.job(elastic.id).num_ranks == 1
    assert server.finish(short.id).state is JobState.SUCCEEDED
    finished = server.finish(elastic.id)
    assert (finished.state, finished.num_failures) == (JobState.SUCCEEDED, 0), finished
    attempts = attempts_of(server, finished)
    assert [attempt.workers for attempt in attempts] == [1, 2]
    assert attempts[0].state is AttemptState.CANCELLED
    assert attempts[1].resumed_from_step
    assert [event.type for event in server.client.events(finished.id)].count("job.resized") == 1
    curve = losses(server, finished)
    assert [step for step, *_ in curve] == [step for step, *_ in expected]
    assert [loss for _, loss, _ in curve] == pytest.approx([loss for _, loss, _ in expected], rel=1e-3)
