"""Read checkpoints: every byte is checked against the manifest, and the manifest against the registered hash."""

import hashlib
import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from octet.api_schemas import CheckpointRef
from octet.worker.checkpoint.files import FORMAT_VERSIONS, MANIFEST, STATE, TENSORS, rank_file, sha256_of
from octet.worker.checkpoint.shards import own_shards, put_together
from octet.worker.mesh import Axis, Cut, SavedShards, SavedStates, SavedTensor
from octet.worker.mesh.saved import read_now


class BadCheckpoint(Exception):
    """A checkpoint's files differ from its manifest, or its manifest differs from the registered hash."""


def load(folder: Path, ref: CheckpointRef, tensor: Axis | None = None) -> dict[str, Any]:
    """Read a whole checkpoint after checking every byte, as `load_later`. Tensors in one file are mapped into memory."""
    state: dict[str, Any] = read_now(load_later(folder, ref, tensor))
    return state


def load_later(folder: Path, ref: CheckpointRef, tensor: Axis | None = None) -> dict[str, Any]:
    """Return a checkpoint's state, with a `SavedTensor` for what ranks have saved in pieces, after checking every byte.

    The optimizer's states are `SavedStates`. Raises BadCheckpoint, which names the file that differs, also when it is read.
    tensor: an axis of as many ranks as divided the tensors takes the own shards, as they were saved. Otherwise shards are put
    together.
    """
    path = folder / ref.name
    try:
        manifest_bytes = (path / MANIFEST).read_bytes()
        if hashlib.sha256(manifest_bytes).hexdigest() != ref.sha256:
            raise BadCheckpoint(f"{ref.name}/{MANIFEST} does not have the registered SHA-256")
        manifest = json.loads(manifest_bytes)
        for name, expected in manifest["files"].items():
            if (path / name).stat().st_size != expected["num_bytes"] or sha256_of(path / name) != expected["sha256"]:
                raise BadCheckpoint(f"{ref.name}/{name} differs from its manifest")
        document = json.loads((path / STATE).read_text())
        if document["version"] not in FORMAT_VERSIONS:
            allowed = ", ".join(map(str, FORMAT_VERSIONS))
            raise BadCheckpoint(f"{ref.name} has format {document['version']}; this version reads {allowed}")
        state: dict[str, Any] = _put_tensors(document["state"], _SavedTensors(path, load_file(path / TENSORS)))
        state = put_together(state) if tensor is None else own_shards(state, tensor)
        if "optimizer" in state and not isinstance(state["optimizer"]["state"], SavedStates):
            states = {key: partial(read_now, parts) for key, parts in state["optimizer"]["state"].items()}
            state["optimizer"] = state["optimizer"] | {"state": SavedStates(states)}
        return {key: part if key in ("model", "optimizer") else read_now(part) for key, part in state.items()}
    except OSError as error:
        raise BadCheckpoint(f"{ref.name}: {error.strerror or error}") from error


def load_together(folder: Path, ref: CheckpointRef, world: Axis, tensor: Axis | None = None) -> dict[str, Any]:
    """Check a checkpoint on all ranks, and return its state on all or on none, as `load_later`.

    If one rank cannot read it, BadCheckpoint is raised on each.
    """
    state: dict[str, Any] = {}
    reason = ""
    try:
        state = load_later(folder, ref, tensor)
    except BadCheckpoint as error:
        reason = str(error)
    [num_failed] = world.sum(float(bool(reason)))
    if num_failed:
        raise BadCheckpoint(reason or f"{ref.name} cannot be read by {int(num_failed)} of {world.size} ranks")
    return state


def complete_in(folder: Path) -> tuple[CheckpointRef, ...]:
    """Find the complete checkpoints in a job's folder, newest first. Their bytes are checked when they are loaded."""
    found = []
    for manifest in folder.glob(f"step_{'[0-9]' * 10}/{MANIFEST}"):
        step = int(manifest.parent.name[-10:])
        sha256 = hashlib.sha256(manifest.read_bytes()).hexdigest()
        found.append(CheckpointRef(step=step, name=manifest.parent.name, sha256=sha256))
    return tuple(sorted(found, key=lambda ref: ref.step, reverse=True))


