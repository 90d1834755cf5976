"""A server with a certificate: clients and ranks trust it, and its limits and its rules without keys stay as they are."""

import os
import socket
import ssl
from contextlib import ExitStack, closing
from pathlib import Path

import psutil
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from typer.testing import CliRunner

from octet.api_schemas import JobState
from octet.client import Client, ConnectionFailed, OctetError
from octet.client.cli.app import build_app
from octet.service import tls
from octet.service.db.engine import Database
from octet.service.processes.connections import shows_users
from octet.service.settings import Settings
from octet.worker.reporting.reporter import Connection
from tests.kit.certificates import Authority, Pair, pem_of
from tests.kit.ports import free_port
from tests.kit.waiting import LONG_S, wait_until
from tests.service.databases import ON_SQLITE
from tests.service.serving import serving
from tests.service.test_peers import NOBODY
from tests.service.test_settings import refused
from tests.service.world import World, step


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def with_tls(settings: Settings, pair: Pair, **changes: object) -> Settings:
    given = {"tls_certificate": pair.certificate, "tls_key": pair.key, "port": 0, **changes}
    return Settings(**(settings.model_dump(exclude_unset=True) | given))


@ON_SQLITE
def test_a_client_trusts_the_authority_that_it_is_given(
    world: World, database_url: str, authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = with_tls(world.settings, authority.issue("localhost"))
    with serving(settings, Database(database_url, world.clock)) as (_, port):
        monkeypatch.setenv("OCTET_CA_FILE", str(authority.file))
        with Client(f"https://localhost:{port}") as client:
            assert [pool.name for pool in client.pools()]
        wrong_name = pytest.raises(ConnectionFailed, match="IP address mismatch")
        with Client(f"https://127.0.0.1:{port}", patience_s=0) as client, wrong_name:
            list(client.pools())
        monkeypatch.delenv("OCTET_CA_FILE")
        unknown_authority = pytest.raises(ConnectionFailed, match="Set OCTET_CA_FILE")
        with Client(f"https://localhost:{port}", patience_s=0) as client, unknown_authority:
            list(client.pools())
        monkeypatch.setenv("OCTET_CA_FILE", str(tmp_path / "none.pem"))
        with pytest.raises(OctetError, match=r"OCTET_CA_FILE is .*none\.pem.*No such file"):
            Client(f"https://localhost:{port}")


@ON_SQLITE
def test_ranks_of_the_machine_trust_the_certificate_whatever_its_name(
    world: World, database_url: str, authority: Authority
) -> None:
    """The ranks reach the server at 127.0.0.1, and its certificate is for the name that people use."""
    settings = with_tls(world.settings, authority.issue("octet.example.com"))
    job_id, rank = world.start()
    with serving(settings, Database(database_url, world.clock)) as (_, port):
        url = f"https://127.0.0.1:{port}/internal/v1/attempts/{rank.order.attempt_id}/reports"
        name, ca = settings.report_name, settings.report_ca
        assert name == "octet.example.com"
        with closing(Connection(url, rank.order.token, LONG_S, ca=ca, name=name)) as reports:
            assert reports.post(rank.batch(step(1)).model_dump_json().encode()).status == 200
        for wrong in ({"ca": ca, "name": "another.example.com"}, {"ca": None, "name": name}):
            with closing(Connection(url, rank.order.token, LONG_S, **wrong)) as reports, pytest.raises(ssl.SSLError):
                reports.post(b"{}")
    assert world.job(job_id).state is JobState.RUNNING


def test_orders_have_what_ranks_trust(world: World, authority: Authority, tmp_path: Path) -> None:
    pair = authority.issue("octet.example.com", "127.0.0.1")
    assert (world.settings.report_ca, world.settings.report_name) == (None, None)
    own = with_tls(world.settings, pair)
    assert own.effective_report_url.startswith("https://127.0.0.1:")
    assert (own.report_ca, own.report_name) == (pair.certificate.read_text(), None)
    elsewhere = Settings(data_dir=tmp_path, report_url="https://octet.example.com", ca_file=authority.file)
    assert (elsewhere.report_ca, elsewhere.report_name) == (authority.file.read_text(), None)
    assert Settings(data_dir=tmp_path, report_url="https://octet.example.com").report_ca is None
    combined = tmp_path / "combined.pem"
    combined.write_text(pair.key.read_text() + pair.certificate.read_text())
    assert "PRIVATE KEY" not in (with_tls(world.settings, Pair(combined, combined)).report_ca or "PRIVATE KEY")


def test_files_that_cannot_be_used_are_refused_in_one_sentence(authority: Authority, tmp_path: Path) -> None:
    pair, other = authority.issue("localhost"), authority.issue("localhost", name="other")
    protected, nothing = tmp_path / "protected.key", tmp_path / "nothing.pem"
    protected.write_bytes(pem_of(ec.generate_private_key(ec.SECP256R1()), b"passphrase"))
    nothing.write_text("nothing\n")

    def message(certificate: Path | None, key: Path | None, **others: object) -> str:
        return refused(data_dir=tmp_path, tls_certificate=certificate, tls_key=key, **others)

    assert "set tls_key too (octet serve --tls-key)" in message(pair.certificate, None)
    assert "set tls_certificate too" in message(None, pair.key)
    assert "is not that of the certificate" in message(pair.certificate, other.key)
    assert "cannot be read: No such file" in message(tmp_path / "gone", pair.key)
    assert "has no PEM certificate" in message(nothing, pair.key)
    assert "cannot be used" in message(pair.certificate, nothing)
    assert "has a passphrase" in message(pair.certificate, protected)
    nameless = authority.issue(name="nameless")
    assert "is for no name" in message(nameless.certificate, nameless.key)
    assert "has no PEM certificate" in refused(data_dir=tmp_path, ca_file=nothing)


def test_octet_serve_says_what_is_wrong_with_its_certificate(authority: Authority, tmp_path: Path) -> None:
    pair, other = authority.issue("localhost"), authority.issue("localhost", name="other")
    command = ["serve", "--port", str(free_port()), "--data-dir", str(tmp_path / "octet")]
    command += ["--tls-certificate", str(pair.certificate), "--tls-key", str(other.key)]
    ended = CliRunner().invoke(build_app(), command)
    assert ended.exit_code == 2
    assert "is not that of the certificate" in " ".join(ended.stderr.split())
    assert not (tmp_path / "octet").exists()


def test_a_renewed_certificate_is_used_and_a_broken_one_is_not(authority: Authority, caplog: pytest.LogCaptureFixture) -> None:
    now_s = 0.0
    pair = authority.issue("one.example.com")
    certificate = tls.Certificate(pair.certificate, pair.key, lambda: now_s)
    first = certificate.context()
    key = pair.key.read_bytes()
    pair.key.write_bytes(b"half a key")
    assert certificate.context() is first, "files are not looked at for each connection"
    now_s += tls.LOOK_EVERY_S
    assert certificate.context() is first
    assert "go on with the former TLS certificate" in caplog.text
    pair.key.write_bytes(key)
    authority.issue("two.example.com")
    now_s += tls.LOOK_EVERY_S
    renewed = certificate.context()
    assert renewed is not first
    now_s += tls.LOOK_EVERY_S
    assert certificate.context() is renewed


@ON_SQLITE
def test_without_keys_the_rules_of_loopback_hold_over_tls(world: World, database_url: str, authority: Authority) -> None:
    settings = with_tls(world.settings, authority.issue("octet.example.com", "127.0.0.1"))
    trusting = tls.trusting(authority.file)

    def answer(port: int, request: bytes, user: int | None = None) -> bytes:
        with socket.socket() as raw:
            if user is not None:
                os.fchown(raw.fileno(), user, -1)  # before the server sees it
            raw.connect(("127.0.0.1", port))
            with trusting.wrap_socket(raw, server_hostname="127.0.0.1") as connection:
                connection.sendall(request)
                return connection.recv(4096)

    with serving(settings, Database(database_url, world.clock)) as (_, port):
        assert answer(port, b"GET /v1/jobs HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n").startswith(b"HTTP/1.1 200 ")
        origin = b"Origin: https://127.0.0.1\r\n\r\n"
        assert answer(port, b"GET /v1/jobs HTTP/1.1\r\nHost: 127.0.0.1\r\n" + origin).startswith(b"HTTP/1.1 200 ")
        assert answer(port, b"GET /v1/jobs HTTP/1.1\r\nHost: octet.example.com\r\n\r\n").startswith(b"HTTP/1.1 421 ")
        if os.geteuid() == 0 and shows_users():
            assert answer(port, b"GET /v1/jobs HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n", NOBODY).startswith(b"HTTP/1.1 401 ")


@ON_SQLITE
def test_connections_that_do_not_begin_tls_have_places_and_a_deadline(
    world: World, database_url: str, authority: Authority
) -> None:
    pair = authority.issue("127.0.0.1")
    settings = with_tls(world.settings, pair, max_connections_per_address=16, request_head_timeout_s=0.2)
    patient = settings.model_copy(update={"request_head_timeout_s": LONG_S})
    with serving(patient, Database(database_url, world.clock)) as (_, port), ExitStack() as stack:
        silent = [stack.enter_context(_connected(port)) for _ in range(60)]
        assert _healthz(port, authority) == 200, "the longest silent one makes room"
        this = psutil.Process()
        wait_until(
            lambda: sum(each.laddr.port == port and each.status == "ESTABLISHED" for each in this.net_connections()) <= 18
        )
        silent[-1].sendall(b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        assert not silent[-1].recv(4096).startswith(b"HTTP"), "nothing is answered in plain"
    with serving(settings, Database(database_url, world.clock)) as (_, port), _connected(port) as one:
        assert one.recv(1) == b""


def _connected(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=LONG_S)


def _healthz(port: int, authority: Authority) -> int:
    context = tls.trusting(authority.file)
    with _connected(port) as raw, context.wrap_socket(raw, server_hostname="127.0.0.1") as connection:
        connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
        return int(connection.recv(4096).split()[1])
