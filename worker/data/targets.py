"""Sources that change the targets of another source: masked tokens, and smoothed labels.

Shape suffixes: B sequences or images, T tokens, P predicted tokens of each sequence, K classes.
"""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from octet.worker.data.order import seed_of
from octet.worker.data.source import Batch, DerivedSource

PREDICTED_SHARE = 0.15
MASKED_SHARE, RANDOM_SHARE = 0.8, 0.1
"""Shares of the predicted tokens; the rest stay as they are."""


@dataclass
class MaskedTokens(DerivedSource):
    """A `Source` of masked "tokens" (B, T), with "positions" and "targets" (B, P), all int64.

    The masks are those of Devlin et al. 2019, section 3.1, drawn again in each epoch (Liu et al.
    2019). A sequence's mask depends only on the seed and the sequence's position in the stream, so
    a resumed run, and a run with another number of ranks, draws the same masks. An evaluation
    sequence's mask depends on the seed and its tokens. Every sequence of T tokens has the same
    number P of predicted tokens, so the mean over micro-batches is the mean over tokens.
    """

    vocab_size: int
    mask_token: int
    seed: int

    def train_batch(self, position: int, batch_size: int) -> Batch:
        """Return the `batch_size` sequences that follow `position`, masked."""
        tokens_BT = self.source.train_batch(position, batch_size)["tokens"]
        return self._mask(tokens_BT, (f"train {position + offset}" for offset in range(batch_size)))

    def evaluation_batches(self, batch_size: int, num_batches: int, part: int, num_parts: int) -> Iterator[Batch]:
        """Yield this part's share of the evaluation sequences, masked."""
        for batch in self.source.evaluation_batches(batch_size, num_batches, part, num_parts):
            tokens_BT = batch["tokens"]
            digests = (hashlib.sha256(tokens_T.numpy().tobytes()).hexdigest() for tokens_T in tokens_BT)
            yield self._mask(tokens_BT, (f"evaluation {digest}" for digest in digests))

    def _mask(self, tokens_BT: Tensor, keys: Iterable[str]) -> Batch:
        masked_BT = tokens_BT.clone()
        positions = []
        for tokens_T, key in zip(masked_BT, keys, strict=True):
            generator = torch.Generator().manual_seed(seed_of("mask", self.seed, key))
            num_predicted = max(1, round(PREDICTED_SHARE * len(tokens_T)))
            positions_P = torch.randperm(len(tokens_T), generator=generator)[:num_predicted].sort().values
            draw_P = torch.rand(num_predicted, generator=generator)
            random_P = torch.randint(self.vocab_size, (num_predicted,), generator=generator)
            hidden_P = torch.where(draw_P < MASKED_SHARE + RANDOM_SHARE, random_P, tokens_T[positions_P])
            tokens_T[positions_P] = hidden_P.masked_fill(draw_P < MASKED_SHARE, self.mask_token)
            positions.append(positions_P)
        positions_BP = torch.stack(positions)
        return {"tokens": masked_BT, "positions": positions_BP, "targets": tokens_BT.gather(1, positions_BP)}


@dataclass
class SmoothedLabels(DerivedSource):
    """A `Source` whose training "labels" are the classes' shares of each target, fp32 (B, K).

    Each class gets an equal part of a share of the target (Szegedy et al. 2016, arXiv 1512.00567,
    section 7): target = (1 - share) · one-hot + share / K, as torch's cross_entropy has it.
    Evaluation samples keep their labels.
    """

    num_classes: int
    share: float

    def train_batch(self, position: int, batch_size: int) -> Batch:
        """Return the `batch_size` images that follow `position`, with smoothed targets."""
        batch = self.source.train_batch(position, batch_size)
        labels = batch["labels"]
        targets_BK = labels if labels.is_floating_point() else functional.one_hot(labels, self.num_classes).float()
        return {**batch, "labels": targets_BK * (1 - self.share) + self.share / self.num_classes}

    def evaluation_batches(self, batch_size: int, num_batches: int, part: int, num_parts: int) -> Iterator[Batch]:
        """Yield this part's share of the evaluation images, as they are."""
        return self.source.evaluation_batches(batch_size, num_batches, part, num_parts)
