"""Random lives of the control plane on a simulated cluster: any number of transitions, from a seed.

    .venv/bin/python -m tests.chaos.transitions --seed 7 --transitions 100000 --processes 2 --progress lives.jsonl

These are the rules and the invariants of tests/service/test_stateful.py, where Hypothesis chooses and shrinks; here a plain
generator chooses, which takes a third of the time. A transition is one rule: a request, a step of a loop, a report, a death,
a lost cluster, time that passes. The invariants are checked after each, and each life has to end with every job over.
A broken invariant ends the run with the life's seed and its last transitions. The lives are lived in slices, and each slice's
outcome is a line of its own in the file of `--progress`, so a run that is interrupted says how far it came.
"""

import argparse
import gc
import json
import logging
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from octet.api_schemas import FailureReason
from octet.service.db.engine import Database
from octet.service.dispatcher import launch, place, release, watch
from tests.service.postgres_server import running_server
from tests.service.simulation import MortalDatabase
from tests.service.test_stateful import ControlPlane
from tests.service.world import TurnedClock

LIFE = 40
"""Transitions in a life."""
_ALLOCATIONS_BETWEEN_COLLECTIONS = 50_000  # sessions make many objects, and few cycles

Draw = Callable[[random.Random], dict[str, Any]]
RULES: dict[str, Draw] = {
    "submit": lambda chance: {
        "workers": chance.randint(1, 2),
        "priority": chance.randint(0, 2),
        "max_failures": chance.randint(0, 2),
    },
    "cancel": lambda chance: {"place": chance.randrange(100), "saves": chance.random() < 0.5},
    "pause": lambda chance: {"place": chance.randrange(100)},
    "resume": lambda chance: {"place": chance.randrange(100)},
    "retry": lambda chance: {"place": chance.randrange(100), "more": chance.randrange(3)},
    "delete": lambda chance: {"place": chance.randrange(100)},
    "change": lambda chance: {"place": chance.randrange(100), "priority": chance.randint(0, 2)},
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
"""Each rule with a function that draws its arguments. Hypothesis draws from the same values."""


class _Life(ControlPlane):
    """A life on a database of former lives, which saves a sixth of the time: their statements are compiled."""

    def __init__(self, database: MortalDatabase) -> None:
        super().__init__()
        self._database = database

    def opened(self, clock: TurnedClock) -> MortalDatabase:
        return self._database.by(clock)


class LifeBroken(Exception):
    """A life broke an invariant. The message has its seed, what happened last and what does not hold."""


@dataclass(frozen=True)
class Slice:
    """Lives whose seeds follow each other, and what came of them."""

    seed: int
    database: str
    transitions: int
    counts: dict[str, int] = field(default_factory=dict)
    """The number of times each rule was applied."""
    cpu_s: float = 0.0
    broken: str | None = None


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
            if name in {"cancel", "pause", "resume", "retry", "change", "delete"} and not machine.jobs:
                continue
            applied.append(name)
            getattr(machine, name)(**arguments)
            machine.nothing_is_broken()
        machine.teardown()
    except Exception as error:
        message = f"the life of seed {seed} broke after {len(applied)} transitions, at last {applied[-8:]}: {error!r}"
        raise LifeBroken(message) from error
    return Counter(applied)


def live_on(database_url: str, seed: int, num_transitions: int) -> Counter[str]:
    """Live one life after the other until there were this many transitions."""
    database = MortalDatabase(database_url)
    lives = range(-(-num_transitions // LIFE))
    return sum((_live(database, seed + number, LIFE) for number in lives), Counter[str]())


@contextmanager
def sqlite_url() -> Iterator[str]:
    """A new SQLite database in memory if the system has a folder there: the disk's time is not what is tested."""
    shared_memory = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(prefix="octet-transitions-", dir=shared_memory if shared_memory.is_dir() else None))
    try:
        yield f"sqlite:///{folder / 'octet.db'}"
    finally:
        shutil.rmtree(folder)


def _live_apart(slice_: Slice) -> Slice:
    """Live a slice on a new database, in a process of its own."""
    logging.getLogger("octet.service").setLevel(logging.CRITICAL)  # thousands of deaths, each with its lines
    logging.getLogger("alembic").setLevel(logging.WARNING)
    gc.freeze()
    gc.set_threshold(_ALLOCATIONS_BETWEEN_COLLECTIONS)
    began = time.process_time()
    with running_server() if slice_.database == "postgres" else sqlite_url() as url:
        empty = Database(url)
        empty.migrate()
        empty.close()
        try:
            counts, broken = live_on(url, slice_.seed, slice_.transitions), None
        except LifeBroken as error:
            counts, broken = Counter(), str(error)
    return replace(slice_, counts=dict(counts), cpu_s=time.process_time() - began, broken=broken)


def slices_of(database: str, seed: int, num_transitions: int, slice_transitions: int) -> list[Slice]:
    """Divide lives among slices. Each life has a seed of its own, which does not depend on the slices."""
    num_lives, lives_of_slice = -(-num_transitions // LIFE), -(-slice_transitions // LIFE)
    starts = range(0, num_lives, lives_of_slice)
    return [Slice(seed + start, database, LIFE * min(lives_of_slice, num_lives - start)) for start in starts]


def live_in_processes(slices: list[Slice], num_processes: int, progress: Path | None = None) -> Iterator[Slice]:
    """Live the slices in several processes, and yield each when it has ended. Raises LifeBroken as soon as a life broke.

    progress: a file to which the outcome of each slice is appended as a line of JSON.
    """
    with ProcessPoolExecutor(num_processes, mp_context=multiprocessing.get_context("spawn")) as processes:
        try:
            for future in as_completed([processes.submit(_live_apart, slice_) for slice_ in slices]):
                ended = future.result()
                if progress is not None:
                    with progress.open("a") as file:
                        file.write(json.dumps(asdict(ended)) + "\n")
                if ended.broken is not None:
                    raise LifeBroken(ended.broken)
                yield ended
        except BaseException:
            for process in multiprocessing.active_children():
                process.terminate()
            raise


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.transitions")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--transitions", type=int, default=100_000)
    parser.add_argument("--slice", type=int, default=10_000, help="transitions of a slice")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--database", choices=["sqlite", "postgres"], default="sqlite")
    parser.add_argument("--progress", type=Path, default=None, help="a file that gets a line of JSON for each slice")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda _number, _frame: sys.exit(1))  # through `live_in_processes`, which ends its processes
    began, counts, cpu_s = time.monotonic(), Counter[str](), 0.0
    slices = slices_of(options.database, options.seed, options.transitions, options.slice)
    for ended in live_in_processes(slices, options.processes, options.progress):
        counts, cpu_s = counts + Counter(ended.counts), cpu_s + ended.cpu_s
        sys.stderr.write(f"{counts.total()} transitions in {time.monotonic() - began:.0f} s, {cpu_s:.0f} CPU s\n")
    sys.stdout.write(
        f"{counts.total()} transitions in {counts.total() // LIFE} lives on {options.database}, seeds from {options.seed}, "
        f"{options.processes} processes, {time.monotonic() - began:.0f} s, {cpu_s:.0f} CPU s: no invariant broke\n"
        + "".join(f"{count:8} {name}\n" for name, count in counts.most_common())
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
