"""The calls of a server to the process of its Ray, over a real socket, without a Ray."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from octet.api_schemas import AttemptRef, JobSpec, LaunchOrder, PoolCapacity, Probe, ProbeState
from octet.service.cluster.fake import FakeLauncher
from octet.service.cluster.launcher import LauncherError
from octet.service.cluster.ray import calls
from octet.service.cluster.ray.calls import HostedLauncher, Start
from octet.service.cluster.ray.host import Calls
from tests.kit.servers import running
from tests.service.conftest import POOLS

REF = AttemptRef(attempt_id="att_1", epoch=3)


@pytest.fixture
def launch_order(spec_document: dict[str, Any]) -> LaunchOrder:
    return LaunchOrder(
        attempt_id=f"att_{'0' * 26}",
        job_id=f"job_{'0' * 26}",
        epoch=4,
        token="secret",
        spec=JobSpec.model_validate(spec_document | {"resources": {"workers": 2}}),
        pool=POOLS[0],
        report_url="http://127.0.0.1:1",
        job_dir="/none",
        checkpoints=(),
        lease_s=60,
        heartbeat_s=2,
    )


class Cluster(FakeLauncher):
    """A fake of `RayLauncher` with the methods that other launchers lack."""

    def __init__(self) -> None:
        super().__init__(POOLS)
        self.starts: list[Start] = []
        self.stops: list[tuple[AttemptRef, float]] = []
        self.refusal: Exception | None = None

    def start(self, wanted: Start) -> None:
        if self.refusal:
            raise self.refusal
        self.starts.append(wanted)

    def stop(self, ref: AttemptRef, grace_s: float) -> None:
        self.stops.append((ref, grace_s))

    def probe(self, ref: AttemptRef) -> Probe:
        if self.refusal:
            raise self.refusal
        return Probe(state=ProbeState.RUNNING, message=f"{ref.attempt_id} {ref.epoch}")

    def resources_of_nodes(self) -> list[dict[str, float]]:
        cpu, cuda = POOLS[0].slot_resource, POOLS[1].slot_resource
        return [
            {cpu: 7.0, "CPU": 2.0, "node:10.0.0.7": 1.0, "node:__internal_head__": 1.0},
            {cuda: 8.0, "GPU": 5.0, "node:10.0.0.10": 1.0},
            {cuda: 2.0, "GPU": 4.0, "node:10.0.0.11": 1.0},
        ]

    def list(self) -> list[AttemptRef]:
        return [REF]


@contextmanager
def answering(path: Path, cluster: Any) -> Iterator[HostedLauncher]:
    with running(Calls(path, cluster)):
        yield HostedLauncher(lambda: str(path), POOLS, warm_idle_s=5)


@contextmanager
def listening_only(path: Path, then: Callable[[socket.socket], None]) -> Iterator[HostedLauncher]:
    """A host that accepts one call, does `then` with its connection, and says nothing."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        held: list[socket.socket] = []

        def accept() -> None:
            held.append(listener.accept()[0])
            then(held[0])

        thread = threading.Thread(target=accept)
        thread.start()
        yield HostedLauncher(lambda: str(path), POOLS)
        thread.join()
        held[0].close()


def test_every_call_reaches_the_cluster_and_its_answer_comes_back(tmp_path: Path) -> None:
    cluster = Cluster()
    with answering(tmp_path / "s", cluster) as launcher:
        assert launcher.probe(REF) == Probe(state=ProbeState.RUNNING, message="att_1 3")
        assert launcher.list() == [REF]
        assert launcher.stop(REF, 1.5) is None  # type: ignore[func-returns-value]
        nodes = ("10.0.0.10", "10.0.0.11", "10.0.0.7")
        assert launcher.capacity() == [
            PoolCapacity(pool=POOLS[0].name, slots_present=7, nodes=nodes),
            PoolCapacity(pool=POOLS[1].name, slots_present=7, nodes=nodes, slots_without_device=3),
        ]
    assert cluster.stops == [(REF, 1.5)]


def test_an_order_arrives_unparsed(tmp_path: Path, launch_order: LaunchOrder) -> None:
    cluster = Cluster()
    with answering(tmp_path / "s", cluster) as launcher:
        launcher.launch(launch_order)
    (start,) = cluster.starts
    assert start.order_json == launch_order.model_dump_json()
    assert start.ref == AttemptRef(attempt_id=launch_order.attempt_id, epoch=launch_order.epoch)
    assert (start.num_workers, start.num_together, start.warm_idle_s) == (launch_order.spec.resources.workers, 1, 5)
    assert tuple(start.node_label) == launch_order.pool.node_label


@pytest.mark.parametrize("retryable", [True, False])
def test_an_error_of_the_cluster_is_the_launcher_s_error(tmp_path: Path, launch_order: LaunchOrder, retryable: bool) -> None:
    cluster = Cluster()
    cluster.refusal = LauncherError("Ray is away", retryable=retryable)
    with answering(tmp_path / "s", cluster) as launcher, pytest.raises(LauncherError, match="Ray is away") as caught:
        launcher.launch(launch_order)
    assert caught.value.retryable is retryable


def test_a_host_that_fails_in_a_call_goes_on_and_the_call_may_be_repeated(tmp_path: Path) -> None:
    cluster = Cluster()
    cluster.refusal = ZeroDivisionError("a defect")
    with answering(tmp_path / "s", cluster) as launcher:
        found = launcher.probe(REF)
        assert found.state is ProbeState.UNREACHABLE
        assert "before it answered" in (found.message or "")
        cluster.refusal = None
        assert launcher.probe(REF).state is ProbeState.RUNNING


def test_a_host_that_dies_in_a_call_is_unreachable(tmp_path: Path) -> None:
    with listening_only(tmp_path / "s", lambda connection: connection.close()) as launcher:
        assert launcher.probe(REF).state is ProbeState.UNREACHABLE


def test_a_suspended_host_costs_a_call_its_deadline_and_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "CALL_S", 0.0)
    monkeypatch.setattr(calls, "_ANSWER_S", 0.1)
    with (
        listening_only(tmp_path / "s", lambda connection: None) as launcher,
        pytest.raises(LauncherError, match="did not answer within") as caught,
    ):
        launcher.capacity()
    assert caught.value.retryable


def test_without_a_host_the_error_says_why_ray_did_not_start() -> None:
    def find() -> str:
        raise RuntimeError("the local Ray did not start within 60 s. The end of its log:\nno space left")

    with pytest.raises(LauncherError, match="no space left"):
        HostedLauncher(find, POOLS).list()
