"""Micro-batches in the order of training, read ahead by a thread while the device computes."""

import threading
from queue import SimpleQueue
from typing import NamedTuple

import torch

from octet.api_schemas import BatchDivision
from octet.worker.data.source import Batch, Source, loss_divisor

NUM_AHEAD = 6
"""Micro-batches that wait at most. Each takes a batch's bytes of pinned host memory on CUDA."""
NUM_AT_ONCE = 3
"""Micro-batches that the thread reads when it is woken. To wake it for each one took longer than to read one of text."""


class MicroBatch(NamedTuple):
    """A micro-batch on its device. divisor: of its mean loss (`loss_divisor`). first: the position of its first sample."""

    samples: Batch
    divisor: float
    first: int


class Prefetcher:
    """One data rank's micro-batches of consecutive steps, on its device.

    On CUDA a batch goes from pinned memory to the device without a wait. What the source raises is raised by `take`.
    """

    def __init__(self, source: Source, batch: BatchDivision, data_rank: int, device: torch.device) -> None:
        self._source, self._batch, self._data_rank, self._device = source, batch, data_rank, device
        self._reader: _Reader | None = None

    def micro_batch(self, position: int, index: int) -> MicroBatch:
        """Return micro-batch `index` of the step that begins at `position`, with what its loss is divided by."""
        first = self._batch.first_sample(position, self._data_rank, index)
        return MicroBatch(self.take(position, index), loss_divisor(self._source, self._batch, position, first), first)

    def take(self, position: int, index: int) -> Batch:
        """Return the samples of micro-batch `index` of the step that begins at `position`.

        Whoever takes them in order gets what the thread has read ahead; any other position starts another thread.
        """
        if self._reader is None or self._reader.next_taken != (position, index):
            self.close()
            self._reader = _Reader(self._source, self._batch, self._data_rank, (position, index), self._device)
        return on_device(self._reader.take(), self._device)

    def close(self) -> None:
        """End the thread and wait for it."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None


class _Reader:
    """The thread, and the queue that it fills from one place on."""

    def __init__(
        self, source: Source, batch: BatchDivision, data_rank: int, first: tuple[int, int], device: torch.device
    ) -> None:
        self._source, self._batch, self._data_rank = source, batch, data_rank
        self._device = device
        self._found: SimpleQueue[Batch | Exception] = SimpleQueue()
        self._wanted: SimpleQueue[int] = SimpleQueue()
        self._is_closing = False
        self._num_taken = 0
        self.next_taken = first
        self._wanted.put(NUM_AHEAD)
        self._thread = threading.Thread(target=self._read_forever, args=first, name="octet-data", daemon=True)
        self._thread.start()

    def take(self) -> Batch:
        found = self._found.get()
        if isinstance(found, Exception):
            raise found
        self._num_taken += 1
        if self._num_taken % NUM_AT_ONCE == 0:
            self._wanted.put(NUM_AT_ONCE)
        self.next_taken = self._after(*self.next_taken)
        return found

    def close(self) -> None:
        self._is_closing = True
        self._wanted.put(1)  # the thread may wait for it
        self._thread.join()

    def _after(self, position: int, index: int) -> tuple[int, int]:
        if index + 1 < self._batch.num_micro_batches:
            return position, index + 1
        return position + self._batch.global_batch_size, 0

    def _read_forever(self, position: int, index: int) -> None:
        if self._device.type == "cuda":  # a thread begins on the first device, and would pin memory from there
            torch.cuda.set_device(self._device)
        num_wanted = 0
        while not self._is_closing:
            if not num_wanted:
                num_wanted = self._wanted.get()
                continue
            num_wanted -= 1
            found: Batch | Exception
            try:
                first = self._batch.first_sample(position, self._data_rank, index)
                found = pinned(self._source.train_batch(first, self._batch.micro_batch_size), self._device)
            except Exception as error:  # noqa: BLE001 - raised again where it is waited for
                found = error
            self._found.put(found)
            if isinstance(found, Exception):
                return
            position, index = self._after(position, index)


def pinned(samples: Batch, device: torch.device) -> Batch:
    """Return a batch in memory from which a CUDA device copies while the host goes on. For other devices it stays."""
    return {name: tensor.pin_memory() for name, tensor in samples.items()} if device.type == "cuda" else samples


def on_device(samples: Batch, device: torch.device) -> Batch:
    """Return a batch on a device. From pinned memory the host does not wait for the copy."""
    return {name: tensor.to(device, non_blocking=True) for name, tensor in samples.items()}
