"""The listener for reports, health and metrics alone: what the API's connections do is nothing to it."""

import http.client
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from octet.api_schemas import JobState
from octet.service.db.engine import Database
from octet.service.processes.connections import Listeners
from octet.service.processes.startup import listening
from octet.service.settings import Settings
from tests.kit.ports import free_port
from tests.kit.waiting import LONG_S
from tests.service.databases import ON_SQLITE
from tests.service.serving import serving
from tests.service.test_connections import connect, report, status
from tests.service.test_settings import KEY, refused
from tests.service.world import World, step

STREAM = b"GET /v1/stream?rows=limit%3D1 HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"


@ON_SQLITE
@pytest.mark.parametrize("has_internal_address", [True, pytest.param(False, marks=pytest.mark.matrix)])
def test_no_lease_runs_out_while_streams_of_the_ranks_address_take_every_place(
    world: World, database_url: str, has_internal_address: bool
) -> None:
    """There are more streams than one address may have by default, and each of the places of the API is taken."""
    num_streams = 288
    job_id, rank = world.start()
    internal_port = free_port() if has_internal_address else 0
    changes = {"port": 0, "max_connections_per_address": 384, "internal_address": f"127.0.0.1:{internal_port}"}
    if not has_internal_address:
        changes.pop("internal_address")
    settings = world.settings.model_copy(update=changes)
    with serving(settings, Database(database_url, world.clock)) as (_, port), ExitStack() as stack:
        streams = [stack.enter_context(connect(port, STREAM)) for _ in range(num_streams)]
        assert all(stream.recv(4096).startswith(b"HTTP/1.1 200 ") for stream in streams)
        rest = [stack.enter_context(connect(port, b"GET /v1/jobs HTTP/1.1\r\n")) for _ in range(384 - num_streams)]
        ranks_port = internal_port or port
        for number in range(1, 8):
            world.turn(settings.lease_s / 2)
            world.dispatch()
            assert report(ranks_port, rank, step(number)) == 200
            assert [status(ranks_port, path) for path in ("/healthz", "/metrics")] == [200, 200]
        assert len(rest) == 96
        assert world.job(job_id).state is JobState.RUNNING
        (attempt,) = world.attempts(job_id)
        assert attempt.lease_expires_at is not None
        assert (attempt.lease_expires_at - world.clock.now()).total_seconds() == settings.lease_s
        for stream in streams:
            stream.setblocking(False)
            assert _is_open(stream), "no stream had to make room"


def _is_open(stream: object) -> bool:
    try:
        return bool(stream.recv(1 << 20))  # type: ignore[attr-defined]
    except BlockingIOError:
        return True


@ON_SQLITE
def test_the_api_is_not_at_the_internal_address(world: World, database_url: str) -> None:
    internal_port = free_port()
    settings = world.settings.model_copy(update={"port": 0, "internal_address": f"127.0.0.1:{internal_port}"})
    with serving(settings, Database(database_url, world.clock)) as (_, port):
        for path in (
            "/",
            "/v1/jobs",
            "/openapi.json",
            "http://127.0.0.1/v1/jobs",
            "/%69nternal/v1/prometheus/targets",
            "/x/healthz",
        ):
            assert status(internal_port, path) == 404, path
        for path in ("/internal/v1/prometheus/targets", "/healthz", "/metrics"):
            assert (status(internal_port, path), status(port, path)) == (200, 200), path
        assert status(port, "/v1/jobs") == 200
        with closing(http.client.HTTPConnection("127.0.0.1", internal_port, timeout=LONG_S)) as kept:
            for path, expected in (("/healthz", 200), ("/v1/jobs", 404)):
                kept.request("GET", path)
                answer = kept.getresponse()
                assert (answer.status, bool(answer.read())) == (expected, True), "a connection is looked at for each request"


def test_ranks_report_to_the_internal_address_unless_another_is_set(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path, internal_address="127.0.0.1:8001")
    assert settings.effective_report_url == "http://127.0.0.1:8001"
    everywhere = {"host": "0.0.0.0", "api_keys": (KEY,), "data_roots": ("/data",)}
    assert (
        Settings(data_dir=tmp_path, internal_address="0.0.0.0:8001", **everywhere).effective_report_url
        == "http://127.0.0.1:8001"
    )
    there = Settings(data_dir=tmp_path, internal_address="127.0.0.1:8001", report_url="http://octet:8001")
    assert there.effective_report_url == "http://octet:8001"


def test_addresses_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    assert "HOST:PORT" in refused(data_dir=tmp_path, internal_address="8001")
    assert "the port of the API too" in refused(data_dir=tmp_path, internal_address="127.0.0.1:8000")
    assert "no API key is configured" in refused(data_dir=tmp_path, internal_address="0.0.0.0:8001")
    settings = Settings(data_dir=tmp_path, port=0, internal_address="127.0.0.1:0")
    with listening(settings) as (_, internal):
        taken = settings.model_copy(update={"internal_address": f"127.0.0.1:{internal.getsockname()[1]}"})
        with pytest.raises(OSError, match="Choose another with OCTET_INTERNAL_ADDRESS"), listening(taken):
            pass


def test_two_listeners_share_the_descriptors_that_there_are(tmp_path: Path) -> None:
    one, two = Settings(data_dir=tmp_path), Settings(data_dir=tmp_path, internal_address="127.0.0.1:8001")
    assert _limits(Listeners.of(one, 1 << 20)) == [(3584, 512), (3584, 512)]
    assert _limits(Listeners.of(one, 1280))[0] == (896, 128)
    assert _limits(Listeners.of(two, 1280)) == [(448, 64), (448, 64)]


def _limits(listeners: Listeners) -> list[tuple[int, int]]:
    return [(each.ordinary.limit, each.reserved.limit) for each in (listeners.api, listeners.internal)]
