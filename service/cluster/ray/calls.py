"""Calls from a server to the process that runs its Ray (`host.py`), over a socket in the cluster's private folder.

Each call is a connection of its own: one JSON object each way, then the end. Ray takes 35 MiB of a process that connects to
it, and may end that process; the server neither imports it nor ends with it.
"""

import json
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from octet.api_schemas import AttemptRef, LaunchOrder, PoolCapacity, PoolConfig, Probe, ProbeState
from octet.service.cluster.launcher import LauncherError

LAUNCH_S = 60.0
CALL_S = 10.0
_NODE, _HEAD = "node:", "node:__internal_head__"
"""The beginning of a resource that each of Ray's nodes has, before its address; and one that the head has too."""
_ANSWER_S = 5.0
"""The time that the server waits longer than the host, whose message says more than that nobody answered."""


@dataclass(frozen=True)
class Start:
    """The arguments that start a supervisor. The order is passed on unparsed; only the ranks parse it."""

    attempt_id: str
    epoch: int
    order_json: str
    pool_json: str
    num_workers: int
    num_together: int
    warm_idle_s: float
    node_label: Sequence[str]

    @classmethod
    def of(cls, order: LaunchOrder, warm_idle_s: float) -> "Start":
        """warm_idle_s: how long a node keeps processes warm for further ranks; 0: none."""
        spec = order.spec
        return cls(
            attempt_id=order.attempt_id,
            epoch=order.epoch,
            order_json=order.model_dump_json(),
            pool_json=order.pool.model_dump_json(),
            num_workers=spec.resources.workers,
            num_together=spec.parallelism.tensor,
            warm_idle_s=warm_idle_s,
            node_label=order.pool.node_label,
        )

    @property
    def ref(self) -> AttemptRef:
        return AttemptRef(attempt_id=self.attempt_id, epoch=self.epoch)


def capacity_of(pools: Sequence[PoolConfig], nodes: Sequence[dict[str, float]]) -> list[PoolCapacity]:
    """Read each pool's slots and the nodes' addresses from the resources that each of Ray's nodes has.

    A node that offers more slots of GPUs than it has GPUs promises what no rank gets: Ray would wait for the others for good.
    """
    names = {name for node in nodes for name in node if name.startswith(_NODE) and name != _HEAD}
    addresses = tuple(sorted(name.removeprefix(_NODE) for name in names))
    found = []
    for pool in pools:
        offered = [int(node.get(pool.slot_resource, 0)) for node in nodes]
        held = [min(slots, int(node.get("GPU", 0))) for slots, node in zip(offered, nodes, strict=True)]
        present = sum(held if pool.accelerator == "cuda" else offered)
        missing = sum(offered) - present
        found.append(PoolCapacity(pool=pool.name, slots_present=present, nodes=addresses, slots_without_device=missing))
    return found


class HostedLauncher:
    """`Launcher` over the embedded Ray. `find_host` returns the path of its socket, and starts Ray first if none runs."""

    def __init__(self, find_host: Callable[[], str], pools: Sequence[PoolConfig], *, warm_idle_s: float = 0) -> None:
        """warm_idle_s: see `Start.of`."""
        self._find_host = find_host
        self._pools = pools
        self._warm_idle_s = warm_idle_s

    def launch(self, order: LaunchOrder) -> None:
        """Start the attempt's supervisor, or find the one that an earlier call started; returns once it answers."""
        self._call(LAUNCH_S, "launch", **asdict(Start.of(order, self._warm_idle_s)))

    def probe(self, ref: AttemptRef) -> Probe:
        """Ask the attempt's supervisor. ABSENT means that the present cluster has no such supervisor."""
        try:
            return Probe.model_validate(self._call(CALL_S, "probe", ref=ref.model_dump()))
        except LauncherError as error:
            return Probe(state=ProbeState.UNREACHABLE, message=str(error))

    def stop(self, ref: AttemptRef, grace_s: float) -> None:
        """End the attempt's processes and free its slots. An attempt that is not there counts as stopped."""
        self._call(grace_s + 2 * CALL_S, "stop", ref=ref.model_dump(), grace_s=grace_s)

    def list(self) -> Sequence[AttemptRef]:
        """List every attempt that has a supervisor on the cluster."""
        return [AttemptRef.model_validate(ref) for ref in self._call(CALL_S, "list")]

    def capacity(self) -> Sequence[PoolCapacity]:
        """Count the slots of the nodes that are there now."""
        answer = self._call(CALL_S, "resources")
        # The host of an older version, which a killed server has left, answers for its one node.
        return capacity_of(self._pools, [answer] if isinstance(answer, dict) else answer)

    def close(self) -> None:
        """Nothing is open between calls. Attempts go on."""

    def _call(self, deadline_s: float, method: str, **arguments: Any) -> Any:
        """Make one call. Raises LauncherError if Ray does not start, nobody answers in time, or the answer is an error."""
        question = json.dumps({"method": method, "arguments": arguments}).encode()
        try:
            path = self._find_host()
            answer = json.loads(_exchange(path, question, time.monotonic() + deadline_s + _ANSWER_S))
        except TimeoutError as error:
            raise LauncherError(
                f"the process of the local Ray did not answer within {deadline_s:g} s", retryable=True
            ) from error
        except (RuntimeError, OSError, ValueError) as error:
            raise LauncherError(f"{type(error).__name__}: {error}", retryable=True) from error
        if "error" in answer:
            raise LauncherError(answer["error"], retryable=answer["retryable"])
        return answer["value"]


def _exchange(path: str, question: bytes, deadline: float) -> bytes:
    """Send the question, and return all that comes back. Raises ConnectionError if nothing does."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(max(0.01, deadline - time.monotonic()))
        connection.connect(path)
        connection.sendall(question)
        connection.shutdown(socket.SHUT_WR)
        answer = bytearray()
        while part := connection.recv(1 << 16):
            answer += part
            connection.settimeout(max(0.01, deadline - time.monotonic()))
    if not answer:
        raise ConnectionError("the local Ray's process ended before it answered")
    return bytes(answer)
