"""A whole `octet serve` as root: ranks of each tenant run as its user, who sees nothing of another tenant's jobs."""

import contextlib
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from octet.api_schemas import JobState
from octet.client import Client
from tests.e2e.octet_server import Server
from tests.kit.waiting import LONG_S

USERS = {"vision": 20_001, "speech": 20_002}
KEYS = {tenant: f"the key of {tenant} here" for tenant in USERS}
ROOT = Path(__file__).parents[2]


def _is_open_to_others(place: Path) -> bool:
    return all(folder.stat().st_mode & stat.S_IXOTH for folder in (place.resolve(), *place.resolve().parents))


def _python_for_all() -> str | None:
    """Return a Python of this version that other users can run; Debian's, where ours lies in root's own folder."""
    for path in (sys.executable, f"/usr/bin/python{sys.version_info.major}.{sys.version_info.minor}"):
        if Path(path).exists() and _is_open_to_others(Path(path)) and _is_open_to_others(ROOT):
            return path
    return None


pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root, who alone can become other users"),
    pytest.mark.skipif(_python_for_all() is None, reason="needs a Python that other users can run"),
]


class ServerOfUsers(Server):
    """`octet serve` with a pool whose tenants have users."""

    def command(self) -> list[str]:
        python = _python_for_all()
        assert python is not None
        return [
            python,
            *super().command()[1:],
            "--pools",
            str(self.data_dir.parent / "pools.yaml"),
            *_keys_of(self.data_dir.parent),
        ]


def _keys_of(folder: Path) -> list[str]:
    return ["--api-key-file", str(folder / "keys"), "--data-root", "/usr/share/doc"]


@pytest.fixture
def server() -> Iterator[ServerOfUsers]:
    folder = Path(tempfile.mkdtemp(prefix="octet-users-", dir="/var/tmp"))  # pytest's own are closed to other users
    folder.chmod(0o755)
    tenants = {tenant: {"user": {"uid": uid, "gid": uid}} for tenant, uid in USERS.items()}
    pool = {"name": "cpu", "node_label": ["octet-pool", "cpu"], "slots": 2, "tenants": tenants}
    (folder / "pools.yaml").write_text(yaml.safe_dump([pool]))
    (folder / "keys").write_text("".join(f"{tenant}:{key}\n" for tenant, key in KEYS.items()))
    search_path = os.pathsep.join(part for part in sys.path if part and not part.startswith(sys.base_prefix))
    server = ServerOfUsers(folder / "data", variables={"PYTHONPATH": search_path})
    server.client = Client(f"http://127.0.0.1:{server.port}", KEYS["vision"], patience_s=LONG_S)
    server.start()
    try:
        yield server
    finally:
        server.stop()
        shutil.rmtree(folder)


def _as_user(uid: int, *command: str) -> int:
    return subprocess.run(command, user=uid, group=uid, extra_groups=[], capture_output=True, check=False).returncode


def _owners(folder: Path) -> set[int]:
    """Collect the owners of a folder and of what is in it, except for files that a running job removes meanwhile."""
    owners = set()
    for parent, _, files in os.walk(folder):  # `rglob` fails where a folder is renamed under it
        for path in (parent, *(os.path.join(parent, name) for name in files)):
            with contextlib.suppress(FileNotFoundError):
                owners.add(os.lstat(path).st_uid)
    return owners


def test_ranks_run_as_their_tenants_users(server: ServerOfUsers, long_job: dict[str, Any]) -> None:
    spec = long_job | {"data": {"path": "/usr/share/doc", "include": ["**/copyright"]}}
    job = server.client.submit(spec)
    server.wait_for_step(job.id, 41)
    folder = server.data_dir / "jobs" / job.id
    (rank,) = server.ranks()
    assert (set(rank.uids()), set(rank.gids())) == ({USERS["vision"]}, {USERS["vision"]})
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    with Client(server.client.url, KEYS["speech"], patience_s=LONG_S) as speech:
        other = speech.submit(spec | {"name": "other", "training": spec["training"] | {"steps": 4}})
        server.wait_for(lambda: speech.job(other.id).state.is_terminal)
        assert speech.job(other.id).state is JobState.SUCCEEDED
    owners = {job.id: USERS["vision"], other.id: USERS["speech"]}
    for job_id, uid in owners.items():
        folder = server.data_dir / "jobs" / job_id
        assert _owners(folder) == {uid}
        for user in USERS.values():
            assert (_as_user(user, "ls", str(folder)) == 0) == (user == uid)
        assert _as_user(uid, "cat", str(server.data_dir / "octet.db")) != 0
        assert _as_user(uid, "ls", str(server.data_dir)) != 0
        assert _as_user(uid, "cat", str(server.data_dir / "ray/token")) != 0
    assert server.finish(job.id).state is JobState.SUCCEEDED
    (checkpoint, *_) = server.client.checkpoints(job.id)
    assert list(server.client.checkpoint_files(job.id, checkpoint.id)), "root still reads what its users wrote"
