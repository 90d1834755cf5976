"""Checkpoints: plain tensors in safetensors, everything else in JSON, and a manifest written last.

A checkpoint is a folder `step_0000000100` with `tensors.safetensors`, `state.json` and `manifest.json`. Tensors that ranks hold
in pieces (`TensorInPieces`) are in one more file for each rank, `rank_00003.safetensors`, which that rank writes; `state.json`
says where each piece belongs, so any number of ranks can read them. The folder is written under another name, synced to disk
and then renamed, so a folder with this name is complete. The manifest lists the size and SHA-256 of each file. The control
plane keeps the hash of the manifest, and a resume checks it first.
"""

import hashlib
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from api_schemas import CheckpointRef
from worker.errors import StorageFull, is_storage_full
from worker.mesh import Axis, TensorInPieces

FORMAT_VERSION, FORMAT_VERSION_OF_PIECES = 1, 2
_TENSORS, _STATE, _MANIFEST = "tensors.safetensors", "state.json", "manifest.json"
_WRITTEN, _FAILED, _FULL = range(3)


class BadCheckpoint(Exception):
    """A checkpoint's files differ from its manifest, or its manifest differs from the registered hash."""


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint on disk. `sha256` is the hash of its manifest."""

    name: str
    num_bytes: int
    sha256: str


def checkpoint_name(step: int) -> str:
    return f"step_{step:010d}"


def save(folder: Path, step: int, state: dict[str, Any], world: Axis | None = None) -> SavedCheckpoint | None:
    """Write `state` (nested dicts and lists of tensors and JSON values) as the checkpoint of `step` in `folder`.

    world: the ranks that write together, to one folder; all of them call it, and None is returned to all but the first. Without
    pieces only the first rank writes, and nobody waits for it.
    Raises StorageFull if the disk is full for one of them, on all of them, and leaves nothing unfinished, whatever it raises.
    """
    world = world or Axis("world", 1, 0, torch.device("cpu"))
    whole: dict[str, Tensor] = {}
    pieces: dict[str, TensorInPieces] = {}
    skeleton = _take_tensors(state, whole, pieces)
    if not pieces and not world.is_first:
        return None
    unfinished = folder / f".unfinished_{checkpoint_name(step)}"
    try:
        version = FORMAT_VERSION_OF_PIECES if pieces else FORMAT_VERSION
        document = json.dumps({"version": version, "step": step, "state": skeleton})
        written = _write_together(unfinished, document, whole, pieces, world if pieces else None)
        return _complete(folder, unfinished, step, version, written) if world.is_first else None
    except Exception as error:
        if world.is_first:
            shutil.rmtree(unfinished, ignore_errors=True)
        if is_storage_full(error):
            raise StorageFull(f"the checkpoint of step {step} does not fit on the disk of {folder}: {error}") from error
        raise


class _File(NamedTuple):
    num_bytes: int
    sha256: str


def _write_together(
    unfinished: Path, document: str, whole: dict[str, Tensor], pieces: dict[str, TensorInPieces], world: Axis | None
) -> dict[str, _File]:
    """Write this rank's files, and return those of all ranks, by name. Fails on all ranks if it fails on one."""
    own: dict[str, _File] = {}
    error: Exception | None = None
    try:
        if world is None or world.is_first:
            own = _write_whole(unfinished, document, whole)
        if world is not None:
            unfinished.mkdir(parents=True, exist_ok=True)
            entries = {path: held.own.cpu().clone() for path, held in pieces.items() if held.own.numel()}
            save_file(entries, unfinished / _rank_file(world.rank))
            own[_rank_file(world.rank)] = _finish(unfinished / _rank_file(world.rank))
    except Exception as raised:  # noqa: BLE001  raised again, once the other ranks know
        error = raised
    if world is None:
        if error is not None:
            raise error
        return own
    return own | _agree(own, error, world)


def _write_whole(unfinished: Path, document: str, whole: dict[str, Tensor]) -> dict[str, _File]:
    unfinished.mkdir(parents=True, exist_ok=True)
    copies = {path: tensor.detach().contiguous().cpu().clone() for path, tensor in whole.items()}  # none shares its memory
    save_file(copies, unfinished / _TENSORS)
    (unfinished / _STATE).write_text(document)
    return {name: _finish(unfinished / name) for name in (_TENSORS, _STATE)}


