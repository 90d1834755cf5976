"""A cluster in memory, for tests. It obeys, and can be made to misbehave.

It keeps the launcher's promises: launching twice starts once, and stopping an absent attempt succeeds. It keeps a list
of what happened, so a test needs no mock.
"""

from collections.abc import Iterable, Sequence

from octet.api_schemas import AttemptRef, FailureReason, LaunchOrder, PoolCapacity, PoolConfig, Probe, ProbeState
from octet.service.cluster.launcher import LauncherError


class FakeLauncher:
    """A `Launcher` without processes. `orders` holds what runs now, `started` every order that was ever started."""

    def __init__(self, pools: Iterable[PoolConfig]) -> None:
        self.slots_present = {pool.name: pool.slots for pool in pools}
        self.slots_without_device: dict[str, int] = {}
        self.nodes: tuple[str, ...] = ("127.0.0.1",)
        self.orders: dict[AttemptRef, LaunchOrder] = {}
        self.started: list[LaunchOrder] = []
        self.stopped: list[AttemptRef] = []
        self.reachable = True
        self.refuse_launches: LauncherError | None = None
        self._probes: dict[AttemptRef, Probe] = {}

    # What tests call.

    def exit(self, ref: AttemptRef, reason: FailureReason | None = None, message: str | None = None) -> None:
        """End the attempt's processes. Their supervisor stays and says so."""
        self._probes[ref] = Probe(state=ProbeState.EXITED, reason=reason, message=message)

    def lose_everything(self) -> None:
        """Replace the cluster by an empty one."""
        self.orders.clear()
        self._probes.clear()

    def is_running(self, ref: AttemptRef) -> bool:
        """True while processes of the attempt run, even if the cluster cannot be reached."""
        probe = self._probes.get(ref)
        return probe is not None and probe.state is ProbeState.RUNNING

    # What the dispatcher calls.

    def launch(self, order: LaunchOrder) -> None:
        self._answer()
        if self.refuse_launches is not None:
            raise self.refuse_launches
        ref = AttemptRef(attempt_id=order.attempt_id, epoch=order.epoch)
        if ref in self.orders:
            return
        if self._slots_free(order.pool.name) < order.spec.resources.workers:
            raise LauncherError(f"pool {order.pool.name!r} is full", retryable=True)
        self.orders[ref] = order
        self.started.append(order)
        self._probes[ref] = Probe(state=ProbeState.RUNNING)

    def probe(self, ref: AttemptRef) -> Probe:
        if not self.reachable:
            return Probe(state=ProbeState.UNREACHABLE, message="the fake cluster is switched off")
        return self._probes.get(ref, Probe(state=ProbeState.ABSENT))

    def stop(self, ref: AttemptRef, grace_s: float) -> None:
        self._answer()
        self.stopped.append(ref)
        self.orders.pop(ref, None)
        self._probes.pop(ref, None)

    def list(self) -> Sequence[AttemptRef]:
        self._answer()
        return [*self.orders]

    def capacity(self) -> Sequence[PoolCapacity]:
        self._answer()
        missing = self.slots_without_device
        return [
            PoolCapacity(pool=pool, slots_present=slots, nodes=self.nodes, slots_without_device=missing.get(pool, 0))
            for pool, slots in self.slots_present.items()
        ]

    def close(self) -> None:
        return None

    def _answer(self) -> None:
        if not self.reachable:
            raise LauncherError("the fake cluster is switched off", retryable=True)

    def _slots_free(self, pool: str) -> int:
        taken = sum(order.spec.resources.workers for order in self.orders.values() if order.pool.name == pool)
        return self.slots_present.get(pool, 0) - taken
