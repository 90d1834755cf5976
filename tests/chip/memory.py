"""The memory of the device and the pinned memory of the host: who wrote each byte, who reads it, and which stream owns it.

A block is one storage of torch's. The chip keeps its memory for a while after the last tensor of it is gone, filled with
poison (NaN in every dtype that has one, -1 in integers), so an address that was kept too long reads poison and is named.
"""

import ctypes
import threading
from bisect import bisect_right, insort
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from tests.chip.timelines import Fault, Timeline, place

POISON = 0xFF
NUM_BYTES_KEPT = 64 << 20
"""Freed memory that stays poisoned; what was freed earlier goes back to the process."""


class Access(NamedTuple):
    """Bytes [first, end) that a timeline reads or writes at a time."""

    first: int
    end: int
    timeline: Timeline
    time: int
    is_write: bool
    where: str

    def __str__(self) -> str:
        return f"{'written' if self.is_write else 'read'} by {self.timeline} at {self.where}"


@dataclass(eq=False)
class Block:
    """A storage. device: the index of the device that holds it, None for pinned memory of the host."""

    storage: torch.UntypedStorage
    device: int | None
    owner: Timeline
    made_at: str
    accesses: list[Access] = field(default_factory=list)
    num_held: int = 1
    """References to the storage that are the chip's own."""
    is_freed: bool = False
    is_in_pool: bool = False
    """True for memory of a graph, which keeps it."""
    awaits_tensor: bool = False
    """True until a tensor has it, for a storage that was copied alone."""

    @property
    def address(self) -> int:
        return self.storage.data_ptr()

    @property
    def is_in_use(self) -> bool:
        is_in_use = torch._C._storage_Use_Count(self.storage._cdata) > self.num_held
        self.awaits_tensor &= not is_in_use
        return is_in_use or self.awaits_tensor

    def poison(self) -> None:
        """Overwrite all of it."""
        ctypes.memset(self.address, POISON, self.storage.nbytes())

    def content(self) -> bytes:
        return ctypes.string_at(self.address, self.storage.nbytes())

    def restore(self, content: bytes) -> None:
        ctypes.memmove(self.address, content, len(content))

    def check_live(self) -> None:
        if self.is_freed:
            raise Fault("use after free", f"{place()} uses memory that {self.made_at} made and that was freed")

    def touch(self, first: int, end: int, timeline: Timeline, *, is_write: bool) -> None:
        """Check that an access is in order with all others to the same bytes, and keep it."""
        self.check_live()
        time, kept = timeline.clock[timeline.number], []
        for other in self.accesses:
            if first < other.end and other.first < end:
                is_known = other.timeline is timeline or timeline.knows(other.timeline.number, other.time)
                if not is_known and (is_write or other.is_write):
                    kind = "pinned memory changed too early" if self.device is None and is_write else "missing wait"
                    verb = "writes" if is_write else "reads"
                    raise Fault(
                        kind, f"{timeline} {verb} at {place()} what is {other} and does not wait for it; made at {self.made_at}"
                    )
                if first <= other.first and other.end <= end and is_known and (is_write or not other.is_write):
                    continue
            kept.append(other)
        if not timeline.is_noted:
            return
        kept.append(Access(first, end, timeline, time, is_write, place()))
        self.accesses = kept


def bytes_of(tensor: Tensor) -> tuple[int, int]:
    """Return the first byte of a tensor in its storage, and the one after its last."""
    if not tensor.numel():
        return 0, 0
    first = tensor.storage_offset()
    last = first + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return first * tensor.element_size(), (last + 1) * tensor.element_size()


class Memory:
    """All blocks, by the key of their storage and by address."""

    def __init__(self) -> None:
        self.blocks: dict[int, Block] = {}
        self._addresses: list[tuple[int, int]] = []
        """The address and the key of each block, in order."""
        self._lock = threading.RLock()
        self._kept: deque[Block] = deque()
        self._num_bytes_kept = 0
        self._reusable: dict[Timeline, list[tuple[str, list[Access]]]] = {}
        """By the stream that owns it: where freed memory was made, and the accesses to it. That stream may reuse it."""

    def of(self, tensor: Tensor) -> Block | None:
        """Return a tensor's block; None for pageable memory of the host."""
        return self.blocks.get(tensor.untyped_storage()._cdata)

    def add(self, storage: torch.UntypedStorage, device: int | None, owner: Timeline) -> Block:
        """Take a new storage. Threads that read batches pin theirs."""
        block = Block(storage, device, owner, place())
        with self._lock:
            self.collect()
            if device is not None:
                self.check_reuse(owner)
            self.blocks[storage._cdata] = block
            if storage.nbytes():
                insort(self._addresses, (block.address, storage._cdata))
        return block

    def collect(self) -> None:
        """Free the blocks that no tensor uses any more."""
        with self._lock:
            for block in [
                block for block in self.blocks.values() if not (block.is_freed or block.is_in_pool or block.is_in_use)
            ]:
                block.poison()
                block.is_freed = True
                self.release(block)
                self._kept.append(block)
                self._num_bytes_kept += block.storage.nbytes()
            while self._num_bytes_kept > NUM_BYTES_KEPT:
                oldest = self._kept.popleft()
                self._num_bytes_kept -= oldest.storage.nbytes()
                self.forget(oldest)

    def release(self, block: Block) -> None:
        """Let the owner reuse the memory of a block from now on."""
        if block.device is not None:
            self._reusable.setdefault(block.owner, []).append((block.made_at, block.accesses))
        block.accesses = []

    def forget(self, block: Block) -> None:
        """Give a block's memory back to the process."""
        if block.storage.nbytes():
            self._addresses.remove((block.address, block.storage._cdata))
        del self.blocks[block.storage._cdata]

    def check_reuse(self, owner: Timeline) -> None:
        """Check that a stream that allocates has waited for all that still uses what it may get."""
        for made_at, accesses in self._reusable.pop(owner, []):
            for access in accesses:
                if access.timeline is not owner and not owner.knows(access.timeline.number, access.time):
                    raise Fault(
                        "freed under a reader",
                        f"{owner} allocates at {place()} and may get what {made_at} made, {access}; nothing waits for that",
                    )

    def resize(self, block: Block, owner: Timeline, resize: Callable[[], None]) -> None:
        """Let a storage give its memory back, or get other memory, which the owner's stream allocates."""
        with self._lock:
            if block.storage.nbytes():
                self._addresses.remove((block.address, block.storage._cdata))
            self.release(block)
            resize()
            if block.storage.nbytes():
                self.check_reuse(owner)
                block.owner = owner
                insort(self._addresses, (block.address, block.storage._cdata))
                block.poison()

    def at(self, address: int) -> Block | None:
        """Return the block that has an address."""
        with self._lock:
            place_in_order = bisect_right(self._addresses, (address, 1 << 64)) - 1
            if place_in_order < 0:
                return None
            block = self.blocks[self._addresses[place_in_order][1]]
        return block if address < block.address + block.storage.nbytes() else None

    @property
    def num_bytes(self) -> int:
        """Bytes of the device's live blocks."""
        with self._lock:
            return sum(b.storage.nbytes() for b in self.blocks.values() if b.device is not None and not b.is_freed)
