"""Strikes cluster mode: SIGKILL and SIGSTOP of each part and of each process inside of it, and SIGKILL of whole nodes."""

import time
from dataclasses import dataclass, field
from typing import ClassVar

import psutil

from tests.chaos.cluster import Cluster, Part
from tests.chaos.faults import FAULTS, KILL, LONGEST_AWAY_S, NODE, Storm, Weights, logger

# What may end when its peers are away, as docker-compose.yml says, and is then started again. The others may not.
ENDS_WITH_ITS_PEERS = ("postgres", "head", "node-1", "node-2", "dispatcher-1", "dispatcher-2")
RESTART_S = 1.0


@dataclass
class ClusterStorm(Storm):
    """Strikes PostgreSQL, the api, the dispatchers, Ray and the ranks of a cluster."""

    cluster: Cluster = field(kw_only=True)
    _starts_at: dict[str, float] = field(default_factory=dict)
    weights: ClassVar[Weights] = {(fault.component, fault.signal): fault.of_cluster for fault in FAULTS if fault.of_cluster}

    def end(self) -> None:
        self._due = []
        self.cluster.kill()

    def _is_ready(self) -> bool:
        self.do_due()
        return all(part.is_running for part in self.cluster.parts.values()) and self.cluster.client.is_ready()

    def _start_again(self) -> None:
        now = time.monotonic()
        for part in self.cluster.parts.values():
            if part.is_running:
                continue
            if part.name not in self._starts_at:
                if part.name not in ENDS_WITH_ITS_PEERS:
                    self.ended_by_itself.append(f"{part.name} after {self.num_sent} signals")
                logger.info("%s ended", part.name)
                self._starts_at[part.name] = now + RESTART_S
            elif now >= self._starts_at[part.name]:
                del self._starts_at[part.name]
                part.start()

    def _processes(self) -> dict[str, list[psutil.Process]]:
        found: dict[str, list[psutil.Process]] = {}
        for part in self.cluster.parts.values():
            if part.is_running:
                for component, process in part.processes():
                    found.setdefault(component, []).append(process)
        return found

    def _can_strike(self, component: str, found: dict[str, list[psutil.Process]]) -> bool:
        return bool(self._running_nodes()) if component == NODE else component in found

    def _strike(self, component: str, number: str, found: dict[str, list[psutil.Process]]) -> None:
        if component == NODE:
            part = self.random.choice(self._running_nodes())
            self.num_signals[NODE, KILL] += 1
            part.kill()
            self._start_later(part)
            logger.info("%4d SIGKILL all of %s", self.num_sent, part.name)
        else:
            super()._strike(component, number, found)

    def _kill(self, process: psutil.Process, component: str) -> None:
        """Kill a process. If it is a part's first one, the part's other processes have to end by themselves."""
        super()._kill(process, component)
        for part in self.cluster.parts.values():
            if part.running is not None and part.running.pid == process.pid:
                self._start_later(part)

    def _start_later(self, part: Part) -> None:
        self._starts_at[part.name] = time.monotonic() + self.random.uniform(0, LONGEST_AWAY_S)

    def _running_nodes(self) -> list[Part]:
        return [part for part in self.cluster.parts.values() if part.name.startswith(NODE) and part.is_running]
