"""Faults for a running service: SIGKILL and SIGSTOP of each of its processes, chosen by a seeded random generator.

The dispatcher is a part of the server's process and the reporter is a thread of each rank, so a signal to the process is
one to them as well. A component that has no process at the instant of a strike is passed over for another.
"""

import contextlib
import logging
import random
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import psutil

from tests.e2e.octet_server import Server
from tests.kit.waiting import wait_until

RAYLET_THEN_SERVER = "raylet, then server"
MACHINE = "machine"
NODE = "node"
KILL, STOP = "SIGKILL", "SIGSTOP"

Weights = Mapping[tuple[str, str], int]


class Fault(NamedTuple):
    """A signal to a component, and how often it is sent, relative to the others, to each kind of service. 0: never.

    Components that only one kind has: `octet serve` the server, Ray's keeper, both of them with the whole machine, and a raylet
    that is killed while the server is suspended; cluster mode nodes, the api, dispatchers with their Ray, and PostgreSQL.
    """

    component: str
    signal: str
    of_serve: int
    of_cluster: int


FAULTS = (
    Fault("rank", KILL, 16, 10),
    Fault("rank", STOP, 10, 6),
    Fault("supervisor", KILL, 8, 6),
    Fault("supervisor", STOP, 5, 4),
    Fault("template", KILL, 3, 2),
    Fault("template", STOP, 2, 2),
    Fault("raylet", KILL, 5, 3),
    Fault("raylet", STOP, 5, 4),
    Fault("gcs", KILL, 4, 3),
    Fault("gcs", STOP, 5, 4),
    Fault("other Ray", KILL, 3, 2),
    Fault("other Ray", STOP, 2, 2),
    Fault("keeper", KILL, 3, 0),
    Fault("keeper", STOP, 3, 0),
    Fault("server", KILL, 12, 0),
    Fault("server", STOP, 10, 0),
    Fault(RAYLET_THEN_SERVER, STOP, 4, 0),
    Fault(MACHINE, KILL, 1, 0),
    Fault(NODE, KILL, 0, 3),
    Fault("api", KILL, 0, 8),
    Fault("api", STOP, 0, 8),
    Fault("dispatcher", KILL, 0, 10),
    Fault("dispatcher", STOP, 0, 12),
    Fault("dispatcher's Ray", KILL, 0, 3),
    Fault("dispatcher's Ray", STOP, 0, 2),
    Fault("postgres", KILL, 0, 3),
    Fault("postgres", STOP, 0, 3),
    Fault("backend", KILL, 0, 3),
    Fault("backend", STOP, 0, 6),
)
MEAN_STOP_S, LONGEST_STOP_S = 3.0, 12.0
PAST_LEASE_S, PAST_LEASE_SHARE = 40.0, 0.05
LONGEST_AWAY_S = 5.0
PATIENCE = 0.9
"""The share of strikes that is left out while no rank runs. Otherwise a loaded machine would never get to train."""

logger = logging.getLogger("chaos")


def component_of(process: psutil.Process) -> str:
    """Name the part that a process of `Server.processes` is. Raises psutil.NoSuchProcess for one that has ended."""
    name, command = process.name(), " ".join(process.cmdline())
    if "RankActor" in command or "octet.worker.rank.warm.template" in command:
        return "template" if _is_template(process) else "rank"
    if "octet.service.cluster.ray.embedded" in command:
        return "keeper"
    if "Supervisor" in command:
        return "supervisor"
    return {"raylet": "raylet", "gcs_server": "gcs"}.get(name, "other Ray")


def _is_template(process: psutil.Process) -> bool:
    """True for the process that forks warm ranks. A forked rank keeps its command line and is its child."""
    if "octet.worker.rank.warm.template" not in " ".join(process.cmdline()):
        return False
    parent = process.parent()
    return parent is None or "octet.worker.rank.warm.template" not in " ".join(parent.cmdline())


