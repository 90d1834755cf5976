"""Process groups with NCCL's rules, over gloo.

A collective is work of its communicator's stream: it begins after what the current stream was given, and only `wait` lets that
stream go on after it; the host does not wait. A send ends when it is received. Each rank notes what it has launched, and
`check_order` runs the notes of all ranks again on devices that do one thing at a time: NCCL promises no more for several
communicators, whose launches have to come in one order on all ranks ("Using multiple communicators concurrently").

In the capture of a graph nothing is sent: each replay launches what was captured, in order and with the addresses of then.
NCCL wants a collective captured on all ranks or on none, in graphs that were captured together ("Using NCCL with CUDA Graphs"),
and destroys a communicator only after all graphs that have captured one of its collectives.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest import mock
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor

from octet.worker.mesh import axis
from tests.chip.device import HOST, Chip, tensors_in, unseen
from tests.chip.graphs import CudaGraph
from tests.chip.memory import bytes_of
from tests.chip.timelines import Fault, Timeline, place

OPERANDS: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "all_reduce": ((0,), (0,)),
    "broadcast": ((0,), (0,)),
    "all_to_all_single": ((1,), (0,)),
    "all_gather": ((1,), (0,)),
    "reduce_scatter": ((1,), (0,)),
    "all_gather_into_tensor": ((1,), (0,)),
    "reduce_scatter_tensor": ((1,), (0,)),
    "all_gather_single": ((1,), (0,)),
    "reduce_scatter_single": ((1,), (0,)),
}
"""By the function of torch.distributed: the positions of what it reads, and of what it writes."""
OF_LISTS = ("all_gather", "reduce_scatter")
"""NCCL runs them in memory of its own, and copies each part."""


class Launched(NamedTuple):
    """Something that a rank has launched. peers: of transfers, (True to send, the other rank) for each.

    graph: the number of the graph whose replay launched it, of those that its rank has captured; None for the host.
    """

    kind: str
    communicator: str
    members: tuple[int, ...]
    peers: tuple[tuple[bool, int], ...]
    where: str
    graph: int | None = None


class Work:
    """A collective or transfer that is under way. It keeps the tensors, as torch's does, until it is waited for."""

    def __init__(self, chip: Chip, inner: Any, clock: dict[int, int], tensors: Sequence[Tensor]) -> None:
        self._chip, self._inner, self._clock, self._tensors = chip, inner, clock, tensors

    def wait(self, *_timeout: object) -> bool:
        unseen(self._inner.wait, self._chip)()
        self._chip.current_stream().timeline.join(self._clock)
        self._tensors = ()
        return True

    def is_completed(self) -> bool:
        return True


class CapturedWork:
    """A collective in a capture. Each replay begins it, and lets the stream wait for it where the capture did."""

    def __init__(self, graph: CudaGraph, clock: dict[int, int]) -> None:
        """clock: what a replay knows when the collective has ended."""
        self._graph, self._clock = graph, clock
        graph.under_way.add(self)

    def wait(self, *_timeout: object) -> bool:
        chip, clock = self._graph.chip, self._clock
        self._graph.under_way.discard(self)
        self._graph.add("wait", lambda: chip.current_stream().timeline.join(clock), ((), {}), [], ([], []))
        return True


