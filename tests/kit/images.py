"""Small images of few classes, as files."""

from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image


def write_images(path: Path, num_images: int = 96, size: int = 16, num_channels: int = 3, **changes: Any) -> Path:
    """Write noisy images of four classes: dark ones, and those that are bright in one of three channels."""
    generator = np.random.default_rng(0)
    labels = generator.integers(0, 4, num_images)
    images = generator.integers(0, 80, (num_images, size, size, num_channels))
    for image, label in zip(images, labels, strict=True):
        if label < num_channels:
            image[..., label] += 150
    arrays = {"images": images.astype(np.uint8), "labels": labels} | changes
    np.savez_compressed(path, **{name: array for name, array in arrays.items() if array is not None})
    return path


def write_folder(folder: Path, num_images: int = 24, size: tuple[int, int] = (24, 20)) -> Path:
    """Write images of three classes, red, green and blue, as PNG and JPEG, some of them in subfolders."""
    draws = np.random.default_rng(0)
    for number in range(num_images):
        label = number % 3
        pixels = draws.integers(0, 80, (size[1], size[0], 3))
        pixels[..., label] += 150
        name = f"{number:03}.png" if number % 2 else f"more/{number:03}.JPEG"
        path = folder / f"class_{label}" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels.astype(np.uint8)).save(path)
    (folder / "class_0" / "notes.txt").write_text("no image")
    (folder / ".hidden").mkdir()
    return folder
