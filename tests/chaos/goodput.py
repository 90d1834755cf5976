"""Goodput under failures: the seconds of training that each kind of failure costs, and the share left at one in ten minutes.

    .venv/bin/python -m tests.chaos.goodput --repeats 3

One job trains on a real `octet serve` with its usual leases while one failure after the other is injected. A failure's loss
is the time from the struck attempt's last new step, or from the signal if none came after it, until the API shows a step above
that. It counts the detection, the new attempt's start, the steps trained again, and the delay of the reports, so it is an upper
bound. Where the attempt goes on (`SURVIVED`), it is the time until the API shows its next step.
Goodput at one failure in 600 s is 1 - loss / 600, with the mean over all kinds and with the worst one.
"""

import argparse
import logging
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from api_schemas import Job
from tests.chaos.customers import corpus, job_document
from tests.chaos.faults import component_of
from tests.e2e.octet_server import Server

INTERVAL_S = 600.0
_QUIET_STEPS = 60  # trained between two failures, so that each meets a job that runs and has a checkpoint

logger = logging.getLogger("goodput")


def _kill(component: str) -> Callable[[Server], None]:
    def act(server: Server) -> None:
        struck = [process for process in server.processes() if component_of(process) == component]
        assert struck, f"no process is a {component}"
        struck[0].kill()

    return act


def _kill_the_server(server: Server) -> None:
    server.kill()
    server.start()


def _kill_the_machine(server: Server) -> None:
    server.kill()
    server.kill_the_cluster()
    server.start()


def _suspend_the_server(server: Server) -> None:
    process = psutil.Process(server.pid)
    process.suspend()
    time.sleep(5)
    process.resume()


FAILURES: dict[str, Callable[[Server], None]] = {
    "rank killed": _kill("rank"),
    "supervisor killed": _kill("supervisor"),
    "raylet killed": _kill("raylet"),
    "GCS killed": _kill("gcs"),
    "keeper killed": _kill("keeper"),
    "server killed, started again at once": _kill_the_server,
    "server suspended for 5 s": _suspend_the_server,
    "all processes killed, server started again at once": _kill_the_machine,
}

SURVIVED = {"server killed, started again at once", "server suspended for 5 s"}
"""The failures that leave the attempt training."""


def measure(repeats: int, folder: Path) -> dict[str, list[float]]:
    """Return the seconds that each failure cost, by its kind."""
    server = Server(folder / "octet")
    losses_s: dict[str, list[float]] = {kind: [] for kind in FAILURES}
    try:
        server.start()
        for _ in range(repeats):
            # A job has ten failures of the platform to its name at most, and its pauses grow with their number.
            for kind, fail in FAILURES.items():
                job_id = _new_job(server, folder / "corpus")
                server.wait_for_step(job_id, _QUIET_STEPS)
                losses_s[kind].append(_loss_s(server, job_id, fail, survives=kind in SURVIVED))
                logger.info("%s: %.1f s", kind, losses_s[kind][-1])
                server.client.cancel(job_id)
                server.finish(job_id)
        server.stop()
    finally:
        if server.is_running:
            server.kill()
        server.kill_the_cluster()
    return losses_s


def _new_job(server: Server, text: Path) -> str:
    return server.client.submit(job_document(text, steps=1_000_000) | {"name": "goodput"}).id


def _loss_s(server: Server, job_id: str, fail: Callable[[Server], None], *, survives: bool) -> float:
    before = server.client.job(job_id)
    highest = _step(before)
    began = time.monotonic()
    fail(server)

    def is_past_it() -> bool:
        nonlocal highest, began
        job = server.client.job(job_id)
        assert not job.state.is_terminal, job
        if job.num_attempts == before.num_attempts and not survives:
            if _step(job) > highest:  # Ray drains for up to 30 s when its keeper is gone, and the attempt trains on
                highest, began = _step(job), time.monotonic()
            return False
        return _step(job) > highest

    server.wait_for(is_past_it)
    return time.monotonic() - began


def _step(job: Job) -> int:
    return job.progress.step if job.progress is not None else 0


def report(losses_s: dict[str, list[float]]) -> str:
    """Describe the losses and the goodput in Markdown."""
    means = {kind: statistics.mean(values) for kind, values in losses_s.items()}
    mean, worst = statistics.mean(means.values()), max(means.values())
    lines = [
        f"{len(next(iter(losses_s.values())))} of each kind, load average at the end {os.getloadavg()[0]:.1f}.",
        "",
        "| failure | mean loss (s) | longest (s) |",
        "| --- | ---: | ---: |",
        *[f"| {kind} | {means[kind]:.1f} | {max(values):.1f} |" for kind, values in losses_s.items()],
        "",
        f"Goodput at one failure every {INTERVAL_S:.0f} s: {1 - mean / INTERVAL_S:.1%} with the mean of all kinds "
        f"({mean:.1f} s), {1 - worst / INTERVAL_S:.1%} with the worst kind ({worst:.1f} s).",
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.goodput")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    signal.signal(signal.SIGTERM, lambda _number, _frame: sys.exit(1))  # by the `finally` block, which leaves no process
    with tempfile.TemporaryDirectory(prefix="octet-goodput-") as folder:
        corpus(Path(folder))
        sys.stdout.write(report(measure(options.repeats, Path(folder))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
