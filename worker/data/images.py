"""Labelled images of a .npz file, in memory as bytes, or of a folder; the contract checks and divides them.

Shape suffixes: N images of the file, B images of a batch, C channels, H height, W width.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from octet.api_schemas import ANY_FILE, Files, ImageInput, SpecConflict
from octet.api_schemas.data.image_folder import check_classes, empty_class, list_classes, list_images
from octet.api_schemas.data.images import IMAGES, LABELS, ImagesSpec, check_shapes, read_headers
from octet.worker.common.errors import DataError
from octet.worker.data.image_parts import DividedImages, Parts
from octet.worker.data.order import evaluation_rows, seed_of
from octet.worker.data.source import Batch, Source


@dataclass
class LabelledImages(DividedImages):
    """A `Source` of images that are in memory."""

    images_NHWC: Tensor = field(repr=False)

    def train_batch(self, position: int, batch_size: int) -> Batch:
        """Return the `batch_size` images that follow `position` in the stream of epochs."""
        return self._gather(self.parts.train[torch.from_numpy(self.order.take(position, batch_size))])

    def evaluation_batches(self, batch_size: int, num_batches: int, part: int, num_parts: int) -> Iterator[Batch]:
        """Yield this part's share of the first `num_batches` × `batch_size` images, spread over the whole evaluation part."""
        for rows in evaluation_rows(len(self.parts.evaluation), batch_size, num_batches, part, num_parts):
            yield self._gather(self.parts.evaluation[rows])

    def _gather(self, numbers_B: Tensor) -> Batch:
        images_BCHW = self.images_NHWC[numbers_B].permute(0, 3, 1, 2).float() / 127.5 - 1.0
        return {"images": images_BCHW.contiguous(), "labels": self.labels_N[numbers_B]}


def open_source(spec: ImagesSpec, takes: ImageInput, seed: int, files: Files = ANY_FILE) -> Source:
    """Open a file or folder of images. Raises DataError if it is missing or does not hold the images that the model takes."""
    path = spec.place
    is_folder = _is_folder(path, files)
    if is_folder or spec.is_varied:
        return _open_varied(spec, takes, seed, files, is_folder=is_folder)
    images_NHWC, labels_N = _read_arrays(path, takes, files)
    return LabelledImages(labels_N, _divide(spec, len(labels_N)), seed, images_NHWC)


def _open_varied(spec: ImagesSpec, takes: ImageInput, seed: int, files: Files, *, is_folder: bool) -> Source:
    try:
        from octet.worker.data.varied_images import ArrayStock, Stock, VariedImages
    except ModuleNotFoundError as error:
        message = (
            "this node has no Pillow, which decodes and varies images. Install octet-fp8[models], or use a .npz file as it is."
        )
        raise DataError(message) from error
    path = spec.place
    stock: Stock = open_folder(path, takes, files) if is_folder else ArrayStock(*_read_arrays(path, takes, files))
    return VariedImages(stock.labels_N, _divide(spec, len(stock.labels_N)), seed, stock, takes, spec.augmentation)


def _is_folder(path: Path, files: Files) -> bool:
    try:
        return files.is_folder(path)
    except (SpecConflict, OSError) as error:
        raise DataError(f"cannot open {path}: {error}") from None


def _divide(spec: ImagesSpec, num_images: int) -> Parts:
    shuffled = torch.randperm(num_images, generator=torch.Generator().manual_seed(seed_of("evaluation images")))
    num_evaluation = spec.num_evaluation(num_images)
    return Parts(shuffled[num_evaluation:], shuffled[:num_evaluation])


def _read_arrays(path: Path, takes: ImageInput, files: Files) -> tuple[Tensor, Tensor]:
    """Return the images, uint8 (N, H, W, C), and their labels, int64 (N,)."""
    try:
        with files.open(path) as file:
            check_shapes(path, *read_headers(path, file), takes)
            file.seek(0)
            with np.load(file, allow_pickle=False) as arrays:
                images, labels = arrays[IMAGES], arrays[LABELS].astype(np.int64)
    except SpecConflict as conflict:
        raise DataError(str(conflict)) from None
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"cannot read {path}: {error}. Write it with numpy.savez, or change data.path.") from error
    if not 0 <= labels.min() <= labels.max() < takes.num_classes:
        raise DataError(
            f"the labels in {path} go from {labels.min()} to {labels.max()}; allowed: 0 to {takes.num_classes - 1}, as "
            f"the model has {takes.num_classes} classes. Change model.num_classes or the labels."
        )
    return torch.from_numpy(images.reshape(*images.shape[:3], -1)), torch.from_numpy(labels)


@dataclass
class FolderStock:
    """The images of all classes, in the order of classes and names. Names take about 40 bytes an image, labels 8.

    names: all relative paths in UTF-8, one after the other. ends_N: where each name ends, int64 (N,).
    """

    folder: Path
    files: Files = field(repr=False)
    mode: str
    names: bytes = field(repr=False)
    ends_N: np.ndarray = field(repr=False)
    labels_N: Tensor = field(repr=False)

    def path(self, number: int) -> Path:
        """Return the path of an image."""
        start = int(self.ends_N[number - 1]) if number else 0
        return self.folder / self.names[start : int(self.ends_N[number])].decode(errors="surrogateescape")

    def read(self, number: int) -> Image.Image:
        """Decode an image. Raises DataError with the name of a file that cannot be read or decoded."""
        path = self.path(number)
        try:
            with self.files.open(path) as file, Image.open(file) as image:
                return image.convert(self.mode)
        except (SpecConflict, OSError, SyntaxError, ValueError, EOFError, Image.DecompressionBombError) as error:
            raise DataError(f"cannot decode the image {path}: {error}. Replace or remove the file.") from error


def open_folder(folder: Path, takes: ImageInput, files: Files) -> FolderStock:
    """List a folder's images. Raises DataError if it cannot be listed or its classes do not fit the model."""
    names, ends, labels, num_bytes = [], [], [], 0
    try:
        classes = list_classes(folder, files)
        check_classes(folder, classes, takes)
        for label, class_name in enumerate(classes):
            found = sorted(f"{class_name}/{name}" for name in list_images(folder, class_name, files))
            if not found:
                raise empty_class(folder / class_name)
            encoded = [name.encode(errors="surrogateescape") for name in found]
            ends.append(num_bytes + np.cumsum([len(name) for name in encoded], dtype=np.int64))
            num_bytes = int(ends[-1][-1])
            names.append(b"".join(encoded))
            labels.append(torch.full((len(found),), label))
    except SpecConflict as conflict:
        raise DataError(str(conflict)) from None
    except OSError as error:
        raise DataError(f"cannot list {folder}: {error}. Make it readable or change data.path.") from error
    mode = "L" if takes.num_channels == 1 else "RGB"
    return FolderStock(folder, files, mode, b"".join(names), np.concatenate(ends), torch.cat(labels))
