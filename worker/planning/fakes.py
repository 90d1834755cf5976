"""torch's fake tensors, whose ops are looked up once and then made again from their results' shapes.

torch looks an op up in a cache whose keys take 50 to 100 µs, and a step of a few blocks has ten thousand ops.
"""

import functools
from collections.abc import Iterator
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager

META = torch.device("meta")
VIEWS = frozenset(
    [
        *("_unsafe_view", "alias", "as_strided", "detach", "expand", "permute", "select", "slice"),
        *("split", "squeeze", "t", "transpose", "unbind", "unsqueeze", "view"),
    ]
)
"""Ops whose kernel on `meta` is all that torch runs for them."""


class Made(NamedTuple):
    """A result without values."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class Fakes(FakeTensorMode):
    """Makes tensors fake."""

    avoid_device_init = True  # else `torch.tensor` initializes the device first, as torch does for fake CUDA tensors
    known: ClassVar[dict[tuple[Any, ...], Any]] = {}
    """By op and arguments: what it makes; of an op that changes its first argument, None. For all modes of the process."""

    def __init__(self) -> None:
        super().__init__()
        self.cache_enabled = False  # torch's own

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and to keep the compiler out takes as long as a short op

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        if func.namespace == "c10d":  # a collective changes its tensors, and makes none
            with in_kernel_invocation_manager(self):
                return func(*args, **options)
        if is_view(func) and type(base := args[0]) is FakeTensor and base.constant is None:
            with in_kernel_invocation_manager(self):
                result = func(*args, **options)
            if isinstance(result, Tensor):
                return FakeTensor(self, result, base.fake_device)
            return [FakeTensor(self, each, base.fake_device) for each in result]
        key = _key(func, args, options) if is_known_by_shapes(func) else None
        if key is not None and key in self.known:
            made = self.known[key]
            return args[0] if made is None else self._made_again(made)
        result = super().__torch_dispatch__(func, types, args, options)
        if key is not None and (made := _made(func, args, result)) is not NotImplemented:
            self.known[key] = made
        return result

    def _made_again(self, made: Any) -> Any:
        if not isinstance(made, Made):
            return list(map(self._made_again, made)) if isinstance(made, list) else tuple(map(self._made_again, made))
        with in_kernel_invocation_manager(self):
            result = torch.empty_strided(made.shape, made.stride, dtype=made.dtype, device=META)
        return FakeTensor(self, result, made.device)


@functools.cache
def is_view(func: Any) -> bool:
    """Return whether an op returns a view of its first argument, and `meta` has a kernel that is all that torch runs."""
    return func.namespace == "aten" and func.overloadpacket.__name__ in VIEWS and len(func._schema.returns) == 1


@functools.cache
def is_known_by_shapes(func: Any) -> bool:
    """Return whether shapes, dtypes and devices of an op's arguments are all that its results depend on."""
    if func.namespace != "aten" or {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(func.tags):
        return False
    aliases = [each.alias_info for each in func._schema.returns]
    if not any(aliases):
        return not func._schema.is_mutable
    written = [each.alias_info is not None and each.alias_info.is_write for each in func._schema.arguments]
    return len(aliases) == 1 and written[0] and sum(written) == 1 and torch.Tag.inplace_view not in func.tags


def _key(func: Any, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, ...] | None:
    """Return what two calls of an op share whose results are alike; None if a tensor has values or is no fake one."""
    parts = [func]
    for value in _flat((*args, *options.items())):
        if not isinstance(value, Tensor):
            parts += (type(value), value)
        elif type(value) is FakeTensor and value.constant is None:
            parts += (value.shape, value.stride(), value.dtype, value.fake_device)
        else:
            return None
    return tuple(parts)


def _flat(values: Any) -> Iterator[Any]:
    for value in values:
        if isinstance(value, (list, tuple)):
            yield len(value)
            yield from _flat(value)
        else:
            yield value


def _made(func: Any, args: tuple[Any, ...], result: Any) -> Any:
    """Return what an op has made; None if it has changed its first argument; NotImplemented for anything else."""
    if func._schema.is_mutable:
        return None if result is args[0] else NotImplemented
    results = result if isinstance(result, (list, tuple)) else [result]
    if not all(type(each) is FakeTensor and _is_plain(each) for each in results):
        return NotImplemented
    storages = [each.untyped_storage()._cdata for each in (*results, *_flat(args)) if isinstance(each, Tensor)]
    if len(set(storages[: len(results)])) < len(results) or set(storages[: len(results)]) & set(storages[len(results) :]):
        return NotImplemented  # a view, whatever its schema says
    made = [Made(tuple(each.shape), each.stride(), each.dtype, each.fake_device) for each in results]
    return made[0] if isinstance(result, Tensor) else made if isinstance(result, list) else tuple(made)


def _is_plain(tensor: FakeTensor) -> bool:
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    num_bytes = (last + 1) * tensor.itemsize if tensor.numel() else 0
    return tensor.constant is None and tensor.storage_offset() == 0 and tensor.untyped_storage().nbytes() == num_bytes
