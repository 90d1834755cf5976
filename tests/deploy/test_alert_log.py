"""The receiver of the compose stack prints what Alertmanager sends; the real one sends it by the stack's own configuration."""

import json
import os
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.kit.ports import free_port
from tests.kit.waiting import wait_until

ROOT = Path(__file__).parents[2]
COMPOSE = ROOT / "deploy/compose"
ALERT: dict[str, Any] = {
    "status": "firing",
    "labels": {"alertname": "OctetNoLeader", "severity": "critical"},
    "annotations": {"summary": "No dispatcher\nleads", "runbook_url": "http://127.0.0.1:9090/user/operations.md#octetnoleader"},
}
LINE = "critical OctetNoLeader: No dispatcher leads http://127.0.0.1:9090/user/operations.md#octetnoleader"


class Receiver:
    """The receiver in a process, and what it has printed."""

    def __init__(self, folder: Path) -> None:
        self.port, self.log = free_port(), folder / "alerts.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen([sys.executable, COMPOSE / "alert_log.py", str(self.port)], stdout=log)
        wait_until(lambda: self.answers() == 501)  # a GET is not for it, and shows that it listens

    def answers(self, body: bytes | None = None) -> int | None:
        """Return the status of an answer; None while nobody listens."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/", body) as answer:
                status: int = answer.status
                return status
        except urllib.error.HTTPError as error:
            return error.code
        except urllib.error.URLError:
            return None


@pytest.fixture
def receiver(tmp_path: Path) -> Iterator[Receiver]:
    running = Receiver(tmp_path)
    yield running
    running.process.kill()
    running.process.wait()


def test_an_alert_is_one_line(receiver: Receiver) -> None:
    assert receiver.answers(json.dumps({"alerts": [ALERT, {"status": "resolved"}]}).encode()) == 200
    assert receiver.log.read_text().splitlines() == [f"firing {LINE}", "resolved ? ?:"]


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"alerts": 3}', b'{"alerts": ["x"]}'])
def test_what_is_no_notification_is_refused(receiver: Receiver, body: bytes) -> None:
    assert receiver.answers(body) == 400
    assert receiver.log.read_text() == ""


def program(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        if os.environ.get("CI") == "true":
            pytest.fail(f"missing: {name}")
        pytest.skip(f"missing: {name}, of Debian's package prometheus-alertmanager")
    return found


def test_alertmanager_accepts_the_configuration() -> None:
    command = [program("amtool"), "check-config", str(COMPOSE / "alertmanager.yml")]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stdout + answer.stderr


@pytest.mark.system
def test_alertmanager_sends_an_alert_to_the_log(receiver: Receiver, tmp_path: Path) -> None:
    """Only the receiver's address and the wait for further alerts differ from the stack's configuration."""
    config = yaml.safe_load((COMPOSE / "alertmanager.yml").read_text())
    config["route"]["group_wait"] = "0s"
    (webhook,) = config["receivers"][0]["webhook_configs"]
    webhook["url"] = f"http://127.0.0.1:{receiver.port}/"
    (tmp_path / "alertmanager.yml").write_text(yaml.safe_dump(config))
    address = f"127.0.0.1:{free_port()}"
    options = [f"--config.file={tmp_path}/alertmanager.yml", f"--storage.path={tmp_path}/data", "--cluster.listen-address="]
    with (tmp_path / "log").open("wb") as log:
        manager = subprocess.Popen(
            [program("prometheus-alertmanager"), *options, f"--web.listen-address={address}"], stdout=log, stderr=log
        )
    try:
        alert = {name: ALERT[name] for name in ("labels", "annotations")} | {"startsAt": datetime.now(UTC).isoformat()}
        request = urllib.request.Request(
            f"http://{address}/api/v2/alerts", json.dumps([alert]).encode(), {"Content-Type": "application/json"}
        )
        wait_until(lambda: is_taken(request), poll_s=0.1)
        wait_until(lambda: f"firing {LINE}" in receiver.log.read_text(), poll_s=0.1)
    finally:
        manager.terminate()
        manager.wait()


def is_taken(request: urllib.request.Request) -> bool:
    try:
        with urllib.request.urlopen(request) as answer:
            return bool(answer.status == 200)
    except urllib.error.URLError:
        return False
