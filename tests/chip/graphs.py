"""CUDA graphs of the chip: a capture records launches with their addresses, and a replay runs them there again.

A capture runs nothing: what it has to execute for the shapes of results is taken back when it ends. Before a replay all memory
of the pool that the recording allocates, or may overwrite, is poisoned.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from tests.chip.cuda import Stream
from tests.chip.device import HOST, NO_WORK, Chip, tensors_in, unseen
from tests.chip.memory import Block
from tests.chip.timelines import Fault, place


class Pool:
    """The memory that graphs share which never run at the same time."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []


def new_pool() -> Pool:
    return Pool()


class Entry(NamedTuple):
    """One launch. run: of the arguments; made: what it has made, which a replay overwrites. where: the line that launched."""

    name: str
    run: Callable[..., Any]
    args: Any
    kwargs: Any
    made: Any
    reads: list[Tensor]
    writes: list[Tensor]
    where: str


class CudaGraph:
    """A recording. It keeps addresses alive that it allocated, and no others."""

    num_captured = 0

    def __init__(self) -> None:
        self.chip: Chip = Stream.chip
        self.number = CudaGraph.num_captured
        self.entries: list[Entry] = []
        self.pool, self.stream = Pool(), self.chip.current_stream()
        self.own: list[Block] = []
        self.reusable: list[Block] = []
        self.under_way: set[Any] = set()
        """Collectives that the capture has begun and not waited for."""
        self._saved: dict[int, tuple[Block, bytes]] = {}
        self._held: list[Block] = []

    # Capture ----------------------------------------------------------------------------------------------------------------

    def begin(self, pool: Pool, stream: Stream) -> None:
        self.pool, self.stream = pool, stream
        self.chip.memory.collect()
        self.reusable = [block for block in pool.blocks if not block.is_in_use]
        self._random_state = torch.get_rng_state()
        self.chip.graph = self

    def end(self) -> None:
        self.chip.graph, CudaGraph.num_captured = None, CudaGraph.num_captured + 1
        torch.set_rng_state(self._random_state)
        for block, saved in self._saved.values():
            block.restore(saved)
        self._saved.clear()

    def note_block(self, block: Block, stream: Stream) -> None:
        """Take memory that is allocated while this graph is captured."""
        if stream is not self.stream:
            message = f"{place()} allocates for {stream.timeline}, outside of the graph's pool: the address will be reused"
            raise Fault("capture that allocates", message)
        block.is_in_pool = True
        self.own.append(block)
        self.pool.blocks.append(block)

    def save(self, tensors: list[Tensor]) -> None:
        """Keep what launches are about to overwrite, to take it back: a capture runs nothing."""
        for tensor in tensors:
            self.save_block(self.chip.block_of(tensor))

    def save_block(self, block: Block | None) -> None:
        if block is not None and block not in self.own and block.storage._cdata not in self._saved:
            self._saved[block.storage._cdata] = block, block.content()

    def note(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Record an op. Views, and memory that is only allocated, are no launches."""
        name = func.overloadpacket.__name__
        if func.is_view or name in NO_WORK or "empty" in name:
            return
        given = {leaf.untyped_storage()._cdata for leaf in tensors_in([args, list(kwargs.values())])}
        made = [leaf if leaf.untyped_storage()._cdata not in given else None for leaf in tensors_in(result)]
        reads, writes = self.chip.operands(func, args, kwargs)
        if all(self.chip.device_of(tensor) == HOST for tensor in (*reads, *writes, *tensors_in(result))):
            return
        self.add(name, func, (args, kwargs), made, (reads, writes))

    def add(self, name: str, run: Callable[..., Any], arguments: Any, made: Any, operands: Any) -> None:
        """Record a launch."""
        args, kwargs = self.held(arguments)
        reads, writes = self.held(operands)
        self.entries.append(Entry(name, run, args, kwargs, self.held(made), reads, writes, place()))

    def held(self, value: Any) -> Any:
        """Return a value with other tensors of the same addresses, which do not count as users of the memory."""

        def alias(tensor: Tensor) -> Tensor:
            block = self.chip.block_of(tensor)
            if block is None:
                return tensor
            other = torch.empty(0, dtype=tensor.dtype)
            other.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())
            block.num_held += 1
            self._held.append(block)
            return other

        return unseen(tree_map_only, self.chip)(Tensor, alias, value)

    # Replay -----------------------------------------------------------------------------------------------------------------

    def replay(self) -> None:
        chip = self.chip
        timeline = chip.begin_launch(chip.current_device)
        for block in (*self.own, *self.reusable):
            block.poison()
            block.accesses = []
        for entry in self.entries:
            try:
                chip.touch(timeline, entry.reads, entry.writes)
            except Fault as fault:
                raise Fault(fault.kind, f"the replay of {entry.name}, recorded at {entry.where}: {fault}") from fault
            unseen(run_again, chip)(entry)

    def host_values(self) -> list[tuple[str, list[str], str]]:
        """Return each launch's name, the numbers that the host gave it, and its place."""
        return [
            (
                entry.name,
                [str(value_of(leaf)) for leaf in tree_leaves((entry.args, entry.kwargs)) if self.is_of_host(leaf)],
                entry.where,
            )
            for entry in self.entries
        ]

    def is_of_host(self, leaf: Any) -> bool:
        return not isinstance(leaf, Tensor) or self.chip.block_of(leaf) is None

    def reset(self) -> None:
        """Give all memory back."""
        for block in self._held:
            block.num_held -= 1
        for block in self.own:
            block.is_in_pool = False
        self.entries, self._held, self.own = [], [], []

    def __del__(self) -> None:
        self.reset()


def run_again(entry: Entry) -> None:
    """Run a launch as it was recorded."""
    with torch.no_grad():
        found = tensors_in(entry.run(*entry.args, **entry.kwargs))
        for made, now in zip(entry.made, found, strict=False):
            if made is not None:
                made.copy_(now)


def value_of(leaf: Any) -> Any:
    return leaf.tolist() if isinstance(leaf, Tensor) else leaf


@contextmanager
def capture(
    graph: CudaGraph, pool: Pool | None = None, stream: Stream | None = None, capture_error_mode: str = "global"
) -> Iterator[None]:
    """Capture what is inside, as torch.cuda.graph does."""
    stream = stream or Stream()
    torch.cuda.synchronize()  # as torch does
    with stream:
        graph.begin(pool or Pool(), stream)
        try:
            yield
        finally:
            graph.end()
    if graph.under_way:
        raise Fault(
            "capture with work under way", f"{len(graph.under_way)} collectives of the capture are not waited for in it"
        )


def check_host_values(one: CudaGraph, other: CudaGraph) -> None:
    """Raise if two captures of the same work have other numbers of the host: a replay would repeat the first one's."""
    for (name, values, where), (other_name, other_values, _) in zip(one.host_values(), other.host_values(), strict=True):
        if (name, values) != (other_name, other_values):
            raise Fault(
                "host value in a graph", f"{name} at {where} was recorded with {values}, and the next time with {other_values}"
            )
