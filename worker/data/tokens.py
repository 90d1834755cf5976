"""Memory-mapped token shards, as their index describes them (`api_schemas/data/tokens.py`), and a function to write them."""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from octet.api_schemas import ANY_FILE, Files, Needs, SpecConflict
from octet.api_schemas.data.stores import StorePath
from octet.api_schemas.data.tokens import INDEX_NAME, TokenIndex, TokenShard, TokensSpec
from octet.worker.common.errors import DataError
from octet.worker.data.windows import TokenWindows

SMALLEST_DTYPES: tuple[tuple[Literal["uint8", "uint16", "uint32"], int], ...] = (
    ("uint8", 1 << 8),
    ("uint16", 1 << 16),
    ("uint32", 1 << 32),
)


class ShardedTokens:
    """A run of tokens over several files. Only the tokens that are read come into memory."""

    def __init__(self, folder: Path, shards: Sequence[TokenShard], dtype: str, files: Files = ANY_FILE) -> None:
        self._arrays = [_map(folder / shard.file, dtype, files) for shard in shards]
        for shard, array in zip(shards, self._arrays, strict=True):
            if len(array) != shard.num_tokens:
                raise DataError(
                    f"{shard.file} has {len(array)} tokens; the index says {shard.num_tokens}. Write the shards again."
                )
        self._ends = list(accumulate(len(array) for array in self._arrays))

    def __len__(self) -> int:
        return self._ends[-1]

    def read(self, start: int, stop: int) -> Tensor:
        """Return the tokens of a range, int64 (stop - start,)."""
        return torch.from_numpy(self._range(start, stop).astype(np.int64))

    def read_rows(self, starts: Sequence[int] | np.ndarray, length: int) -> np.ndarray:
        """Return `length` tokens from each start on, (rows, length)."""
        return np.stack([self._range(int(start), int(start) + length) for start in starts])

    def _range(self, start: int, stop: int) -> np.ndarray:
        parts, shard = [], bisect_right(self._ends, start)
        while start < stop:
            first = self._ends[shard] - len(self._arrays[shard])
            end = min(stop, self._ends[shard])
            parts.append(self._arrays[shard][start - first : end - first])
            start, shard = end, shard + 1
        if len(parts) == 1:
            return parts[0]
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)


def open_source(spec: TokensSpec, sequence_length: int, seed: int, files: Files = ANY_FILE) -> TokenWindows:
    """Map the shards. Raises DataError if they are missing, too short, or differ from the index."""
    folder = spec.place
    try:
        index = TokenIndex.read(folder, files)
        index.check(folder, Needs(sequence_length, index.vocab_size), files)
        train = ShardedTokens(folder, index.train, index.dtype, files)
        evaluation = ShardedTokens(folder, index.evaluation, index.dtype, files)
    except SpecConflict as conflict:
        raise DataError(str(conflict)) from None
    except OSError as error:
        raise DataError(f"cannot read {error.filename or folder}: {error.strerror}. Write the shards again.") from error
    facts = {"train_tokens": len(train), "evaluation_tokens": len(evaluation), "vocab_size": index.vocab_size}
    return TokenWindows(train, evaluation, sequence_length, seed, {name: float(value) for name, value in facts.items()})


class StoredArray:
    """A shard in an object store. What a slice needs is fetched when it is taken."""

    def __init__(self, path: Path, dtype: np.dtype, files: Files) -> None:
        self._path, self._dtype, self._files = path, dtype, files
        self._num_tokens = files.num_bytes(path) // dtype.itemsize

    def __len__(self) -> int:
        return self._num_tokens

    def __getitem__(self, taken: slice) -> np.ndarray:
        """Return a range, which has a start and a stop, of the dtype."""
        width = self._dtype.itemsize
        content = self._files.read(self._path, (taken.stop - taken.start) * width, taken.start * width)
        return np.frombuffer(content, self._dtype)


def _map(path: Path, dtype: str, files: Files) -> np.ndarray | StoredArray:
    little_endian = np.dtype(f"<{np.dtype(dtype).str[1:]}")
    if isinstance(path, StorePath):
        return StoredArray(path, little_endian, files)
    with files.open(path) as file:
        return np.memmap(file, dtype=little_endian, mode="r").view(np.ndarray)  # a memmap takes 3 µs for a slice, an array 0.3


def write_shards(
    folder: Path, vocab_size: int, train: Iterable[Sequence[int]], evaluation: Iterable[Sequence[int]]
) -> TokenIndex:
    """Write one shard for each run of tokens, in the smallest dtype that holds the vocabulary, then the index.

    Raises ValueError for a token outside the vocabulary. It does so before the index is written, so no source is left behind.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / INDEX_NAME).unlink(missing_ok=True)
    shards = {
        part: tuple(write_shard(folder / f"{part}-{number:05}.bin", tokens, vocab_size) for number, tokens in enumerate(runs))
        for part, runs in (("train", train), ("evaluation", evaluation))
    }
    index = TokenIndex(dtype=smallest_dtype(vocab_size), vocab_size=vocab_size, **shards)  # type: ignore[arg-type]
    (folder / INDEX_NAME).write_text(index.model_dump_json(indent=1))
    return index


def smallest_dtype(vocab_size: int) -> Literal["uint8", "uint16", "uint32"]:
    """Return the dtype of the shards of a vocabulary."""
    return next(name for name, limit in SMALLEST_DTYPES if vocab_size <= limit)


def write_shard(path: Path, tokens: Sequence[int] | np.ndarray, vocab_size: int) -> TokenShard:
    """Write a run of tokens as a shard of an index that is still to be written. ValueError as `write_shards`."""
    wide = np.asarray(tokens, dtype=np.int64)
    if wide.size and not 0 <= wide.min() <= wide.max() < vocab_size:
        raise ValueError(
            f"{path.name} has tokens from {wide.min()} to {wide.max()}; allowed: 0 to {vocab_size - 1}. Raise vocab_size."
        )
    wide.astype(f"<{np.dtype(smallest_dtype(vocab_size)).str[1:]}").tofile(path)
    return TokenShard(file=path.name, num_tokens=wide.size)
