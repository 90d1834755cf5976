"""A run of tokens cut into windows, in an order that depends only on (seed, epoch).

An epoch is a permutation of the training windows. Any rank of any world size computes its sequences from the position, and
this one number resumes the stream exactly.

Shape suffixes: B sequences, T tokens.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from worker.data.order import EpochOrder, evaluation_rows
from worker.data.source import Batch


class Tokens(Protocol):
    """A run of tokens that need not be in memory."""

    def __len__(self) -> int: ...

    def read(self, start: int, stop: int) -> Tensor:
        """Return the tokens of a range, int64 (stop - start,)."""


@dataclass
class TokenWindows:
    """A `Source` of windows of `sequence_length` tokens. Each token's target is the token that follows it."""

    train: Tokens = field(repr=False)
    evaluation: Tokens = field(repr=False)
    sequence_length: int
    seed: int
    facts: dict[str, float]
    _order: EpochOrder = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._order = EpochOrder(self.num_train_windows, self.seed)

    @property
    def num_train_windows(self) -> int:
        """Number of windows in one epoch."""
        return num_windows(self.train, self.sequence_length)

    @property
    def num_train_samples(self) -> int:
        """Number of windows in one epoch, under the name of `Source`."""
        return self.num_train_windows

    @property
    def num_evaluation_windows(self) -> int:
        """Number of windows for evaluation."""
        return num_windows(self.evaluation, self.sequence_length)

    def train_batch(self, position: int, batch_size: int) -> Batch:
        """Return the `batch_size` sequences that follow `position` in the stream of epochs."""
        return self._gather(self.train, [self._order[position + offset] for offset in range(batch_size)])

    def evaluation_batches(self, batch_size: int, num_batches: int, part: int, num_parts: int) -> Iterator[Batch]:
        """Yield this part's share of the first `num_batches` × `batch_size` windows, spread over the whole text."""
        for windows in evaluation_rows(self.num_evaluation_windows, batch_size, num_batches, part, num_parts):
            yield self._gather(self.evaluation, windows)

    def _gather(self, tokens: Tokens, windows: list[int]) -> Batch:
        starts = [window * self.sequence_length for window in windows]
        rows = torch.stack([tokens.read(start, start + self.sequence_length + 1) for start in starts])
        return {"tokens": rows[:, :-1].contiguous(), "targets": rows[:, 1:].contiguous()}


def num_windows(tokens: Tokens, sequence_length: int) -> int:
    """Count the whole windows in a run of tokens. The last window needs one token after it."""
    return max(0, len(tokens) - 1) // sequence_length
