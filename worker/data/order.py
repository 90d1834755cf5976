"""The order in which samples are read. It depends only on (seed, epoch), so a rank finds its samples by position alone."""

import hashlib
from dataclasses import dataclass, field

import numpy as np
import torch


@dataclass
class EpochOrder:
    """A stream of epochs; each is a permutation of `num_samples` samples."""

    num_samples: int
    seed: int
    _permutations: dict[int, np.ndarray] = field(default_factory=dict, repr=False)

    def __getitem__(self, position: int) -> int:
        """Return the sample at a position in the stream."""
        epoch, offset = divmod(position, self.num_samples)
        return int(self._permutation(epoch)[offset])

    def take(self, position: int, num_samples: int) -> np.ndarray:
        """Return the samples at a position and after it, int64 (num_samples,)."""
        epoch, offset = divmod(position, self.num_samples)
        taken = self._permutation(epoch)[offset : offset + num_samples]
        while len(taken) < num_samples:
            epoch += 1
            taken = np.concatenate((taken, self._permutation(epoch)[: num_samples - len(taken)]))
        return taken

    def _permutation(self, epoch: int) -> np.ndarray:
        permutation = self._permutations.get(epoch)
        if permutation is None:
            generator = torch.Generator().manual_seed(seed_of("epoch", self.seed, epoch))
            permutation = torch.randperm(self.num_samples, generator=generator).numpy()
            # A batch spans two epochs at most. A thread that reads ahead may be here too: the dict is replaced, never changed.
            kept = {key: value for key, value in self._permutations.items() if key >= epoch - 1}
            self._permutations = kept | {epoch: permutation}
        return permutation


def evaluation_rows(num_samples: int, batch_size: int, num_batches: int, part: int, num_parts: int) -> list[list[int]]:
    """Divide the first `num_batches` × `batch_size` samples, spread over the whole set; returns this part's batches."""
    wanted = min(batch_size * num_batches, num_samples)
    mine = [position * num_samples // wanted for position in range(wanted)][part::num_parts]
    rows = max(1, batch_size // num_parts)
    return [mine[start : start + rows] for start in range(0, len(mine), rows)]


def seed_of(*words: object) -> int:
    """Return a generator's seed that depends on all words and on nothing else."""
    digest = hashlib.sha256(" ".join(map(str, words)).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
