"""A folder that is written under another name and renamed when it is complete, and safetensors files in shards."""

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from octet.worker.common.errors import StorageFull, is_storage_full

SHARD_BYTES = 1 << 30
"""Bytes of tensors in one file, unless one tensor is larger; as many are in memory until the file is written."""
_INDEX = "model.safetensors.index.json"


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yield an unfinished folder, which gets its name at the end, or is removed if anything is raised.

    Raises ValueError if `folder` exists and is not empty, and StorageFull.
    """
    check_new(folder)
    unfinished = folder.with_name(f".unfinished_{folder.name}")
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        unfinished.mkdir(parents=True)
        yield unfinished
        if folder.exists():
            folder.rmdir()
        unfinished.rename(folder)
    except Exception as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        if is_storage_full(error):
            raise StorageFull(f"the exported model does not fit on the disk of {folder}: {error}") from error
        raise


def check_new(folder: Path) -> None:
    """Raise ValueError unless the folder is empty or does not exist."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} exists and is not an empty folder; allowed: an empty or a new one. Name another.")


class ShardWriter:
    """Writes tensors as they come, as `model.safetensors`, or as shards with an index if they are more than one shard."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._waiting: dict[str, Tensor] = {}
        self._num_waiting = self._num_bytes = 0
        self._shards: list[list[str]] = []

    def add(self, name: str, tensor: Tensor) -> None:
        """Take a tensor. Writes a shard as soon as it is full, before the next tensor is made."""
        num_bytes = tensor.numel() * tensor.element_size()
        if self._waiting and self._num_waiting + num_bytes > SHARD_BYTES:
            self._write()
        self._waiting[name] = tensor.detach().cpu().contiguous()
        self._num_waiting += num_bytes
        self._num_bytes += num_bytes
        if self._num_waiting >= SHARD_BYTES:
            self._write()

    def finish(self) -> None:
        """Write the last shard, the files' names and the index."""
        self._write()
        if len(self._shards) == 1:
            self._file(0).rename(self._folder / "model.safetensors")
            return
        weight_map: dict[str, str] = {}
        for number, names in enumerate(self._shards):
            name = f"model-{number + 1:05}-of-{len(self._shards):05}.safetensors"
            self._file(number).rename(self._folder / name)
            weight_map |= dict.fromkeys(names, name)
        index = {"metadata": {"total_size": self._num_bytes}, "weight_map": weight_map}
        (self._folder / _INDEX).write_text(json.dumps(index, indent=2) + "\n")

    def _write(self) -> None:
        if not self._waiting:
            return
        save_file(self._waiting, self._file(len(self._shards)), metadata={"format": "pt"})
        self._shards.append(list(self._waiting))
        self._waiting, self._num_waiting = {}, 0

    def _file(self, number: int) -> Path:
        return self._folder / f".shard-{number}.safetensors"


class MappedValues:
    """Holds tensors in files without a name, mapped into memory, so that they take disk and no memory of their own."""

    def __init__(self, folder: Path) -> None:
        """folder: on the disk to use."""
        self._folder = folder

    def hold(self, tensor: Tensor) -> Tensor:
        """Return a copy on the host. Raises OSError if the disk is full."""
        num_bytes = tensor.numel() * tensor.element_size()
        if num_bytes == 0:
            return tensor.detach().cpu()
        with tempfile.NamedTemporaryFile(dir=self._folder, prefix=".values-") as file:
            os.posix_fallocate(file.fileno(), 0, num_bytes)  # a full disk would end the process at the copy
            held = torch.from_numpy(np.memmap(file.name, np.uint8, "r+")).view(tensor.dtype).view(tensor.shape)
        return held.copy_(tensor.detach())
