"""Runs attempts on a Ray cluster. Each attempt has one detached, named supervisor actor (`octet.worker.rank.supervisor`).

Every call runs in a thread of its own with a deadline, because Ray's own calls can hang when the cluster is gone. A thread
that hangs is left behind, and takes no place from later calls.
A process connects to one cluster at a time. When the cluster is lost, the next call connects again, and the attempts of
the old cluster are absent from the new one.
"""

import logging
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as DeadlineExceeded
from typing import Any, TypeVar

import ray
from ray.autoscaler.sdk import request_resources
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayActorError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from octet.api_schemas import AttemptRef, FailureReason, LaunchOrder, PoolCapacity, PoolConfig, Probe, ProbeState
from octet.service.cluster.launcher import LauncherError
from octet.service.cluster.ray.calls import CALL_S, LAUNCH_S, Start, capacity_of
from octet.worker.rank.supervisor import NAMESPACE, Supervisor, actor_name, warm_up

_CONNECT_S = 60.0
_NAME_PREFIX = "octet-"

Answer = TypeVar("Answer")

logger = logging.getLogger(__name__)


class RayLauncher:
    """`Launcher` over one Ray cluster. `find_cluster` returns its address; for an embedded cluster it starts it first."""

    def __init__(
        self,
        find_cluster: Callable[[], str],
        pools: tuple[PoolConfig, ...],
        *,
        warm_idle_s: float = 0,
        warms_ahead: bool = False,
    ) -> None:
        """warm_idle_s: how long a node keeps processes warm for further ranks; 0: none. warms_ahead: before the first job."""
        self._find_cluster = find_cluster
        self._pools = pools
        self._warm_idle_s = warm_idle_s
        self._warms_ahead = warms_ahead
        self._connect_lock = threading.Lock()
        self._nodes: dict[AttemptRef, str] = {}
        """The nodes of supervisors, as they answered last."""

    def launch(self, order: LaunchOrder) -> None:
        """Start the attempt's supervisor, or find the one that an earlier call started; returns once it answers."""
        self.start(Start.of(order, self._warm_idle_s))

    def start(self, wanted: Start) -> None:
        """Do what `launch` does."""
        actor: Any = ray.remote(Supervisor)
        key, value = wanted.node_label
        arguments = (wanted.order_json, wanted.pool_json, wanted.num_workers, wanted.warm_idle_s, wanted.num_together)

        def start() -> None:
            supervisor = actor.options(
                name=actor_name(wanted.ref),
                namespace=NAMESPACE,
                lifetime="detached",
                get_if_exists=True,
                num_cpus=0,
                max_concurrency=4,
                max_restarts=0,
                label_selector={key: value},
            ).remote(*arguments)
            answer: str = ray.get(supervisor.probe.remote(), timeout=LAUNCH_S)
            self._remember_node(wanted.ref, Probe.model_validate_json(answer))

        self._call(LAUNCH_S, start)

    def probe(self, ref: AttemptRef) -> Probe:
        """Ask the attempt's supervisor. ABSENT means that the present cluster has no such supervisor."""

        def ask() -> Probe:
            supervisor = _find(ref)
            if supervisor is None:
                return Probe(state=ProbeState.ABSENT)
            answer: str = ray.get(supervisor.probe.remote(), timeout=CALL_S / 2)
            return Probe.model_validate_json(answer)

        try:
            probe = self._call(CALL_S, ask)
            # Ray names a supervisor for a moment after its death, and soon forgets the name: both have one cause.
            if probe.state is ProbeState.ABSENT:
                return self._lost_with_its_node(ref) or probe
        except LauncherError as error:
            cause = error.__cause__
            # Ray has lost its connection to one that is unavailable, and does not know yet if it died.
            if isinstance(cause, RayActorError) and not isinstance(cause, ActorUnavailableError):
                return self._died(ref)
            return Probe(state=ProbeState.UNREACHABLE, message=str(error))
        self._remember_node(ref, probe)
        return probe

    def _remember_node(self, ref: AttemptRef, probe: Probe) -> None:
        if "node_id" in probe.data:
            self._nodes[ref] = str(probe.data["node_id"])

    def _died(self, ref: AttemptRef) -> Probe:
        """Say how an attempt's supervisor died: with its node or alone. Which of the two waits for Ray's list of nodes."""
        try:
            lost = self._lost_with_its_node(ref)
        except LauncherError as error:
            return Probe(state=ProbeState.UNREACHABLE, message=f"the attempt's supervisor died; {error}")
        alone = Probe(state=ProbeState.EXITED, reason=FailureReason.CLUSTER_LOST, message="the attempt's supervisor died")
        return lost or alone

    def _lost_with_its_node(self, ref: AttemptRef) -> Probe | None:
        """Return what became of a supervisor whose node the cluster lists as dead, and None for any other.

        A cluster that has replaced the attempt's own lists no node of before.
        """
        node_id = self._nodes.get(ref)
        if node_id is None or node_id not in {node["NodeID"] for node in self._list_nodes() if not node["Alive"]}:
            return None
        message = f"the node of the attempt's supervisor ({node_id[:8]}) is gone"
        return Probe(state=ProbeState.EXITED, reason=FailureReason.NODE_LOST, message=message)

    def _nodes_there(self) -> list[dict[str, Any]]:
        return [node for node in self._list_nodes() if node["Alive"]]

    def _list_nodes(self) -> list[dict[str, Any]]:
        """Return Ray's description of each node, those that died since the cluster's start too."""
        list_nodes: Any = ray.nodes  # Ray's own annotations lack it
        return self._call(CALL_S, list_nodes)

    def stop(self, ref: AttemptRef, grace_s: float) -> None:
        """End the attempt's processes and free its slots. An attempt that is not there counts as stopped."""

        def end() -> None:
            supervisor = _find(ref)
            if supervisor is None:
                return
            try:
                # By name: of a supervisor whose class another release imports, Ray knows no positions.
                ray.get(supervisor.stop.remote(grace_s=grace_s), timeout=grace_s + CALL_S)
            except RayActorError:
                return
            ray.kill(supervisor, no_restart=True)

        self._call(grace_s + 2 * CALL_S, end)
        self._nodes.pop(ref, None)

    def resources_of_nodes(self) -> list[dict[str, float]]:
        """Return Ray's resources of each node that is there now."""
        return [node["Resources"] for node in self._nodes_there()]

    def list(self) -> Sequence[AttemptRef]:
        """List every attempt that has a supervisor on the cluster."""
        names: list[str] = self._call(CALL_S, ray.util.list_named_actors)
        found = [name.removeprefix(_NAME_PREFIX).rsplit("-", 1) for name in names if name.startswith(_NAME_PREFIX)]
        return [AttemptRef(attempt_id=attempt_id, epoch=int(epoch)) for attempt_id, epoch in found]

    def capacity(self) -> Sequence[PoolCapacity]:
        """Count the slots of the nodes that are there now."""
        return capacity_of(self._pools, self.resources_of_nodes())

    def request_slots(self, slots: Mapping[str, int]) -> None:
        """Ask the autoscaler for room for this many ranks, by pool. The request holds until the next one."""
        wanted = [pool for pool in self._pools for _ in range(slots.get(pool.name, 0))]
        bundles = [{pool.slot_resource: 1, **({"GPU": 1} if pool.accelerator == "cuda" else {})} for pool in wanted]
        labels = [dict([pool.node_label]) for pool in wanted]
        self._call(CALL_S, lambda: request_resources(bundles=bundles, bundle_label_selectors=labels))

    def close(self) -> None:
        """Disconnect. Attempts go on."""
        if ray.is_initialized():
            ray.shutdown()

    def _call(self, deadline_s: float, function: Callable[[], Answer]) -> Answer:
        def connected() -> Answer:
            self._ensure_connected()
            return function()

        return self._within(deadline_s + _CONNECT_S * (not ray.is_initialized()), connected)

    def _within(self, deadline_s: float, function: Callable[[], Answer]) -> Answer:
        future: Future[Answer] = Future()
        threading.Thread(target=_answer, args=(future, function), name="octet-ray", daemon=True).start()
        try:
            return future.result(timeout=deadline_s)
        except DeadlineExceeded as error:
            raise LauncherError(f"the Ray cluster did not answer within {deadline_s:g} s", retryable=True) from error
        except (GetTimeoutError, RayError, ConnectionError, RuntimeError, OSError) as error:
            raise LauncherError(f"{type(error).__name__}: {error}", retryable=True) from error
        except SystemExit as error:
            # Ray's worker leaves like this when its raylet is gone. It ends a program, and must not end our thread.
            raise LauncherError(f"Ray gave up its connection (SystemExit {error.code})", retryable=True) from error

    def _ensure_connected(self) -> None:
        with self._connect_lock:
            if ray.is_initialized():
                if _cluster_answers():
                    return
                logger.warning("the Ray cluster is gone; connecting again")
                ray.shutdown()
            ray.init(
                address=self._find_cluster(),
                namespace=NAMESPACE,
                log_to_driver=False,
                configure_logging=False,
            )
            if self._warm_idle_s and self._warms_ahead:
                self._warm_nodes()

    def _warm_nodes(self) -> None:
        """Have the pools' nodes import torch before the first job comes. Nobody waits for it; a node may do without."""
        labels = {pool.node_label for pool in self._pools}
        task: Any = ray.remote(num_cpus=0, max_retries=0)(warm_up)
        nodes: Any = ray.nodes  # Ray's own annotations lack it
        for node in nodes():
            if node["Alive"] and labels & set(node["Labels"].items()):
                here = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
                task.options(scheduling_strategy=here).remote(self._warm_idle_s)


def _answer(future: "Future[Answer]", function: Callable[[], Answer]) -> None:
    try:
        future.set_result(function())
    except BaseException as error:  # noqa: BLE001  (the caller raises it)
        future.set_exception(error)


def _cluster_answers() -> bool:
    """True while the GCS that we are connected to accepts connections."""
    host, _, port = ray.get_runtime_context().gcs_address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=2):
            return True
    except OSError:
        return False


def _find(ref: AttemptRef) -> Any:
    """Find the attempt's supervisor; None if the cluster has no actor of that name."""
    try:
        return ray.get_actor(actor_name(ref), namespace=NAMESPACE)
    except ValueError:
        return None
