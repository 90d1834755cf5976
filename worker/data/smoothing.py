"""Label smoothing over any source of images: each class gets an equal part of a share of the target (Szegedy et al. 2016).

target = (1 - share) · one-hot + share / K over K classes, section 7 of arXiv 1512.00567, as torch's cross_entropy has it.
Evaluation samples keep their labels.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from torch.nn import functional

from worker.data.source import Batch, DerivedSource


@dataclass
class SmoothedLabels(DerivedSource):
    """A `Source` whose training batches hold the classes' shares of each target as "labels", fp32 (B images, K classes)."""

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
