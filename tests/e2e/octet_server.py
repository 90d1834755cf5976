"""`octet serve` as a process that a test or a storm may kill and start at will, with its own Ray, database and folder."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import psutil
import pytest

from octet.api_schemas import Job, JobState
from octet.client import Client
from tests.kit.ports import free_port
from tests.kit.waiting import LONG_S

_POLL_S = 0.2  # each look at a job costs client and server some milliseconds of the CPU that the job needs too
_TEMPLATE = "octet.worker.rank.warm.template"
_COUNTING = Path(__file__).with_name("counting")  # its sitecustomize.py notes each validation of a JobSpec


class Server:
    """`octet serve` as a process that a test may kill."""

    def __init__(
        self, data_dir: Path, *, counts_validations: bool = False, umask: int = -1, variables: Mapping[str, str] | None = None
    ) -> None:
        """Choose a port. Nothing is started.

        counts_validations: note every validation of a JobSpec in the server, its Ray and its ranks. umask: -1 keeps ours.
        variables: environment variables that the server gets besides ours, such as OCTET_LEASE_S.
        """
        self.data_dir = data_dir
        self._umask = umask
        self._variables = dict(variables or {})
        self.port = free_port()
        self._counts_validations = counts_validations
        self._validations_file = data_dir.with_name("validations")
        self.client = Client(f"http://127.0.0.1:{self.port}", patience_s=LONG_S)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the server and wait until it takes jobs and runs them."""
        self.spawn()
        self.wait_for(self.client.is_ready)

    def spawn(self) -> None:
        """Start the server's process. It may be killed before it listens."""
        self.data_dir.mkdir(parents=True, exist_ok=True)
        environment = dict(os.environ) | self._variables
        if self._counts_validations:
            search_path = os.pathsep.join(part for part in (str(_COUNTING), os.environ.get("PYTHONPATH", "")) if part)
            environment |= {"PYTHONPATH": search_path, "VALIDATIONS_FILE": str(self._validations_file)}
        with (self.data_dir / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                self.command(), stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, umask=self._umask
            )

    def command(self) -> list[str]:
        """The command line of the server."""
        return [sys.executable, "-m", "octet.client.cli", "serve", "--port", str(self.port), "--data-dir", str(self.data_dir)]

    def kill(self) -> None:
        """End the server with SIGKILL, so that it cannot clean up."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    @property
    def is_running(self) -> bool:
        """True while the server's process runs, suspended or not."""
        return self._process is not None and self._process.poll() is None

    def stop(self) -> None:
        """End the server with SIGTERM, and what asks it."""
        self.client.close()
        self.interrupt(signal.SIGTERM)

    def interrupt(self, by: signal.Signals = signal.SIGINT) -> None:
        """Let the server end by itself, and wait for it."""
        assert self._process is not None
        self._process.send_signal(by)
        self._process.wait(LONG_S)

    def kill_the_cluster(self) -> None:
        """Kill the keeper, Ray and the ranks with SIGKILL, as if the machine lost its power."""
        for process in sorted(self.processes(), key=lambda process: not _is_keeper(process)):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.wait_for(lambda: not self.processes())

    def processes(self) -> list[psutil.Process]:
        """All processes that talk to this server's Ray: the keeper, Ray itself and the ranks, but not the server."""
        found: dict[int, psutil.Process] = {}
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                token = process.environ().get("RAY_AUTH_TOKEN_PATH", "")
                is_ours = token.startswith(str(self.data_dir))
                if is_ours and process.status() != psutil.STATUS_ZOMBIE and process.pid != self.pid:
                    found[process.pid] = process
        return list(found.values())

    def processes_left(self) -> list[psutil.Process]:
        """Return the processes that outlived a stopped server."""
        return self.processes()

    @property
    def database_url(self) -> str:
        return f"sqlite:///{self.data_dir / 'octet.db'}"

    def ranks(self) -> list[psutil.Process]:
        """Those of `processes` that train: forks of the node's template, or actors whose ranks started without one."""
        actors, forks = [], []
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                parent = process.parent()
                if "RankActor" in " ".join(process.cmdline()):
                    actors.append(process)
                elif parent is not None and all(_TEMPLATE in " ".join(each.cmdline()) for each in (process, parent)):
                    forks.append(process)
        return forks or actors

    def processes_named(self, name: str) -> list[psutil.Process]:
        """Those of `processes` that have this name. One that ends meanwhile is left out."""
        found = []
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.name() == name:
                    found.append(process)
        return found

    def wait_for(self, condition: Callable[[], Any]) -> None:
        deadline = time.monotonic() + LONG_S
        while not condition():
            if time.monotonic() > deadline:
                log = (self.data_dir / "server.log").read_text(errors="replace")[-4000:]
                pytest.fail(f"it did not happen within {LONG_S:g} s; the server's log ends:\n{log}")
            time.sleep(_POLL_S)

    def wait_for_step(self, job_id: str, step: int) -> None:
        """Wait until the job has reported this step. Fails if the job ends before that."""

        def reached() -> bool:
            job = self.client.job(job_id)
            assert not job.state.is_terminal, job
            return job.progress is not None and job.progress.step >= step

        self.wait_for(reached)

    def wait_for_attempt(self, job_id: str, epoch: int) -> None:
        """Wait until this attempt trains. Fails if the job ends before that."""

        def trains() -> bool:
            job = self.client.job(job_id)
            assert not job.state.is_terminal, job
            return job.num_attempts == epoch and job.state is JobState.RUNNING

        self.wait_for(trains)

    def finish(self, job_id: str) -> Job:
        self.wait_for(lambda: self.client.job(job_id).state.is_terminal)
        return self.client.job(job_id)

    @property
    def pid(self) -> int:
        """The server's own process; 0 before the start."""
        return self._process.pid if self._process is not None else 0

    def spec_validations(self) -> list[int]:
        """The ids of the processes that parsed a JobSpec, one for each time, since the first start."""
        return [int(line) for line in self._validations_file.read_text().split()] if self._validations_file.exists() else []


class HasClient(Protocol):
    """A service that a test runs."""

    client: Client


def losses(server: HasClient, job: Job) -> list[tuple[int, float | None, float | None]]:
    """The curve as the API gives it: step, training loss, evaluation loss."""
    return [(point.step, point.loss, point.evaluation_loss) for point in server.client.metrics(job.id)]


def _is_keeper(process: psutil.Process) -> bool:
    try:
        return "octet.service.cluster.ray.embedded" in process.cmdline()
    except psutil.NoSuchProcess:  # ended meanwhile, or a zombie
        return False
