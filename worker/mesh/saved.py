"""Tensors of a checkpoint that are read when they are wanted, so that whoever resumes holds one at a time."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from octet.worker.mesh.pieces import Cut


@dataclass(frozen=True, eq=False)
class SavedTensor:
    """A tensor of a checkpoint. read: gives it, whole, on the host; each call reads it again."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]


@dataclass(frozen=True, eq=False)
class SavedShards:
    """A tensor of a checkpoint that was saved as shards. read: gives one shard, by its number, in `shape`."""

    cut: Cut
    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[int], Tensor]

    def all(self) -> list[Tensor]:
        """Return every shard, in order."""
        return [self.read(shard) for shard in range(self.cut.num_shards)]


class SavedStates(Mapping[Any, Any]):
    """The states of an optimizer's parameters in a checkpoint, by key. Each look-up reads one parameter's, again."""

    def __init__(self, readers: Mapping[Any, Callable[[], Any]]) -> None:
        self._readers = dict(readers)

    def __getitem__(self, key: Any) -> Any:
        return self._readers[key]()

    def __iter__(self) -> Iterator[Any]:
        return iter(self._readers)

    def __len__(self) -> int:
        return len(self._readers)

    def __contains__(self, key: object) -> bool:
        return key in self._readers

    def only(self, keys: Iterable[Any]) -> "SavedStates":
        """Return the states of those keys that are saved."""
        return SavedStates({key: self._readers[key] for key in keys if key in self._readers})

    def changed(self, changes: Mapping[Any, Callable[[Any], Any]]) -> "SavedStates":
        """Return states that are changed when they are read. changes: by key; others stay."""

        def reader(key: Any) -> Callable[[], Any]:
            return lambda: changes[key](self._readers[key]())

        return SavedStates(self._readers | {key: reader(key) for key in changes if key in self._readers})


def changed(held: Any, change: Callable[[Tensor], Tensor], shape: tuple[int, ...]) -> Any:
    """Change a tensor of a state dict, or one that is saved when it is read. shape: that it then has."""
    if isinstance(held, SavedTensor):
        return SavedTensor(shape, held.dtype, lambda: change(held.read()))
    return change(held)


def read_now(value: Any) -> Any:
    """Return a tree with every tensor in the place of what says how to read it."""
    if isinstance(value, SavedTensor):
        return value.read()
    if isinstance(value, Mapping):
        return {key: read_now(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(read_now(item) for item in value)
    return value