def load_folder(folder: Path) -> dict[str, Any]:
    """Read the checkpoint in a folder of its own, wherever it was copied to. Raises BadCheckpoint as `load` does."""
    folder = folder.resolve()
    try:
        manifest_bytes = (folder / MANIFEST).read_bytes()
        step = int(json.loads(manifest_bytes)["step"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadCheckpoint(f"{folder} holds no checkpoint: {MANIFEST} cannot be read ({error})") from error
    return load(folder.parent, CheckpointRef(step=step, name=folder.name, sha256=hashlib.sha256(manifest_bytes).hexdigest()))


class _SavedTensors:
    """The tensors of a checkpoint's files. A file of pieces is opened when its first piece is read."""

    def __init__(self, folder: Path, whole: dict[str, Tensor]) -> None:
        self.folder, self.whole = folder, whole
        self._files: dict[int, Any] = {}

    def shards(self, name: str, shape: list[int], cut: dict[str, Any], places: list[list[int]]) -> SavedShards:
        """Describe a tensor that was saved as shards, all of one shape, and how to read one. Nothing is read yet."""

        def read(shard: int) -> Tensor:
            own = [[rank, first, length] for rank, of_shard, first, length in places if of_shard == shard]
            return self.join(name, shape, own)

        for shard in range(cut["num_shards"]):
            self._check(name, shape, [[rank, first, length] for rank, of_shard, first, length in places if of_shard == shard])
        return SavedShards(Cut(**cut | {"shape": tuple(cut["shape"])}), tuple(shape), self._dtype(places[0][0], name), read)

    def later(self, name: str, shape: list[int], places: list[list[int]]) -> SavedTensor:
        """Describe a tensor that was saved in pieces. Nothing is read yet but its dtype."""
        self._check(name, shape, places)
        return SavedTensor(tuple(shape), self._dtype(places[0][0], name), lambda: self.join(name, shape, places))

    def join(self, name: str, shape: list[int], places: list[list[int]]) -> Tensor:
        """Put the pieces of a tensor together, on the host. They have been checked."""
        ordered = sorted(places, key=lambda place: place[1])
        return torch.cat([self._file(rank).get_tensor(name) for rank, _, _ in ordered]).view(shape)

    def _check(self, name: str, shape: list[int], places: list[list[int]]) -> None:
        """Raise BadCheckpoint unless the pieces are the whole tensor. Nothing is read but their sizes."""
        num_entries = 0
        for rank, first, length in sorted(places, key=lambda place: place[1]):
            if first != num_entries or self._file(rank).get_slice(name).get_shape() != [length]:
                break
            num_entries += length
        if not num_entries or num_entries != torch.Size(shape).numel():
            raise BadCheckpoint(f"{self.folder.name}: the pieces of {name} are not the whole tensor, {tuple(shape)}")

    def _dtype(self, rank: int, name: str) -> torch.dtype:
        one: Tensor = self._file(rank).get_slice(name)[:1]
        return one.dtype

    def _file(self, rank: int) -> Any:
        if rank not in self._files:
            self._files[rank] = safe_open(self.folder / rank_file(rank), "pt")
        return self._files[rank]


def _put_tensors(skeleton: dict[str, Any], saved: _SavedTensors) -> Any:
    ((kind, content),) = skeleton.items()
    match kind:
        case "tensor":
            return saved.whole[content]
        case "pieces":
            return saved.later(*content)
        case "shards":
            return saved.shards(*content)
        case "dict":
            return {key: _put_tensors(item, saved) for key, item in content}
        case "list":
            return [_put_tensors(item, saved) for item in content]
        case "tuple":
            return tuple(_put_tensors(item, saved) for item in content)
        case _:
            return content
