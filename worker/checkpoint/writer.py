"""Checkpoints are written while training goes on.

`start` begins to copy what a rank writes to the host, on CUDA while the next step computes its gradients (`host_copies.py`); a
thread then writes, syncs and hashes. Where ranks hold pieces, the manifest waits until all of them have met in `finish`;
otherwise the thread writes it too. No thread takes part in a collective. A checkpoint is reported when its manifest is on disk.
"""

import logging
import shutil
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from octet.api_schemas import CheckpointReport
from octet.worker.checkpoint.files import SavedCheckpoint, WrittenFile, checkpoint_name
from octet.worker.checkpoint.host_copies import HostCopies
from octet.worker.checkpoint.write import Contents, agree, complete, contents_of, write_own
from octet.worker.common.errors import Diverged, Fenced, LeaseLost, NonFiniteLoss, Stopped, StorageFull, is_storage_full
from octet.worker.mesh import Axis
from octet.worker.metrics.readback import DeferredValue

_UNFINISHED = ".unfinished_"

logger = logging.getLogger(__name__)


class CheckpointWriter:
    """Writes one checkpoint after the other to a folder. All ranks start and finish each at the same step.

    As a context manager it ends, with what is done inside, the checkpoint that is under way: it waits for it, unless this
    attempt may write nothing more (its lease is lost, another has taken over), or the other ranks know nothing of the error
    that ends this one and will not meet it.
    """

    def __init__(self, folder: Path, world: Axis, tell: Callable[[CheckpointReport], None] | None = None) -> None:
        """world: the ranks that write together. tell: called with each complete checkpoint on the first rank, by `finish`."""
        self.folder, self.world, self._tell = folder, world, tell
        self.copies = HostCopies()
        self._writing: _Writing | None = None

    @property
    def is_writing(self) -> bool:
        """True while a thread of this rank writes."""
        return self._writing is not None and self._writing.thread.is_alive()

    def start(self, step: int, state: dict[str, Any], loss: DeferredValue | float | None = None) -> None:
        """Start to write `state` as the checkpoint of `step`.

        state: nested dicts and lists of tensors, JSON values, and numbers that are read later (`DeferredValue`).

        Waits for the one before, and raises what `finish` raises for it. Call `before_change` before the state changes. loss:
        for the report, in nats. Without pieces only the first rank writes.
        """
        self.finish()
        contents = contents_of(step, state, self.world, self.copies)
        if contents is not None:
            self._writing = _Writing(contents, self.folder, self.world, loss)
            self._writing.thread.start()

    def before_change(self) -> None:
        """Finish the copies before work is issued that changes what checkpoints hold, such as an optimizer's step."""
        self.copies.hold_back()

    def finish(self) -> SavedCheckpoint | None:
        """Wait for the checkpoint that is under way and complete it. Returns it on the first rank; None if there is none.

        Raises StorageFull if the disk is full for one of the ranks that write, on all of them, and leaves nothing unfinished,
        whatever it raises.
        """
        return self._finish(None)

    def __enter__(self) -> Self:
        """Remove what killed attempts have left half-written. No rank writes before its first step with the others."""
        if self.world.is_first:
            for left in self.folder.glob(f"{_UNFINISHED}*"):
                shutil.rmtree(left, ignore_errors=True)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:
            self.finish()
        elif self._writing is None:
            return
        elif isinstance(error, LeaseLost | Fenced) and not self._writing.contents.in_pieces:
            self._writing.is_discarded.set()
            self._writing = None
        elif self._writing.contents.in_pieces and not isinstance(error, Stopped | NonFiniteLoss | Diverged):
            self._discard()
        else:  # with pieces: an error that all ranks raise at the same step, so that they meet
            try:
                self._finish(error if isinstance(error, LeaseLost | Fenced) else None)
            except Exception as failure:  # noqa: BLE001  the error that ended the run is the one to report
                logger.warning("the last checkpoint could not be completed: %s", failure)

    def _finish(self, refusal: Exception | None) -> SavedCheckpoint | None:
        """refusal: why this rank lets no checkpoint be completed."""
        writing, self._writing = self._writing, None
        if writing is None:
            return None
        self.copies.hold_back()
        writing.thread.join()
        try:
            saved = writing.result(refusal)
        except Exception as error:
            if self.world.is_first and refusal is None:
                shutil.rmtree(writing.unfinished, ignore_errors=True)
            if is_storage_full(error):
                step = writing.contents.step
                raise StorageFull(
                    f"the checkpoint of step {step} does not fit on the disk of {self.folder}: {error}"
                ) from error
            raise
        if saved is not None and self._tell is not None:
            step, loss = writing.contents.step, writing.loss.read() if isinstance(writing.loss, DeferredValue) else writing.loss
            report = CheckpointReport(step=step, loss=loss, name=saved.name, num_bytes=saved.num_bytes, sha256=saved.sha256)
            self._tell(report)
        return saved

    def _discard(self) -> None:
        """Remove what this rank has written."""
        writing, self._writing = self._writing, None
        assert writing is not None
        self.copies.hold_back()
        writing.thread.join()
        for name in writing.files:
            (writing.unfinished / name).unlink(missing_ok=True)
        with suppress(OSError):  # others' files are in it
            writing.unfinished.rmdir()


class _Writing:
    """A checkpoint that is being written, and the thread that writes it."""

    def __init__(self, contents: Contents, folder: Path, world: Axis, loss: DeferredValue | float | None) -> None:
        self.contents, self.folder, self.world, self.loss = contents, folder, world, loss
        self.unfinished = folder / f"{_UNFINISHED}{checkpoint_name(contents.step)}"
        self.files: dict[str, WrittenFile] = {}
        self.is_discarded = threading.Event()
        self.thread = threading.Thread(target=self._write, name="octet-checkpoint", daemon=True)
        self._error: Exception | None = None
        self._saved: SavedCheckpoint | None = None

    def result(self, refusal: Exception | None) -> SavedCheckpoint | None:
        """Return the thread's result once it has ended; with pieces, that of all ranks' threads. Raises their errors."""
        error = self._error or refusal
        if self.contents.in_pieces:
            files = agree(self.files, error, self.world)
            return complete(self.folder, self.unfinished, self.contents, files) if self.world.is_first else None
        if error is not None:
            raise error
        return self._saved

    def _write(self) -> None:
        try:
            self.files = write_own(self.contents, self.unfinished, self.world)
            if not self.contents.in_pieces and not self.is_discarded.is_set():
                self._saved = complete(self.folder, self.unfinished, self.contents, self.files)
        except Exception as error:  # noqa: BLE001  raised by `finish`
            self._error = error


def save(folder: Path, step: int, state: dict[str, Any], world: Axis | None = None) -> SavedCheckpoint | None:
    """Write a checkpoint and wait for it. Arguments as for `CheckpointWriter`, result and errors as for its `finish`."""
    writer = CheckpointWriter(folder, world or Axis("world", 1, 0, torch.device("cpu")))
    writer.start(step, state)
    return writer.finish()