def _agree(own: dict[str, _File], error: Exception | None, world: Axis) -> dict[str, _File]:
    """Each rank's file, once all have written theirs. Raises if one has failed: its own error there, elsewhere its rank."""
    outcome = _WRITTEN if error is None else _FULL if is_storage_full(error) else _FAILED
    num_bytes, sha256 = own.get(_rank_file(world.rank), _File(0, "00" * 32))
    told = bytes([outcome]) + num_bytes.to_bytes(8, "big") + bytes.fromhex(sha256)
    heard = world.start_gather(torch.tensor(list(told), dtype=torch.uint8, device=world.device)).wait()
    if error is not None:
        raise error
    files = {}
    for rank, row in enumerate(bytes(part) for part in heard.tolist()):
        if row[0] != _WRITTEN:
            kind = StorageFull if row[0] == _FULL else OSError
            raise kind(f"rank {rank} could not write its part of the checkpoint{': its disk is full' * (row[0] == _FULL)}")
        files[_rank_file(rank)] = _File(int.from_bytes(row[1:9], "big"), row[9:].hex())
    return files


def _complete(folder: Path, unfinished: Path, step: int, version: int, written: dict[str, _File]) -> SavedCheckpoint:
    """Write the manifest and give the checkpoint its name. What an attempt that died has left goes."""
    for name, file in written.items():
        if not (unfinished / name).is_file() or (unfinished / name).stat().st_size != file.num_bytes:
            raise OSError(
                f"{name} is not in {folder}, where its rank has written it; allowed: one folder for all ranks. Mount the same "
                "file system on all nodes, or use parallelism.zero_stage 0."
            )
    for path in unfinished.iterdir():
        if path.name not in written:
            path.unlink()
    files = {name: file._asdict() for name, file in written.items()}
    manifest = json.dumps({"version": version, "step": step, "files": files}, indent=1, sort_keys=True)
    (unfinished / _MANIFEST).write_text(manifest)
    for name in (_MANIFEST, "."):
        _sync(unfinished / name)
    final = folder / checkpoint_name(step)
    shutil.rmtree(final, ignore_errors=True)
    unfinished.rename(final)
    _sync(folder)
    num_bytes = sum(file.num_bytes for file in written.values()) + len(manifest)
    return SavedCheckpoint(final.name, num_bytes, hashlib.sha256(manifest.encode()).hexdigest())


def _rank_file(rank: int) -> str:
    return f"rank_{rank:05d}.safetensors"


def _finish(path: Path) -> _File:
    """Sync a file that was written."""
    _sync(path)
    return _File(path.stat().st_size, _sha256(path))


def load(folder: Path, ref: CheckpointRef) -> dict[str, Any]:
    """Read a checkpoint after checking every byte. Raises BadCheckpoint, which names the file that differs."""
    path = folder / ref.name
    try:
        manifest_bytes = (path / _MANIFEST).read_bytes()
        if hashlib.sha256(manifest_bytes).hexdigest() != ref.sha256:
            raise BadCheckpoint(f"{ref.name}/{_MANIFEST} does not have the registered SHA-256")
        manifest = json.loads(manifest_bytes)
        for name, expected in manifest["files"].items():
            if (path / name).stat().st_size != expected["num_bytes"] or _sha256(path / name) != expected["sha256"]:
                raise BadCheckpoint(f"{ref.name}/{name} differs from its manifest")
        document = json.loads((path / _STATE).read_text())
        if document["version"] not in (FORMAT_VERSION, FORMAT_VERSION_OF_PIECES):
            allowed = f"{FORMAT_VERSION} and {FORMAT_VERSION_OF_PIECES}"
            raise BadCheckpoint(f"{ref.name} has format {document['version']}; this version reads {allowed}")
        state: dict[str, Any] = _put_tensors(document["state"], _SavedTensors(path, load_file(path / _TENSORS)))
    except OSError as error:
        raise BadCheckpoint(f"{ref.name}: {error.strerror or error}") from error
    return state


def load_together(folder: Path, ref: CheckpointRef, world: Axis) -> dict[str, Any]:
    """Read a checkpoint on all ranks, or on none: if one cannot read it, BadCheckpoint is raised on each."""
    state: dict[str, Any] = {}
    reason = ""
    try:
        state = load(folder, ref)
    except BadCheckpoint as error:
        reason = str(error)
    [num_failed] = world.sum(float(bool(reason)))
    if num_failed:
        raise BadCheckpoint(reason or f"{ref.name} cannot be read by {int(num_failed)} of {world.size} ranks")
    return state


