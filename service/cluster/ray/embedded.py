"""The embedded Ray: a cluster of one node on this machine. A process of its own, the keeper, starts and ends it.

    python -m octet.service.cluster.ray.embedded --dir DIR --pools JSON --warm-idle-s SECONDS  (started by `LocalRay.ensure`)

The keeper runs Ray in a child (`host.py`), which also makes the server's calls to Ray. It outlives a killed `octet serve` by
two minutes, so that a server that is started again finds its jobs still training. If no server comes back, the keeper ends
the cluster and leaves nothing behind. The cluster has a token that only this user can read, its own ports and its own
temporary folder.
"""

import argparse
import contextlib
import ctypes
import fcntl
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the keeper, which runs this module, would load pydantic for nothing
    from octet.api_schemas import PoolConfig

_START_S = 60.0
_LINGER_S = 120.0
_STOP_S = 10.0
_KEEPER_LOCK = "keeper.lock"
_PUBLISHED = "cluster.json"
# What the host has in the folder that the keeper makes for it.
TEMP_DIR, SOCKET_FILE, ADDRESS_FILE = "ray", "calls.sock", "address"
# With exactly this address Ray's servers listen on loopback alone; with any other, 127.0.0.2 too, they listen on every address.
# Without the setting Ray replaces it by the address of the current network. Despite its name it works on Linux too.
ADDRESS = "127.0.0.1"
_STAY_ON_LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
# By default the raylet answers the first driver only after it has started idle workers. The driver waits for that answer and
# holds the interpreter's lock, and the first job started 3 s later (docs/log.md).
# By default supervisors and ranks have niceness 15: with other work on the machine they get next to nothing.
_RAYLET_SETTINGS = {"RAY_prestart_worker_first_driver": "0", "RAY_worker_niceness": "0"}


class LocalRay:
    """The embedded cluster of one data folder."""

    def __init__(self, data_dir: Path, pools: "tuple[PoolConfig, ...]", *, warm_idle_s: float = 0) -> None:
        """warm_idle_s: how long the node keeps processes warm for further ranks; 0: none."""
        self._dir = data_dir / "ray"
        self._pools = pools
        self._warm_idle_s = warm_idle_s
        self._lock = threading.Lock()
        self._keeper: subprocess.Popen[bytes] | None = None
        self._is_stopped = False

    def ensure(self) -> str:
        """Start the keeper if none runs; return the path of the host's socket. Raises RuntimeError with the end of the log."""
        self._dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        _write_token(self._dir)
        deadline = time.monotonic() + _START_S
        num_started = 0
        while time.monotonic() < deadline:
            with self._lock:
                if self._is_stopped:
                    raise RuntimeError("the local Ray was stopped with its server")
                if path := self._running_socket():
                    return path
                if not _is_locked(self._dir / _KEEPER_LOCK) and not (self._keeper and self._keeper.poll() is None):
                    if num_started:
                        break
                    (self._dir / _PUBLISHED).unlink(missing_ok=True)  # of a keeper that was killed; nobody answers there
                    self._keeper, num_started = self._start_keeper(), 1
            time.sleep(0.05)
        log = self._dir / "keeper.log"
        log_end = log.read_text(errors="replace")[-2000:] if log.exists() else "(no log)"
        raise RuntimeError(f"the local Ray did not start within {_START_S:g} s. The end of its log:\n{log_end}")

    def stop(self) -> None:
        """End the cluster and wait until it is gone. After that `ensure` raises RuntimeError."""
        with self._lock:
            self._is_stopped = True
            pid = self._keeper.pid if self._keeper and self._keeper.poll() is None else self._adopted_keeper()
        if pid is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
        deadline = time.monotonic() + 3 * _STOP_S
        while _is_alive(pid, self._keeper) and time.monotonic() < deadline:
            time.sleep(0.05)

    def _adopted_keeper(self) -> int | None:
        """The process id of a keeper that an earlier server started; it is written in the keeper's lock file."""
        lock = self._dir / _KEEPER_LOCK
        return int(lock.read_text()) if _is_locked(lock) else None

    def _running_socket(self) -> str | None:
        if not _is_locked(self._dir / _KEEPER_LOCK):
            return None
        try:
            return str(json.loads((self._dir / _PUBLISHED).read_text())["socket"])
        except (OSError, ValueError, KeyError):
            return None

    def _start_keeper(self) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-m", "octet.service.cluster.ray.embedded", "--dir", str(self._dir)]
        command += ["--pools", json.dumps([pool.model_dump(mode="json") for pool in self._pools])]
        command += ["--warm-idle-s", str(self._warm_idle_s)]
        with (self._dir / "keeper.log").open("wb") as log:
            return subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, env=self._full_env()
            )

    def _full_env(self) -> dict[str, str]:
        # Ranks inherit it and run a user's own code. API keys and the database's password are not for them.
        settings = {name for name in os.environ if name.upper().startswith("OCTET_")}
        inherited = {name: os.environ[name] for name in os.environ.keys() - settings}
        return inherited | ray_environment(self._dir / "token") | _STAY_ON_LOOPBACK


def hold_serve_lock(data_dir: Path) -> int | None:
    """Lock the data folder for this process until it ends, and note its id there.

    Returns the id of the process that held the lock before, which has ended; None if none did. Raises RuntimeError if another
    server holds it.
    """
    data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(data_dir / "serve.lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        raise RuntimeError(
            f"another `octet serve` uses {data_dir}. Stop it, or choose another folder with --data-dir."
        ) from error
    former = os.pread(descriptor, 20, 0)
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, str(os.getpid()).encode(), 0)
    return int(former) if former.isdigit() else None


