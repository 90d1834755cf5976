"""Count the bytes of live storages on the host, also of those that are emptied and filled again."""

import weakref
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from octet.worker.fp8.weight import stored


class LiveStorages(TorchDispatchMode):
    """The bytes of all storages that ops have made inside the context, but those on `meta`: now, and at most.

    A storage that is emptied and filled counts what it has at the moment. Of a weight of codes its codes count: the storage
    that it shows has no memory.
    """

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = self.peak_bytes = 0
        self._bytes: dict[int, int] = {}
        self._references: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._resize = torch.UntypedStorage.resize_

    def __enter__(self) -> Self:
        torch.UntypedStorage.resize_ = lambda storage, size: self._resized(storage, size)  # type: ignore[method-assign]
        super().__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.device.type != "meta":
                self._note(stored(tensor).untyped_storage())
        return result

    def _resized(self, storage: torch.UntypedStorage, size: int) -> Any:
        resized = self._resize(storage, size)
        if storage._cdata in self._bytes:
            self._count(storage._cdata, storage.nbytes())
        return resized

    def _note(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._bytes:
            self._references[key] = weakref.ref(storage, lambda _: self._forget(key))
            self._count(key, storage.nbytes())

    def _count(self, key: int, num_bytes: int) -> None:
        self.num_bytes += num_bytes - self._bytes.get(key, 0)
        self._bytes[key] = num_bytes
        self.peak_bytes = max(self.peak_bytes, self.num_bytes)

    def _forget(self, key: int) -> None:
        self._count(key, 0)
        del self._bytes[key], self._references[key]
