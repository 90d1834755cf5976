"""A server without keys serves the user who runs it: the kernel says whose the other end of a connection is."""

import http.client
import json
import os
import signal
import socket
from contextlib import closing
from pathlib import Path

import pytest

from octet.api_schemas.keys import local_key_file
from octet.client import ApiError, Client
from octet.service.db.engine import Database
from octet.service.processes import embedded
from octet.service.processes.connections import shows_users, user_of
from octet.service.settings import Settings
from tests.kit.ports import free_port
from tests.service.serving import serving

NOBODY = 65534

NEEDS_LINUX = pytest.mark.skipif(not shows_users(), reason="needs a kernel with sock_diag: Linux")


@NEEDS_LINUX
@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_the_kernel_names_the_user_of_a_socket_until_it_is_closed(host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, 0), family=family)
    except OSError:
        pytest.skip(f"this machine has no {host}")
    with listener, socket.create_connection(listener.getsockname()[:2]) as client:
        ends = client.getsockname()[:2], client.getpeername()[:2]
        assert user_of(*ends) == os.geteuid()
        client.close()
        assert user_of(*ends) is None, "the kernel's 0 of a closed socket is not root"
        with pytest.raises(OSError, match="does not show"):
            user_of((host, 1), ends[1])


@NEEDS_LINUX
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give a socket to another user")
def test_another_user_of_the_machine_is_refused_and_root_is_not(sqlite_file: Path, tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path, port=0)
    with serving(settings, Database(f"sqlite:///{sqlite_file}")) as (_, port):
        for path, refused in (("/v1/jobs", 401), ("/metrics", 401), ("/", 401), ("/healthz", 200)):
            assert ask_as(None, port, path)[0] == 200
            status, body = ask_as(NOBODY, port, path)
            assert status == refused, path
            if refused == 401:
                assert json.loads(body)["code"] == "unauthenticated"
                assert "comes from user 65534. Start it with --api-key-file" in json.loads(body)["detail"]
        assert ask_as(NOBODY, port, "/internal/v1/attempts/x/reports")[0] == 405, "ranks have a token of their own"


def test_with_keys_every_user_is_served(sqlite_file: Path, tmp_path: Path) -> None:
    key = "a key that is long enough"
    settings = Settings(data_dir=tmp_path, port=0, api_keys=(key,))
    user = NOBODY if os.geteuid() == 0 else None
    with serving(settings, Database(f"sqlite:///{sqlite_file}")) as (_, port):
        assert ask_as(user, port, "/v1/jobs")[0] == 401
        assert ask_as(user, port, "/v1/jobs", {"Authorization": f"Bearer {key}"})[0] == 200


def test_where_the_system_names_no_users_the_server_writes_a_key_for_its_own(
    sqlite_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`octet serve` is run up to its cluster, and its settings served."""
    found: list[Settings] = []
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(embedded, "shows_users", lambda: False)
    monkeypatch.setattr(embedded, "run", lambda settings, *_: found.append(settings))
    monkeypatch.setattr(embedded, "hold_serve_lock", lambda _: None)
    monkeypatch.setattr(embedded, "log_to_stderr", lambda _: None)
    port = free_port()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        embedded.serve(given={"port": port, "data_dir": tmp_path / "data"})
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    key_file = local_key_file(port)
    assert key_file.stat().st_mode & 0o777 == 0o600
    with serving(found[0], Database(f"sqlite:///{sqlite_file}")), Client(f"http://127.0.0.1:{port}") as client:
        assert list(client.jobs()) == []
        assert ask_as(None, port, "/v1/jobs")[0] == 401, "without the key"
        monkeypatch.setenv("HOME", str(tmp_path / "of-another-user"))
        with Client(f"http://127.0.0.1:{port}") as other, pytest.raises(ApiError, match="API key is needed"):
            list(other.jobs())


def ask_as(user: int | None, port: int, path: str, headers: dict[str, str] | None = None) -> tuple[int, str]:
    """Ask the server from a socket of another user; None: of this one. Return the status and the body."""
    asking = http.client.HTTPConnection("127.0.0.1", port)
    asking.sock = socket.socket()
    if user is not None:
        os.fchown(asking.sock.fileno(), user, -1)  # before the server sees it
    asking.sock.connect(("127.0.0.1", port))
    with closing(asking):
        asking.request("GET", path, headers=headers or {})
        response = asking.getresponse()
        return response.status, response.read(4096).decode()