def load_folder(folder: Path) -> dict[str, Any]:
    """Read the checkpoint in a folder of its own, wherever it was copied to. Raises BadCheckpoint as `load` does."""
    folder = folder.resolve()
    try:
        manifest_bytes = (folder / _MANIFEST).read_bytes()
        step = int(json.loads(manifest_bytes)["step"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadCheckpoint(f"{folder} holds no checkpoint: {_MANIFEST} cannot be read ({error})") from error
    return load(folder.parent, CheckpointRef(step=step, name=folder.name, sha256=hashlib.sha256(manifest_bytes).hexdigest()))


def _take_tensors(value: Any, whole: dict[str, Tensor], pieces: dict[str, TensorInPieces], path: str = "") -> Any:
    """Convert `value` to JSON and move its tensors to `whole` and `pieces`. Dicts become pairs: keys may be int or str."""
    if isinstance(value, TensorInPieces) and 0 in value.shape:
        value = value.own.view(value.shape)
    if isinstance(value, Tensor):
        whole[path] = value
        return {"tensor": path}
    if isinstance(value, TensorInPieces):
        pieces[path] = value
        places = [[rank, *place] for rank, place in enumerate(value.places) if place[1]]
        return {"pieces": [path, list(value.shape), places]}
    if isinstance(value, dict):
        return {"dict": [[key, _take_tensors(item, whole, pieces, f"{path}/{key}")] for key, item in value.items()]}
    if isinstance(value, list | tuple):
        items = [_take_tensors(item, whole, pieces, f"{path}/{index}") for index, item in enumerate(value)]
        return {"tuple" if isinstance(value, tuple) else "list": items}
    assert value is None or isinstance(value, str | int | float | bool), f"{path} is a {type(value).__name__}"
    return {"value": value}


class _SavedTensors:
    """The tensors of a checkpoint's files. A file of pieces is opened when the first of them is asked for."""

    def __init__(self, folder: Path, whole: dict[str, Tensor]) -> None:
        self.folder, self.whole = folder, whole
        self._files: dict[int, Any] = {}

    def join(self, name: str, shape: list[int], places: list[list[int]]) -> Tensor:
        """Put the pieces of a tensor together, on the host. Raises BadCheckpoint if one is missing."""
        num_entries = 0
        parts: list[Tensor] = []
        for rank, first, length in sorted(places, key=lambda place: place[1]):
            part = self._file(rank).get_tensor(name)
            if first != num_entries or part.numel() != length:
                break
            num_entries += length
            parts.append(part)
        if not parts or num_entries != torch.Size(shape).numel():
            raise BadCheckpoint(f"{self.folder.name}: the pieces of {name} are not the whole tensor, {tuple(shape)}")
        return torch.cat(parts).view(shape)

    def _file(self, rank: int) -> Any:
        if rank not in self._files:
            self._files[rank] = safe_open(self.folder / _rank_file(rank), "pt")
        return self._files[rank]


def _put_tensors(skeleton: dict[str, Any], saved: _SavedTensors) -> Any:
    ((kind, content),) = skeleton.items()
    match kind:
        case "tensor":
            return saved.whole[content]
        case "pieces":
            return saved.join(*content)
        case "dict":
            return {key: _put_tensors(item, saved) for key, item in content}
        case "list":
            return [_put_tensors(item, saved) for item in content]
        case "tuple":
            return tuple(_put_tensors(item, saved) for item in content)
        case _:
            return content


def random_state(world: Axis) -> dict[str, Tensor]:
    """Return the states of torch's random generators on each rank, by rank: uint8, (R, bytes). All ranks call it together."""
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return {name: world.start_gather(part.to(world.device)).wait().cpu() for name, part in state.items()}


def set_random_state(state: dict[str, Tensor], world: Axis) -> None:
    """Go on with this rank's random numbers. With another number of ranks than saved them, each has numbers of its own."""
    states = {name: part.view(-1, part.shape[-1]) for name, part in state.items()}  # one for all, before each rank had its own
    number, num_saved = world.rank, len(states["cpu"])
    torch.set_rng_state(states["cpu"][number % num_saved].clone())  # torch crashed on a view
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"][number % num_saved].clone())
    if number >= num_saved and state["cpu"].dim() == 2:
        torch.manual_seed(int(torch.randint(1 << 62, ())) + number)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
