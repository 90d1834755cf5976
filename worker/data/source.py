"""The training loop's view of its data: batches by position, equal on any rank of any world."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeGuard, runtime_checkable

from torch import Tensor

from octet.api_schemas import BatchDivision

Batch = Mapping[str, Tensor]
"""Tensors by name; the first dimension counts samples.

Text: "tokens" and "targets", int64 (B sequences, T tokens). Completions: the same, with `IGNORED` as the target of tokens that
do not count, and "num_targets", int64 (B): how many count, at least one. Packed: these, and "documents", int32 (B, D): where
the documents of each row begin (`octet.worker.models.documents`). Masked text: see `octet.worker.data.targets`.
Images: "images", fp32 (B, C channels, H height, W width), and "labels", int64 (B), or in training
the classes' shares of each target, fp32 (B, K classes).
"""


class Source(Protocol):
    """Training samples in epochs, and evaluation samples from the front; the two are disjoint.

    A position is the number of samples read so far over all ranks. Any rank computes its own samples from it, and this one
    number resumes the stream exactly.
    """

    @property
    def facts(self) -> Mapping[str, float]:
        """Return numbers that describe the data, for the job's summary."""

    @property
    def num_train_samples(self) -> int:
        """Return the number of training samples in one epoch."""

    def train_batch(self, position: int, batch_size: int) -> Batch:
        """Return the `batch_size` samples that follow `position` in the stream of epochs."""

    def evaluation_batches(self, batch_size: int, num_batches: int, part: int, num_parts: int) -> Iterator[Batch]:
        """Yield this part's share of the first `num_batches` × `batch_size` evaluation samples, spread over the whole set."""


@dataclass
class DerivedSource:
    """The members that a source made from another one shares with it."""

    source: Source

    @property
    def facts(self) -> Mapping[str, float]:
        """Return the facts of the other source."""
        return self.source.facts

    @property
    def num_train_samples(self) -> int:
        """Return the number of samples in one epoch, that of the other source."""
        return self.source.num_train_samples


@runtime_checkable
class VaryingTargets(Source, Protocol):
    """A source whose samples differ in their number of targets, so micro-batches weigh differently in the global mean."""

    def num_targets(self, position: int, batch_size: int) -> int:
        """Return the number of targets of the `batch_size` samples that follow `position`."""


def loss_divisor(source: Source, batch: BatchDivision, position: int, first: int) -> float:
    """Return what the mean loss of the micro-batch at `first` is divided by, in the global batch at `position`.

    Averaged over the data ranks, the sums of the divided losses are the mean over all targets of the global batch.
    """
    if not _varies(source):
        return batch.num_micro_batches
    num_targets = source.num_targets(position, batch.global_batch_size)
    return num_targets / (source.num_targets(first, batch.micro_batch_size) * batch.num_data_ranks)


def _varies(source: Source) -> TypeGuard[VaryingTargets]:
    return hasattr(source, "num_targets")  # isinstance with a Protocol reads every property, and takes 80 µs of each pass
