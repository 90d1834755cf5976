"""The demo's own server: the demo reports its end, and leaves neither the server nor its children running."""

import os
import sys
from pathlib import Path

import pytest

from octet.client.demo.own_server import OwnServer
from octet.client.errors import ServerFailed
from octet.client.terminal import Terminal
from tests.kit.waiting import wait_until

STUBBORN = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
ignoring = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
child = subprocess.Popen([sys.executable, "-c", ignoring])
print(child.pid, flush=True)
time.sleep(60)
"""


def server(tmp_path: Path, code: str) -> OwnServer:
    return OwnServer([sys.executable, "-c", code], "http://127.0.0.1:9", tmp_path)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_server_that_ends_is_reported_with_its_log(tmp_path: Path) -> None:
    failing = server(tmp_path, "import sys; print('no disk'); sys.exit(7)")
    with pytest.raises(ServerFailed, match=rf"exit status 7.*{tmp_path / 'server.log'}(?s:.*)no disk"):
        failing.wait_until_ready(Terminal())
    failing.stop()


def test_a_server_that_is_never_ready_is_given_up(tmp_path: Path) -> None:
    silent = server(tmp_path, "import time; time.sleep(60)")
    with pytest.raises(ServerFailed, match=r"not ready after 0\.05 s"):
        silent.wait_until_ready(Terminal(), timeout_s=0.05)
    silent.stop()
    with pytest.raises(ServerFailed, match="exit status -15"):
        silent.check()


def test_what_ignores_sigterm_is_killed_with_its_children(tmp_path: Path) -> None:
    stubborn = server(tmp_path, STUBBORN)
    wait_until(lambda: stubborn.log_path.read_text().endswith("\n"))
    text = stubborn.log_path.read_text()
    assert is_running(int(text))
    stubborn.stop(timeout_s=0.1)
    with pytest.raises(ServerFailed, match="exit status -9"):
        stubborn.check()
    wait_until(lambda: not is_running(int(text)))


def test_settings_of_another_server_are_not_inherited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTET_DATABASE_URL", "postgresql://production")
    monkeypatch.setenv("HARMLESS", "kept")
    child = server(tmp_path, "import os; print(os.environ.get('OCTET_DATABASE_URL'), os.environ['HARMLESS'], os.getpgid(0))")
    with pytest.raises(ServerFailed):
        child.wait_until_ready(Terminal())
    database, harmless, group = child.log_path.read_text().split()
    assert (database, harmless) == ("None", "kept")
    assert int(group) != os.getpgid(0)
    child.stop()
