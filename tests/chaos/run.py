"""A storm over a real `octet serve`, or over cluster mode: signals to every component at random instants, then the ledger.

    make chaos                                             1,000 signals, 100 jobs
    make chaos CHAOS_SEED=7 CHAOS_SIGNALS=200 CHAOS_JOBS=20
    .venv/bin/python -m tests.chaos.run --cluster --signals 50 --jobs 10

The seed decides what is struck, when, and for how long; what the processes do at that instant is up to the machine. Leases
are shorter than usual (`VARIABLES`), so that a stopped rank outlives its lease now and then. The storm ends by itself after
`--minutes`, and leaves no process. Exit status 0 only if every kind of finding is empty.
"""

import argparse
import json
import logging
import os
import random
import secrets
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

from sqlalchemy import func, select

from octet.api_schemas import JobState
from octet.service.db.engine import Database
from octet.service.db.tables import AttemptRow, EventRow, JobRow
from octet.service.dispatcher.make_way import PREEMPTED
from tests.chaos.cluster import API_KEY, Cluster, cluster_in, write_pools
from tests.chaos.cluster_faults import ClusterStorm
from tests.chaos.customers import Customers, corpus, job_document
from tests.chaos.faults import ServerStorm, Storm
from tests.chaos.ledger import Curve, audit
from tests.e2e.octet_server import Server, losses
from tests.kit.waiting import LONG_S

LEASE_GRACE_S = 5
VARIABLES = {"OCTET_LEASE_S": "20", "OCTET_LEASE_GRACE_S": str(LEASE_GRACE_S)}

logger = logging.getLogger("chaos")


@dataclass(frozen=True)
class Plan:
    """The size of a storm. It ends once it has sent its signals and its jobs have ended, or after `minutes` of it."""

    seed: int
    signals: int
    jobs: int
    minutes: float
    gap_s: float
    """Mean time between two strikes, in seconds."""
    cluster: bool = False
    """Cluster mode: PostgreSQL, `octet api` and two `octet dispatcher`s, in place of `octet serve`."""


@dataclass(frozen=True)
class Outcome:
    """The result of a storm: the signals sent, the jobs and attempts that ran, and the problems found afterwards."""

    plan: Plan
    wall_s: float
    load_average: float
    signals: dict[str, int]
    num_pairs: int
    """Raylets that were killed with the server suspended at once."""
    jobs: dict[str, int]
    attempts: dict[str, int]
    preempted: int
    """Attempts that made way for a job of a higher priority."""
    findings: dict[str, list[str]]

    @property
    def num_signals(self) -> int:
        return sum(self.signals.values())

    @property
    def is_clean(self) -> bool:
        return not any(self.findings.values())

    @property
    def is_complete(self) -> bool:
        """True if the storm sent all of its signals over all of its jobs, before its time was over."""
        return self.num_signals >= self.plan.signals and sum(self.jobs.values()) >= self.plan.jobs


def weather(plan: Plan, folder: Path) -> Outcome:
    """Run a storm with its database and jobs below `folder`, stop the service, and audit its database."""
    if plan.cluster:
        with cluster_in(folder, VARIABLES) as cluster:
            return _weather(plan, folder, cluster, ClusterStorm(random.Random(plan.seed), cluster=cluster), API_KEY)
    # A keeper that is killed leaves Ray's folder behind. Its name is short: the path of a socket has 107 characters at most.
    with tempfile.TemporaryDirectory(prefix="oc-", ignore_cleanup_errors=True) as ray_folder:
        variables = VARIABLES | {"TMPDIR": ray_folder, "OCTET_POOLS_FILE": str(write_pools(folder / "pools.json"))}
        server = Server(folder / "octet", variables=variables)
        return _weather(plan, folder, server, ServerStorm(random.Random(plan.seed), server=server), None)


def _weather(plan: Plan, folder: Path, server: Server | Cluster, storm: Storm, api_key: str | None) -> Outcome:
    began = time.monotonic()
    text = corpus(folder)
    customers = Customers(server.client.url, text, random.Random(plan.seed + 1), api_key)
    database = Database(server.database_url)
    try:
        server.start()
        logger.info("the service runs after %.0f s", time.monotonic() - began)
        expected = {workers: _undisturbed(server, text, workers) for workers in (1, 2)}
        logger.info("undisturbed jobs have ended after %.0f s; the storm begins", time.monotonic() - began)
        customers.start()
        _blow(plan, storm, customers, time.monotonic() + 60 * plan.minutes)
        storm.calm()
        settled = _finish(customers, storm)
        findings = {} if settled else {"customers still waiting": [f"after {LONG_S:g} s without signals"]}
        findings["keys that made a second job"] = customers.submit_again()
        _wait_for_released_slots(database)
        server.stop()
        findings["processes left"] = [" ".join(process.cmdline())[:80] for process in server.processes_left()]
    finally:
        storm.end()
    findings["server ended by itself"] = storm.ended_by_itself
    with database.read() as session:
        findings |= audit(session, customers.accepted, expected, timedelta(seconds=LEASE_GRACE_S)).by_kind()
        states = session.execute(select(JobRow.state, func.count()).where(JobRow.name.like("storm-%")).group_by(JobRow.state))
        jobs = {state.value: count for state, count in states}
        endings = session.execute(
            select(AttemptRow.state, AttemptRow.reason, func.count()).group_by(AttemptRow.state, AttemptRow.reason)
        )
        attempts = {reason.value if reason else state.value: count for state, reason, count in endings}
        is_preemption = EventRow.type == "job.yielding", EventRow.message.endswith(PREEMPTED)
        preempted = session.scalar(select(func.count()).where(*is_preemption)) or 0
    database.close()
    signals = {f"{component} {signal}": count for (component, signal), count in sorted(storm.num_signals.items())}
    wall_s = time.monotonic() - began
    return Outcome(plan, wall_s, os.getloadavg()[0], signals, storm.num_pairs, jobs, attempts, preempted, findings)


