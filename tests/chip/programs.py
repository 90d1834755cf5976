"""Triton's interpreter as a GPU would punish: programs in a random order, races between them, and addresses of nobody."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
from torch import Tensor
from torch.utils._pytree import tree_leaves
from triton.runtime import interpreter

from tests.chip.device import HOST, Chip, unseen
from tests.chip.memory import Block
from tests.chip.timelines import Fault, Timeline, place

Builder = interpreter.InterpreterBuilder
Addresses = Any
"""Unsigned integers of NumPy."""


class Launch:
    """One launch of a kernel: the programs in a random order, and all that they load and store."""

    current: "Launch | None" = None

    def __init__(self, name: str, seed: int, chip: Chip | None) -> None:
        self.name, self.chip = name, chip
        self.random = random.Random(seed)
        self.order: list[tuple[int, int, int]] = []
        self.program = -1
        self.loads: list[tuple[int, Addresses]] = []
        self.stores: list[tuple[int, Addresses]] = []
        self.extents: dict[tuple[Block, bool], list[int]] = {}

    def set_grid(self, *sizes: int) -> None:
        self.order = [(x, y, z) for x in range(sizes[0]) for y in range(sizes[1]) for z in range(sizes[2])]
        self.random.shuffle(self.order)

    def next_program(self) -> tuple[int, int, int]:
        self.program += 1
        return self.order[self.program]

    def access(self, pointers: Addresses, mask: Addresses, size: int, *, is_write: bool, is_atomic: bool = False) -> None:
        """Note the elements that a program loads or stores."""
        addresses = np.unique(
            np.asarray(pointers, dtype=np.uint64)[np.broadcast_to(np.asarray(mask, dtype=bool), np.shape(pointers))]
        )
        if not addresses.size:
            return
        if self.chip is not None:
            self.find_blocks(self.chip, addresses, size, is_write=is_write)
        if not is_atomic:
            each_byte = (addresses[:, None] + np.arange(size, dtype=np.uint64)).ravel()
            (self.stores if is_write else self.loads).append((self.program, each_byte))

    def find_blocks(self, chip: Chip, addresses: Addresses, size: int, *, is_write: bool) -> None:
        """Find the tensors that addresses are of, in order."""
        verb = "stores to" if is_write else "loads from"
        while addresses.size:
            block = chip.memory.at(int(addresses[0]))
            if block is None:
                raise Fault(
                    "wrong mask",
                    f"a program of {self.name}, launched at {place()}, {verb} {int(addresses[0]):#x}, which no tensor has",
                )
            if block.is_freed:
                raise Fault(
                    "use after free",
                    f"{self.name}, launched at {place()}, {verb} memory that {block.made_at} made and that was freed",
                )
            if chip.graph is not None and is_write:
                chip.graph.save_block(block)
            end = block.address + block.storage.nbytes()
            ours, addresses = addresses[addresses < end], addresses[addresses >= end]
            if int(ours[-1]) + size > end:
                raise Fault(
                    "wrong mask",
                    f"a program of {self.name}, launched at {place()}, {verb} the end of what {block.made_at} made, and beyond",
                )
            first, last = int(ours[0]) - block.address, int(ours[-1]) + size - block.address
            extent = self.extents.setdefault((block, is_write), [first, last])
            extent[:] = min(extent[0], first), max(extent[1], last)

    def touch(self, timeline: Timeline) -> None:
        """Check that all accesses are in order with those of other launches."""
        assert self.chip is not None
        for (block, is_write), (first, end) in self.extents.items():
            self.chip.touch_block(block, (first, end), timeline, is_write=is_write)

    def check_races(self) -> None:
        """Raise if an address that one program stores to is loaded from, or stored to, by another one."""
        if not self.stores:
            return
        stored, by = joined(self.stores)
        same = (stored[1:] == stored[:-1]) & (by[1:] != by[:-1])
        if same.any():
            at = int(np.argmax(same))
            raise Fault(
                "race", f"programs {self.order[by[at]]} and {self.order[by[at + 1]]} of {self.name} store to one address"
            )
        if not self.loads:
            return
        loaded, reader = joined(self.loads)
        found = np.searchsorted(stored, loaded).clip(max=stored.size - 1)
        races = (stored[found] == loaded) & (by[found] != reader)
        if races.any():
            at = int(np.argmax(races))
            message = f"program {self.order[reader[at]]} of {self.name} loads what program {self.order[by[found[at]]]} stores"
            raise Fault("race", message)


def joined(accesses: list[tuple[int, Addresses]]) -> tuple[Addresses, Addresses]:
    """Return all addresses in order and the program of each, without repetitions."""
    addresses = np.concatenate([each for _, each in accesses])
    programs = np.concatenate([np.full(each.size, program) for program, each in accesses])
    order = np.lexsort((programs, addresses))
    addresses, programs = addresses[order], programs[order]
    is_new = np.ones(addresses.size, dtype=bool)
    is_new[1:] = (addresses[1:] != addresses[:-1]) | (programs[1:] != programs[:-1])
    return addresses[is_new], programs[is_new]


def element_size(pointers: Any) -> int:
    return int(np.dtype(interpreter._get_np_dtype(pointers.get_element_ty())).itemsize)


@contextmanager
def watched() -> Iterator[None]:
    """Let the launch that runs decide the order of its programs, and see each address inside."""
    set_dim, set_index = Builder.set_grid_dim, Builder.set_grid_idx

    def set_grid_dim(builder: Any, *sizes: int) -> None:
        if Launch.current is not None:
            Launch.current.set_grid(*sizes)
        set_dim(builder, *sizes)

    def set_grid_idx(builder: Any, *index: int) -> None:
        set_index(builder, *(Launch.current.next_program() if Launch.current is not None else index))

    def noting(name: str, first: int, mask_at: int | None, **kind: bool) -> Any:
        """Return a method that notes its pointers. mask_at: the position of the mask; None if all are used."""
        method = getattr(Builder, name)

        def call(builder: Any, *arguments: Any) -> Any:
            if Launch.current is not None:
                pointers = arguments[first]
                mask = True if mask_at is None else arguments[mask_at].data
                Launch.current.access(pointers.data, mask, element_size(pointers), **kind)
            return method(builder, *arguments)

        return mock.patch.object(Builder, name, call)

    with (
        mock.patch.object(Builder, "set_grid_dim", set_grid_dim),
        mock.patch.object(Builder, "set_grid_idx", set_grid_idx),
        noting("create_masked_load", 0, 1, is_write=False),
        noting("create_masked_store", 0, 2, is_write=True),
        noting("create_atomic_rmw", 1, 3, is_write=True, is_atomic=True),
        noting("create_atomic_cas", 0, None, is_write=True, is_atomic=True),
    ):
        yield


@contextmanager
def checked(chip: Chip | None = None, seed: int = 0) -> Iterator[None]:
    """Check each launch of the interpreter inside. With a chip, launches of its tensors take part in its order and memory."""
    launch_all, seeds = interpreter.GridExecutor.__call__, random.Random(seed)

    def launch(executor: Any, *args: Any, **kwargs: Any) -> None:
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        on_chip = chip if chip is not None and any(chip.device_of(tensor) != HOST for tensor in tensors) else None
        name = executor.fn.__name__

        def run(*args: Any, **kwargs: Any) -> None:
            seen = Launch(name, seeds.randrange(1 << 30), on_chip)
            with mock.patch.object(Launch, "current", seen):
                launch_all(executor, *args, **kwargs)
            seen.check_races()
            if on_chip is not None:
                seen.touch(on_chip.current_stream().timeline)

        if on_chip is None:
            run(*args, **kwargs)
            return
        begin_launch(on_chip, name, tensors)
        unseen(run, on_chip)(*args, **kwargs)
        if on_chip.graph is not None:
            on_chip.graph.add(name, run, (args, kwargs), [], ([], []))

    with watched(), mock.patch.object(interpreter.GridExecutor, "__call__", launch):
        yield


def begin_launch(chip: Chip, name: str, tensors: list[Tensor]) -> None:
    """Launch a kernel in the current stream of its tensors' device, which has to be the current one."""
    indices = {chip.device_of(tensor) for tensor in tensors}
    if HOST in indices:
        raise Fault("memory of the host in a kernel", f"{name}, launched at {place()}, gets a tensor of the host")
    if indices != {chip.current_device}:
        message = f"{name}, launched at {place()}, runs on device {chip.current_device}; its tensors are on {sorted(indices)}"
        raise Fault("kernel on the wrong device", message)
    chip.begin_launch(chip.current_device)
