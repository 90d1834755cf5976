"""`deploy/nginx/octet.conf` in front of a server: TLS, streams as they are sent, nothing that is for ranks or Prometheus."""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from octet.client import Client, OctetError
from octet.service import tls
from octet.service.db.engine import Database
from octet.service.settings import Settings
from tests.kit.certificates import Authority
from tests.kit.ports import free_port
from tests.kit.waiting import LONG_S, wait_until
from tests.service.databases import ON_SQLITE
from tests.service.serving import serving
from tests.service.world import World

KEY = "the key of the operator"
ROOT = Path(__file__).parents[2]
CONFIGURATION = ROOT / "deploy/nginx/octet.conf"
NGINX = shutil.which("nginx", path=os.pathsep.join([os.environ["PATH"], "/usr/sbin", str(ROOT / "build/nginx/usr/sbin")]))
TEMPORARY = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")

pytestmark = [pytest.mark.system, pytest.mark.skipif(NGINX is None, reason="needs nginx: make nginx, on Debian")]


@contextmanager
def proxy(folder: Path, authority: Authority, server_port: int) -> Iterator[int]:
    """Run nginx with the file as it is, except for addresses and files. Yields the port of https."""
    port, plain_port, pair = free_port(), free_port(), authority.issue("127.0.0.1", name="nginx")
    text = CONFIGURATION.read_text()
    for here, there in (
        ("server 127.0.0.1:8000;", f"server 127.0.0.1:{server_port};"),
        ("listen 443 ", f"listen 127.0.0.1:{port} "),
        ("listen 80;", f"listen 127.0.0.1:{plain_port};"),
        ("/etc/ssl/octet/octet.crt", str(pair.certificate)),
        ("/etc/ssl/octet/octet.key", str(pair.key)),
    ):
        assert text.count(here) == 1, here
        text = text.replace(here, there)
    (folder / "octet.conf").write_text(text)
    temporary = " ".join(f"{name}_temp_path {folder}/{name};" for name in TEMPORARY)  # Debian's are made by its package
    (folder / "nginx.conf").write_text(
        f"daemon off; pid {folder}/pid; error_log {folder}/error.log; events {{}}\n"
        f"http {{ {temporary} access_log {folder}/access.log; include {folder}/octet.conf; }}\n"
    )
    assert NGINX is not None
    process = subprocess.Popen([NGINX, "-p", str(folder), "-c", str(folder / "nginx.conf")])
    try:
        wait_until(lambda: "pid" in {path.name for path in folder.iterdir()} or process.poll() is not None)
        assert process.poll() is None, (folder / "error.log").read_text()
        yield port
    finally:
        process.terminate()
        process.wait(LONG_S)


@ON_SQLITE
def test_a_client_reaches_octet_through_the_proxy(
    world: World, database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority, folder = Authority(tmp_path), tmp_path / "nginx"
    folder.mkdir()
    monkeypatch.setenv("OCTET_CA_FILE", str(authority.file))
    settings = Settings(data_dir=world.settings.data_dir, port=0, api_keys=(KEY,), max_connections_per_address=0)
    with (
        serving(settings, Database(database_url, world.clock)) as (_, server_port),
        proxy(folder, authority, server_port) as port,
        Client(f"https://127.0.0.1:{port}", KEY) as client,
        httpx.Client(base_url=client.url, verify=tls.trusting(authority.file), timeout=LONG_S) as stranger,
    ):
        with pytest.raises(OctetError, match="an API key is needed"), Client(client.url) as without_key:
            without_key.submit(world.spec)
        headers = {"Authorization": f"Bearer {KEY}"}
        with stranger.stream("GET", "/v1/stream?rows=limit%3D1", headers=headers) as streamed:
            assert streamed.headers["content-type"].startswith("text/event-stream")
            chunks = streamed.iter_text()
            received = next(chunks)
            job = client.submit(world.spec)  # while the stream is open
            while job.id not in received:
                received += next(chunks)
        answered = stranger.post("/v1/jobs", content=b"{}", headers=headers)
        assert re.fullmatch(r"[0-9a-f]{32}", answered.headers["x-request-id"]), "the id that nginx has made"
        assert answered.headers["strict-transport-security"]
        for hidden in ("/metrics", "/internal/v1/prometheus/targets"):
            assert stranger.get(hidden, headers=headers).status_code == 404
