"""A run of tokens cut into windows, in an order that depends only on (seed, epoch).

An epoch is a permutation of the training windows. Any rank of any world size computes its sequences from the position, and
this one number resumes the stream exactly.

Shape suffixes: B sequences, T tokens.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view
from torch import Tensor

from octet.worker.data.order import EpochOrder, evaluation_rows
from octet.worker.data.source import Batch
from octet.worker.models.cross_entropy import IGNORED
from octet.worker.models.documents import document_starts


class Tokens(Protocol):
    """A run of tokens that need not be in memory."""

    def __len__(self) -> int: ...

    def read(self, start: int, stop: int) -> Tensor:
        """Return the tokens of a range, int64 (stop - start,)."""

    def read_rows(self, starts: Sequence[int] | np.ndarray, length: int) -> np.ndarray:
        """Return `length` tokens from each start on, (rows, length), of the dtype in which they are held."""


class HeldTokens:
    """Tokens in memory, of any integer dtype."""

    def __init__(self, tokens: np.ndarray) -> None:
        """tokens: (N,)."""
        self._tokens = tokens
        self._windows = tokens[:, None]

    def __len__(self) -> int:
        return len(self._tokens)

    def read(self, start: int, stop: int) -> Tensor:
        """Return the tokens of a range, int64 (stop - start,)."""
        return torch.from_numpy(self._tokens[start:stop].astype(np.int64))

    def read_rows(self, starts: Sequence[int] | np.ndarray, length: int) -> np.ndarray:
        """Return `length` tokens from each start on, (rows, length)."""
        windows = self._windows
        if windows.shape[1] != length:  # a view, kept because to make it takes longer than to read a batch
            windows = self._windows = sliding_window_view(self._tokens, length)
        return windows[starts]


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
        return self._gather(self.train, self._order.take(position, batch_size))

    def evaluation_batches(self, batch_size: int, num_batches: int, part: int, num_parts: int) -> Iterator[Batch]:
        """Yield this part's share of the first `num_batches` × `batch_size` windows, spread over the whole text."""
        for windows in evaluation_rows(self.num_evaluation_windows, batch_size, num_batches, part, num_parts):
            yield self._gather(self.evaluation, np.array(windows))

    def _gather(self, tokens: Tokens, windows_B: np.ndarray) -> Batch:
        rows = tokens.read_rows(windows_B * self.sequence_length, self.sequence_length + 1)
        parts = {"tokens": rows[:, :-1], "targets": rows[:, 1:]}
        return {name: torch.from_numpy(part.astype(np.int64)) for name, part in parts.items()}


@dataclass
class DocumentWindows(TokenWindows):
    """A `VaryingTargets` of windows over documents that do not see each other. A document's last token predicts nothing.

    train_starts, evaluation_starts: where the documents of each part begin, int64 ascending from 0; each document has at least
    two tokens, so each window has a target.
    """

    train_starts: Tensor = field(repr=False)
    evaluation_starts: Tensor = field(repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        begun = [
            torch.bincount(starts[starts % self.sequence_length != 0] // self.sequence_length, minlength=1).max()
            for starts in (self.train_starts, self.evaluation_starts)
        ]
        self._most_documents = 1 + int(max(begun))  # of a window: the first token's, and those that begin behind it

    def num_targets(self, position: int, batch_size: int) -> int:
        """Return the number of targets of the `batch_size` windows that follow `position`."""
        first = torch.from_numpy(self._order.take(position, batch_size) * self.sequence_length)
        num_borders = self._num_begun(first + self.sequence_length) - self._num_begun(first)
        return batch_size * self.sequence_length - int(num_borders.sum())

    def _num_begun(self, places: Tensor) -> Tensor:
        """Return how many training documents begin up to each place, the place counted."""
        return torch.searchsorted(self.train_starts, places, right=True)

    def _gather(self, tokens: Tokens, windows_B: np.ndarray) -> Batch:
        batch = super()._gather(tokens, windows_B)
        starts = self.train_starts if tokens is self.train else self.evaluation_starts
        places_BT = torch.from_numpy(windows_B * self.sequence_length)[:, None] + torch.arange(self.sequence_length + 1)
        numbers_BT = torch.searchsorted(starts, places_BT, right=True)
        is_last_BT = numbers_BT[:, 1:] != numbers_BT[:, :-1]
        return {
            "tokens": batch["tokens"],
            "targets": batch["targets"].masked_fill(is_last_BT, IGNORED),
            "num_targets": (~is_last_BT).sum(1),
            "documents": document_starts(numbers_BT[:, :-1], self._most_documents),
        }


def num_windows(tokens: Tokens, sequence_length: int) -> int:
    """Count the whole windows in a run of tokens. The last window needs one token after it."""
    return max(0, len(tokens) - 1) // sequence_length
