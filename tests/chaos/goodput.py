"""Goodput under failures: the seconds of training that each kind of failure costs, and the share left at one in ten minutes.

    .venv/bin/python -m tests.chaos.goodput --repeats 2 --minutes 6

One job trains on a real `octet serve` with its usual leases while one failure after the other is injected. A failure's loss
is the time from the struck attempt's last new step, or from the signal if none came after it, until the API shows a step above
that. It counts the detection, the new attempt's start, the steps trained again, and the delay of the reports, so it is an upper
bound. Where the attempt goes on (`SURVIVED`), it is the time until the API shows its next step.
Goodput at one failure in 600 s is 1 - loss / 600, with the mean over all kinds and with the worst one. The goal is for the
mean; exit status 0 says that it is reached. A loss is divided by the job's events: until the attempt was ended, until the next
one had its slots, until that one trained, and until it had passed the last step of the one before.
"""

import argparse
import logging
import math
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil

from octet.api_schemas import Job
from tests.chaos.customers import corpus, job_document
from tests.chaos.faults import component_of
from tests.e2e.octet_server import Server

INTERVAL_S = 600.0
GOAL = 0.97
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


@dataclass(frozen=True)
class Loss:
    """The cost of one failure, in seconds."""

    total_s: float
    ended_s: float | None = None
    """From the failure until the attempt was ended. None, as the next two, where the attempt goes on."""
    placed_s: float | None = None
    """From then until the next attempt had its slots: back-off, and a cluster that starts."""
    trains_s: float | None = None
    """From then until the next attempt trained."""
    busy: float = 0.0
    """The share of the machine's processor time that was used meanwhile, by whomever."""

    @property
    def again_s(self) -> float:
        """The rest of the total: steps that were trained again, and the delay of the reports."""
        return self.total_s - sum(filter(None, (self.ended_s, self.placed_s, self.trains_s)))


def measure(
    repeats: int, folder: Path, kinds: Collection[str] = FAILURES.keys(), *, limit_s: float = math.inf
) -> dict[str, list[Loss]]:
    """Return what each failure cost, by its kind. A repeat that would probably end after `limit_s` is left out."""
    server = Server(folder / "octet")
    found: dict[str, list[Loss]] = {kind: [] for kind in kinds}
    try:
        server.start()
        began = time.monotonic()
        for number in range(repeats):
            if number and (time.monotonic() - began) * (number + 1) / number > limit_s:
                break
            # A job has ten failures of the platform to its name at most, and its pauses grow with their number.
            for kind in kinds:
                job_id = _new_job(server, folder / "corpus")
                server.wait_for_step(job_id, _QUIET_STEPS)
                loss = _loss(server, job_id, FAILURES[kind], survives=kind in SURVIVED)
                found[kind].append(loss)
                logger.info("%s: %.1f s (%s)", kind, loss.total_s, ", ".join(_parts([loss])))
                server.client.cancel(job_id)
                server.finish(job_id)
        server.stop()
    finally:
        if server.is_running:
            server.kill()
        server.kill_the_cluster()
    return found


def _new_job(server: Server, text: Path) -> str:
    return server.client.submit(job_document(text, steps=1_000_000) | {"name": "goodput"}).id


def _loss(server: Server, job_id: str, fail: Callable[[Server], None], *, survives: bool) -> Loss:
    before = server.client.job(job_id)
    highest = _step(before)
    began, began_at, times = time.monotonic(), datetime.now(UTC), psutil.cpu_times()
    fail(server)

    def is_past_it() -> bool:
        nonlocal highest, began, began_at
        job = server.client.job(job_id)
        assert not job.state.is_terminal, job
        if job.num_attempts == before.num_attempts and not survives:
            if _step(job) > highest:  # Ray drains for up to 30 s when its keeper is gone, and the attempt trains on
                highest, began, began_at = _step(job), time.monotonic(), datetime.now(UTC)
            return False
        return _step(job) > highest

    server.wait_for(is_past_it)
    total_s = time.monotonic() - began
    busy = _busy_share(times, psutil.cpu_times())
    if survives:
        return Loss(total_s, busy=busy)
    at = {event.type: event.at for event in server.client.events(job_id)}  # of each type the last
    moments = [began_at, at["attempt.failed"], at["job.placed"], at["attempt.started"]]
    return Loss(total_s, *[(after - before).total_seconds() for before, after in pairwise(moments)], busy=busy)


def _busy_share(before: Any, after: Any) -> float:
    """The share of the processors' time between two readings of `psutil.cpu_times` in which they were not idle."""
    spent = {name: getattr(after, name) - getattr(before, name) for name in ("user", "nice", "system", "idle", "iowait")}
    return 1 - (spent["idle"] + spent["iowait"]) / sum(spent.values())


def _step(job: Job) -> int:
    return job.progress.step if job.progress is not None else 0


def goodput(losses: dict[str, list[Loss]]) -> tuple[float, float]:
    """The share of the time that is left to training at one failure in `INTERVAL_S`: with all kinds' mean, with the worst."""
    means = [statistics.mean(loss.total_s for loss in values) for values in losses.values()]
    return 1 - statistics.mean(means) / INTERVAL_S, 1 - max(means) / INTERVAL_S


def report(losses: dict[str, list[Loss]]) -> str:
    """Describe the losses and the goodput in Markdown."""
    mean, worst = goodput(losses)
    lines = [
        f"{len(next(iter(losses.values())))} of each kind, load average at the end {os.getloadavg()[0]:.1f}. Means in seconds.",
        "",
        "| failure | loss | longest | until ended | until placed | until it trains | steps again | processors busy |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
        *[f"| {kind} | {' | '.join(_cells(values))} |" for kind, values in losses.items()],
        "",
        f"Goodput at one failure every {INTERVAL_S:.0f} s: goal {GOAL:.1%}, measured {mean:.1%} (mean of all kinds), "
        f"{'reached' if mean >= GOAL else 'MISSED'}; {worst:.1%} with the worst kind.",
    ]
    return "\n".join(lines) + "\n"


def _cells(values: list[Loss]) -> list[str]:
    total_s = [loss.total_s for loss in values]
    busy = statistics.mean(loss.busy for loss in values)
    return [f"{statistics.mean(total_s):.1f}", f"{max(total_s):.1f}", *_parts(values), f"{busy:.0%}"]


def _parts(values: list[Loss]) -> list[str]:
    parts = [(loss.ended_s, loss.placed_s, loss.trains_s, loss.again_s) for loss in values]
    return ["" if None in column else f"{statistics.mean(filter(None, column)):.1f}" for column in zip(*parts, strict=True)]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.goodput")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=6, help="begin no repeat that would probably end after this time")
    options = parser.parse_args()
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    signal.signal(signal.SIGTERM, lambda _number, _frame: sys.exit(1))  # by the `finally` block, which leaves no process
    with tempfile.TemporaryDirectory(prefix="octet-goodput-") as folder:
        corpus(Path(folder))
        losses = measure(options.repeats, Path(folder), limit_s=60 * options.minutes)
    sys.stdout.write(report(losses))
    return 0 if goodput(losses)[0] >= GOAL else 1


if __name__ == "__main__":
    sys.exit(main())
