"""Time the way of a tiny job of one rank from its submission to its first step, phase by phase, and count the CPU.

    python -m benchmarks.start_overhead --tree . --tree ../before --rounds 3 --write

Each tree (a checkout) gets an `octet serve` of its own, with its own Ray, and the trees take turns. A bare `import torch` runs
before each server. The first job finds a fresh server, the others one that has trained; each waits until the server's
processes are quiet. `--trainers` compares jobs of two ranks with Ray Train's TorchTrainer: its script joins a Ray cluster that
is up, as Ray Jobs would start it, so what Ray Jobs adds before the script is not in its time.

CPU is user and system time of all the processes of a server, between one quiet moment and the next.
"""

import argparse
import contextlib
import os
import resource
import secrets
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.figures import Figure, add_write_option, command_line, write
from octet.client import Client
from octet.service.cluster.ray.embedded import ray_environment

_READY_S = 180.0
_JOB_S = 300.0
_POLL_S = 0.05
_LOOKS = 20
_MOST_OWN_SHARE = 0.01
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_QUIET_S = 3.0
_QUIET_SHARE = 0.25
_QUIET_TIMEOUT_S = 40.0
_TRAINER_S = 600.0
NUM_RANKS, TWO_RANKS, TRAINER = 2, "job of two ranks", "TorchTrainer, two ranks"
TO_FIRST_STEP = "submit to first step (s)"
PHASES = ("queue", "supervisor and placement", "process", "import torch", "model", "first step")


def spec_of(corpus: Path, num_ranks: int = 1) -> dict[str, Any]:
    return {
        "name": "start",
        "model": {"hidden_size": 32, "num_layers": 1, "num_heads": 2, "vocab_size": 256, "max_sequence_length": 64},
        "precision": {"level": "O2"},
        "data": {"source": "text", "path": str(corpus)},
        "training": {"steps": 2, "global_batch_size": 4, "sequence_length": 32, "optimizer": {"learning_rate": 3e-4}},
        "resources": {"workers": num_ranks},
    }


