"""One detached Ray actor per attempt: it places the ranks, watches them, and reports how they ended.

It holds no truth of its own: the database does. It is named after the attempt and its epoch, so launching twice finds
the first actor. It outlives the dispatcher that created it, and its ranks die with it. This is the only file of the runtime
that imports Ray. Importing it does not load torch, which happens in the ranks' own processes.
"""

import importlib
import logging
import os
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from octet.api_schemas import AttemptRef, FailureReason, JsonScalar, PoolConfig, Probe, ProbeState
from octet.worker.common.config import RankEnv
from octet.worker.rank import warm

NAMESPACE = "octet"
_RANK_START_TIMEOUT_S = 120.0
_OTHER_RANKS_GRACE_S = 5.0
_NODE_NOTICED_S = 30.0
"""Ray's list shows a node that was killed after up to 15 s. An attempt's lease lasts longer."""
_LINGER_S = 900.0
_TOO_SMALL_S = 30.0
"""A pool has this long until tensor groups have to fit on its nodes. Ranks that outnumber its slots do not wait."""
_PRIVATE_UMASK = 0o077  # checkpoints and spools are their owner's alone

logger = logging.getLogger(__name__)


def actor_name(ref: AttemptRef) -> str:
    return f"octet-{ref.attempt_id}-{ref.epoch}"


@dataclass(frozen=True)
class RankNode:
    """The node on which a rank process started, by Ray's id. `pid` is the process that trains."""

    node_id: str
    address: str
    free_port: int
    labels: dict[str, Any]
    pid: int


class RankActor:
    """One rank's process, or the one that waits for it. Ray starts it inside the attempt's placement group.

    A single rank on the supervisor's own node needs no actor: the supervisor waits for its warm process itself.
    """

    def __init__(self, warm_idle_s: float) -> None:
        """warm_idle_s: see `octet.worker.rank.warm.take`; 0 runs the rank in this process."""
        os.umask(_PRIVATE_UMASK)
        self._process = warm.take(warm_idle_s)
        self._port_holder: socket.socket | None = None

    @property
    def is_warm(self) -> bool:
        """True if the rank has a process of its own."""
        return self._process is not None

    def node(self) -> RankNode:
        """Return where this rank is, and a port that is kept for the first rank, which listens there seconds later."""
        address: str = ray.util.get_node_ip_address()
        self._port_holder = hold_port(address)
        port = int(self._port_holder.getsockname()[1])
        here = ray.get_runtime_context()
        labels: dict[str, Any] = dict(here.get_node_labels())
        return RankNode(here.get_node_id(), address, port, labels, self._process.pid if self._process else os.getpid())

    def run(self, order_json: str, env: dict[str, Any], placed_at: datetime) -> warm.Ending:
        """Run the rank; return its outcome, reason and message. The runtime is imported by name because it loads torch."""
        if self._process is None:
            ending: warm.Ending = importlib.import_module("octet.worker.rank.warm.order").run_order(order_json, env, placed_at)
            return ending
        try:
            return self._process.run(order_json, env, placed_at)
        except warm.ProcessLost as error:
            return "failed", FailureReason.WORKER_LOST, f"rank {env['rank']} of {env['world_size']}: {error}"

    def end(self) -> None:
        """End the rank's own process, if it has one; `run` then returns in the other thread."""
        if self._process is not None:
            self._process.end()


def hold_port(address: str) -> socket.socket:
    """Return a socket that keeps a free port of the address from others until it is closed.

    It does not listen. A server that sets SO_REUSEADDR, as torch's stores do, can listen there nonetheless.
    """
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind((address, 0))
    return holder


def warm_up(warm_idle_s: float) -> None:
    """Start this node's template of rank processes, if it has none."""
    connection = warm.start(warm_idle_s)
    if connection is not None:
        connection.close()


