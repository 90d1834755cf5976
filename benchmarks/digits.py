"""The handwritten digits that scikit-learn ships: 1,797 grey images of 8 × 8 pixels, of values from 0 to 16.

`data/digits.csv.gz` is scikit-learn's own file (1.9, BSD licence): the test part of Alpaydin and Kaynak's "Optical Recognition
of Handwritten Digits" (UCI, CC BY 4.0). The package is no dependency: transformers would import it, and SciPy, wherever it is.
"""

import gzip
from pathlib import Path

import numpy as np
from PIL import Image


def read_digits() -> tuple[np.ndarray, np.ndarray]:
    """Return the images, uint8 (N, 8, 8) from 0 to 255, and their classes, int64 (N,)."""
    with gzip.open(Path(__file__).parent / "data" / "digits.csv.gz", "rt") as lines:
        table = np.loadtxt(lines, delimiter=",")
    images = np.round(table[:, :-1].reshape(-1, 8, 8) * (255 / 16)).astype(np.uint8)
    return images, table[:, -1].astype(np.int64)


def write_digits(folder: Path, num_images: int = 1797, size: int = 16) -> Path:
    """Write the first images as PNG files of size × size pixels, a folder for each digit."""
    for number, (pixels, label) in enumerate(zip(*read_digits(), strict=True)):
        if number == num_images:
            break
        path = folder / str(label) / f"{number:04}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).resize((size, size), Image.Resampling.BICUBIC).save(path)
    return folder
