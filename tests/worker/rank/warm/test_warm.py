"""Processes that are forked with torch imported: each runs one rank, and whatever goes wrong ends in a cold start."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest

from octet.api_schemas import DesiredState, JobSpec, LaunchOrder, PoolConfig, ReportReply
from octet.api_schemas.tracking import TensorBoardTracker, TrackersSpec
from octet.worker.rank import warm
from octet.worker.rank.warm import messages
from tests.kit.waiting import wait_until
from tests.worker.models.test_python import PACKAGE

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has pidfd and abstract sockets")
IDLE_S = 60.0


class ControlPlane(ThreadingHTTPServer):
    """Answers every report of a rank, and keeps them."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Route)
        self.reports: list[dict[str, Any]] = []


class _Route(BaseHTTPRequestHandler):
    server: ControlPlane

    def do_POST(self) -> None:
        batch = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.reports += batch["reports"]
        acknowledged = max((report["seq"] for report in self.server.reports), default=0)
        reply = ReportReply(desired=DesiredState.RUN, lease_s=60, acknowledged_seq=acknowledged).model_dump_json().encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(reply)))
        self.end_headers()
        self.wfile.write(reply)

    def log_message(self, *_arguments: Any) -> None:
        return None


@pytest.fixture
def control_plane() -> Iterator[ControlPlane]:
    with ControlPlane() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def take_or_none(idle_s: float = IDLE_S, owner: int | None = None) -> warm.WarmProcess | None:
    """pytest names the current test in the environment, and another environment means another template."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("PYTEST_CURRENT_TEST")
        return warm.take(idle_s, owner=owner or os.getpid())


def take(idle_s: float = IDLE_S, owner: int | None = None) -> warm.WarmProcess:
    process = take_or_none(idle_s, owner)
    assert process is not None
    return process


def template_of(process: warm.WarmProcess) -> psutil.Process:
    template = psutil.Process(process.pid).parent()
    assert template is not None
    assert "octet.worker.rank.warm.template" in template.cmdline()
    return template


def has_ended(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_without_time_to_wait_there_is_no_warm_process() -> None:
    assert warm.take(0) is None


@pytest.fixture
def order(control_plane: ControlPlane, spec_document: dict[str, Any], tmp_path: Path) -> LaunchOrder:
    return LaunchOrder(
        attempt_id=f"att_{'0' * 26}",
        job_id=f"job_{'0' * 26}",
        epoch=1,
        token="secret",
        spec=JobSpec.model_validate(spec_document),
        pool=PoolConfig(name="cpu", node_label=("octet-pool", "cpu"), slots=1),
        report_url=f"http://127.0.0.1:{control_plane.server_port}",
        data_roots=("/",),
        job_dir=str(tmp_path),
        checkpoints=(),
        trackers=TrackersSpec(tensorboard=TensorBoardTracker()),
        lease_s=60,
        heartbeat_s=2,
    )


def test_each_process_runs_one_rank_with_our_environment_and_ends(
    control_plane: ControlPlane, order: LaunchOrder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = take(), take()
    assert len({first.pid, second.pid, os.getpid()}) == 3
    assert template_of(first) == template_of(second)
    environment = Path(f"/proc/{first.pid}/environ").read_bytes()
    monkeypatch.setenv("RAY_ONLY_NOW", "the process gets it with its rank")
    assert b"RAY_ONLY_NOW" not in environment
    assert first.run(order.model_dump_json(), {}, datetime.now(UTC))[:2] == ("succeeded", None)
    wait_until(lambda: has_ended(first.pid))
    phases = [report["body"]["phase"] for report in control_plane.reports if report["body"]["kind"] == "phase"]
    assert phases == ["placed", "process_up", "torch_imported", "model_built", "first_step"]
    assert control_plane.reports[-1]["body"]["kind"] == "finished"
    assert len(list((tmp_path / "trackers" / "tensorboard").iterdir())) == 1
    assert not has_ended(second.pid)
    second.close()
    wait_until(lambda: has_ended(second.pid))


LOOKS = """
import json, os

def build_and_look(path, width):
    with open(path, "w") as file:
        json.dump(dict(os.environ), file)
    return Network(width)
"""


def test_a_users_code_does_not_find_the_token_of_the_cluster(
    order: LaunchOrder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "looks.py").write_text(PACKAGE + LOOKS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("RAY_AUTH_TOKEN", "opens every node")
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    model = {"entrypoint": "looks:build_and_look", "arguments": {"path": str(tmp_path / "seen.json"), "width": 32}}
    spec = JobSpec.model_validate(order.spec.model_dump(exclude_unset=True) | {"model": model})
    process = take()
    assert b"opens every node" not in Path(f"/proc/{process.pid}/environ").read_bytes()
    assert process.run(order.model_copy(update={"spec": spec}).model_dump_json(), {}, datetime.now(UTC))[:2] == (
        "succeeded",
        None,
    )
    seen = json.loads((tmp_path / "seen.json").read_text())
    assert seen["RAY_AUTH_MODE"] == "token", "it has the rest of our environment"
    assert "opens every node" not in seen.values()


def test_a_process_that_is_ended_takes_no_rank() -> None:
    process = take()
    process.end()
    wait_until(lambda: has_ended(process.pid))
    with pytest.raises(warm.ProcessLost):
        process.run("{}", {}, datetime.now(UTC))
    process.end()


def test_what_a_rank_raises_is_told() -> None:
    with pytest.raises(RuntimeError, match="ValidationError"):
        take().run("{}", {}, datetime.now(UTC))


def test_a_killed_process_is_told_as_lost() -> None:
    process = take()
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(warm.ProcessLost, match=r"SIGKILL|before it was given its rank"):
        process.run("{}", {}, datetime.now(UTC))


@pytest.mark.system
def test_a_template_that_stands_still_is_killed_and_its_processes_live_until_their_connections_end() -> None:
    process = take()
    template = template_of(process)
    template.suspend()
    assert take_or_none() is None, "this rank starts cold"
    wait_until(lambda: has_ended(template.pid))
    assert not has_ended(process.pid)
    process.close()
    wait_until(lambda: has_ended(process.pid))


@pytest.mark.system
def test_another_environment_has_a_template_of_its_own_and_each_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Started after the former template died, by the test above."""
    process = take(idle_s=1.0)
    template = template_of(process)
    with subprocess.Popen(["sleep", "600"]) as owner:
        monkeypatch.setenv("PYTHONHASHSEED", "7")
        other = take(owner=owner.pid)
        others_template = template_of(other)
        assert others_template != template
        time.sleep(1.5)
        assert not has_ended(template.pid), "one of its processes is in use"
        process.close()
        wait_until(lambda: has_ended(template.pid))  # nobody used it for a second
        assert not has_ended(others_template.pid)
        owner.kill()
        wait_until(lambda: has_ended(others_template.pid) and has_ended(other.pid))
        other.close()


def test_a_message_that_breaks_off_is_no_message() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(b"\0\0\0\0\0\0\0\x09{")
        theirs.close()
        assert messages.receive(ours) is None
