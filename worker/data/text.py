"""Text as bytes: which files, which windows, in which order.

A corpus is one run of bytes cut into windows of `sequence_length` tokens. An epoch is a permutation of the windows that
depends on (seed, epoch) alone, and a position is the number of sequences read so far over all ranks. So any rank of any
world size finds its sequences from the position, and that one number resumes the stream exactly.
"""

import hashlib
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from api_schemas import DataSpec
from worker.errors import DataError

# B sequences, T tokens
_BINARY_PROBE_BYTES = 8192


class Batch(NamedTuple):
    """Inputs and, shifted by one, what follows each of them; both int64 of shape (B, T)."""

    tokens_BT: Tensor
    targets_BT: Tensor


@dataclass
class TextData:
    """Training windows in epochs, evaluation windows from the front; disjoint files (or parts of the one file)."""

    train: Tensor = field(repr=False)
    evaluation: Tensor = field(repr=False)
    sequence_length: int
    seed: int
    facts: dict[str, float]
    _permutations: dict[int, Tensor] = field(default_factory=dict, repr=False)

    @property
    def num_train_windows(self) -> int:
        return _num_windows(self.train, self.sequence_length)

    @property
    def num_evaluation_windows(self) -> int:
        return _num_windows(self.evaluation, self.sequence_length)

    def train_batch(self, position: int, batch_size: int) -> Batch:
        """The `batch_size` sequences that follow `position` in the stream of epochs."""
        indices = [self._window_at(position + offset) for offset in range(batch_size)]
        return _gather(self.train, indices, self.sequence_length)

    def evaluation_batches(self, batch_size: int, num_batches: int, part: int, num_parts: int) -> Iterator[Batch]:
        """This part's share of the first `num_batches` × `batch_size` evaluation windows, spread over the whole text."""
        wanted = min(batch_size * num_batches, self.num_evaluation_windows)
        indices = [position * self.num_evaluation_windows // wanted for position in range(wanted)]
        mine = indices[part::num_parts]
        rows = max(1, batch_size // num_parts)
        for start in range(0, len(mine), rows):
            yield _gather(self.evaluation, mine[start : start + rows], self.sequence_length)

    def _window_at(self, position: int) -> int:
        epoch, offset = divmod(position, self.num_train_windows)
        if epoch not in self._permutations:
            generator = torch.Generator().manual_seed(_epoch_seed(self.seed, epoch))
            # A batch spans two epochs at most.
            self._permutations = {key: value for key, value in self._permutations.items() if key >= epoch - 1}
            self._permutations[epoch] = torch.randperm(self.num_train_windows, generator=generator)
        return int(self._permutations[epoch][offset])


def load_text(spec: DataSpec, sequence_length: int, seed: int) -> TextData:
    """Read the corpus. Raises DataError where there is nothing to read or a part is shorter than one sequence."""
    root = Path(spec.path)
    if root.is_file():
        whole = root.read_bytes()
        counts: dict[str, float] = {"train_files": 1, "evaluation_files": 1, "binary_files": 0}
        cut = len(whole) - math.ceil(len(whole) * spec.evaluation_fraction)
        train, evaluation = whole[:cut], whole[cut:]
    else:
        train, evaluation, counts = _read_folder(root, spec)
    data = TextData(
        train=_as_tensor(train),
        evaluation=_as_tensor(evaluation),
        sequence_length=sequence_length,
        seed=seed,
        facts={
            **counts,
            "train_bytes": len(train),
            "evaluation_bytes": len(evaluation),
            "unigram_entropy_nats": unigram_entropy_nats(_as_tensor(evaluation)),
        },
    )
    for name, count in (("training", data.num_train_windows), ("evaluation", data.num_evaluation_windows)):
        if count < 1:
            raise DataError(
                f"the {name} text of {spec.path} must hold more than {sequence_length} bytes; got "
                f"{len(train) if name == 'training' else len(evaluation)}. Add text, shorten training.sequence_length, "
                "or change data.evaluation_fraction."
            )
    return data


def unigram_entropy_nats(text: Tensor) -> float:
    """Entropy of the distribution of single bytes, in nats per byte: what a model that ignores context can reach at best."""
    if text.numel() == 0:
        return 0.0
    counts = torch.bincount(text.to(torch.int64), minlength=256).double()
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * shares.log()).sum())


def _read_folder(root: Path, spec: DataSpec) -> tuple[bytes, bytes, dict[str, float]]:
    names = sorted(_selected(root, spec), key=lambda name: hashlib.sha256(name.encode()).digest())
    texts, num_binary = [], 0
    for name in names:
        try:
            content = (root / name).read_bytes()
        except OSError as error:
            raise DataError(f"cannot read {root / name}: {error.strerror}. Make it readable or exclude it.") from error
        if b"\0" in content[:_BINARY_PROBE_BYTES]:
            num_binary += 1
        else:
            texts.append(content)
    if len(texts) < 2:
        raise DataError(
            f"a folder needs at least two text files, one to train on and one to evaluate; {root} has {len(texts)} that "
            "data.include and data.exclude select. Change the globs, or give data.path a single file."
        )
    num_evaluation = min(len(texts) - 1, math.ceil(len(texts) * spec.evaluation_fraction))
    counts: dict[str, float] = {
        "train_files": len(texts) - num_evaluation,
        "evaluation_files": num_evaluation,
        "binary_files": num_binary,
    }
    return b"\n".join(texts[num_evaluation:]), b"\n".join(texts[:num_evaluation]), counts


def _selected(root: Path, spec: DataSpec) -> Iterator[str]:
    """Paths relative to the root, of regular files only: links are not followed, so nothing outside is read."""
    if not root.is_dir():
        raise DataError(f"data.path {root} is neither a file nor a folder on this node. Mount it or change data.path.")
    for folder, subfolders, files in os.walk(root):
        parent = Path(folder).relative_to(root)
        subfolders[:] = [name for name in subfolders if not spec.selects_nothing_below((parent / name).as_posix())]
        for file in files:
            name = (parent / file).as_posix()
            if spec.selects(name) and not Path(folder, file).is_symlink() and Path(folder, file).is_file():
                yield name


def _as_tensor(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else torch.empty(0, dtype=torch.uint8)


def _num_windows(text: Tensor, sequence_length: int) -> int:
    return max(0, text.numel() - 1) // sequence_length


def _gather(text: Tensor, indices: list[int], sequence_length: int) -> Batch:
    starts = [index * sequence_length for index in indices]
    rows = torch.stack([text[start : start + sequence_length + 1] for start in starts]).to(torch.int64)
    return Batch(rows[:, :-1].contiguous(), rows[:, 1:].contiguous())


def _epoch_seed(seed: int, epoch: int) -> int:
    digest = hashlib.sha256(f"epoch {seed} {epoch}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
