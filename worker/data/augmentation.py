"""Variations of one training image, and mixtures of two. Everything is drawn from the generator that the caller passes.

Parameters that a spec does not hold are those of the papers and of torchvision's and timm's classes of the same names.
Shape suffixes: C channels, H height, W width.
"""

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image, ImageEnhance, ImageOps
from torch import Tensor

from octet.api_schemas.data.augmentation import AugmentationSpec

CROP_RATIO = (3 / 4, 4 / 3)
ERASED_AREA, ERASED_RATIO = (0.02, 1 / 3), (0.3, 1 / 0.3)
NUM_TRIES = 10
"""Rectangles that are drawn until one fits inside an image."""
EVALUATED_SHARE = 0.875
"""The share of an image's side that the central crop of an evaluation keeps: 224 of 256 pixels."""
CUTMIX_CHANCE = 0.5
"""The chance of CutMix where both it and mixup are wanted."""

Draws = np.random.Generator


class Box(NamedTuple):
    """A rectangle in pixels."""

    left: int
    top: int
    width: int
    height: int


def draw_box(size: tuple[int, int], area: tuple[float, float], ratio: tuple[float, float], draws: Draws) -> Box | None:
    """Draw a rectangle with a uniform share of the area and a log-uniform aspect ratio (Szegedy et al. 2015, section 6).

    size: width and height of the image. Returns None if none of `NUM_TRIES` fits.
    """
    for _ in range(NUM_TRIES):
        pixels = size[0] * size[1] * draws.uniform(*area)
        aspect = math.exp(draws.uniform(math.log(ratio[0]), math.log(ratio[1])))
        width, height = round(math.sqrt(pixels * aspect)), round(math.sqrt(pixels / aspect))
        if 0 < width <= size[0] and 0 < height <= size[1]:
            left, top = draws.integers(size[0] - width + 1), draws.integers(size[1] - height + 1)
            return Box(int(left), int(top), width, height)
    return None


def crop_and_resize(image: Image.Image, area: tuple[float, float], side: int, draws: Draws) -> Image.Image:
    """Cut out a random rectangle and scale it to a square; the largest central one of an allowed ratio if none fits."""
    width, height = image.size
    box = draw_box(image.size, area, CROP_RATIO, draws)
    if box is None:
        cut_width, cut_height = min(width, round(height * CROP_RATIO[1])), min(height, round(width / CROP_RATIO[0]))
        box = Box((width - cut_width) // 2, (height - cut_height) // 2, cut_width, cut_height)
    edges = (box.left, box.top, box.left + box.width, box.top + box.height)
    return image.resize((side, side), Image.Resampling.BICUBIC, box=edges)


def central_crop(image: Image.Image, side: int) -> Image.Image:
    """Scale the shorter side to `side` / `EVALUATED_SHARE` and cut out the centre, as an evaluation sees an image."""
    if image.size == (side, side):
        return image
    kept = min(image.size) * EVALUATED_SHARE
    left, top = (image.width - kept) / 2, (image.height - kept) / 2
    return image.resize((side, side), Image.Resampling.BICUBIC, box=(left, top, left + kept, top + kept))


def to_tensor(image: Image.Image) -> Tensor:
    """Return an image as fp32 (C, H, W) from -1 to 1."""
    pixels = torch.from_numpy(np.array(image, dtype=np.float32)) / 127.5 - 1.0
    return pixels[None] if pixels.dim() == 2 else pixels.permute(2, 0, 1).contiguous()


def vary(image: Image.Image, side: int, spec: AugmentationSpec, draws: Draws) -> Tensor:
    """Return a variation of an image, fp32 (C, side, side): crop, flip, RandAugment, erasing, in this order."""
    image = central_crop(image, side) if spec.crop_area is None else crop_and_resize(image, spec.crop_area, side, draws)
    if draws.random() < spec.flip:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    if spec.randaugment_operations:
        image = randaugment(image, spec.randaugment_operations, spec.randaugment_magnitude, spec.randaugment_spread, draws)
    pixels_CHW = to_tensor(image)
    if draws.random() < spec.erase:
        erase_(pixels_CHW, draws)
    return pixels_CHW


def erase_(pixels_CHW: Tensor, draws: Draws) -> None:
    """Fill a random rectangle with Gaussian noise in place (Zhong et al. 2020, arXiv 1708.04896; per pixel, as DeiT)."""
    num_channels, height, width = pixels_CHW.shape
    box = draw_box((width, height), ERASED_AREA, ERASED_RATIO, draws)
    if box is not None:
        noise = draws.standard_normal((num_channels, box.height, box.width), dtype=np.float32)
        pixels_CHW[:, box.top : box.top + box.height, box.left : box.left + box.width] = torch.from_numpy(noise)


def mix_(pixels_CHW: Tensor, other_CHW: Tensor, spec: AugmentationSpec, draws: Draws) -> float:
    """Mix another image into the first in place; returns the share that is left of the first, and of its target.

    mixup: share · first + (1 - share) · other, share from Beta(alpha, alpha) (Zhang et al. 2018, equation 2).
    CutMix: a rectangle of the other, whose sides are sqrt(1 - share) of the image's (Yun et al. 2019, equation 2).
    """
    if spec.cutmix and (not spec.mixup or draws.random() < CUTMIX_CHANCE):
        return _cut_in_(pixels_CHW, other_CHW, float(draws.beta(spec.cutmix, spec.cutmix)), draws)
    share = float(draws.beta(spec.mixup, spec.mixup))
    pixels_CHW.mul_(share).add_(other_CHW, alpha=1 - share)
    return share


def _cut_in_(pixels_CHW: Tensor, other_CHW: Tensor, share: float, draws: Draws) -> float:
    height, width = pixels_CHW.shape[1:]
    cut = math.sqrt(1 - share)
    middle_x, middle_y = draws.uniform(0, width), draws.uniform(0, height)
    left, right = (int(min(width, max(0, middle_x + side * width * cut / 2))) for side in (-1, 1))
    top, bottom = (int(min(height, max(0, middle_y + side * height * cut / 2))) for side in (-1, 1))
    pixels_CHW[:, top:bottom, left:right] = other_CHW[:, top:bottom, left:right]
    return 1 - (bottom - top) * (right - left) / (height * width)


# RandAugment (Cubuk et al. 2019, arXiv 1909.13719) as DeiT and Swin use it: `rand-m9-mstd0.5-inc1` of their code.
#
# The fifteen operations, and the strength of each at magnitudes from 0 to 10, are those of timm's increasing set
# (timm/data/auto_augment.py): a larger magnitude always changes more. Each chosen operation is applied with a chance of one
# half.

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
