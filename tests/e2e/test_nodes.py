"""A job over two nodes of a real Ray cluster: each node dies with all its processes, and another joins."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

from octet.api_schemas import FailureReason, JobState, Probe, ProbeState
from tests.e2e.octet_server import losses
from tests.e2e.ray_nodes import Nodes, ServerOnNodes, served_on_nodes
from tests.e2e.specs import on_ranks
from tests.e2e.test_chaos import assert_gapless_and_each_attempt_after_the_other, attempts_of, train_undisturbed
from tests.kit.waiting import LONG_S, wait_until


@pytest.fixture
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Nodes, ServerOnNodes]]:
    """Octet on a cluster whose pool has no node yet."""
    with served_on_nodes(tmp_path_factory.mktemp("nodes")) as both:
        yield both


@pytest.fixture
def wide_job(long_job: dict[str, Any]) -> dict[str, Any]:
    """Four ranks over two nodes of two slots: two groups of two tensor ranks, and ZeRO 1 between the groups."""
    parallelism = {"tensor": 2, "zero_stage": 1}
    return on_ranks(long_job, 4, 36, 6, precision={"level": "O3-split"}, parallelism=parallelism)


@pytest.mark.system
def test_two_nodes_die_one_after_the_other_and_every_loss_is_that_of_an_undisturbed_run(
    cluster: tuple[Nodes, ServerOnNodes], wide_job: dict[str, Any]
) -> None:
    nodes, server = cluster
    wide_job["training"]["steps"] = 240  # as many as pass until this process has seen step 8 and killed a node
    first, second = nodes.add(), nodes.add()
    expected = train_undisturbed(server, wide_job)
    job = server.client.submit(wide_job)  # no failure of its own is tried again
    server.wait_for_step(job.id, 8)
    second.kill()
    nodes.add()
    wait_for_another_attempt(server, job.id)
    first.kill()
    nodes.add()
    finished = server.finish(job.id)
    assert finished.state is JobState.SUCCEEDED, finished
    attempts = attempts_of(server, finished)
    assert len(attempts) >= 3
    trained = [attempt.reason for attempt in attempts[:-1] if attempt.first_step_at is not None]
    assert set(trained) == {FailureReason.NODE_LOST}
    assert losses(server, finished) == expected
    assert_gapless_and_each_attempt_after_the_other(server, finished)


def wait_for_another_attempt(server: ServerOnNodes, job_id: str) -> None:
    """Wait until an attempt after the first trains. One that was placed on a node that Ray had not missed yet fails before."""

    def trains() -> bool:
        assert not server.client.job(job_id).state.is_terminal
        _, *later = server.client.attempts(job_id)
        return any(attempt.first_step_at is not None and attempt.finished_at is None for attempt in later)

    server.wait_for(trains)


@pytest.mark.system
def test_a_supervisor_that_ray_has_forgotten_was_lost_with_its_node(tmp_path: Path) -> None:
    """Ray answers that a dead actor died, and a moment later that it has none of that name."""
    with ExitStack() as stack:
        nodes = Nodes(tmp_path / "octet", stack)
        node = nodes.add()
        command = [sys.executable, "-m", "tests.e2e.probe_lost_supervisor", nodes.address, str(tmp_path / "octet/ray/token")]
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=inherited)
        stack.callback(process.wait)
        stack.callback(process.kill)
        assert process.stdout is not None
        assert process.stdout.readline() == "started\n"
        node.kill()
        answers, _ = process.communicate("it is dead\n", timeout=2 * LONG_S)
        assert process.returncode == 0
        probes = [Probe.model_validate_json(line) for line in answers.splitlines() if line.startswith("{")]  # Ray writes too
        *before, last = probes  # Ray may take the node for alive for a while
        assert {probe.state for probe in before} <= {ProbeState.PLACING, ProbeState.EXITED}
        assert (last.state, last.reason) == (ProbeState.EXITED, FailureReason.NODE_LOST)


@pytest.mark.system
@pytest.mark.parametrize("agent", ["DashboardAgent", "RuntimeEnvAgen"])
def test_a_node_ends_with_its_raylet(tmp_path: Path, agent: str) -> None:
    """The raylet ends itself when an agent is killed, with a status that `ray start` takes for an order."""
    with ExitStack() as stack:
        nodes = Nodes(tmp_path / "octet", stack)
        node = nodes.add()
        wait_until(lambda: any(agent in process.name() for process in node.processes()))
        [victim] = [process for process in node.processes() if agent in process.name()]
        victim.kill()
        wait_until(lambda: node.poll() is not None)
        assert node.poll() == 1


@pytest.mark.system
def test_a_node_dies_while_it_writes_a_checkpoint_and_the_job_goes_on_from_the_one_before(
    cluster: tuple[Nodes, ServerOnNodes], wide_job: dict[str, Any]
) -> None:
    nodes, server = cluster
    _, second = nodes.add(), nodes.add()
    expected = train_undisturbed(server, wide_job)
    job = server.client.submit(wide_job | {"retry": {"max_failures": 3}})
    server.wait_for_step(job.id, 8)  # a checkpoint is complete, and all ranks run
    folder = server.data_dir / "jobs" / job.id / "checkpoints"
    begun = second.kill_when(lambda: unfinished_in(folder))
    assert not begun.with_name(begun.name.removeprefix(".unfinished_")).exists()
    nodes.add()
    finished = server.finish(job.id)
    assert finished.state is JobState.SUCCEEDED, finished
    assert losses(server, finished) == expected
    first, *later = attempts_of(server, finished)
    step = int(begun.name.rpartition("_")[2])
    resumed = [attempt.resumed_from_step for attempt in later if attempt.first_step_at is not None]
    assert resumed[0] == step - wide_job["training"]["checkpoint_every"]
    assert first.last_step is not None
    assert first.last_step >= resumed[0]
    assert_gapless_and_each_attempt_after_the_other(server, finished)


def unfinished_in(folder: Path) -> Path | None:
    """The folder of a checkpoint that has files and no manifest."""
    return next((path for path in folder.glob(".unfinished_*") if is_under_way(path)), None)


def is_under_way(checkpoint: Path) -> bool:
    with suppress(FileNotFoundError):  # it is complete, and has its name, since
        names = {path.name for path in checkpoint.iterdir()}
        return bool(names) and "manifest.json" not in names
    return False


@pytest.fixture
def elastic_job(long_job: dict[str, Any]) -> dict[str, Any]:
    """Two to four ranks with one batch for all, far longer than the test needs it."""
    workers = {"min": 2, "max": 4}
    return on_ranks(long_job, workers, 100_000, 5, precision={"level": "O2"}, parallelism={"zero_stage": 1})


def wait_for_steps_of(server: ServerOnNodes, job_id: str, num_ranks: int) -> int:
    """Wait until an attempt of so many ranks goes on from a checkpoint; returns the step of that.

    One that was placed on a node that Ray had not missed yet may end before that, once Ray has.
    """
    found: list[int] = []

    def trained() -> bool:
        assert not server.client.job(job_id).state.is_terminal
        for attempt in server.client.attempts(job_id):
            start, step = attempt.resumed_from_step, attempt.last_step
            if attempt.workers == num_ranks and start and step and step > start:
                found.append(start)
        return bool(found)

    server.wait_for(trained)
    return found[0]


@pytest.mark.system
def test_an_elastic_job_goes_on_without_a_dead_node_and_grows_when_another_joins(
    cluster: tuple[Nodes, ServerOnNodes], elastic_job: dict[str, Any]
) -> None:
    nodes, server = cluster
    _, second = nodes.add(), nodes.add()
    server.wait_for_slots(4)
    job = server.client.submit(elastic_job | {"retry": {"max_failures": 3}})
    server.wait_for_step(job.id, 12)
    second.kill()
    wait_for_steps_of(server, job.id, num_ranks=2)
    nodes.add()
    grown_at = wait_for_steps_of(server, job.id, num_ranks=4)
    server.client.cancel(job.id)
    cancelled = server.finish(job.id)
    assert cancelled.state is JobState.CANCELLED
    attempts = attempts_of(server, cancelled)
    assert [attempt.workers for attempt in attempts if attempt.first_step_at is not None] == [4, 2, 4]
    resized = [event.message for event in server.client.events(job.id) if event.type == "job.resized"]
    assert [message.partition(",")[0] for message in resized] == [
        "goes on with 2 ranks after 4",
        "goes on with 4 ranks after 2",
    ]
    curve = losses(server, cancelled)
    assert [step for step, _, _ in curve] == list(range(1, len(curve) + 1)), "each step counts once"
    assert len(curve) > grown_at
    assert_gapless_and_each_attempt_after_the_other(server, cancelled)


@pytest.mark.system
def test_tensor_groups_wait_for_nodes_that_hold_them_whole(
    cluster: tuple[Nodes, ServerOnNodes], wide_job: dict[str, Any]
) -> None:
    """Nodes of three slots and of one have slots for two groups of two ranks, and room for one."""
    nodes, server = cluster
    nodes.add(slots=3)
    small = nodes.add(slots=1)
    server.wait_for_slots(4)
    job = server.client.submit(wide_job)
    server.wait_for(lambda: any(attempt.finished_at for attempt in server.client.attempts(job.id)))
    first = attempts_of(server, server.client.job(job.id))[0]
    assert first.reason is FailureReason.LAUNCH_FAILED
    assert first.message is not None
    assert "the nodes of pool cpu have 3, 1 slots, room for 1 of 2 groups" in first.message
    assert "Lower parallelism.tensor" in first.message
    small.kill()
    nodes.add(slots=2)
    finished = server.finish(job.id)
    assert finished.state is JobState.SUCCEEDED, finished
