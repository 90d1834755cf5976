"""A job over two nodes of a real Ray cluster: each node dies with all its processes, and another joins."""

from collections.abc import Iterator
from typing import Any

import pytest

from api_schemas import JobState
from tests.e2e.octet_server import losses
from tests.e2e.ray_nodes import Nodes, ServerOnNodes, served_on_nodes
from tests.e2e.test_chaos import assert_gapless_and_each_attempt_after_the_other, attempts_of, train_undisturbed


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Nodes, ServerOnNodes]]:
    """Octet on a cluster whose pool has no node yet."""
    with served_on_nodes(tmp_path_factory.mktemp("nodes")) as both:
        yield both


@pytest.fixture
def wide_job(long_job: dict[str, Any]) -> dict[str, Any]:
    """Four ranks over two nodes of two slots: two groups of two tensor ranks, and ZeRO 1 between the groups."""
    training = long_job["training"] | {"steps": 36, "checkpoint_every": 6, "eval_every": 0}
    resources = {"pool": "cpu", "workers": 4}
    return long_job | {
        "training": training,
        "resources": resources,
        "precision": {"level": "O3-split"},
        "parallelism": {"tensor": 2, "zero_stage": 1},
    }


@pytest.mark.system
def test_two_nodes_die_one_after_the_other_and_every_loss_is_that_of_an_undisturbed_run(
    cluster: tuple[Nodes, ServerOnNodes], wide_job: dict[str, Any]
) -> None:
    nodes, server = cluster
    first, second = nodes.add(), nodes.add()
    expected = train_undisturbed(server, wide_job)
    job = server.client.submit(wide_job | {"retry": {"max_failures": 3}})
    server.wait_for_step(job.id, 8)
    second.kill()
    nodes.add()
    server.wait_for_attempt(job.id, 2)
    first.kill()
    nodes.add()
    finished = server.finish(job.id)
    assert finished.state is JobState.SUCCEEDED, finished
    attempts = attempts_of(server, finished)
    assert len(attempts) >= 3
    assert losses(server, finished) == expected
    assert_gapless_and_each_attempt_after_the_other(server, finished)
