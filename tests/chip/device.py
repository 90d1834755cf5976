"""A device that computes on the CPU, and refuses or counts what a GPU would punish.

Tensors "on cuda" are tensors of the CPU whose storages the chip knows: `Tensor.device` says cuda, torch's functions that make
or move tensors accept it, and `torch.cuda` has streams, events and graphs of the chip. So the worker takes the road of a GPU
unchanged, with torch's own kernels of the CPU, its autograd, and real memory; nothing is compiled for it. A mode sees each op
and checks it as `timelines` and `memory` say. Ops of ours run their twins, which have the bits of the kernels; the optimizer's
kernels run in Triton's interpreter. What differs from a GPU: autograd runs all nodes in the stream that called it.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from octet.worker.kernels import normalization
from tests.chip.cuda import Stream
from tests.chip.memory import Block, Memory, bytes_of
from tests.chip.timelines import Fault, Timeline, place

REAL_DEVICE = Tensor.device
HOST = -1
"""Stands for the host where a device has an index."""
READS_OF_HOST = {"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "is_nonzero", "equal", "allclose"}
"""Ops that bring a value of the device to the host."""
TAKES_HOST_INDICES = {"index", "index_put", "index_put_", "_index_put_impl_"}
"""Ops that copy index tensors of the host to the device, as torch does on CUDA."""
COPIES = {"copy_", "_to_copy", "_foreach_copy_"}
TWINS = {
    torch.ops.aten._fused_rms_norm_backward.default: lambda grad, x, _shape, rstd, weight, _mask: (
        normalization._rms_norm_backward(grad, x, rstd, weight)
    )
}
"""Kernels of torch's that only CUDA has, by what computes their bits on a CPU."""
NO_WORK = {"lift_fresh", "detach", "alias", "set_", "resize_", "sym_size", "_unsafe_view"}


@cache
def written_places(func: Any) -> tuple[frozenset[int], frozenset[str]]:
    """Return the positions and the names of the arguments that an op writes."""
    written = [
        (position, argument.name)
        for position, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return frozenset(position for position, _ in written), frozenset(name for _, name in written)


@cache
def is_composite(func: Any) -> bool:
    """Return True for an op that is made of others on every device."""
    has_own = func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CPU)  # as silu_backward, whose parts round more often
    return bool(func.namespace == "aten" and func._can_decompose() and not has_own)