class RankFailed(Exception):
    """An attempt failed. Carries the typed reason."""

    def __init__(self, reason: FailureReason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class Supervisor:
    """The supervising actor. The launcher calls `probe` and `stop`; everything else happens in one thread of its own."""

    def __init__(
        self, order_json: str, pool_json: str, num_workers: int, warm_idle_s: float = 0, num_together: int = 1
    ) -> None:
        """Place and run `num_workers` ranks in the pool. The order is passed on unparsed; only the ranks parse it.

        warm_idle_s: how long a node keeps processes warm for further ranks; 0 keeps none.
        num_together: so many neighbouring ranks, which divide each layer, share a node. It divides num_workers.
        """
        self._order_json = order_json
        self._pool = PoolConfig.model_validate_json(pool_json)
        self._num_workers, self._num_together = num_workers, num_together
        self._warm_idle_s = warm_idle_s
        self._group: PlacementGroup | None = None
        self._ranks: list[Any] = []
        self._rank_here: RankActor | None = None
        self._node_id: str = ray.get_runtime_context().get_node_id()
        self._probe = Probe(state=ProbeState.PLACING, data={"node_id": self._node_id})
        self._stopping = threading.Event()
        threading.Thread(target=self._supervise, name="octet-supervise", daemon=True).start()

    def probe(self) -> str:
        return self._probe.model_dump_json()

    def stop(self, grace_s: float) -> None:
        """End ranks that have not started at once, the others after `grace_s`. The caller then kills this actor."""
        self._stopping.set()
        deadline = time.monotonic() + grace_s
        while self._probe.state is not ProbeState.EXITED and time.monotonic() < deadline:
            time.sleep(0.05)
        self._release()

    def _supervise(self) -> None:
        try:
            self._place()
            self._rank_here = self._take_rank_here()
            if self._rank_here is not None:
                self._run_here(self._rank_here)
            else:
                self._start_ranks()
                self._watch()
            self._exit(None, "every rank ended")
        except RankFailed as failure:
            self._exit(failure.reason, str(failure))
        except BaseException as error:
            logger.exception("the supervisor failed")
            self._exit(FailureReason.LAUNCH_FAILED, f"{type(error).__name__}: {error}")
        finally:
            self._release()
        # The dispatcher reads the outcome and kills this actor. If no dispatcher comes back, end after a while.
        time.sleep(_LINGER_S)
        os._exit(0)

    def _place(self) -> None:
        """Reserve one slot per rank, all or nothing, on nodes that carry the pool's label."""
        self._group = reserve(self._pool, self._num_workers, self._num_together)
        give_up_at = time.monotonic() + _TOO_SMALL_S
        while not self._group.wait(timeout_seconds=1):
            if self._stopping.is_set():
                raise RankFailed(FailureReason.LAUNCH_FAILED, "stopped before it was placed")
            list_nodes: Any = ray.nodes  # Ray's own annotations lack it
            nodes = list_nodes()
            if time.monotonic() > give_up_at or sum(slots_of_nodes(self._pool, nodes)) < self._num_workers:
                check_room(self._pool, self._num_workers, self._num_together, nodes)
        self._placed_at = datetime.now(UTC)

    def _take_rank_here(self) -> RankActor | None:
        """Take a warm process for the only rank if its slot is on this node. It spares the start of a Ray worker.

        None: the rank needs an actor, because Ray gives GPUs to actors alone, or because it starts cold.
        """
        if self._num_workers > 1 or self._pool.accelerator == "cuda" or not self._warm_idle_s:
            return None
        table: dict[str, Any] = placement_group_table(self._group)
        if table["bundles_to_node_id"][0] != self._node_id:
            return None
        rank = RankActor(self._warm_idle_s)
        return rank if rank.is_warm else None

    def _run_here(self, rank: RankActor) -> None:
        node = rank.node()
        self._check_labels([node])
        self._probe = Probe(
            state=ProbeState.RUNNING, placed_at=self._placed_at, data={"node_id": self._node_id, "rank_0_pid": node.pid}
        )
        try:
            failure = _failure_in(rank.run(self._order_json, asdict(self._rank_env(0, [node])), self._placed_at))
        except RuntimeError as error:
            failure = FailureReason.WORKER_ERROR, str(error)
        if failure is not None:
            raise _grouped({0: failure})

    def _start_ranks(self) -> None:
        """Start a process for each rank in its bundle."""
        slot, group = slots(self._pool, 1), self._group
        assert group is not None, "the ranks are placed"
        self._ranks = [
            ray.remote(RankActor)
            .options(
                num_cpus=0,
                num_gpus=slot.get("GPU", 0),
                resources={self._pool.slot_resource: 1},
                max_restarts=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    group, placement_group_bundle_index=index // self._num_together
                ),
            )
            .remote(self._warm_idle_s)
            for index in range(self._num_workers)
        ]

    def _watch(self) -> None:
        """Check the nodes of the ranks, run the ranks, and wait for all of them. The first failure ends the others."""
        nodes = self._nodes()
        self._check_labels(nodes)
        running = {
            rank.run.remote(self._order_json, asdict(self._rank_env(index, nodes)), self._placed_at): index
            for index, rank in enumerate(self._ranks)
        }
        pids: dict[str, JsonScalar] = {f"rank_{index}_pid": node.pid for index, node in enumerate(nodes)}
        self._probe = Probe(state=ProbeState.RUNNING, placed_at=self._placed_at, data={"node_id": self._node_id, **pids})
        failures: dict[int, tuple[FailureReason, str]] = {}
        unreachable: set[int] = set()
        give_up_at = float("inf")
        while running and time.monotonic() < give_up_at:
            done, _ = ray.wait(list(running), num_returns=1, timeout=0.5)
            for reference in done:
                index = running.pop(reference)
                failure = _failure_of(reference, f"rank {index} of {len(self._ranks)}")
                if failure is not None:
                    failures[index] = failure
                if _is_unreachable(reference):
                    unreachable.add(index)
            if failures:
                # A failed rank leaves the others waiting in a collective. Give them a moment to report their own reason.
                give_up_at = min(give_up_at, time.monotonic() + _OTHER_RANKS_GRACE_S)
        if failures:
            failed = _grouped(failures)
            if failed.reason is FailureReason.WORKER_LOST:
                failed = self._blame_node(failed, nodes, is_sure=not running and not unreachable)
            raise failed

    def _blame_node(self, failed: RankFailed, nodes: Sequence[RankNode], *, is_sure: bool) -> RankFailed:
        """Say that a node is gone where Ray's list of nodes shows it, in place of what the other ranks make of it.

        is_sure: every rank has answered or is known to have died, so there is nothing that Ray may still have to notice.
        """
        if len({node.node_id for node in nodes}) == 1:
            return failed
        list_nodes: Any = ray.nodes  # Ray's own annotations lack it
        give_up_at = time.monotonic() + _NODE_NOTICED_S
        while not (lost := ranks_of_lost_nodes(nodes, list_nodes())):
            if is_sure or time.monotonic() >= give_up_at or self._stopping.wait(0.5):
                return failed
        return RankFailed(FailureReason.NODE_LOST, f"{describe_lost(lost, nodes)}\n{failed}")

    def _nodes(self) -> list[RankNode]:
        try:
            nodes: list[RankNode] = ray.get([rank.node.remote() for rank in self._ranks], timeout=_RANK_START_TIMEOUT_S)
        except RayError as error:
            raise RankFailed(FailureReason.START_TIMEOUT, f"the rank processes did not start: {error}") from error
        return nodes

    def _check_labels(self, nodes: list[RankNode]) -> None:
        key, value = self._pool.node_label
        for index, node in enumerate(nodes):
            if node.labels.get(key) != value:
                raise RankFailed(
                    FailureReason.WRONG_NODE,
                    f"rank {index} is on {node.address}, where label {key} is {node.labels.get(key)!r}; pool "
                    f"{self._pool.name} needs {value!r}. Label the node or change the pool.",
                )

    def _rank_env(self, index: int, nodes: list[RankNode]) -> RankEnv:
        pool = self._pool
        return RankEnv(
            rank=index,
            world_size=len(nodes),
            # Ray shows each rank only its own devices.
            local_rank=0,
            master_address=nodes[0].address,
            master_port=nodes[0].free_port,
            accelerator=pool.accelerator,
            num_threads=pool.threads_per_worker,
            num_nodes=len({node.node_id for node in nodes}),
        )

    def _exit(self, reason: FailureReason | None, message: str) -> None:
        self._probe = Probe(state=ProbeState.EXITED, placed_at=self._probe.placed_at, reason=reason, message=message[:16_384])

    def _release(self) -> None:
        for rank in self._ranks:
            ray.kill(rank, no_restart=True)
        self._ranks = []
        if self._rank_here is not None:
            self._rank_here.end()
        if self._group is not None:
            remove_placement_group(self._group)
            self._group = None


