"""Turn text files into shards of tokens: what `octet data tokenize` runs, because it needs transformers.

    python -m octet.worker.data.tokenize /data/books --tokenizer /models/llama --out /data/books-tokens --processes 8

Files are selected, and divided into training and evaluation, as source `text` does. A file is cut at line ends into pieces, and
pieces are gathered into shards of about `--shard-bytes` of text. A process of a pool reads, tokenizes and writes each:
memory does not grow with the text, and the shards are the same with any number of processes. The index is written last.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from pydantic import ValidationError

from octet.api_schemas import SpecConflict, TextSpec
from octet.api_schemas.data.tokens import INDEX_NAME, TokenIndex, TokenShard
from octet.worker.common.errors import DataError, RankError
from octet.worker.data.tokenizer import RecordTokenizer
from octet.worker.data.tokens import smallest_dtype, write_shard

PIECE_BYTES = 1 << 20
SHARD_BYTES = 64 << 20
_PROBE_BYTES = 8192
_tokenizers: dict[Path, RecordTokenizer] = {}


@dataclass(frozen=True)
class Piece:
    """Bytes of a file from the first line that begins at or after `start` up to the first one at or after `stop`."""

    path: Path
    start: int
    stop: int
    num_bytes: int
    """The bytes of the whole file."""


@dataclass(frozen=True)
class Shard:
    """A file to write, and the pieces of text that it holds."""

    part: str
    name: str
    pieces: tuple[Piece, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of text, up to the ends of lines."""
        return sum(piece.stop - piece.start for piece in self.pieces)


def tokenize(spec: TextSpec, tokenizer: Path, out: Path, num_processes: int = 1, shard_bytes: int = SHARD_BYTES) -> TokenIndex:
    """Write the shards of the text that a spec selects, and their index, to a new or empty folder; prints progress.

    Each file that is not empty is a document: it begins as the tokenizer begins a text, and ends with its end-of-text token.
    Raises DataError, which names the file, for what cannot be read or is not UTF-8, and for a part without tokens.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise DataError(f"--out {out} exists and is not an empty folder; allowed: an empty or a new one. Name another.")
    try:
        parts = _parts(spec)
    except SpecConflict as conflict:
        raise DataError(str(conflict).replace("data.path", "PATH").replace("data.", "--")) from None
    except OSError as error:
        raise DataError(
            f"cannot read {error.filename or spec.path}: {error.strerror}. Make it readable, or exclude it."
        ) from error
    vocab_size = _load(tokenizer).vocab_size
    out.mkdir(parents=True, exist_ok=True)
    shards = [shard for part, pieces in parts.items() for shard in _shards(part, pieces, shard_bytes)]
    written: dict[str, list[TokenShard]] = {part: [] for part in parts}
    progress = _Progress(shards)
    write = partial(_write, tokenizer=tokenizer, out=out, vocab_size=vocab_size)
    for shard, num_tokens in zip(shards, _in_processes(write, shards, num_processes), strict=True):
        progress.add(shard, num_tokens)
        if num_tokens:
            written[shard.part].append(TokenShard(file=shard.name, num_tokens=num_tokens))
    if empty := [part for part, found in written.items() if not found]:
        raise DataError(f"the {empty[0]} part of {spec.path} has no tokens; allowed: text in both parts. Add text.")
    dtype = smallest_dtype(vocab_size)
    index = TokenIndex(dtype=dtype, vocab_size=vocab_size, **{part: tuple(found) for part, found in written.items()})  # type: ignore[arg-type]
    (out / INDEX_NAME).write_text(index.model_dump_json(indent=1))
    return index


class _Progress:
    """Prints a line for each finished shard on standard error."""

    def __init__(self, shards: Sequence[Shard]) -> None:
        self._num_shards, self._all_bytes = len(shards), sum(shard.num_bytes for shard in shards)
        self._num_done = self._num_bytes = self._num_tokens = 0
        self._started_s = time.monotonic()

    def add(self, shard: Shard, num_tokens: int) -> None:
        """Count a shard that is written."""
        self._num_done += 1
        self._num_bytes += shard.num_bytes
        self._num_tokens += num_tokens
        bytes_per_s = self._num_bytes / max(time.monotonic() - self._started_s, 1e-3)
        sys.stderr.write(
            f"{self._num_done} of {self._num_shards} shards, {100 * self._num_bytes / max(1, self._all_bytes):.0f} % of "
            f"{self._all_bytes / 1e6:,.1f} MB, {self._num_tokens:,} tokens, {bytes_per_s / 1e6:.2f} MB/s\n"
        )
        sys.stderr.flush()


def _parts(spec: TextSpec) -> dict[str, list[Piece]]:
    """Select the files, and return the pieces of training and of evaluation."""
    root = Path(spec.path)
    if not root.is_dir():
        size = root.stat().st_size
        cut = spec.divide_bytes(size)
        return {"train": list(_pieces(root, 0, cut, size)), "evaluation": list(_pieces(root, cut, size, size))}
    names = [name for name, is_read in spec.entries(root) if is_read and not spec.is_binary(_beginning(root / name))]
    if len(names) < 2:
        raise spec.too_few_files(len(names))
    divided = zip(("train", "evaluation"), spec.divide_files(names), strict=True)
    return {part: [piece for name in files for piece in _file_pieces(root / name)] for part, files in divided}


def _beginning(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(_PROBE_BYTES)


def _file_pieces(path: Path) -> Iterator[Piece]:
    size = path.stat().st_size
    return _pieces(path, 0, size, size)


def _pieces(path: Path, start: int, stop: int, size: int) -> Iterator[Piece]:
    for first in range(start, stop, PIECE_BYTES):
        yield Piece(path, first, min(first + PIECE_BYTES, stop), size)


def _shards(part: str, pieces: Sequence[Piece], shard_bytes: int) -> Iterator[Shard]:
    """Gather pieces in order. A shard is full when its text reaches `shard_bytes`."""
    begins = list(accumulate((piece.stop - piece.start for piece in pieces), initial=0))
    starts = [at for at in range(len(pieces)) if at == 0 or begins[at] // shard_bytes != begins[at - 1] // shard_bytes]
    for number, (first, last) in enumerate(pairwise([*starts, len(pieces)])):
        yield Shard(part, f"{part}-{number:05}.bin", tuple(pieces[first:last]))


def _in_processes(write: Callable[[Shard], int], shards: Sequence[Shard], num_processes: int) -> Iterator[int]:
    if num_processes == 1:
        yield from map(write, shards)
        return
    with ProcessPoolExecutor(num_processes, get_context("spawn")) as pool:
        yield from pool.map(write, shards)


def _write(shard: Shard, tokenizer: Path, out: Path, vocab_size: int) -> int:
    """Tokenize and write a shard, if it has tokens; returns how many. Runs in a process of the pool."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the pool's processes are the parallelism
    tokens: list[np.ndarray] = []
    for piece in shard.pieces:
        text = _read(piece)
        encoded = _load(tokenizer).encode_part(text, begins=piece.start == 0, ends=piece.stop == piece.num_bytes)
        tokens.append(np.asarray(encoded, dtype=np.int64))
    joined = np.concatenate(tokens)
    if not len(joined):
        return 0
    return write_shard(out / shard.name, joined, vocab_size).num_tokens


