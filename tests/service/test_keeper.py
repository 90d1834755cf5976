"""Finding the embedded cluster's keeper, without a Ray."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from octet.service.cluster.ray.embedded import LocalRay
from tests.service.conftest import POOLS

OF_A_KILLED_KEEPER, OF_THE_NEW_ONE = "killed/calls.sock", "new/calls.sock"
NEW_KEEPER = """
import fcntl, json, pathlib, sys, time
folder = pathlib.Path(sys.argv[1])
lock = (folder / "keeper.lock").open("w")
fcntl.flock(lock, fcntl.LOCK_EX)
time.sleep(0.5)  # Ray starts
(folder / "cluster.json").write_text(json.dumps({"socket": sys.argv[2]}))
sys.stdin.read()
"""


def test_the_socket_that_a_killed_keeper_left_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody answers there, and a call would fail while the new keeper already starts Ray."""
    folder = tmp_path / "ray"
    folder.mkdir()
    (folder / "cluster.json").write_text(json.dumps({"socket": OF_A_KILLED_KEEPER}))
    local = LocalRay(tmp_path, POOLS)
    command = [sys.executable, "-c", NEW_KEEPER, str(folder), OF_THE_NEW_ONE]
    started: list[subprocess.Popen[bytes]] = []

    def start() -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen(command, stdin=subprocess.PIPE))
        return started[0]

    monkeypatch.setattr(local, "_start_keeper", start)
    assert local.ensure() == OF_THE_NEW_ONE
    (keeper,) = started
    keeper.communicate(b"")


def test_the_server_s_settings_are_not_in_the_environment_of_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTET_API_KEYS", "a-key-that-ranks-must-not-see")
    monkeypatch.setenv("octet_database_url", "postgresql://octet:password@postgres/octet")
    monkeypatch.setenv("VISIBLE_TO_RANKS", "1")
    environment = LocalRay(tmp_path, POOLS)._full_env()
    assert [name for name in environment if name.upper().startswith("OCTET_")] == []
    assert environment["VISIBLE_TO_RANKS"] == "1"
    assert environment["RAY_AUTH_MODE"] == "token"