def ray_environment(token_file: Path) -> dict[str, str]:
    """The variables that every process of a cluster with this token needs before it imports Ray."""
    return {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token_file.resolve()),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    }


def without_arrow() -> None:
    """Keep Ray from importing pyarrow, and numpy with it, into this process, which exchanges texts and numbers with Ray.

    It does so for its data sets wherever pyarrow is installed: 50 MB of memory.
    """
    sys.modules.setdefault("pyarrow", None)  # type: ignore[arg-type]  # Python's own way to say that there is none


def _write_token(folder: Path) -> None:
    path = folder / "token"
    if not path.exists():
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_hex(32))


def _is_locked(path: Path) -> bool:
    """True if some process holds this lock file."""
    try:
        descriptor = os.open(path, os.O_RDWR)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def _is_alive(pid: int, child: "subprocess.Popen[bytes] | None") -> bool:
    """True if the process runs. `child` is polled, so that it does not stay a zombie."""
    return child.poll() is None if child is not None and child.pid == pid else _runs(pid)


# What follows runs in the keeper's process.


def _keep(folder: Path, pools: str, warm_idle_s: str) -> int:
    os.umask(0o077)  # Ray and the ranks inherit it
    # The server that started us blocks these signals, and a child process inherits the mask.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGINT})
    lock = os.open(folder / _KEEPER_LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return 0
    os.truncate(lock, 0)
    os.write(lock, str(os.getpid()).encode())
    (folder / _PUBLISHED).unlink(missing_ok=True)
    # Ray opens its temporary folder to everybody (0777), so it gets one inside a folder that only we can enter. Ray keeps its
    # sockets there, and the path of a socket has 107 characters at most.
    private_dir = Path(tempfile.mkdtemp(prefix="octet-ray-"))
    stopping: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda received, _frame: stopping.append(received))
    ray = _start_host(private_dir, pools, warm_idle_s)
    try:
        published, unserved_since = False, time.monotonic()
        while ray.poll() is None and not stopping:
            if not published:
                published = _publish(folder, private_dir)
            if _is_locked(folder.parent / "serve.lock"):
                unserved_since = time.monotonic()
            elif time.monotonic() - unserved_since > _LINGER_S:
                break
            time.sleep(0.05 if not published else 0.5)
        return 0 if stopping else ray.poll() or 0
    finally:
        (folder / _PUBLISHED).unlink(missing_ok=True)
        end_ray(ray)
        shutil.rmtree(private_dir, ignore_errors=True)


def _start_host(private_dir: Path, pools: str, warm_idle_s: str) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "octet.service.cluster.ray.host", "--folder", str(private_dir)]
    command += ["--pools", pools, "--warm-idle-s", warm_idle_s]
    env = {**os.environ, **_RAYLET_SETTINGS}
    return start_dying_with_us(command, env=env)


def start_dying_with_us(command: Sequence[str], **options: Any) -> "subprocess.Popen[bytes]":
    """Start a process in a session of its own. It gets SIGTERM when the calling thread ends, and so when this process dies.

    That is how Linux has it (prctl(2), PR_SET_PDEATHSIG): the parent is the thread, not its process.
    """

    def die_with(parent: int) -> None:
        if sys.platform == "linux":
            pr_set_pdeathsig = 1
            ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)
            if os.getppid() != parent:  # it died before this call
                os.kill(os.getpid(), signal.SIGTERM)

    before = partial(die_with, os.getpid())
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=before, **options)


def _publish(folder: Path, private_dir: Path) -> bool:
    """Write for the servers where the host answers. Returns False until Ray is up; the host writes its address last."""
    try:
        address = (private_dir / ADDRESS_FILE).read_text()
    except OSError:
        return False
    found = {"address": address, "temp_dir": str(private_dir / TEMP_DIR), "socket": str(private_dir / SOCKET_FILE)}
    unfinished = folder / f"{_PUBLISHED}.new"
    unfinished.write_text(json.dumps(found))
    unfinished.rename(folder / _PUBLISHED)
    return True


def end_ray(ray: "subprocess.Popen[bytes]") -> None:
    """End Ray with SIGTERM, then kill what is left of its session: some of its processes end later than Ray itself."""
    ray.terminate()
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            ray.wait(_STOP_S)
    finally:
        while left := _session_members(ray.pid):
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)
        ray.wait()


def _session_members(session: int) -> list[int]:
    """List the processes of a session that still run. Without /proc only the session's leader is known."""
    if not Path("/proc/self").exists():
        return [session] if _runs(session) else []
    members = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if entry.name.isdigit() and os.getsid(int(entry.name)) == session and _runs(int(entry.name)):
                members.append(int(entry.name))
    return members


def _runs(pid: int) -> bool:
    """True if the process exists and is not a zombie."""
    try:
        os.kill(pid, 0)
        state = Path(f"/proc/{pid}/stat")
        return not state.exists() or state.read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m octet.service.cluster.ray.embedded")
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--pools", required=True)
    parser.add_argument("--warm-idle-s", required=True)
    options = parser.parse_args()
    return _keep(options.dir, options.pools, options.warm_idle_s)


if __name__ == "__main__":
    sys.exit(main())
