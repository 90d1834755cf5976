"""Checkpoints: plain tensors in safetensors, everything else in JSON, and a manifest written last.

A checkpoint is a folder `step_0000000100` with `tensors.safetensors`, `state.json` and `manifest.json`. It is written
under another name, synced to disk and then renamed, so a folder with this name is complete. The manifest lists the size and
SHA-256 of each file. The control plane keeps the hash of the manifest, and a resume checks it first.
"""

import hashlib
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from api_schemas import CheckpointRef
from worker.errors import StorageFull, is_storage_full

FORMAT_VERSION = 1
_TENSORS, _STATE, _MANIFEST = "tensors.safetensors", "state.json", "manifest.json"


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


def save(folder: Path, step: int, state: dict[str, Any]) -> SavedCheckpoint:
    """Write `state` (nested dicts and lists of tensors and JSON values) as the checkpoint of `step` in `folder`.

    Raises StorageFull if the disk is full, and leaves nothing unfinished, whatever it raises.
    """
    unfinished = folder / f".unfinished_{checkpoint_name(step)}"
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        return _write(folder, unfinished, step, state)
    except Exception as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        if is_storage_full(error):
            raise StorageFull(f"the checkpoint of step {step} does not fit on the disk of {folder}: {error}") from error
        raise


def _write(folder: Path, unfinished: Path, step: int, state: dict[str, Any]) -> SavedCheckpoint:
    final = folder / checkpoint_name(step)
    unfinished.mkdir(parents=True)
    tensors: dict[str, Tensor] = {}
    skeleton = _take_tensors(state, tensors)
    save_file(tensors, unfinished / _TENSORS)
    (unfinished / _STATE).write_text(json.dumps({"version": FORMAT_VERSION, "step": step, "state": skeleton}))
    files: dict[str, dict[str, Any]] = {
        name: {"num_bytes": (unfinished / name).stat().st_size, "sha256": _sha256(unfinished / name)}
        for name in (_TENSORS, _STATE)
    }
    manifest = json.dumps({"version": FORMAT_VERSION, "step": step, "files": files}, indent=1, sort_keys=True)
    (unfinished / _MANIFEST).write_text(manifest)
    for name in (_TENSORS, _STATE, _MANIFEST, "."):
        _sync(unfinished / name)
    shutil.rmtree(final, ignore_errors=True)
    unfinished.rename(final)
    _sync(folder)
    num_bytes = sum(file["num_bytes"] for file in files.values()) + len(manifest)
    return SavedCheckpoint(final.name, num_bytes, hashlib.sha256(manifest.encode()).hexdigest())


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
        tensors = load_file(path / _TENSORS)
    except OSError as error:
        raise BadCheckpoint(f"{ref.name}: {error.strerror or error}") from error
    if document["version"] != FORMAT_VERSION:
        raise BadCheckpoint(f"{ref.name} has format {document['version']}; this version reads {FORMAT_VERSION}")
    state: dict[str, Any] = _put_tensors(document["state"], tensors)
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


def _take_tensors(value: Any, tensors: dict[str, Tensor], path: str = "") -> Any:
    """Convert `value` to JSON and move its tensors to `tensors`. Dicts become pairs, since their keys may be int or str."""
    if isinstance(value, Tensor):
        tensors[path] = value.detach().contiguous().cpu().clone()
        return {"tensor": path}
    if isinstance(value, dict):
        return {"dict": [[key, _take_tensors(item, tensors, f"{path}/{key}")] for key, item in value.items()]}
    if isinstance(value, list | tuple):
        items = [_take_tensors(item, tensors, f"{path}/{index}") for index, item in enumerate(value)]
        return {"tuple" if isinstance(value, tuple) else "list": items}
    assert value is None or isinstance(value, str | int | float | bool), f"{path} is a {type(value).__name__}"
    return {"value": value}


def _put_tensors(skeleton: dict[str, Any], tensors: dict[str, Tensor]) -> Any:
    ((kind, content),) = skeleton.items()
    match kind:
        case "tensor":
            return tensors[content]
        case "dict":
            return {key: _put_tensors(item, tensors) for key, item in content}
        case "list":
            return [_put_tensors(item, tensors) for item in content]
        case "tuple":
            return tuple(_put_tensors(item, tensors) for item in content)
        case _:
            return content


def random_state() -> dict[str, Tensor]:
    """Return the state of torch's random generators on this rank."""
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: dict[str, Tensor]) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
