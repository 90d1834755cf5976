"""The dispatcher: runs the loops that move jobs along, while it leads."""

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from octet.service.cluster.launcher import Launcher
from octet.service.db.engine import Database
from octet.service.dispatcher import compare, launch, make_way, orphans, place, plan, release, watch
from octet.service.dispatcher.context import LEADER_LEASE_S, DispatcherContext, NotLeading, holder_of
from octet.service.dispatcher.loop import Loop
from octet.service.jobs.planning import Planning
from octet.service.settings import Settings
from octet.service.telemetry.loops import LoopHealth

_STOP_TIMEOUT_S = 10.0
ORPHANS_INTERVAL_S = 30.0
_JOB_STEPS: dict[str, tuple[Callable[[DispatcherContext], None], float]] = {
    "plan": (plan.step, 0.5),
    "place": (place.step, 0.5),
    "reclaim": (make_way.reclaim, 0.5),
    "launch": (launch.step, 0.5),
    "watch": (watch.step, 1.0),
    "release": (release.step, 0.5),
    "grow": (make_way.grow, 1.0),
    "limit": (make_way.limit, 5.0),
    "compare": (compare.step, 1.0),
}

logger = logging.getLogger(__name__)


class Dispatcher:
    """All loops on one database and one cluster. Any number may run: one leads, and the others wait until it falls silent."""

    def __init__(self, database: Database, launcher: Launcher, settings: Settings) -> None:
        self.planning = Planning(settings)
        self._executor = ThreadPoolExecutor(max_workers=8, thread_name_prefix="octet-call")
        self.health = LoopHealth()
        self._context = DispatcherContext(
            database,
            launcher,
            settings,
            wake=self.wake,
            executor=self._executor,
            health=self.health,
            planning=self.planning,
        )
        self._lead_loop = Loop("lead", self._lead, LEADER_LEASE_S / 5, self.health)
        self._orphans_loop = Loop("orphans", self._while_leading(orphans.step), ORPHANS_INTERVAL_S, self.health)
        loops = {
            name: Loop(name, self._while_leading(step), pause_s, self.health) for name, (step, pause_s) in _JOB_STEPS.items()
        }
        self._job_loops = list(loops.values())
        self._starting_loops = [loops[name] for name in ("plan", "place", "reclaim", "launch", "grow")]

    @property
    def leads(self) -> bool:
        """True while this dispatcher leads."""
        return self._context.leads_since is not None

    def succeed(self, pid: int) -> None:
        """End the lease of a process of this machine that has ended, so that nobody waits until it runs out."""
        self._context.end_lease_of(holder_of(pid))

    def start(self) -> None:
        for loop in (self._lead_loop, *self._job_loops, self._orphans_loop):
            loop.start()

    def wake(self) -> None:
        """Run the loops of jobs now instead of at their next interval."""
        for loop in self._job_loops:
            loop.wake()

    def drain(self) -> int:
        """Place nothing more, and have every attempt save a checkpoint and end. Return how many have not ended yet.

        Raises NotLeading if another dispatcher leads.
        """
        for loop in self._starting_loops:
            loop.stop(timeout_s=0)
        return make_way.drain(self._context)

    def stop(self) -> None:
        """Finish the calls under way, for ten seconds a loop at most, and stop leading. Attempts on the cluster go on."""
        for loop in (*self._job_loops, self._orphans_loop, self._lead_loop):
            loop.stop(_STOP_TIMEOUT_S)
        self.planning.close()
        self._executor.shutdown(wait=False, cancel_futures=True)
        self._context.give_up()

    def _lead(self) -> None:
        led = self._context.leads_since
        self._context.lead()
        if self._context.leads_since != led:
            self.wake()

    def _while_leading(self, step: Callable[[DispatcherContext], None]) -> Callable[[], None]:
        def run() -> None:
            if self._context.leads_since is None:
                return
            try:
                step(self._context)
            except NotLeading:
                logger.warning("another dispatcher leads; this one drops what it was about to write")

        return run