class Communicators:
    """The communicators of one rank."""

    def __init__(self, chip: Chip) -> None:
        self.chip = chip
        self.launched: list[Launched] = []
        self.graphs: WeakSet[CudaGraph] = WeakSet()
        """Those that have captured a collective."""
        self._timelines: dict[str, Timeline] = {}

    def begin(
        self,
        kind: str,
        group: Any,
        peers: tuple[tuple[bool, int], ...],
        reads: list[Tensor],
        writes: list[Tensor],
        graph: int | None = None,
    ) -> dict[int, int]:
        """Launch something after what the current stream was given. Returns what is known when it has ended."""
        chip, group = self.chip, group or dist.group.WORLD
        if chip.graph is not None:
            raise Fault("unknown in a capture", f"{place()}: the chip captures no {kind}")
        name = group.group_name
        members = tuple(dist.get_process_group_ranks(group))
        self.launched.append(Launched(kind, name, members, peers, place(), graph))
        if any(chip.device_of(tensor) == HOST for tensor in (*reads, *writes)):
            raise Fault("memory of the host in a kernel", f"{place()}: {kind} of a tensor of the host")
        timeline = self._timelines.setdefault(name, Timeline(f"the stream of communicator {name}"))
        current = chip.current_stream().timeline
        current.join(chip.host.clock)
        timeline.join(current.clock)
        timeline.tick()
        for tensors, is_write in ((reads, False), (writes, True)):
            for tensor in tensors:
                block = chip.block_of(tensor)
                assert block is not None
                if tensor.numel():
                    chip.touch_block(block, bytes_of(tensor), timeline, is_write=is_write)
        return dict(timeline.clock)

    def collective(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        read, written = OPERANDS[name]

        def call(*args: Any, group: Any = None, async_op: bool = False, **options: Any) -> Work | None:
            given = (*args, *(value for value in options.values() if isinstance(value, Tensor)))
            reads, writes = ([each for at in places for each in tensors_in(given[at])] for places in (read, written))
            if name in OF_LISTS:
                raise Fault(
                    "list gather", f"{place()}: NCCL runs {name} of a list in memory of its own and copies; use one tensor"
                )
            if self.chip.graph is not None:
                captured = self.capture(name, original, group, reads, writes, (args, options))
                return captured if async_op else captured.wait() and None
            self.chip.num_launches += 1
            clock = self.begin(name, group, (), reads, writes)
            inner = unseen(original, self.chip)(*args, group=group, async_op=True, **options)
            work = Work(self.chip, inner, clock, (*reads, *writes))
            if async_op:
                return work
            work.wait()
            return None

        return call

    def capture(
        self,
        name: str,
        original: Callable[..., Any],
        group: Any,
        reads: list[Tensor],
        writes: list[Tensor],
        arguments: tuple[Any, Any],
    ) -> CapturedWork:
        graph, clock = self.chip.graph, dict[int, int]()
        number = graph.number
        self.graphs.add(graph)
        if any(self.chip.device_of(tensor) == HOST for tensor in (*reads, *writes)):
            raise Fault("memory of the host in a kernel", f"{place()}: {name} of a tensor of the host")

        def launch(reads: list[Tensor], writes: list[Tensor], args: Any, options: Any) -> None:
            clock.update(self.begin(name, group, (), reads, writes, number))
            original(*args, group=group, **options)

        graph.add(name, launch, ((reads, writes, *arguments), {}), [], ([], []))
        return CapturedWork(graph, clock)

    def barrier(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(group: Any = None, **options: Any) -> None:
            self.chip.wait("barrier", self.chip.current_stream().timeline)
            self.begin("barrier", group, (), [], [])
            unseen(original, self.chip)(group=group, **options)

        return call

    def transfer(self, original: Callable[..., Any], *, sends: bool) -> Callable[..., Any]:
        def call(tensor: Tensor, *others: int, group: Any = None, **options: Any) -> Any:
            name, peer = ("global", others[0]) if others else next(iter(options.items()))
            if name.startswith("group_"):
                peer = dist.get_global_rank(group or dist.group.WORLD, peer)
            clock = self.begin("send" if sends else "recv", group, ((sends, peer),), [tensor] * sends, [tensor] * (not sends))
            result = unseen(original, self.chip)(tensor, *others, group=group, **options)
            self.chip.current_stream().timeline.join(clock)
            return result

        return call

    def batch(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(operations: list[Any]) -> list[Work]:
            sends = [operation.op.__name__ == "isend" for operation in operations]
            reads = [operation.tensor for operation, is_sent in zip(operations, sends, strict=True) if is_sent]
            writes = [operation.tensor for operation, is_sent in zip(operations, sends, strict=True) if not is_sent]
            peers = tuple((is_sent, operation.peer) for operation, is_sent in zip(operations, sends, strict=True))
            clock = self.begin("transfers", operations[0].group, peers, reads, writes)
            return [Work(self.chip, inner, clock, (*reads, *writes)) for inner in unseen(original, self.chip)(operations)]

        return call


@contextmanager
def communicators(chip: Chip) -> Iterator[Communicators]:
    """Inside, torch.distributed's NCCL is gloo with NCCL's rules. Yields what this rank launches."""
    found = Communicators(chip)
    begin, begin_group, destroy = dist.init_process_group, dist.new_group, dist.destroy_process_group

    def init(backend: str, *args: Any, device_id: Any = None, **options: Any) -> None:
        begin("gloo" if backend == "nccl" else backend, *args, **options)
        chip.num_communicators += 1

    def new_group(ranks: Any = None, *, backend: str | None = None, pg_options: Any = None, **options: Any) -> Any:
        if chip.graph is not None:
            raise Fault("communicator made in a capture", place())
        chip.num_communicators += 1
        return begin_group(ranks, **options)

    def destroy_group() -> None:
        if found.graphs:
            raise Fault("communicator destroyed under a graph", f"{len(found.graphs)} graphs have captured its collectives")
        destroy()

    with ExitStack() as stack:
        for name in OPERANDS:
            if hasattr(dist, name):
                stack.enter_context(mock.patch.object(dist, name, found.collective(name, getattr(dist, name))))
        for name, replacement in {
            "init_process_group": init,
            "new_group": new_group,
            "destroy_process_group": destroy_group,
            "get_backend": lambda _group=None: "nccl",
            "barrier": found.barrier(dist.barrier),
            "send": found.transfer(dist.send, sends=True),
            "recv": found.transfer(dist.recv, sends=False),
            "batch_isend_irecv": found.batch(dist.batch_isend_irecv),
        }.items():
            stack.enter_context(mock.patch.object(dist, name, replacement))
        stack.enter_context(mock.patch.object(dist, "ProcessGroupNCCL", create=True))
        stack.enter_context(mock.patch.object(torch.cuda.nccl, "version", return_value=(2, 28, 9)))  # torch logs it
        gather = found.collective("all_gather_into_tensor", axis._gather_into_one)
        stack.enter_context(mock.patch.object(axis, "_gather_into_one", gather))
        yield found


def do_meet(entry: Launched, heads: list[Launched | None]) -> bool:
    """Return True if all members of a communicator are in one collective. heads: what each of them is in."""
    graphs = {}
    for member, other in zip(entry.members, heads, strict=True):
        if other is None or (other.kind, other.communicator) != (entry.kind, entry.communicator):
            return False
        graphs[member] = other.graph
    if len(set(graphs.values())) > 1:
        raise Fault("recorded otherwise on another rank", f"{entry.kind} of {entry.communicator} at {entry.where}: {graphs}")
    return True


def check_order(launched: Sequence[Sequence[Launched]]) -> None:
    """Run what all ranks have launched on devices that do one thing at a time. launched: by rank. Raise Fault if they hang.

    One run stands for all timings. What a rank has in progress ends when its peers have the other ends in progress, and stays
    possible until then, whatever other ranks do: so steps that are possible at once do not hinder each other, and any order of
    them ends at the same place. Only what hosts launch could depend on more: a pipeline's follows from its schedule, and the
    seeds of `test_launch_order.py` vary the data that decides it at ZeRO 3.
    """
    at = [0] * len(launched)
    matched: list[set[int]] = [set() for _ in launched]

    def head(rank: int) -> Launched | None:
        return launched[rank][at[rank]] if at[rank] < len(launched[rank]) else None

    def match(rank: int) -> None:
        """Let the transfers of a rank meet those of its peers that are running, too."""
        group = head(rank)
        assert group is not None
        for index, (sends, peer) in enumerate(group.peers):
            other = head(peer)
            if index in matched[rank] or other is None or other.communicator != group.communicator:
                continue
            found = (i for i, transfer in enumerate(other.peers) if transfer == (not sends, rank) and i not in matched[peer])
            reverse = next(found, None)
            if reverse is not None:
                matched[rank].add(index)
                matched[peer].add(reverse)

    def is_done(rank: int) -> bool:
        entry = head(rank)
        assert entry is not None
        if entry.peers:
            match(rank)
            return len(matched[rank]) == len(entry.peers)
        return do_meet(entry, [head(member) for member in entry.members])

    while running := [rank for rank in range(len(launched)) if head(rank) is not None]:
        done = [rank for rank in running if is_done(rank)]
        if not done:
            lines = [
                f"rank {rank} waits in {entry.kind} of {entry.communicator} at {entry.where}"
                for rank in running
                if (entry := head(rank))
            ]
            raise Fault("communicators in another order", "; ".join(lines))
        for rank in done:
            at[rank] += 1
            matched[rank].clear()
