"""RandAugment (Cubuk et al. 2019, arXiv 1909.13719) as DeiT and Swin use it: `rand-m9-mstd0.5-inc1` of their code.

The fifteen operations, and the strength of each at magnitudes from 0 to 10, are those of timm's increasing set
(timm/data/auto_augment.py): a larger magnitude always changes more. Each chosen operation is applied with a chance of one half.
"""

from collections.abc import Callable, Mapping

import numpy as np
from PIL import Image, ImageEnhance, ImageOps

APPLIED = 0.5
"""The chance that a chosen operation is applied."""
LARGEST_MAGNITUDE = 10.0
_GREY = 128
_BICUBIC = Image.Resampling.BICUBIC

Operation = Callable[[Image.Image, float, float], Image.Image]
"""Takes an image, the magnitude divided by LARGEST_MAGNITUDE, and a sign (1 or -1) for what has two directions."""


def _fill(image: Image.Image) -> int | tuple[int, int, int]:
    return _GREY if image.mode == "L" else (_GREY, _GREY, _GREY)


def _affine(image: Image.Image, *rows: float) -> Image.Image:
    return image.transform(image.size, Image.Transform.AFFINE, rows, _BICUBIC, fillcolor=_fill(image))


def _enhancement(share: float, sign: float) -> float:
    return max(0.1, 1.0 + sign * 0.9 * share)


def _solarize_add(image: Image.Image, share: float, _sign: float) -> Image.Image:
    added = min(128, int(110 * share))
    return image.point([min(255, value + added) if value < 128 else value for value in range(256)] * len(image.getbands()))


OPERATIONS: Mapping[str, Operation] = {
    "autocontrast": lambda image, _share, _sign: ImageOps.autocontrast(image),
    "equalize": lambda image, _share, _sign: ImageOps.equalize(image),
    "invert": lambda image, _share, _sign: ImageOps.invert(image),
    "rotate": lambda image, share, sign: image.rotate(sign * 30 * share, _BICUBIC, fillcolor=_fill(image)),
    "posterize": lambda image, share, _sign: ImageOps.posterize(image, max(1, 4 - int(4 * share))),
    "solarize": lambda image, share, _sign: ImageOps.solarize(image, 256 - min(256, int(256 * share))),
    "solarize_add": _solarize_add,
    "color": lambda image, share, sign: ImageEnhance.Color(image).enhance(_enhancement(share, sign)),
    "contrast": lambda image, share, sign: ImageEnhance.Contrast(image).enhance(_enhancement(share, sign)),
    "brightness": lambda image, share, sign: ImageEnhance.Brightness(image).enhance(_enhancement(share, sign)),
    "sharpness": lambda image, share, sign: ImageEnhance.Sharpness(image).enhance(_enhancement(share, sign)),
    "shear_x": lambda image, share, sign: _affine(image, 1, sign * 0.3 * share, 0, 0, 1, 0),
    "shear_y": lambda image, share, sign: _affine(image, 1, 0, 0, sign * 0.3 * share, 1, 0),
    "translate_x": lambda image, share, sign: _affine(image, 1, 0, sign * 0.45 * share * image.width, 0, 1, 0),
    "translate_y": lambda image, share, sign: _affine(image, 1, 0, 0, 0, 1, sign * 0.45 * share * image.height),
}


def randaugment(
    image: Image.Image, num_operations: int, magnitude: float, spread: float, draws: np.random.Generator
) -> Image.Image:
    """Apply randomly chosen operations in a row, each at a strength of N(magnitude, spread), kept from 0 to 10.

    image: of mode RGB or L. draws: choose the operation, its strength and its direction.
    """
    names = list(OPERATIONS)
    for number in draws.integers(len(names), size=num_operations):
        is_applied, sign = draws.random() < APPLIED, 1.0 if draws.random() < 0.5 else -1.0
        strength = min(LARGEST_MAGNITUDE, max(0.0, draws.normal(magnitude, spread)))
        if is_applied:
            image = OPERATIONS[names[number]](image, strength / LARGEST_MAGNITUDE, sign)
    return image
