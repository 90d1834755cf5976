"""Prompts with completions, and conversations, as tokens; the contract reads the lines (`api_schemas/data/jsonl.py`).

A sample is a row of one record, or of several that do not see each other, padded to the sequence length. Padding stands behind
the records and attention is causal, so no token of a record sees it. Shape suffixes: B sequences, T tokens.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from octet.api_schemas import ANY_FILE, Files, SpecConflict
from octet.api_schemas.data.jsonl import JsonlSpec
from octet.worker.common.errors import DataError
from octet.worker.data.order import EpochOrder, evaluation_rows, seed_of
from octet.worker.data.packing import Rows, pack
from octet.worker.data.source import Batch
from octet.worker.data.tokenizer import RecordTokenizer, TokenizedRecords
from octet.worker.models.cross_entropy import IGNORED

PADDING = 0
"""The token behind a record; its number has no effect."""


@dataclass
class Completions:
    """A `VaryingTargets` of records. train, evaluation: numbers of the records of each part. is_packed: rows hold several."""

    records: TokenizedRecords = field(repr=False)
    train: Sequence[int] = field(repr=False)
    evaluation: Sequence[int] = field(repr=False)
    sequence_length: int
    seed: int
    is_packed: bool = False
    _order: EpochOrder = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._train_rows, self._evaluation_rows = self._divide(self.train), self._divide(self.evaluation)
        self._order = EpochOrder(len(self._train_rows), self.seed)
        self._most_documents = 1 + max(rows.most_documents for rows in (self._train_rows, self._evaluation_rows))

    @property
    def facts(self) -> dict[str, float]:
        """Return the numbers of records, and how many of them were cut, or left out because nothing to learn was left."""
        facts = {
            "train_records": float(len(self.train)),
            "evaluation_records": float(len(self.evaluation)),
            "cut_records": float(self.records.num_cut),
            "left_out_records": float(self.records.num_left_out),
            "train_targets": float(sum(self.records.num_targets[number] for number in self.train)),
            "vocab_size": float(self.records.vocab_size),
        }
        if not self.is_packed:
            return facts
        num_tokens = sum(self.records.lengths[number] - 1 for number in self.train)
        num_rows = len(self._train_rows)
        return facts | {
            "train_rows": float(num_rows),
            "filled_share": float(num_tokens / (num_rows * self.sequence_length)),
        }

    @property
    def num_train_samples(self) -> int:
        """Return the number of rows in one epoch."""
        return len(self._train_rows)

    def num_targets(self, position: int, batch_size: int) -> int:
        """Return the number of targets of the `batch_size` rows that follow `position`."""
        return int(sum(self.records.num_targets[row].sum() for row in self._rows(position, batch_size)))

    def train_batch(self, position: int, batch_size: int) -> Batch:
        """Return the `batch_size` rows that follow `position` in the stream of epochs."""
        return self._gather(self._rows(position, batch_size))

    def evaluation_batches(self, batch_size: int, num_batches: int, part: int, num_parts: int) -> Iterator[Batch]:
        """Yield this part's share of the first `num_batches` × `batch_size` rows, spread over the whole evaluation part."""
        for rows in evaluation_rows(len(self._evaluation_rows), batch_size, num_batches, part, num_parts):
            yield self._gather([self._evaluation_rows[row] for row in rows])

    def _divide(self, numbers: Sequence[int]) -> Rows:
        if not self.is_packed:
            return Rows.of_one_each(numbers)
        return pack(numbers, self.records.lengths - 1, self.sequence_length)

    def _rows(self, position: int, batch_size: int) -> list[np.ndarray]:
        return [self._train_rows[row] for row in self._order.take(position, batch_size)]

    def _gather(self, rows: Sequence[np.ndarray]) -> Batch:
        tokens_BT = torch.full((len(rows), self.sequence_length), PADDING, dtype=torch.int64)
        targets_BT = torch.full_like(tokens_BT, IGNORED)
        documents_BD = torch.full((len(rows), self._most_documents), self.sequence_length, dtype=torch.int32)
        for row, numbers in enumerate(rows):
            start = 0
            for document, number in enumerate(numbers):
                tokens, counts = map(torch.from_numpy, self.records[number])
                stop = start + len(tokens) - 1
                tokens_BT[row, start:stop] = tokens[:-1]
                targets_BT[row, start:stop] = tokens[1:].to(torch.int64).masked_fill(~counts[1:], IGNORED)
                documents_BD[row, document] = start
                start = stop
            documents_BD[row, len(numbers)] = start  # padding is a document of its own
        num_targets_B = torch.tensor([int(self.records.num_targets[numbers].sum()) for numbers in rows], dtype=torch.int64)
        batch = {"tokens": tokens_BT, "targets": targets_BT, "num_targets": num_targets_B}
        return batch | {"documents": documents_BD} if self.is_packed else batch


def open_source(spec: JsonlSpec, sequence_length: int, seed: int, files: Files = ANY_FILE) -> Completions:
    """Read and tokenize all records. Raises DataError, which names file and line, for one that is none."""
    assert spec.tokenizer is not None, "the job's model has completed the spec"
    path = spec.place
    tokenizer = RecordTokenizer(Path(spec.tokenizer), files)
    try:
        # A window of T tokens has a target for each: T + 1 tokens.
        records = TokenizedRecords(tokenizer.encode(spec.lines(path, files)), sequence_length + 1)
    except SpecConflict as conflict:
        raise DataError(str(conflict)) from None
    except OSError as error:
        raise DataError(f"cannot read {error.filename or path}: {error.strerror}. Make it readable.") from error
    if len(records) < 2:
        raise DataError(
            f"{path} has {len(records)} records with a completion in their first {sequence_length + 1} tokens; "
            f"{records.num_left_out} more have none; allowed: at least two. Add records, or raise training.sequence_length."
        )
    generator = torch.Generator().manual_seed(seed_of("evaluation records"))
    shuffled = torch.randperm(len(records), generator=generator).tolist()
    num_evaluation = spec.num_evaluation(len(records))
    return Completions(records, shuffled[num_evaluation:], shuffled[:num_evaluation], sequence_length, seed, spec.packing)
