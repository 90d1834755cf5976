"""Random lives of the control plane on a simulated cluster: any number of transitions, from a seed.

    .venv/bin/python -m tests.chaos.transitions --seed 7 --transitions 100000 --processes 2

These are the rules and the invariants of tests/service/test_stateful.py, where Hypothesis chooses and shrinks; here a plain
generator chooses, which takes a third of the time. A transition is one rule: a request, a step of a loop, a report, a death,
a lost cluster, time that passes. The invariants are checked after each, and each life has to end with every job over.
A broken invariant ends the run with the life's seed and its last transitions.
"""

import argparse
import logging
import multiprocessing
import os
import random
import resource
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

from api_schemas import FailureReason
from service.db.engine import Database
from service.dispatcher import launch, place, release, watch
from tests.service.postgres_server import running_server
from tests.service.simulation import MortalDatabase
from tests.service.test_stateful import ControlPlane
from tests.service.world import TurnedClock

LIFE = 40
"""Transitions in a life."""
_REPORT_EVERY_S = 60.0

Draw = Callable[[random.Random], dict[str, Any]]
RULES: dict[str, Draw] = {
    "submit": lambda chance: {
        "workers": chance.randint(1, 2),
        "priority": chance.randint(0, 2),
        "max_failures": chance.randint(0, 2),
    },
    "cancel": lambda chance: {"place": chance.randrange(100)},
    "one_loop": lambda chance: {"loop": chance.choice((place, launch, watch, release))},
    "all_loops": lambda chance: {},
    "orphans": lambda chance: {},
    "workers_advance": lambda chance: {},
    "a_worker_repeats_itself": lambda chance: {},
    "a_worker_dies": lambda chance: {"reason": chance.choice((FailureReason.WORKER_LOST, FailureReason.OUT_OF_MEMORY))},
    "a_worker_fails_and_lingers": lambda chance: {},
    "the_cluster_is_lost": lambda chance: {},
    "the_network": lambda chance: {"reachable": chance.random() < 0.5},
    "time_passes": lambda chance: {"seconds": chance.choice((1, 3, 10, 80))},
    "the_control_plane_is_away": lambda chance: {"seconds": chance.choice((0, 60, 400))},
    "it_will_die": lambda chance: {"instants": chance.randint(1, 8)},
}
"""How the arguments of each rule are drawn; Hypothesis draws the same ones."""

logger = logging.getLogger("transitions")


class _Life(ControlPlane):
    """A life on a database of former lives, which saves a sixth of the time: their statements are compiled."""

    def __init__(self, database: MortalDatabase) -> None:
        super().__init__()
        self._database = database

    def opened(self, clock: TurnedClock) -> MortalDatabase:
        return self._database.by(clock)


class LifeBroken(Exception):
    """A life broke an invariant. The message has its seed and what happened last."""


def live(database_url: str, seed: int, num_transitions: int = LIFE) -> Counter[str]:
    """Live one life on an empty database, and return how often each rule was applied. Raises LifeBroken."""
    return _live(MortalDatabase(database_url), seed, num_transitions)


def _live(database: MortalDatabase, seed: int, num_transitions: int) -> Counter[str]:
    chance = random.Random(seed)
    machine = _Life(database)
    machine.begin()
    applied: list[str] = []
    try:
        while len(applied) < num_transitions:
            name = chance.choice([*RULES])
            arguments = RULES[name](chance)
            if name == "cancel" and not machine.jobs:
                continue
            applied.append(name)
            getattr(machine, name)(**arguments)
            machine.nothing_is_broken()
        machine.teardown()
    except Exception as error:
        raise LifeBroken(f"the life of seed {seed} broke after {len(applied)} transitions, at last {applied[-8:]}") from error
    return Counter(applied)


def live_on(database_url: str, seed: int, num_transitions: int) -> Counter[str]:
    """Live one life after the other until there were this many transitions."""
    counts: Counter[str] = Counter()
    database = MortalDatabase(database_url)
    began = reported = time.monotonic()
    for number in range(-(-num_transitions // LIFE)):
        counts += _live(database, seed + number, LIFE)
        if time.monotonic() - reported > _REPORT_EVERY_S:
            reported = time.monotonic()
            logger.info("%d transitions in %.0f s", counts.total(), reported - began)
    return counts


@contextmanager
def sqlite_url() -> Iterator[str]:
    """A new SQLite database in memory if the system has a folder there: the disk's time is not what is tested."""
    shared_memory = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(prefix="octet-transitions-", dir=shared_memory if shared_memory.is_dir() else None))
    try:
        yield f"sqlite:///{folder / 'octet.db'}"
    finally:
        shutil.rmtree(folder)


def _live_apart(database: str, seed: int, num_transitions: int) -> Counter[str]:
    """Live on a new database of this kind, in a process of its own."""
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    logging.getLogger("service").setLevel(logging.CRITICAL)  # thousands of deaths, each with its lines
    logging.getLogger("alembic").setLevel(logging.WARNING)
    with running_server() if database == "postgres" else sqlite_url() as url:
        empty = Database(url)
        empty.migrate()
        empty.close()
        return live_on(url, seed, num_transitions)


def live_in_processes(database: str, seed: int, num_transitions: int, num_processes: int) -> Counter[str]:
    """Share the lives out to processes: the seeds follow each other. Raises LifeBroken as soon as one breaks."""
    num_lives = -(-num_transitions // LIFE)
    starts = [num_lives * number // num_processes for number in range(num_processes + 1)]
    counts: Counter[str] = Counter()
    with ProcessPoolExecutor(num_processes, mp_context=multiprocessing.get_context("spawn")) as processes:
        shares = [
            processes.submit(_live_apart, database, seed + start, LIFE * (end - start)) for start, end in pairwise(starts)
        ]
        try:
            for share in as_completed(shares):
                counts += share.result()
        except BaseException:
            for process in multiprocessing.active_children():
                process.terminate()
            raise
    return counts


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.transitions")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--transitions", type=int, default=100_000)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--database", choices=["sqlite", "postgres"], default="sqlite")
    options = parser.parse_args()
    began = time.monotonic()
    counts = live_in_processes(options.database, options.seed, options.transitions, options.processes)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    sys.stdout.write(
        f"{counts.total()} transitions in {counts.total() // LIFE} lives on {options.database}, seeds from {options.seed}, "
        f"{options.processes} processes, {time.monotonic() - began:.0f} s, {used.ru_utime + used.ru_stime:.0f} CPU s: "
        "no invariant broke\n"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
