"""Images that are decoded when they are read, and varied in training (`augmentation.py`).

A sample depends only on the seed and its position in the stream of epochs, so a resumed run, and a run with another number of
ranks, reads the same pixels. Mixup and CutMix take the second image from the whole training part, not from the batch.
Shape suffixes: N images, B images of a batch, K classes, C channels, H height, W width.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional

from octet.api_schemas import ImageInput
from octet.api_schemas.data.augmentation import AugmentationSpec
from octet.worker.data.augmentation import central_crop, mix_, to_tensor, vary
from octet.worker.data.image_parts import DividedImages
from octet.worker.data.order import evaluation_rows, seed_of
from octet.worker.data.source import Batch


class Stock(Protocol):
    """Labelled images by number. labels_N: int64 (N,)."""

    labels_N: Tensor

    def read(self, number: int) -> Image.Image:
        """Return an image, of mode RGB or L as the model takes. Raises DataError with the name of a bad file."""


@dataclass
class VariedImages(DividedImages):
    """A `Source` of images from a stock. Where images are mixed, training batches hold the classes' shares of each target."""

    stock: Stock = field(repr=False)
    takes: ImageInput
    augmentation: AugmentationSpec

    def train_batch(self, position: int, batch_size: int) -> Batch:
        """Return the `batch_size` images that follow `position` in the stream of epochs, varied."""
        images, labels = zip(*(self._sample(position + offset) for offset in range(batch_size)), strict=True)
        return {"images": torch.stack(images), "labels": torch.stack(labels)}

    def evaluation_batches(self, batch_size: int, num_batches: int, part: int, num_parts: int) -> Iterator[Batch]:
        """Yield this part's share of the first `num_batches` × `batch_size` images, spread over the whole evaluation part."""
        for rows in evaluation_rows(len(self.parts.evaluation), batch_size, num_batches, part, num_parts):
            numbers_B = self.parts.evaluation[rows]
            side = self.takes.image_size
            images = [to_tensor(central_crop(self.stock.read(number), side)) for number in numbers_B.tolist()]
            yield {"images": torch.stack(images), "labels": self.labels_N[numbers_B]}

    def _sample(self, position: int) -> tuple[Tensor, Tensor]:
        draws = np.random.default_rng(seed_of("augmentation", self.seed, position))
        pixels_CHW, label = self._varied(self.order[position], draws)
        if not self.augmentation.mixes:
            return pixels_CHW, label
        other_CHW, other_label = self._varied(int(draws.integers(len(self.parts.train))), draws)
        share = mix_(pixels_CHW, other_CHW, self.augmentation, draws)
        targets_2K = functional.one_hot(torch.stack((label, other_label)), self.takes.num_classes).float()
        return pixels_CHW, share * targets_2K[0] + (1 - share) * targets_2K[1]

    def _varied(self, index: int, draws: np.random.Generator) -> tuple[Tensor, Tensor]:
        number = int(self.parts.train[index])
        varied_CHW = vary(self.stock.read(number), self.takes.image_size, self.augmentation, draws)
        return varied_CHW, self.labels_N[number]


@dataclass
class ArrayStock:
    """Images that are in memory as bytes. images_NHWC: uint8, of one or three channels."""

    images_NHWC: Tensor
    labels_N: Tensor

    def read(self, number: int) -> Image.Image:
        """Return an image."""
        pixels_HWC = self.images_NHWC[number].numpy()
        return Image.fromarray(pixels_HWC[..., 0] if pixels_HWC.shape[-1] == 1 else pixels_HWC)