def _load(folder: Path) -> RecordTokenizer:
    """Load the tokenizer once in a process."""
    if folder not in _tokenizers:
        _tokenizers[folder] = RecordTokenizer(folder)
    return _tokenizers[folder]


def _read(piece: Piece) -> str:
    try:
        with piece.path.open("rb") as file:
            first, last = (_line_at(file, at, piece.num_bytes) for at in (piece.start, piece.stop))
            file.seek(first)
            content = file.read(last - first)
    except OSError as error:
        raise DataError(f"cannot read {piece.path}: {error.strerror}. Make it readable, or exclude it.") from error
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise DataError(
            f"{piece.path} is not UTF-8 at byte {first + error.start}: {error.reason}; allowed: text in UTF-8. Convert it, or "
            "leave it out with --exclude."
        ) from error


def _line_at(file: BinaryIO, at: int, num_bytes: int) -> int:
    """Return the start of the first line that begins at or after a byte; the ends of the file are beginnings too."""
    if at in (0, num_bytes):
        return at
    file.seek(at - 1)
    file.readline()
    return file.tell()


def main(arguments: Sequence[str] | None = None) -> int:
    """Tokenize, and print what was written. Exit status: 0, or 2 with the reason on standard error."""
    parser = argparse.ArgumentParser(prog="python -m octet.worker.data.tokenize", description="Write text as shards of tokens.")
    parser.add_argument("path", type=Path, help="a text file, or a folder of them")
    parser.add_argument("--tokenizer", type=Path, required=True, help="a folder with a tokenizer of transformers")
    parser.add_argument("--out", type=Path, required=True, help="a folder that does not exist yet, or is empty")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="default: one for each core")
    parser.add_argument("--include", action="append", help="a glob of files to read, such as **/*.txt; may be repeated")
    parser.add_argument("--exclude", action="append", help="a glob of files to leave out; may be repeated")
    parser.add_argument("--evaluation-fraction", type=float, default=0.1, help="the share that is held out")
    parser.add_argument("--shard-bytes", type=int, default=SHARD_BYTES, help="bytes of text in a shard, about")
    options = parser.parse_args(arguments)
    for name in ("processes", "shard_bytes"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is {getattr(options, name)}; allowed: 1 or more")
    selects: dict[str, Any] = {name: tuple(given) for name in ("include", "exclude") if (given := getattr(options, name))}
    try:
        spec = TextSpec(path=str(options.path.resolve()), evaluation_fraction=options.evaluation_fraction, **selects)
        index = tokenize(spec, options.tokenizer, options.out, options.processes, options.shard_bytes)
    except ValidationError as error:
        for each in error.errors():
            sys.stderr.write(f"--{'.'.join(map(str, each['loc'])).replace('_', '-')}: {each['msg']}\n")
        return 2
    except (RankError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    counts = [sum(shard.num_tokens for shard in shards) for shards in (index.train, index.evaluation)]
    sys.stdout.write(
        f"{options.out} holds {counts[0]:,} tokens to train on and {counts[1]:,} to evaluate on, of a vocabulary of "
        f"{index.vocab_size:,}. Train with: data: {{source: tokens, path: {options.out.resolve()}}}\n"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
