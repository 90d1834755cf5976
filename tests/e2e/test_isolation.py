"""Nobody else reaches a server on loopback: not through its sockets, not through its files, whatever the caller's umask."""

import ipaddress
import json
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.e2e.conftest import served
from tests.e2e.octet_server import Server


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that was started with umask 0."""
    yield from served(Server(tmp_path_factory.mktemp("open") / "octet", umask=0))


@pytest.mark.slow
def test_two_ranks_listen_and_write_for_us_alone(training: Server, long_job: dict[str, Any]) -> None:
    long_job["training"] |= {"steps": 100_000, "checkpoint_every": 5}
    job = training.client.submit(long_job | {"resources": {"pool": "cpu", "workers": 2}})
    training.wait_for(lambda: len(list(training.client.checkpoints(job.id))) > 0)
    assert len([each for each in training.processes() if "RankActor" in " ".join(each.cmdline())]) == 2
    assert open_sockets(training) == []
    assert open_paths(training.data_dir) == []
    temp_dir = Path(json.loads((training.data_dir / "ray" / "cluster.json").read_text())["temp_dir"])
    assert stat.S_IMODE(temp_dir.parent.stat().st_mode) == 0o700, "Ray's own folder is open to all; the one around it is not"
    training.client.cancel(job.id)
    training.finish(job.id)


def open_sockets(server: Server) -> list[str]:
    """Name every listening socket that another machine can reach, with its process."""
    found, names = [], set()
    for process in [*server.processes(), psutil.Process(server.pid)]:
        for connection in process.net_connections("inet"):
            if connection.status == psutil.CONN_LISTEN:
                ip, port = connection.laddr
                names.add(process.name())
                found += [] if is_loopback(ip) else [f"{process.name()} {' '.join(process.cmdline())[:160]}: {ip}:{port}"]
    assert {"gcs_server", "raylet"} < names, "they listen, and so do the ranks"
    assert any("RankActor" in name for name in names), names
    return found


def is_loopback(ip: str) -> bool:
    address = ipaddress.ip_address(ip)
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


def open_paths(folder: Path) -> list[str]:
    """Name every path of the data folder that has a mode for other users."""
    modes = {path: stat.S_IMODE(path.lstat().st_mode) for path in [folder, *folder.rglob("*")] if not path.is_symlink()}
    assert any(path.name == "tensors.safetensors" for path in modes)
    assert any(path.name == "octet.db-wal" for path in modes)
    return [f"{path.relative_to(folder)} {mode:04o}" for path, mode in modes.items() if mode & 0o077]
