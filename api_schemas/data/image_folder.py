"""Labelled images as files, a folder for each class: which files are images, and what is checked at submission.

The control plane has no Pillow: it looks at the first bytes of one image of each class. Ranks decode every image they read.
"""

from collections.abc import Iterator
from pathlib import Path

from octet.api_schemas.base import SpecConflict
from octet.api_schemas.data.files import Files
from octet.api_schemas.inputs import ImageInput

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")
_SIGNATURES = (b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"BM", b"GIF8", b"II*\0", b"MM\0*")
_LAYOUT = "a folder for each class, with its images inside"


def list_classes(folder: Path, files: Files) -> tuple[str, ...]:
    """Return the names of the class folders in sorted order; a class's label is its place. Hidden folders are left out."""
    found: list[str] = []

    def note(name: str) -> bool:
        if not name.startswith("."):
            found.append(name)
        return False

    for _ in files.list_below(folder, note):
        pass
    return tuple(sorted(found))


def list_images(folder: Path, class_name: str, files: Files) -> Iterator[str]:
    """Yield the paths of a class's images, relative to its folder, in no order."""
    for name, is_file in files.list_below(folder / class_name, lambda _: True):
        if is_file and name.lower().endswith(SUFFIXES):
            yield name


def check_folder(folder: Path, takes: ImageInput, files: Files) -> None:
    """Raise SpecConflict if the classes do not fit the model, one has no image, or its first image is none."""
    names = list_classes(folder, files)
    check_classes(folder, names, takes)
    for name in names:
        first = next(list_images(folder, name, files), None)
        if first is None:
            raise empty_class(folder / name)
        _check_signature(folder / name / first, files)


def check_classes(folder: Path, names: tuple[str, ...], takes: ImageInput) -> None:
    """Raise SpecConflict unless there are at least two classes, and as many as the model can tell apart or fewer."""
    if takes.num_channels not in (1, 3):
        allowed = "1 (grey) or 3 (RGB) with images in files"
        raise SpecConflict("model.num_channels", takes.num_channels, allowed, "Change model.num_channels, or use a .npz file.")
    if len(names) < 2:
        raise SpecConflict(
            "data.path", f"{folder} with {len(names)} class folders", f"{_LAYOUT}; at least two", "Change data.path."
        )
    if len(names) > takes.num_classes:
        allowed = f"at least {len(names)}, the number of class folders in {folder}"
        raise SpecConflict("model.num_classes", takes.num_classes, allowed, "Raise model.num_classes.")


def empty_class(folder: Path) -> SpecConflict:
    """Return the refusal of a class without images."""
    allowed = f"at least one image ({', '.join(SUFFIXES)})"
    return SpecConflict("data.path", f"no image in {folder}", allowed, "Add images or remove the folder.")


def _check_signature(path: Path, files: Files) -> None:
    start = files.read(path, 16)
    if not start.startswith(_SIGNATURES) and start[8:12] != b"WEBP":
        allowed = "an image as its suffix says"
        raise SpecConflict("data.path", f"{path} begins with {start[:8]!r}", allowed, "Replace or remove the file.")