def tensors_in(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
    return []


class Chip(TorchDispatchMode):
    """Devices, their streams and memory, and the host. As a mode it sees all ops of torch's inside."""

    def __init__(self, num_devices: int = 1) -> None:
        super().__init__()
        self.num_devices, self.current_device = num_devices, 0
        self.memory, self._host, self._thread = Memory(), Timeline("the host"), threading.current_thread()
        self.streams: list[Any] = []
        self.streams_outside: list[Any] = []
        self.all_streams: list[Any] = []
        self.waits: Counter[str] = Counter()
        self.num_launches = self.first_launch = self.num_communicators = 0
        self.graph: Any = None
        """The graph that is being captured."""
        self._checked_fakes: set[str] = set()
        self._local = threading.local()

    # Who runs where ---------------------------------------------------------------------------------------------------------

    def make_streams(self) -> None:
        self.streams = [
            Stream(index, timeline=Timeline(f"the default stream of device {index}")) for index in range(self.num_devices)
        ]

    def index_of(self, device: Any) -> int:
        if device is None:
            return self.current_device
        if isinstance(device, int):
            return device
        index = torch.device(device).index
        return self.current_device if index is None else index

    def current_stream(self, device: Any = None) -> Any:
        return self.streams[self.index_of(device)]

    @property
    def aim(self) -> int | None:
        """The place where a function is to make its result: a device's index, HOST, or None for where its inputs are."""
        return getattr(self._local, "aim", None)

    @contextmanager
    def aimed(self, at: int | None) -> Iterator[None]:
        before, self._local.aim = self.aim, at
        try:
            yield
        finally:
            self._local.aim = before

    @property
    def is_inside(self) -> bool:
        """True inside a kernel, where tensors say what they are."""
        return getattr(self._local, "is_inside", False)

    @contextmanager
    def inside(self) -> Iterator[None]:
        before, self._local.is_inside = self.is_inside, True
        try:
            yield
        finally:
            self._local.is_inside = before

    @property
    def host(self) -> Timeline:
        """The host. Threads apart from the training thread have their own: what they wait for, it does not know."""
        if threading.current_thread() is self._thread:
            return self._host
        if not hasattr(self._local, "host"):
            self._local.host = Timeline("a thread of the host", is_noted=False)
        return self._local.host

    # Waits ------------------------------------------------------------------------------------------------------------------

    def count_wait(self, name: str) -> None:
        """Note that the training thread waits for a device. A capture refuses it."""
        if threading.current_thread() is not self._thread:
            return
        if self.graph is not None:
            raise Fault(name if name == "pageable copy" else "wait in a capture", f"{place()} waits for the device: {name}")
        self.waits[f"{name} at {place()}"] += 1

    def wait(self, name: str, timeline: Timeline) -> None:
        self.count_wait(name)
        self.host.join(timeline.clock)

    def begin_step(self) -> None:
        """Begin to count: what the host waits for from now on, but for events that were recorded before."""
        self.waits.clear()
        self.first_launch = self.num_launches + 1

    # Where tensors are ------------------------------------------------------------------------------------------------------

    def block_of(self, tensor: Tensor) -> Block | None:
        return self.memory.of(tensor)

    def device_of(self, tensor: Tensor) -> int:
        """Return the index of a tensor's device, or HOST."""
        shell = tensor.__dict__.get("_chip_index") if type(tensor) is not Tensor else None
        if shell is not None:
            return int(shell)
        try:
            block = self.memory.of(tensor)
        except (NotImplementedError, RuntimeError):
            return HOST  # a tensor without storage
        return HOST if block is None or block.device is None else block.device

    def device_property(self, tensor: Tensor) -> torch.device:
        real: torch.device = REAL_DEVICE.__get__(tensor)
        if real.type != "cpu" or self.is_inside:
            return real
        index = self.device_of(tensor)
        return real if index == HOST else torch.device("cuda", index)

    def place_on(self, tensor: Tensor, index: int, *, is_empty: bool = False) -> Block | None:
        """Let a new tensor of the CPU be on a device."""
        storage = tensor.untyped_storage()
        if storage._cdata in self.memory.blocks or REAL_DEVICE.__get__(tensor).type != "cpu":
            return self.memory.blocks.get(storage._cdata)
        block = self.memory.add(storage, index, self.streams[index].timeline)
        if is_empty:
            block.poison()
        if self.graph is not None:
            self.graph.note_block(block, self.streams[index])
        return block

    def place_made(self, tensor: Tensor, index: int, *, is_empty: bool = False) -> None:
        """Let a tensor be on a device that a function of torch's has made where no mode sees it, as in other threads."""
        if self.memory.of(tensor) is not None:
            return
        timeline = self.begin_launch(index)
        block = self.place_on(tensor, index, is_empty=is_empty)
        if block is not None and not is_empty and tensor.numel():
            self.touch_block(block, bytes_of(tensor), timeline, is_write=True)

    def pin(self, tensor: Tensor) -> Tensor:
        """Let a new tensor of the host be in pinned memory."""
        self.memory.add(tensor.untyped_storage(), None, self.host)
        return tensor

    # Ops --------------------------------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for leaf in (leaf for argument in (*args, *kwargs.values()) for leaf in tensors_in(argument)):
            handler = type(leaf).__torch_dispatch__
            if handler is not torch._C._disabled_torch_dispatch_impl:
                if self.aim is not None and "device" in kwargs:  # torch got the CPU for it
                    kwargs = kwargs | {"device": torch.device("cpu") if self.aim == HOST else torch.device("cuda", self.aim)}
                with self.aimed(None), self:
                    return handler(func, types, args, kwargs)
        if self.is_inside or func.namespace == "c10d":
            return func(*args, **kwargs)
        if is_composite(func):  # torch has not taken it apart: below autograd, as inside of a subclass, it does not
            with self:
                return func.decompose(*args, **kwargs)
        return self.run(func, args, kwargs)

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an op of plain tensors, checked."""
        reads, writes = self.operands(func, args, kwargs)
        name = func.overloadpacket.__name__
        if self.graph is not None:
            self.graph.save(writes)
        if func.is_view or name in NO_WORK:
            result = func(*args, **kwargs)
        elif name in COPIES:
            result = self.copy(func, args, kwargs, reads, writes)
        else:
            run = self.launch if any(self.device_of(tensor) != HOST for tensor in (*reads, *writes)) else self.on_host
            result = run(func, args, kwargs, reads, writes)
        if self.graph is not None:
            self.graph.note(func, args, kwargs, result)
        return result

    def operands(self, func: Any, args: Any, kwargs: Any) -> tuple[list[Tensor], list[Tensor]]:
        """Return the tensors that an op reads, and those that it writes."""
        positions, names = written_places(func)
        reads: list[Tensor] = []
        writes: list[Tensor] = []
        for position, argument in enumerate(args):
            (writes if position in positions else reads).extend(tensors_in(argument))
        for name, argument in kwargs.items():
            (writes if name in names else reads).extend(tensors_in(argument))
        return reads, writes

    def on_host(self, func: Any, args: Any, kwargs: Any, reads: list[Tensor], writes: list[Tensor]) -> Any:
        self.touch(self.host, reads, writes)
        with self.inside() if func.namespace != "aten" else nullcontext():
            result = func(*args, **kwargs)
        if self.aim not in (None, HOST):
            self.take_results(result, self.aim, self.begin_launch(self.aim), is_empty="empty" in func.overloadpacket.__name__)
        return result

    def touch(self, timeline: Timeline, reads: Iterable[Tensor], writes: Iterable[Tensor]) -> None:
        """Check the accesses of a piece of work to all memory that a device may use."""
        for tensors, is_write in ((reads, False), (writes, True)):
            for tensor in tensors:
                block = self.memory.of(tensor)
                if block is not None and tensor.numel():
                    self.touch_block(block, bytes_of(tensor), timeline, is_write=is_write)

    def touch_block(self, block: Block, extent: tuple[int, int], timeline: Timeline, *, is_write: bool) -> None:
        """Check an access to a block. What is captured does not run: its accesses are those of replays."""
        if self.graph is None:
            block.touch(*extent, timeline, is_write=is_write)
        else:
            block.check_live()

    def begin_launch(self, index: int) -> Timeline:
        """Begin a piece of work in the current stream of a device."""
        timeline: Timeline = self.streams[index].timeline
        timeline.join(self.host.clock)
        timeline.tick()
        self.num_launches += 1
        return timeline

    def launch(self, func: Any, args: Any, kwargs: Any, reads: list[Tensor], writes: list[Tensor]) -> Any:
        """Run an op of a device's tensors in its current stream."""
        name = func.overloadpacket.__name__
        index = self.common_device(name, (*reads, *writes))
        timeline = self.begin_launch(index)
        self.touch(timeline, reads, writes)
        if name in READS_OF_HOST or (name in TAKES_HOST_INDICES and self.has_mask(args)):
            self.wait(name, timeline)
        with self.inside() if func.namespace != "aten" else nullcontext():
            result = TWINS.get(func, func)(*args, **kwargs)
        if func.namespace != "aten":
            self.check_fake(func, args, kwargs, result)
        if name != "_local_scalar_dense":
            self.take_results(result, index, timeline, is_empty="empty" in name)
        return result

    def check_fake(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Compare the results of an op of ours, once for each layout, with its fake, which a compiler believes."""
        layouts = [(tensor.shape, tensor.dtype, tensor.stride()) for tensor in tensors_in([args, list(kwargs.values())])]
        key = f"{func} {layouts} {[leaf for leaf in tree_leaves((args, kwargs)) if not isinstance(leaf, Tensor)]}"
        if key in self._checked_fakes:
            return
        self._checked_fakes.add(key)
        mode = FakeTensorMode()
        with self.inside(), _disable_current_modes():
            given = tree_map_only(Tensor, lambda tensor: mode.from_tensor(tensor.detach()), (args, kwargs))
            with mode:
                fake = func(*given[0], **given[1])
        for real, expected in zip(tensors_in([result]), tensors_in([fake]), strict=True):
            if (real.shape, real.dtype) != (expected.shape, expected.dtype) or any(
                one != other for size, one, other in zip(real.shape, real.stride(), expected.stride(), strict=True) if size > 1
            ):
                said = f"{expected.dtype} {tuple(expected.shape)} of strides {expected.stride()}"
                made = f"{real.dtype} {tuple(real.shape)} of strides {real.stride()}"
                raise Fault("fake strides lie", f"{func} at {place()}: the fake is {said}; the result is {made}")

    def take_results(self, result: Any, index: int, timeline: Timeline, *, is_empty: bool = False) -> None:
        """Place new tensors of an op on its device, if it is not to make them on the host."""
        if self.aim == HOST:
            return
        for tensor in tensors_in(result):
            if self.memory.of(tensor) is None:
                block = self.place_on(tensor, index if self.aim is None else self.aim, is_empty=is_empty)
                if block is not None and not is_empty and tensor.numel():
                    self.touch_block(block, bytes_of(tensor), timeline, is_write=True)

    def common_device(self, name: str, tensors: Iterable[Tensor]) -> int:
        """Return the device of an op's tensors. CUDA refuses tensors of the host, unless they are one number each."""
        indices = set()
        for tensor in tensors:
            index = self.device_of(tensor)
            if index != HOST:
                indices.add(index)
            elif tensor.dim() and name in TAKES_HOST_INDICES:
                self.count_wait("pageable copy")
            elif tensor.dim():
                raise Fault("memory of the host in a kernel", f"{place()}: {name} of a tensor of the host and of the device")
        if len(indices) > 1:
            raise Fault("kernel on the wrong device", f"{place()}: {name} of tensors of devices {sorted(indices)}")
        return indices.pop()

    @staticmethod
    def has_mask(args: Any) -> bool:
        return any(tensor.dtype in (torch.bool, torch.uint8) for tensor in tensors_in(args[1]))

    def copy(self, func: Any, args: Any, kwargs: Any, reads: list[Tensor], writes: list[Tensor]) -> Any:
        """Run a copy. Between host and device it is a wait, unless the memory is pinned and the caller does not wait."""
        makes_result = func.overloadpacket.__name__ == "_to_copy"
        sources = {self.device_of(tensor) for tensor in reads} or {HOST}
        if len(sources) > 1 and func.overloadpacket.__name__ == "copy_":
            raise AssertionError(sources)
        targets = (
            {self.device_of(tensor) for tensor in writes}
            if not makes_result
            else {self.aim}
            if self.aim is not None
            else sources
        )
        ends = sources | targets
        if ends == {HOST}:
            return self.on_host(func, args, kwargs, reads, writes)
        index = max(ends)
        timeline = self.begin_launch(index)
        self.touch(timeline, reads, writes)
        if HOST in ends and any(tensor.numel() for tensor in (*reads, *writes)):
            ours = [tensor for tensor in (*reads, *writes) if self.device_of(tensor) == HOST]
            is_pinned = all(self.memory.of(tensor) is not None for tensor in ours) and not (makes_result and targets == {HOST})
            is_async = kwargs.get("non_blocking") or (not makes_result and len(args) > 2 and args[2])
            if not is_pinned:
                self.wait("pageable copy", timeline)
            elif not is_async:
                self.wait("copy that waits", timeline)
        result = func(*args, **kwargs)
        if makes_result and targets != {HOST}:
            for tensor in tensors_in(result):
                block = self.place_on(tensor, max(targets))
                if block is not None and tensor.numel():
                    self.touch_block(block, bytes_of(tensor), timeline, is_write=True)
        return result


def unseen(run: Callable[..., Any], chip: Chip) -> Callable[..., Any]:
    """Return a function that runs without the chip: inside of a kernel, whose accesses others note."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with chip.inside(), _disable_current_modes(), torch._C.DisableTorchFunction():
            return run(*args, **kwargs)

    return call
