"""The division of labelled images into a part for training and a part for evaluation."""

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class Parts:
    """Numbers of the images for training and for evaluation, int64."""

    train: Tensor = field(repr=False)
    evaluation: Tensor = field(repr=False)

    def facts(self, labels_N: Tensor) -> dict[str, float]:
        """Return the numbers of images, and the share of the most frequent class: the accuracy of always guessing it."""
        counts = torch.bincount(labels_N[self.evaluation])
        return {
            "train_images": float(len(self.train)),
            "evaluation_images": float(len(self.evaluation)),
            "largest_class_ratio": float(counts.max() / counts.sum()),
        }
