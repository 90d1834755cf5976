"""Time the way of a tiny job of one rank from its submission to its first step, phase by phase.

    python -m benchmarks.start_overhead --tree . --tree ../before --rounds 3 --write

Each tree (a checkout) gets an `octet serve` of its own, with its own Ray, and the trees take turns. The first job finds a
fresh server, the others one that has trained; each waits until the server's processes are quiet. `--trainers` compares jobs
of two ranks with Ray Train's TorchTrainer: its script joins a Ray cluster that is up, as Ray Jobs would start it, so what Ray
Jobs adds before the script is not in its time.
"""

import argparse
import os
import secrets
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil

from benchmarks.figures import Figure, add_write_option, command_line, write
from octet.client import Client
from octet.service.cluster.ray.embedded import ray_environment

_READY_S = 180.0
_JOB_S = 300.0
_QUIET_S = 3.0
_QUIET_SHARE = 0.25
_QUIET_TIMEOUT_S = 40.0
_TRAINER_S = 600.0
NUM_RANKS, TWO_RANKS, TRAINER = 2, "job of two ranks", "TorchTrainer, two ranks"
TO_FIRST_STEP = "submit to first step (s)"
WaitUntilQuiet = Callable[[], None]
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


def cpu_s(data_dir: Path, server_pid: int) -> float:
    """Return the CPU seconds of the processes of a data folder: the server, and whatever has its Ray token."""
    token, used_s = str(data_dir / "ray" / "token"), 0.0
    for process in psutil.process_iter(["environ", "cpu_times"]):
        environment, times = process.info["environ"] or {}, process.info["cpu_times"]
        if times is not None and (process.pid == server_pid or token in environment.values()):
            used_s += times.user + times.system
    return used_s


def wait_until_quiet(data_dir: Path, server_pid: int) -> None:
    """Wait until the processes of a data folder use little CPU."""
    deadline, before_s = time.monotonic() + _QUIET_TIMEOUT_S, cpu_s(data_dir, server_pid)
    while time.monotonic() < deadline:
        time.sleep(_QUIET_S)
        now_s = cpu_s(data_dir, server_pid)
        # What a process has used that has ended meanwhile is missing from the later sum.
        if abs(now_s - before_s) < _QUIET_SHARE * _QUIET_S:
            return
        before_s = now_s


@contextmanager
def server_of(tree: Path, data_dir: Path, figures: dict[str, list[float]]) -> Iterator[tuple[Client, WaitUntilQuiet]]:
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
        with Client(f"http://127.0.0.1:{port}", patience_s=_READY_S) as client:
            while not client.is_ready():
                if process.poll() is not None or time.monotonic() > began + _READY_S:
                    raise RuntimeError(f"the server did not start: {(data_dir / 'server.log').read_text()}")
                time.sleep(0.02)
            note(figures, "octet serve to ready (s)", time.monotonic() - began)
            quiet = partial(wait_until_quiet, data_dir, process.pid)
            quiet()
            yield client, quiet
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def run_job(client: Client, quiet: WaitUntilQuiet, spec: dict[str, Any], name: str, figures: dict[str, list[float]]) -> None:
    """Run one job and note its phases in seconds."""
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
    quiet()


def note(figures: dict[str, list[float]], name: str, value: float) -> None:
    """Keep a figure, and show it at once: a run on a busy machine takes long."""
    figures.setdefault(name, []).append(value)
    sys.stderr.write(f"{name}: {value:.2f}\n")


@contextmanager
def trainer_cluster(folder: Path) -> Iterator[tuple[dict[str, str], str, WaitUntilQuiet]]:
    """Start a Ray cluster; yield the environment of its processes, its address, and what waits until they are quiet."""
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
    ):
        try:
            assert cluster.stdout is not None
            address = cluster.stdout.readline().decode().strip()
            if not address:
                raise RuntimeError(f"Ray did not start: {(folder / 'cluster.log').read_text()}")
            quiet = partial(wait_until_quiet, folder, cluster.pid)
            quiet()
            yield environment, address, quiet
        finally:
            cluster.communicate()


def compare_two_ranks(
    client: Client, quiet: WaitUntilQuiet, folder: Path, num_runs: int, figures: dict[str, list[float]]
) -> None:
    """Run a job of two ranks and Ray Train's TorchTrainer in turns, each on its own cluster, the other one idle."""
    corpus = folder / "corpus.txt"
    with trainer_cluster(folder / "t") as (environment, address, trainer_quiet):
        for number in range(num_runs):
            run_job(client, quiet, spec_of(corpus, NUM_RANKS), TWO_RANKS, figures)
            of_run = folder / "t" / str(number)
            of_run.mkdir()
            command = [sys.executable, "-m", "benchmarks.torch_trainer", "--address", address, "--folder", str(of_run)]
            began = time.time()
            with (of_run / "log").open("wb") as log:
                ended = subprocess.run(
                    command, check=True, stdout=subprocess.PIPE, stderr=log, env=environment, timeout=_TRAINER_S
                )
            seconds = float(ended.stdout.split()[-1]) - began
            note(figures, f"{TRAINER}: script to first step (s)", seconds)
            trainer_quiet()
            note(figures, f"{TWO_RANKS} / {TRAINER}: to first step", figures[f"{TWO_RANKS}: {TO_FIRST_STEP}"][-1] / seconds)


def measure(tree: Path, folder: Path, num_jobs: int, num_trainers: int, figures: dict[str, list[float]]) -> None:
    """Measure one server of a tree: its start, `num_jobs` jobs one after the other, and `num_trainers` comparisons."""
    corpus = folder / "corpus.txt"
    corpus.write_text("text to train on\n" * 1000)
    with server_of(tree, folder / "data", figures) as (client, quiet):
        for number in range(num_jobs):
            run_job(client, quiet, spec_of(corpus), "later job" if number else "first job", figures)
        if num_trainers:
            compare_two_ranks(client, quiet, folder, num_trainers, figures)


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
