"""Write one rank's part of a checkpoint: its copy on the host, its files, and, on the first rank, the manifest."""

import hashlib
import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from octet.worker.checkpoint.files import (
    FORMAT_VERSION,
    FORMAT_VERSION_OF_PIECES,
    FORMAT_VERSION_OF_SHARDS,
    MANIFEST,
    STATE,
    TENSORS,
    SavedCheckpoint,
    WrittenFile,
    checkpoint_name,
    finish,
    rank_file,
    sync,
)
from octet.worker.checkpoint.host_copies import HostCopies
from octet.worker.common.errors import StorageFull, is_storage_full
from octet.worker.mesh import Axis, TensorInPieces
from octet.worker.metrics.readback import DeferredValue

_WRITTEN, _FAILED, _FULL = range(3)


@dataclass(frozen=True)
class Contents:
    """One rank's part of the checkpoint of a step. Nothing changes it while it is written.

    skeleton: the state as JSON, with the paths of its tensors, and with each `DeferredValue` as it is. whole: the tensors
    that the first rank writes, by path; empty on others. own: this rank's pieces. in_pieces: whether ranks hold
    tensors in pieces, and each writes a file. in_shards: whether tensor ranks divide some.
    """

    step: int
    skeleton: Any
    whole: dict[str, Tensor]
    own: dict[str, Tensor]
    in_pieces: bool
    in_shards: bool
    copies: HostCopies

    @property
    def version(self) -> int:
        """The oldest format that has the contents' features."""
        if self.in_shards:
            return FORMAT_VERSION_OF_SHARDS
        return FORMAT_VERSION_OF_PIECES if self.in_pieces else FORMAT_VERSION


def contents_of(step: int, state: dict[str, Any], world: Axis, copies: HostCopies) -> Contents | None:
    """Start to copy what this rank writes of a state to the host. Returns None if it writes nothing."""
    whole: dict[str, Tensor] = {}
    pieces: dict[str, TensorInPieces] = {}
    skeleton = _take_tensors(state, whole, pieces)
    if not pieces and not world.is_first:
        return None
    own = {path: held.own for path, held in pieces.items() if held.own.numel()}
    written = copies.take((whole if world.is_first else {}) | own)
    return Contents(
        step,
        skeleton,
        {path: written[path] for path in whole if world.is_first},
        {path: written[path] for path in own},
        bool(pieces),
        any(held.cut is not None for held in pieces.values()),
        copies,
    )


def write_own(contents: Contents, unfinished: Path, world: Axis) -> dict[str, WrittenFile]:
    """Write, sync and hash this rank's files, once their contents have arrived on the host. Returns them by name."""
    unfinished.mkdir(parents=True, exist_ok=True)
    contents.copies.wait()
    names = []
    if world.is_first:
        document = {"version": contents.version, "step": contents.step, "state": _read_late(contents.skeleton)}
        save_file(contents.whole, unfinished / TENSORS)
        (unfinished / STATE).write_text(json.dumps(document))
        names += [TENSORS, STATE]
    if contents.in_pieces:
        save_file(contents.own, unfinished / rank_file(world.rank))
        names.append(rank_file(world.rank))
    return {name: finish(unfinished / name) for name in names}


def agree(own: dict[str, WrittenFile], error: Exception | None, world: Axis) -> dict[str, WrittenFile]:
    """Return the files of all ranks, by name. All ranks call it, each when it has written its own or failed to.

    Raises on all ranks if one has failed: its own error there, elsewhere StorageFull or OSError with the number of its rank.
    """
    outcome = _WRITTEN if error is None else _FULL if is_storage_full(error) else _FAILED
    num_bytes, sha256 = own.get(rank_file(world.rank), WrittenFile(0, "00" * 32))
    told = bytes([outcome]) + num_bytes.to_bytes(8, "big") + bytes.fromhex(sha256)
    heard = world.start_gather(torch.tensor(list(told), dtype=torch.uint8, device=world.device)).wait()
    if error is not None:
        raise error
    files = {}
    for rank, row in enumerate(bytes(part) for part in heard.tolist()):
        if row[0] != _WRITTEN:
            kind = StorageFull if row[0] == _FULL else OSError
            raise kind(f"rank {rank} could not write its part of the checkpoint{': its disk is full' * (row[0] == _FULL)}")
        files[rank_file(rank)] = WrittenFile(int.from_bytes(row[1:9], "big"), row[9:].hex())
    return own | files


def complete(folder: Path, unfinished: Path, contents: Contents, written: dict[str, WrittenFile]) -> SavedCheckpoint:
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
    manifest = json.dumps({"version": contents.version, "step": contents.step, "files": files}, indent=1, sort_keys=True)
    (unfinished / MANIFEST).write_text(manifest)
    for name in (MANIFEST, "."):
        sync(unfinished / name)
    final = folder / checkpoint_name(contents.step)
    shutil.rmtree(final, ignore_errors=True)
    unfinished.rename(final)
    sync(folder)
    num_bytes = sum(file.num_bytes for file in written.values()) + len(manifest)
    return SavedCheckpoint(final.name, num_bytes, hashlib.sha256(manifest.encode()).hexdigest())


def _take_tensors(value: Any, whole: dict[str, Tensor], pieces: dict[str, TensorInPieces], path: str = "") -> Any:
    """Convert `value` to JSON and move its tensors to `whole` and `pieces`. Dicts become pairs: keys may be int or str.

    Each `DeferredValue` stays.
    """
    if isinstance(value, DeferredValue):
        return value
    if isinstance(value, TensorInPieces) and 0 in value.shape and value.cut is None:
        value = value.own.view(value.shape)
    if isinstance(value, Tensor):
        whole[path] = value
        return {"tensor": path}
    if isinstance(value, TensorInPieces):
        pieces[path] = value
        if value.cut is not None:
            return {"shards": [path, list(value.shape), asdict(value.cut), [list(place) for place in value.ranked_places]]}
        return {"pieces": [path, list(value.shape), [[rank, *place] for rank, _, *place in value.ranked_places]]}
    if isinstance(value, dict):
        return {"dict": [[key, _take_tensors(item, whole, pieces, f"{path}/{key}")] for key, item in value.items()]}
    if isinstance(value, list | tuple):
        items = [_take_tensors(item, whole, pieces, f"{path}/{index}") for index, item in enumerate(value)]
        return {"tuple" if isinstance(value, tuple) else "list": items}
    assert value is None or isinstance(value, str | int | float | bool), f"{path} is a {type(value).__name__}"
    return {"value": value}


def _read_late(skeleton: Any) -> Any:
    """The skeleton with all values. Waits for each `DeferredValue`."""
    if isinstance(skeleton, DeferredValue):
        return _take_tensors(skeleton.read(), {}, {})
    if isinstance(skeleton, dict):
        return {key: _read_late(item) for key, item in skeleton.items()}
    return [_read_late(item) for item in skeleton] if isinstance(skeleton, list) else skeleton