class CpuMeter:
    """Counts the CPU seconds of all processes of a data folder: the server, and whatever has its Ray token.

    It looks every `poll_s`, or as seldom as its own looks take a hundredth of a core; what a process uses after the last look
    before its end is missed. A process that is known to be another's is not read again.
    """

    def __init__(self, data_dir: Path, server_pid: int, poll_s: float = _POLL_S) -> None:
        self._poll_s = poll_s
        self._token = str(data_dir / "ray" / "token").encode()
        self._server_pid = server_pid
        self._used_s: dict[tuple[int, bytes], float] = {}
        self._num_looks: dict[tuple[int, bytes], int] = {}
        self._others: set[str] = set()
        self.own_s = 0.0
        """CPU seconds of the looks themselves, which are not in `used_s`."""
        self._began_at = time.monotonic()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "CpuMeter":
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._stopping.set()
        self._thread.join()

    def used_s(self) -> float:
        return sum(list(self._used_s.values()))

    def quiet_s(self) -> float:
        """Wait until the processes use little; return the CPU seconds used up to then."""
        deadline = time.monotonic() + _QUIET_TIMEOUT_S
        while time.monotonic() < deadline:
            before = self.used_s()
            time.sleep(_QUIET_S)
            if self.used_s() - before < _QUIET_SHARE * _QUIET_S:
                break
        return self.used_s()

    @property
    def own_share(self) -> float:
        """The share of one core that the looks have taken since the meter was made."""
        return self.own_s / (time.monotonic() - self._began_at)

    def _run(self) -> None:
        pause_s = self._poll_s
        while not self._stopping.wait(pause_s):
            began_s = time.thread_time()
            self._look_at_all()
            look_s = time.thread_time() - began_s
            self.own_s += look_s
            pause_s = max(self._poll_s, look_s / _MOST_OWN_SHARE)

    def _look_at_all(self) -> None:
        present = set(filter(str.isdigit, os.listdir("/proc")))
        self._others &= present  # the number of a process that has ended may be used again
        for name in present - self._others:
            with contextlib.suppress(OSError):
                self._look(int(name))

    def _look(self, pid: int) -> None:
        fields = _read(f"/proc/{pid}/stat").rpartition(b")")[2].split()
        key = (pid, fields[19])  # its start time: a number may be used again
        if key not in self._used_s:
            # A process has its own environment only after `exec`, so a new one is looked at several times.
            looks = self._num_looks[key] = self._num_looks.get(key, 0) + 1
            is_ours = pid == self._server_pid or (looks <= _LOOKS and self._token in _read(f"/proc/{pid}/environ"))
            if not is_ours:
                if looks >= _LOOKS:
                    self._others.add(str(pid))
                return
        self._used_s[key] = (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


def _read(path: str) -> bytes:
    """Read a file of /proc in 13 µs, where `Path.read_text` takes 48."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        content = bytearray()
        while part := os.read(descriptor, 1 << 16):
            content += part
        return bytes(content)
    finally:
        os.close(descriptor)


@contextmanager
def server_of(tree: Path, data_dir: Path, figures: dict[str, list[float]]) -> Iterator[tuple[Client, CpuMeter]]:
    """Start the server of a tree, note what that took, and end it afterwards."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "octet.client.cli", "serve", "--port", str(port), "--data-dir", str(data_dir)]
    environment = os.environ | {"PYTHONPATH": str(tree.resolve()), "PYTHONDONTWRITEBYTECODE": ""}
    data_dir.mkdir()
    began = time.monotonic()
    with (data_dir / "server.log").open("wb") as log:
        process = subprocess.Popen(command, env=environment, cwd=tree, stdout=log, stderr=log)
    try:
        with CpuMeter(data_dir, process.pid) as meter, Client(f"http://127.0.0.1:{port}", patience_s=_READY_S) as client:
            while not client.is_ready():
                if process.poll() is not None or time.monotonic() > began + _READY_S:
                    raise RuntimeError(f"the server did not start: {(data_dir / 'server.log').read_text()}")
                time.sleep(0.02)
            note(figures, "octet serve to ready (s)", time.monotonic() - began)
            note(figures, "octet serve to ready (CPU s)", meter.used_s())
            note(figures, "octet serve until quiet (CPU s)", meter.quiet_s())
            yield client, meter
            note(figures, "the meter's own CPU (% of a core)", 100 * meter.own_share)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def run_job(client: Client, meter: CpuMeter, spec: dict[str, Any], name: str, figures: dict[str, list[float]]) -> None:
    """Run one job and note its phases in seconds."""
    cpu_s = meter.used_s()
    job = client.submit(spec)
    deadline = time.monotonic() + _JOB_S
    while not (job := client.job(job.id)).state.is_terminal:
        if time.monotonic() > deadline:
            raise RuntimeError(f"the job did not end: {job}")
        time.sleep(0.1)
    if job.state.value != "succeeded":
        raise RuntimeError(f"the job ended otherwise: {job}")
    (attempt,) = client.attempts(job.id)
    assert job.start is not None
    start = job.start
    moments = [start.accepted_at, attempt.created_at, start.placed_at, start.process_up_at, start.torch_imported_at]
    moments += [start.model_built_at, start.first_step_at]
    seconds = [(later - earlier).total_seconds() for earlier, later in pairwise(each for each in moments if each is not None)]
    note(figures, f"{name}: {TO_FIRST_STEP}", sum(seconds))
    for phase, duration_s in zip(PHASES, seconds, strict=True):
        note(figures, f"{name}: {phase} (s)", duration_s)
    note(figures, f"{name}: until quiet (CPU s)", meter.quiet_s() - cpu_s)


def import_torch(figures: dict[str, list[float]]) -> None:
    """Note what a bare import of torch takes in a new process."""

    def cpu_s() -> float:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime

    began, cpu_before_s = time.monotonic(), cpu_s()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    note(figures, "python -c 'import torch' (s)", time.monotonic() - began)
    note(figures, "python -c 'import torch' (CPU s)", cpu_s() - cpu_before_s)


def note(figures: dict[str, list[float]], name: str, value: float) -> None:
    """Keep a figure, and show it at once: a run on a busy machine takes long."""
    figures.setdefault(name, []).append(value)
    sys.stderr.write(f"{name}: {value:.2f}\n")


@contextmanager
def trainer_cluster(folder: Path) -> Iterator[tuple[dict[str, str], str, CpuMeter]]:
    """Start a Ray cluster; yield the environment of its processes, its address, and the meter of their CPU."""
    token = folder / "ray" / "token"
    token.parent.mkdir(parents=True)
    token.write_text(secrets.token_hex(32))
    keep = "import ray, sys; ray.init(num_cpus=4, include_dashboard=False, _node_ip_address='127.0.0.1')"
    keep += "; print(ray.get_runtime_context().gcs_address, flush=True); sys.stdin.read()"
    # By default workers have niceness 15: on a busy machine the controller alone then takes minutes. Ours have 0 as well.
    settings = {"RAY_TMPDIR": str(folder), "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_worker_niceness": "0"}
    environment = os.environ | settings | ray_environment(token)
    with (
        (folder / "cluster.log").open("wb") as log,
        subprocess.Popen(
            [sys.executable, "-c", keep], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=environment
        ) as cluster,
        CpuMeter(folder, cluster.pid, poll_s=0.5) as meter,
    ):
        try:
            assert cluster.stdout is not None
            address = cluster.stdout.readline().decode().strip()
            if not address:
                raise RuntimeError(f"Ray did not start: {(folder / 'cluster.log').read_text()}")
            meter.quiet_s()
            yield environment, address, meter
        finally:
            cluster.communicate()


def compare_two_ranks(client: Client, meter: CpuMeter, folder: Path, num_runs: int, figures: dict[str, list[float]]) -> None:
    """Run a job of two ranks and Ray Train's TorchTrainer in turns, each on its own cluster, the other one idle."""
    corpus = folder / "corpus.txt"
    with trainer_cluster(folder / "t") as (environment, address, trainer_meter):
        for number in range(num_runs):
            run_job(client, meter, spec_of(corpus, NUM_RANKS), TWO_RANKS, figures)
            of_run = folder / "t" / str(number)
            of_run.mkdir()
            command = [sys.executable, "-m", "benchmarks.torch_trainer", "--address", address, "--folder", str(of_run)]
            began, cpu_s = time.time(), trainer_meter.used_s()
            with (of_run / "log").open("wb") as log:
                ended = subprocess.run(
                    command, check=True, stdout=subprocess.PIPE, stderr=log, env=environment, timeout=_TRAINER_S
                )
            seconds = float(ended.stdout.split()[-1]) - began
            note(figures, f"{TRAINER}: script to first step (s)", seconds)
            note(figures, f"{TRAINER}: until quiet (CPU s)", trainer_meter.quiet_s() - cpu_s)
            note(figures, f"{TWO_RANKS} / {TRAINER}: to first step", figures[f"{TWO_RANKS}: {TO_FIRST_STEP}"][-1] / seconds)


def measure(tree: Path, folder: Path, num_jobs: int, num_trainers: int, figures: dict[str, list[float]]) -> None:
    """Measure one server of a tree: its start, `num_jobs` jobs one after the other, and `num_trainers` comparisons."""
    corpus = folder / "corpus.txt"
    corpus.write_text("text to train on\n" * 1000)
    import_torch(figures)
    with server_of(tree, folder / "data", figures) as (client, meter):
        for number in range(num_jobs):
            run_job(client, meter, spec_of(corpus), "later job" if number else "first job", figures)
        if num_trainers:
            compare_two_ranks(client, meter, folder, num_trainers, figures)


def table(trees: list[Path], found: list[dict[str, list[float]]], num_rounds: int) -> str:
    """Format the medians as a page."""
    lines = [
        f"# From submission to the first step, {datetime.now(UTC):%Y-%m-%d}",
        "",
        f"`python -m benchmarks.start_overhead {' '.join(sys.argv[1:])}`, {os.cpu_count()} CPU cores, load average "
        f"{os.getloadavg()[1]:.1f}. Median of {num_rounds} rounds.",
        "",
        f"| figure | {' | '.join(str(tree) for tree in trees)} |",
        f"| --- |{' ---: |' * len(trees)}",
        *(f"| {name} | {' | '.join(f'{statistics.median(each[name]):.2f}' for each in found)} |" for name in found[0]),
    ]
    return "\n".join(lines) + "\n"


def cited(found: dict[str, list[float]]) -> list[Figure]:
    """Return the medians that RESULTS.md has, of the last tree."""
    names = [name for name in found if name.endswith((TO_FIRST_STEP, "to ready (s)", "to first step"))]
    goals = {f"{job}: {TO_FIRST_STEP}": "<= 2" for job in ("first job", "later job")}
    goals |= {name: "<= 0.4, ahead <= 0.2" for name in names if " / " in name}
    return [Figure(f"start: {name}", f"{statistics.median(found[name]):.2f}", goal=goals.get(name, "")) for name in names]


def main() -> int:
    """Print and write the table."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tree", type=Path, action="append", help="a checkout; repeat it to compare several (default: .)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=3, help="jobs of each server, at least 2")
    parser.add_argument("--trainers", type=int, default=0, help="runs of two ranks, as jobs and under Ray Train's TorchTrainer")
    add_write_option(parser)
    options = parser.parse_args()
    trees: list[Path] = options.tree or [Path()]
    found: list[dict[str, list[float]]] = [{} for _ in trees]
    for _ in range(options.rounds):
        for tree, figures in zip(trees, found, strict=True):
            with tempfile.TemporaryDirectory(prefix="octet-start-") as folder:
                measure(tree, Path(folder).resolve(), options.jobs, options.trainers, figures)
    report = table(trees, found, options.rounds)
    sys.stdout.write(report)
    if options.write:
        write(options.write, cited(found[-1]), command_line("benchmarks.start_overhead", sys.argv[1:]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