@dataclass
class Storm(ABC):
    """Strikes one service. `do_due` has to be called often: it resumes what was stopped and starts again what was killed."""

    random: random.Random
    num_signals: Counter[tuple[str, str]] = field(default_factory=Counter)
    """SIGKILLs and SIGSTOPs sent, by component and signal. SIGCONTs are not counted."""
    num_pairs: int = 0
    """Times the raylet was killed and the server suspended at once. `num_signals` counts both signals, too."""
    ended_by_itself: list[str] = field(default_factory=list)
    """Ends of a server that no signal of ours explains."""
    _due: list[tuple[float, Callable[[], None]]] = field(default_factory=list)

    weights: ClassVar[Weights]
    """The relative frequency of each strike: a component, and SIGKILL or SIGSTOP."""

    @property
    def num_sent(self) -> int:
        return sum(self.num_signals.values())

    def strike(self) -> None:
        """Send one random signal, or several at once where a component of `weights` stands for them."""
        found = self._processes()
        if "rank" not in found and self.random.random() < PATIENCE:
            return
        kinds = [kind for kind in self.weights if self._can_strike(kind[0], found)]
        if kinds:
            component, number = self.random.choices(kinds, [self.weights[kind] for kind in kinds])[0]
            self._strike(component, number, found)

    def do_due(self) -> None:
        """Resume and start again what is due, and what ended without a signal."""
        now = time.monotonic()
        due, self._due = [one for one in self._due if one[0] <= now], [one for one in self._due if one[0] > now]
        for _, act in due:
            act()
        self._start_again()

    def calm(self) -> None:
        """Resume everything, and wait until the service is ready."""
        for _, act in self._due:
            act()
        self._due = []
        wait_until(self._is_ready, poll_s=0.2)

    @abstractmethod
    def end(self) -> None:
        """Leave no process behind, whatever happened before."""

    @abstractmethod
    def _processes(self) -> dict[str, list[psutil.Process]]:
        """Find what runs, by component."""

    @abstractmethod
    def _start_again(self) -> None:
        """Start what has ended and has nobody else to start it."""

    @abstractmethod
    def _is_ready(self) -> bool:
        """Do what is due, and return True if the service takes jobs."""

    def _strike(self, component: str, number: str, found: dict[str, list[psutil.Process]]) -> None:
        process = self.random.choice(found[component])
        if number == KILL:
            self._kill(process, component)
        else:
            self._stop(process, component)

    def _can_strike(self, component: str, found: dict[str, list[psutil.Process]]) -> bool:
        return component in found

    def _kill(self, process: psutil.Process, component: str) -> None:
        self.num_signals[component, KILL] += 1
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
        logger.info("%4d SIGKILL %s (%d)", self.num_sent, component, process.pid)

    def _stop(self, process: psutil.Process, component: str) -> None:
        seconds = min(LONGEST_STOP_S, self.random.expovariate(1 / MEAN_STOP_S))
        if self.random.random() < PAST_LEASE_SHARE:
            seconds = PAST_LEASE_S
        self.num_signals[component, STOP] += 1
        with contextlib.suppress(psutil.NoSuchProcess):
            process.suspend()
            self._after(seconds, lambda: _resume(process))
        logger.info("%4d SIGSTOP %s (%d) for %.1f s", self.num_sent, component, process.pid, seconds)

    def _after(self, seconds: float, act: Callable[[], None]) -> None:
        self._due.append((time.monotonic() + seconds, act))


@dataclass
class ServerStorm(Storm):
    """Strikes an `octet serve`, its Ray and its ranks."""

    server: Server = field(kw_only=True)
    _server_was_killed: bool = False
    weights: ClassVar[Weights] = {(fault.component, fault.signal): fault.of_serve for fault in FAULTS if fault.of_serve}

    def end(self) -> None:
        self._due = []
        if self.server.is_running:
            self.server.kill()
        self.server.kill_the_cluster()

    def _start_again(self) -> None:
        if not self._server_was_killed and not self.server.is_running:
            self.ended_by_itself.append(f"after {self.num_sent} signals")
            self._restart_server()

    def _is_ready(self) -> bool:
        self.do_due()
        return self.server.client.is_ready()

    def _processes(self) -> dict[str, list[psutil.Process]]:
        found: dict[str, list[psutil.Process]] = {}
        if self.server.is_running:
            found["server"] = [psutil.Process(self.server.pid)]
        for process in self.server.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                found.setdefault(component_of(process), []).append(process)
        return found

    def _can_strike(self, component: str, found: dict[str, list[psutil.Process]]) -> bool:
        if component == RAYLET_THEN_SERVER:
            return "raylet" in found and "server" in found
        return component in found or (component == MACHINE and "keeper" in found)

    def _strike(self, component: str, number: str, found: dict[str, list[psutil.Process]]) -> None:
        if component == MACHINE:
            self._kill_the_machine(found)
        elif component == RAYLET_THEN_SERVER:
            self.num_pairs += 1
            self._kill(self.random.choice(found["raylet"]), "raylet")
            self._stop(found["server"][0], "server")
        else:
            super()._strike(component, number, found)

    def _kill(self, process: psutil.Process, component: str) -> None:
        super()._kill(process, component)
        if component == "server":
            self._server_was_killed = True
            self.server.kill()
            self._after(self.random.uniform(0, LONGEST_AWAY_S), self._restart_server)

    def _kill_the_machine(self, found: dict[str, list[psutil.Process]]) -> None:
        """Kill all processes at once; the keeper first, so that it starts nothing."""
        for component in sorted(found, key=lambda component: component not in ("server", "keeper")):
            for process in found[component]:
                self._kill(process, component)

    def _restart_server(self) -> None:
        self._server_was_killed = False
        self.server.spawn()


def _resume(process: psutil.Process) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.resume()
