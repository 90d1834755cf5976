"""Random lives of the control plane on a simulated cluster: any number of transitions, from a seed.

    .venv/bin/python -m tests.chaos.transitions --seed 7 --transitions 100000

These are the rules and the invariants of tests/service/test_stateful.py, where Hypothesis chooses and shrinks; here a plain
generator chooses, which takes a third of the time. A transition is one rule: a request, a step of a loop, a report, a death,
a lost cluster, time that passes. The invariants are checked after each, and each life has to end with every job over.
A broken invariant ends the run with the life's seed and its last transitions.
"""

import argparse
import logging
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from api_schemas import FailureReason
from service.db.engine import Database
from service.dispatcher import launch, place, release, watch
from tests.service.postgres_server import running_server
from tests.service.test_stateful import ControlPlane

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


class LifeBroken(Exception):
    """A life broke an invariant. The message has its seed and what happened last."""


def live(database_url: str, seed: int, num_transitions: int = LIFE) -> Counter[str]:
    """Live one life on an empty database, and return how often each rule was applied. Raises LifeBroken."""
    chance = random.Random(seed)
    machine = type("Here", (ControlPlane,), {"database_url": database_url})()
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
    began = reported = time.monotonic()
    for number in range(-(-num_transitions // LIFE)):
        counts += live(database_url, seed + number)
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


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.transitions")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--transitions", type=int, default=100_000)
    parser.add_argument("--database", choices=["sqlite", "postgres"], default="sqlite")
    options = parser.parse_args()
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    logging.getLogger("service").setLevel(logging.CRITICAL)  # thousands of deaths, each with its lines
    began, began_cpu = time.monotonic(), time.process_time()
    with running_server() if options.database == "postgres" else sqlite_url() as url:
        database = Database(url)
        database.migrate()
        database.close()
        counts = live_on(url, options.seed, options.transitions)
    sys.stdout.write(
        f"{counts.total()} transitions in {counts.total() // LIFE} lives on {options.database}, seeds from {options.seed}, "
        f"{time.monotonic() - began:.0f} s, {time.process_time() - began_cpu:.0f} CPU s: no invariant broke\n"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