def slots(pool: PoolConfig, count: int) -> dict[str, float]:
    """Return the resources of a node that so many ranks take."""
    return {pool.slot_resource: float(count)} | ({"GPU": float(count)} if pool.accelerator == "cuda" else {})


def bundles_of(pool: PoolConfig, num_workers: int, num_together: int) -> list[dict[str, float]]:
    """Return the bundles that Ray reserves for all ranks. A bundle lies on one node: each is for `num_together` neighbours."""
    return [slots(pool, num_together)] * (num_workers // num_together)


def reserve(pool: PoolConfig, num_workers: int, num_together: int) -> PlacementGroup:
    """Reserve the slots of all ranks, on as few nodes as possible."""
    key, value = pool.node_label
    bundles = bundles_of(pool, num_workers, num_together)
    return placement_group(bundles, strategy="PACK", bundle_label_selector=[{key: value}] * len(bundles))


def check_room(pool: PoolConfig, num_workers: int, num_together: int, nodes: list[dict[str, Any]]) -> None:
    """Raise RankFailed if the pool's nodes cannot hold all tensor groups at once. nodes: as `ray.nodes` lists them.

    The dispatcher counts the slots of all nodes, those too that Ray has not yet missed, and not how groups lie on them.
    """
    found = slots_of_nodes(pool, nodes)
    num_groups, num_fitting = num_workers // num_together, sum(each // num_together for each in found)
    if num_fitting >= num_groups:
        return
    parts = "ranks" if num_together == 1 else "groups"
    there = f"the nodes of pool {pool.name} have {_listed(found)} slots, room for {num_fitting} of {num_groups} {parts}"
    if sum(found) < num_workers:
        raise RankFailed(FailureReason.LAUNCH_FAILED, f"{there}: nodes have gone since the attempt was placed")
    raise RankFailed(
        FailureReason.LAUNCH_FAILED,
        f"parallelism.tensor is {num_together}, and ranks that divide a layer share a node; {there}. Lower "
        "parallelism.tensor or resources.workers, or choose another pool.",
    )


def slots_of_nodes(pool: PoolConfig, nodes: list[dict[str, Any]]) -> list[int]:
    """The slots of each of the pool's nodes that Ray holds for alive, the largest first. nodes: as for `check_room`."""
    key, value = pool.node_label
    ours = [node for node in nodes if node["Alive"] and node["Labels"].get(key) == value]
    return sorted((int(node["Resources"].get(pool.slot_resource, 0)) for node in ours), reverse=True)


def ranks_of_lost_nodes(ranks: Sequence[RankNode], nodes: list[dict[str, Any]]) -> list[int]:
    """Return the ranks whose nodes are not among those that Ray holds for alive. nodes: as `ray.nodes` lists them."""
    alive = {node["NodeID"] for node in nodes if node["Alive"]}
    return [rank for rank, node in enumerate(ranks) if node.node_id not in alive]


def describe_lost(lost: Sequence[int], ranks: Sequence[RankNode]) -> str:
    """Name lost nodes, and the ranks that were on them."""
    addresses = ", ".join(dict.fromkeys(f"{ranks[rank].address} ({ranks[rank].node_id[:8]})" for rank in lost))
    numbers = f"rank{'s' * (len(lost) > 1)} {', '.join(map(str, lost))} of {len(ranks)}"
    return f"lost from the cluster: {addresses}, with {numbers}"


def _listed(found: list[int]) -> str:
    return ", ".join(map(str, found[:8])) + (", …" if len(found) > 8 else "") if found else "no"


def _failure_of(reference: Any, rank: str) -> tuple[FailureReason, str] | None:
    """Return why an ended rank failed; None if it succeeded or was stopped."""
    try:
        ending: warm.Ending = ray.get(reference, timeout=10)
    except RayActorError as error:
        return FailureReason.WORKER_LOST, f"{rank}: its process died: {_first_line(error)}"
    except RayError as error:
        return FailureReason.WORKER_ERROR, f"{rank}: {error}"
    return _failure_in(ending)


def _is_unreachable(reference: Any) -> bool:
    """Return True if Ray has lost the connection to an ended rank, and does not know yet if it died."""
    try:
        ray.get(reference, timeout=10)
    except ActorUnavailableError:
        return True
    except RayError:
        return False
    return False


def _failure_in(ending: warm.Ending) -> tuple[FailureReason, str] | None:
    outcome, reason, message = ending
    if outcome == "failed":
        assert reason is not None, "a failure has a reason"
        return FailureReason(reason), message
    if outcome is None:
        return FailureReason.LEASE_EXPIRED, message
    return None


def _grouped(failures: dict[int, tuple[FailureReason, str]]) -> RankFailed:
    """Group the failures of several ranks into one: each message once, those that name a lost process first.

    Ranks that could still speak to each other have agreed on one message, which names them (`worker/mesh/agreement.py`).
    """
    causes = list(dict.fromkeys(cause for _, cause in sorted(failures.items())))
    causes.sort(key=lambda cause: cause[0] is not FailureReason.WORKER_LOST)
    return RankFailed(causes[0][0], "\n".join(message for _, message in causes))


def _first_line(error: Exception) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