def _undisturbed(server: Server | Cluster, text: Path, workers: int) -> Curve:
    document = job_document(text, workers=workers) | {"name": f"undisturbed-{workers}"}
    job = server.finish(server.client.submit(document).id)
    assert job.state is JobState.SUCCEEDED, job
    return losses(server, job)


def _blow(plan: Plan, storm: Storm, customers: Customers, ends_at: float) -> None:
    next_at = time.monotonic()
    while (storm.num_sent < plan.signals or customers.num_ended < plan.jobs) and time.monotonic() < ends_at:
        customers.check()
        storm.do_due()
        if time.monotonic() >= next_at:
            if storm.num_sent < plan.signals:
                storm.strike()
            next_at = time.monotonic() + storm.random.expovariate(1 / plan.gap_s)
        time.sleep(0.05)
    logger.info("%d signals over %d jobs that ended; the storm is over", storm.num_sent, customers.num_ended)


def _finish(customers: Customers, storm: Storm) -> bool:
    """Wait for the jobs in flight while parts that end are still started again. False if some do not end."""
    deadline = time.monotonic() + LONG_S
    while time.monotonic() < deadline:
        if customers.finish(1.0):
            return True
        storm.do_due()
    return False


def _wait_for_released_slots(database: Database) -> None:
    """Wait until the processes of every attempt are known to be gone. If that never happens, the ledger says which."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        with database.read() as session:
            if session.scalar(select(func.count()).where(AttemptRow.released_at.is_(None))) == 0:
                break
        time.sleep(1)


def report(outcome: Outcome) -> str:
    """Describe an outcome in Markdown."""
    plan = outcome.plan
    jobs = ", ".join(f"{count} {state}" for state, count in outcome.jobs.items())
    lines = [
        f"`python -m tests.chaos.run {'--cluster ' * plan.cluster}--seed {plan.seed} --signals {plan.signals} --jobs "
        f"{plan.jobs}`, mean gap {plan.gap_s:g} s, "
        f"{outcome.wall_s / 60:.0f} minutes, load average at the end {outcome.load_average:.1f}. Leases of "
        f"{VARIABLES['OCTET_LEASE_S']} s.",
        "",
        f"{outcome.num_signals} signals over {sum(outcome.jobs.values())} jobs ({jobs}) and "
        f"{sum(outcome.attempts.values())} attempts. {outcome.preempted} made way for a higher priority. "
        f"{outcome.num_pairs} times a raylet was killed and the server suspended.",
        "",
        "| signal | sent |",
        "| --- | ---: |",
        *[f"| {name} | {count} |" for name, count in outcome.signals.items()],
        "",
        "| end of an attempt | attempts |",
        "| --- | ---: |",
        *[f"| {name} | {count} |" for name, count in sorted(outcome.attempts.items())],
        "",
        "| finding | number |",
        "| --- | ---: |",
        *[f"| {kind} | {len(found)} |" for kind, found in outcome.findings.items()],
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.run")
    parser.add_argument("--seed", type=int, default=None, help="default: drawn, and printed")
    parser.add_argument("--signals", type=int, default=1000)
    parser.add_argument("--jobs", type=int, default=100)
    parser.add_argument("--minutes", type=float, default=240)
    parser.add_argument("--gap-s", type=float, default=4)
    parser.add_argument("--cluster", action="store_true", help="PostgreSQL, octet api and octet dispatcher as processes")
    parser.add_argument("--out", type=Path, default=None, help="a file for the outcome in Markdown")
    options = parser.parse_args()
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    seed = secrets.randbelow(1 << 31) if options.seed is None else options.seed
    plan = Plan(seed, options.signals, options.jobs, options.minutes, options.gap_s, options.cluster)
    logger.info("%s", plan)
    signal.signal(signal.SIGTERM, lambda _number, _frame: sys.exit(1))  # by the `finally` blocks, which leave no process
    folder = Path(tempfile.mkdtemp(prefix="octet-chaos-"))
    outcome = weather(plan, folder)
    sys.stdout.write(report(outcome))
    if options.out is not None:
        options.out.write_text(f"# A storm of signals\n\n{report(outcome)}")
    if outcome.is_clean and outcome.is_complete:
        shutil.rmtree(folder)
        return 0
    wrong = {kind: found for kind, found in outcome.findings.items() if found}
    sys.stderr.write(
        f"{json.dumps(asdict(plan))}\n{json.dumps(wrong, indent=1)}\nis complete: {outcome.is_complete}; kept: {folder}\n"
    )
    return 1


if __name__ == "__main__":
    sys.exit(main())
