"""Count the bytes of live tensors during a piece of work, op by op: the peak, its moment, and what is alive then.

Every storage counts from the op that returns it until nothing refers to it, rounded up as CUDA's caching allocator does.
Memory that an op allocates and frees internally is counted only if the implementation is ours (`see_within`).
"""

import functools
import re
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Self
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type
from torch.utils._pytree import tree_leaves

from octet.worker.fp8.gradient import Float8Gradient
from octet.worker.fp8.weight import Float8Weight
from octet.worker.metrics.memory import held_tensors

_DEVICE_OF = torch.ops.prim.device.default
GRANULE = 512  # bytes: kMinBlockSize of CUDACachingAllocator.cpp
TRANSIENT = {"build": "inputs", "forward": "activations", "backward": "backward", "update": "update"}
"""Class of tensors that neither model nor optimizer hold, by the phase of the step that made them."""


@dataclass(frozen=True)
class Allocation:
    """A live storage. origin: the op and the module in which it ran, without layer numbers."""

    num_bytes: int
    phase: str
    origin: str


@dataclass(frozen=True)
class Snapshot:
    """Bytes of everything alive at one moment: by class, and by origin for what is freed within the step."""

    by_class: Counter[str]
    by_origin: Counter[str]


def tensors_in(result: Any) -> list[Tensor]:
    """Return the tensors that an op has returned or taken."""
    return [result] if isinstance(result, Tensor) else [each for each in tree_leaves(result) if isinstance(each, Tensor)]


@functools.cache
def _is_made_of_tensors(kind: type) -> bool:
    return issubclass(kind, (Float8Gradient, Float8Weight)) or is_traceable_wrapper_subclass_type(kind)


class LiveBytes(TorchDispatchMode):
    """Counts bytes inside its context. see_within: runs an op and counts its own allocations, or returns NotImplemented.

    device_type: of the devices whose storages count; None for all.
    """

    def __init__(
        self,
        granule: int = GRANULE,
        see_within: Callable[..., Any] = lambda *_: NotImplemented,
        device_type: str | None = None,
    ) -> None:
        super().__init__()
        self.granule, self.see_within, self.device_type = granule, see_within, device_type
        self.live: dict[int, Allocation] = {}
        self.num_bytes = self.peak_bytes = self.num_ops = self.peak_op = 0
        self.phase = "build"
        self._references: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._modules: list[str] = []
        self._at: tuple[int, Callable[[], None]] | None = None
        self._depth = 0

    def __enter__(self) -> Self:
        if not self._depth:
            self._resize = mock.patch.object(torch.UntypedStorage, "resize_", self._resized(torch.UntypedStorage.resize_))
            self._resize.start()
        self._depth += 1
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._depth -= 1
        if not self._depth:
            self._resize.stop()

    def restart(self, at: tuple[int, Callable[[], None]] | None = None) -> None:
        """Start counting ops and the peak. at: number of an op, and a function to call after that op."""
        self.num_ops = self.peak_op = 0
        self.peak_bytes, self._at = self.num_bytes, at
        self.phase = "forward"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.follow(func, types, args, kwargs)

    def follow(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Run an op and count what it allocates: a mode's work."""
        if any(map(_is_made_of_tensors, types)):
            return NotImplemented  # the subclass runs on plain tensors, and these come back here; its own storage has no memory
        self.before_op()
        if func is _DEVICE_OF:  # half of all calls, which a fake tensor answers by itself
            self.num_ops += 1
            self.after_op(func, (), ())
            return args[0].device
        result = self.see_within(self, func, args, kwargs or {})
        if result is NotImplemented:
            result = func(*args, **(kwargs or {}))
        self._follow_phase()
        if not func.is_view:  # whose storage is known, and half of the ops are views
            for tensor in tensors_in(result):
                self._note(tensor, func)
        self.num_ops += 1
        if self.num_bytes > self.peak_bytes:
            self.peak_bytes, self.peak_op = self.num_bytes, self.num_ops
        if self._at is not None and self.num_ops == self._at[0]:
            self._at[1]()
        self.after_op(func, args, result)
        return result

    def before_op(self) -> None:
        """Look at the state of the step before an op."""

    def after_op(self, func: Any, args: Any, result: Any) -> None:
        """Look at an op whose bytes are counted."""

    def count(self, key: int, change: int) -> None:
        """Count the bytes by which a storage has grown or, if negative, shrunk. key: of `live`, which has the new size."""
        self.num_bytes += change

    def snapshot(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> Snapshot:
        """Describe everything that is alive at this moment."""
        held = {tensor.untyped_storage()._cdata: kind for kind, tensor in held_tensors(model, optimizer)}
        by_class, by_origin = Counter[str](), Counter[str]()
        for key, allocation in self.live.items():
            kind = held.get(key)
            by_class[kind or TRANSIENT[allocation.phase]] += allocation.num_bytes
            if kind is None:
                by_origin[f"{allocation.phase}: {allocation.origin}"] += allocation.num_bytes
        return Snapshot(by_class, by_origin)

    @contextmanager
    def named(self, model: nn.Module) -> Iterator[None]:
        """Record inside the context in which module of the model each op of the forward pass runs."""
        names = {module: re.sub(r"\.\d+(?=\.|$)", ".*", name) for name, module in model.named_modules()}

        def enter(module: nn.Module, _inputs: Any) -> None:
            self._modules.append(names.get(module, type(module).__name__))

        def leave(_module: nn.Module, _inputs: Any, _outputs: Any) -> None:
            self._modules.pop()

        hooks: tuple[Any, ...] = (enter, leave)
        for hook in hooks:
            hook.reads_no_tensors = True  # layers still compute the activations before them
        handles = register_module_forward_pre_hook(enter), register_module_forward_hook(leave, always_call=True)
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _follow_phase(self) -> None:
        if torch._C._current_graph_task_id() != -1:
            self.phase = "backward"
        elif self.phase == "backward":
            self.phase = "update"

    def _where(self) -> str:
        if self.phase == "forward":
            return self._modules[-1] if self._modules else ""
        node = torch._C._current_autograd_node()
        return "" if node is None else node.name()

    def _note(self, tensor: Tensor, func: Any) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.live or self.device_type not in (None, tensor.device.type):
            return
        num_bytes = self._rounded(storage.nbytes())
        self.live[key] = Allocation(num_bytes, self.phase, self.origin_of(tensor, func))
        self.count(key, num_bytes)
        self._references[key] = weakref.ref(storage, lambda _: self._forget(key))

    def origin_of(self, tensor: Tensor, func: Any) -> str:
        """Return what `Allocation.origin` says of a storage that an op has made."""
        dtype = str(tensor.dtype).removeprefix("torch.")
        return f"{self._where()} {str(func).removeprefix('aten.')} {dtype}{list(tensor.shape)}".strip()

    def _resized(self, resize: Callable[..., Any]) -> Callable[..., Any]:
        """Return torch's `resize_` of a storage, whose memory comes and goes at ZeRO stage 3."""

        def follow(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            allocation = self.live.get(storage._cdata)
            if allocation is not None:
                num_bytes = self._rounded(size)
                self.live[storage._cdata] = replace(allocation, num_bytes=num_bytes)
                self.count(storage._cdata, num_bytes - allocation.num_bytes)
            return result

        return follow

    def _rounded(self, num_bytes: int) -> int:
        return -(-num_bytes // self.granule) * self.granule

    def _forget(self, key: int) -> None:
        del self._references[key]
        self.count(key, -self.live.pop(key).num_bytes)
