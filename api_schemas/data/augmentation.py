"""Random changes of training images: the parts of the recipes of DeiT and Swin, with their published parameters as defaults."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from octet.api_schemas.base import Contract, refusal

AugmentationPreset = Literal["deit", "swin"]
Chance = Annotated[float, Field(ge=0.0, le=1.0)]
Share = Annotated[float, Field(gt=0.0, le=1.0)]

_DEIT: Mapping[str, Any] = {
    "crop_area": (0.08, 1.0),
    "flip": 0.5,
    "randaugment_operations": 2,
    "mixup": 0.8,
    "cutmix": 1.0,
    "erase": 0.25,
}
AUGMENTATION_PRESETS: Mapping[AugmentationPreset, Mapping[str, Any]] = {"deit": _DEIT, "swin": _DEIT}
"""Touvron et al. 2021, table 9, and Liu et al. 2021, appendix A2.1, which have the same ones."""


class AugmentationSpec(Contract):
    """Variations of training images, drawn from (seed, epoch, image). Without any field images stay as they are."""

    preset: AugmentationPreset | None = Field(default=None, description="a paper's values for the fields that are not set")
    crop_area: tuple[Share, Share] | None = Field(
        default=None,
        description="smallest and largest share of an image's area that a random crop keeps, at 3/4 to 4/3 of its aspect ratio "
        "(Szegedy et al. 2015); null: no random crop",
    )
    flip: Chance = Field(default=0.0, description="chance that an image is mirrored from left to right")
    randaugment_operations: int = Field(default=0, ge=0, le=8, description="operations in a row (Cubuk et al. 2019); 0: none")
    randaugment_magnitude: float = Field(default=9.0, ge=0.0, le=10.0, description="mean strength of an operation")
    randaugment_spread: float = Field(default=0.5, ge=0.0, le=10.0, description="standard deviation of the strength")
    mixup: float = Field(default=0.0, ge=0.0, le=100.0, description="alpha of mixup (Zhang et al. 2018); 0: none")
    cutmix: float = Field(default=0.0, ge=0.0, le=100.0, description="alpha of CutMix (Yun et al. 2019); 0: none")
    erase: Chance = Field(default=0.0, description="chance that a rectangle becomes noise (Zhong et al. 2020)")

    @model_validator(mode="before")
    @classmethod
    def _apply_preset(cls, document: Any) -> Any:
        preset = document.get("preset") if isinstance(document, Mapping) else None
        if not isinstance(preset, str) or preset not in AUGMENTATION_PRESETS:
            return document
        return {**AUGMENTATION_PRESETS[preset], **document}

    @model_validator(mode="after")
    def _numbers_have_an_effect(self) -> Self:
        if self.crop_area is not None and self.crop_area[0] > self.crop_area[1]:
            raise refusal(
                "crop_area",
                got=list(self.crop_area),
                allowed="the smaller share first",
                change="Swap the two numbers of data.augmentation.crop_area.",
            )
        for field in ("randaugment_magnitude", "randaugment_spread"):
            is_set = getattr(self, field) != type(self).model_fields[field].default  # a stored spec has every field
            if is_set and not self.randaugment_operations:
                raise refusal(
                    field,
                    got=getattr(self, field),
                    allowed="together with randaugment_operations of at least 1",
                    change=f"Set data.augmentation.randaugment_operations, or remove data.augmentation.{field}.",
                )
        return self

    @property
    def mixes(self) -> bool:
        """True if two images are mixed, and with them their targets."""
        return bool(self.mixup or self.cutmix)
