"""Labelled images in one .npz file of NumPy, or in a folder for each class: what is checked, and which ones evaluate.

`image_folder.py` has the folders. The header of each array is read with the standard library alone, because the control plane
has no NumPy. Nothing is unpickled.
"""

import ast
import math
import zipfile
from pathlib import Path
from typing import BinaryIO, Literal, NamedTuple

from pydantic import Field

from octet.api_schemas.base import SpecConflict
from octet.api_schemas.data.augmentation import AugmentationSpec
from octet.api_schemas.data.base import Needs, SourceSpec
from octet.api_schemas.data.files import ANY_FILE, Files
from octet.api_schemas.data.image_folder import check_folder
from octet.api_schemas.inputs import BatchKind, ImageInput

IMAGES, LABELS = "images", "labels"
LABEL_DTYPES = ("|u1", "<u2", "<u4", "|i1", "<i2", "<i4", "<i8")
_MAGIC = b"\x93NUMPY"
_MAX_HEADER_BYTES = 4096


class ArrayHeader(NamedTuple):
    """The description of one array: NumPy's name of its dtype, and its shape."""

    dtype: str
    shape: tuple[int, ...]


class ImagesSpec(SourceSpec):
    """Images and their classes from a folder, or a .npz file as `numpy.savez(path, images=…, labels=…)` writes it.

    Folder: `<class>/**/<image>`; classes are numbered in the order of their names. An evaluation scales an image's shorter
    side and cuts out the centre. File: images uint8 (N, H, W) or (N, H, W, C), as large as the model's images; labels integers
    from 0, (N,); every rank holds them in memory. The share `evaluation_fraction` of the images (at least one) is kept for
    evaluation; it is chosen at random, the same in every job. Pixels from 0 to 255 become values from -1 to 1.
    """

    source: Literal["images"] = "images"
    evaluation_fraction: float = Field(default=0.1, gt=0.0, lt=1.0)
    augmentation: AugmentationSpec = AugmentationSpec()

    @property
    def gives(self) -> BatchKind:
        """Images."""
        return "images"

    @property
    def is_varied(self) -> bool:
        """True if training images are varied."""
        return self.augmentation != AugmentationSpec()

    def num_evaluation(self, num_images: int) -> int:
        """Return how many images are kept for evaluation."""
        return min(num_images - 1, math.ceil(num_images * self.evaluation_fraction))

    def check(self, path: Path, needs: Needs, files: Files = ANY_FILE) -> None:
        """Check as `SourceSpec.check` says: the arrays' shapes, or the classes of a folder and one image of each."""
        assert needs.images is not None
        if files.is_folder(path):
            check_folder(path, needs.images, files)
            return
        with files.open(path) as file:
            images, labels = read_headers(path, file)
        check_shapes(path, images, labels, needs.images)


def check_shapes(path: Path, images: ArrayHeader, labels: ArrayHeader, takes: ImageInput) -> None:
    """Raise SpecConflict if the arrays do not hold images and labels, or the images are not those that the model takes."""
    if images.dtype != "|u1" or len(images.shape) not in (3, 4) or images.shape[0] < 2:
        allowed = "at least two images as uint8 of shape (N, H, W) or (N, H, W, C)"
        raise SpecConflict("data.path", f"{path}: images {_words(images)}", allowed, "Write the array again.")
    if labels.dtype not in LABEL_DTYPES or labels.shape != images.shape[:1]:
        allowed = f"integers of shape ({images.shape[0]},): a label for each image"
        raise SpecConflict("data.path", f"{path}: labels {_words(labels)}", allowed, "Write the array again.")
    height, width, *channels = images.shape[1:]
    found, wanted = (height, width, *(channels or [1])), (takes.image_size, takes.image_size, takes.num_channels)
    if found != wanted:
        field = "model.num_channels" if found[:2] == wanted[:2] else "model.image_size"
        got = takes.num_channels if found[:2] == wanted[:2] else takes.image_size
        allowed = f"that of the images in {path}, which are {height} × {width} pixels of {found[2]} channels"
        raise SpecConflict(field, got, allowed, f"Change {field}, or write the images in another size.")


def read_headers(path: Path, file: BinaryIO) -> tuple[ArrayHeader, ArrayHeader]:
    """Read the headers of images and labels. Raises SpecConflict if the file is no .npz file or lacks one of them."""
    try:
        with zipfile.ZipFile(file) as archive:
            images, labels = (_read_header(archive, f"{name}.npy") for name in (IMAGES, LABELS))
            return images, labels
    except KeyError as error:
        allowed = f"a .npz file with the arrays {IMAGES} and {LABELS}"
        raise SpecConflict("data.path", f"{path}: {error.args[0]}", allowed, "Write it with numpy.savez.") from None
    except (zipfile.BadZipFile, ValueError, SyntaxError, RecursionError, MemoryError, NotImplementedError, EOFError) as error:
        raise SpecConflict("data.path", path, f"a .npz file of plain arrays ({error})", "Write it with numpy.savez.") from None


def _read_header(archive: zipfile.ZipFile, name: str) -> ArrayHeader:
    """Read a header of NumPy's format, versions 1 to 3 (numpy.lib.format)."""
    with archive.open(name) as member:
        start = member.read(8)
        if start[:6] != _MAGIC:
            raise ValueError(f"{name} is not an array")
        num_bytes = int.from_bytes(member.read(2 if start[6] == 1 else 4), "little")
        if num_bytes > _MAX_HEADER_BYTES:
            raise ValueError(f"the header of {name} has {num_bytes} bytes")
        header = ast.literal_eval(member.read(num_bytes).decode("latin-1"))
    shape = header.get("shape") if isinstance(header, dict) else None
    if (
        not isinstance(shape, tuple)
        or not all(isinstance(size, int) for size in shape)
        or not isinstance(header.get("descr"), str)
    ):
        raise ValueError(f"the header of {name} is damaged")
    return ArrayHeader(header["descr"], shape)


def _words(header: ArrayHeader) -> str:
    return f"{header.dtype} of shape {header.shape}"
