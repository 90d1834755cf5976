"""The division of labelled images into a part for training and a part for evaluation."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from octet.worker.data.order import EpochOrder


@dataclass(frozen=True)
class Parts:
    """Numbers of the images for training and for evaluation, int64."""

    train: Tensor = field(repr=False)
    evaluation: Tensor = field(repr=False)


@dataclass
class DividedImages:
    """The members that sources of labelled images share. labels_N: of all images, int64 (N,)."""

    labels_N: Tensor = field(repr=False)
    parts: Parts
    seed: int
    order: EpochOrder = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.order = EpochOrder(len(self.parts.train), self.seed)

    @property
    def facts(self) -> dict[str, float]:
        """Return the numbers of images, and the share of the most frequent class: the accuracy of always guessing it."""
        counts = torch.bincount(self.labels_N[self.parts.evaluation])
        return {
            "train_images": float(len(self.parts.train)),
            "evaluation_images": float(len(self.parts.evaluation)),
            "largest_class_ratio": float(counts.max() / counts.sum()),
        }

    @property
    def num_train_samples(self) -> int:
        """Return the number of images in one epoch."""
        return len(self.parts.train)
