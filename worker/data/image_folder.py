"""Images in files, a folder for each class: an index of names in memory, each image decoded by Pillow when it is read."""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from octet.api_schemas import Files, ImageInput, SpecConflict
from octet.api_schemas.data.image_folder import check_classes, empty_class, list_classes, list_images
from octet.worker.common.errors import DataError


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
