"""The training loop's view of its data: batches by position, equal on any rank of any world."""

from collections.abc import Iterator, Mapping
from typing import Protocol

from torch import Tensor

Batch = Mapping[str, Tensor]
"""Tensors by name; the first dimension counts samples.

Text: "tokens" and "targets", int64 (B sequences, T tokens). Masked text: see `worker.data.masking`. Images: "images", fp32
(B, C channels, H height, W width), and "labels", int64 (B).
"""


class Source(Protocol):
    """Training samples in epochs, and evaluation samples from the front; the two are disjoint.

    A position is the number of samples read so far over all ranks. Any rank computes its own samples from it, and this one
    number resumes the stream exactly.
    """

    @property
    def facts(self) -> Mapping[str, float]:
        """Return numbers that describe the data, for the job's summary."""

    def train_batch(self, position: int, batch_size: int) -> Batch:
        """Return the `batch_size` samples that follow `position` in the stream of epochs."""

    def evaluation_batches(self, batch_size: int, num_batches: int, part: int, num_parts: int) -> Iterator[Batch]:
        """Yield this part's share of the first `num_batches` × `batch_size` evaluation samples, spread over the whole set."""
