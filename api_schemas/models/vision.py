"""The base of the families of image classifiers: images, classes, and the FLOPs of one image."""

from abc import abstractmethod
from collections.abc import Mapping
from typing import Annotated, ClassVar, NamedTuple

from pydantic import Field

from octet.api_schemas.base import refusal
from octet.api_schemas.inputs import ImageInput, Task
from octet.api_schemas.models.base import FamilySizes, Size, SizedSpec, Sizes
from octet.api_schemas.models.shapes import ParameterShape, Shapes, linear, norm

DropRate = Annotated[float, Field(ge=0.0, lt=1.0)]


class Images(NamedTuple):
    """The RGB images of a preset: pixels along a side of an image and of a patch, and the number of classes."""

    image_size: int = 224
    patch_size: int = 16
    num_classes: int = 1000
    num_channels: int = 3


IMAGENET = Images()


class VisionSizes(FamilySizes):
    """Sizes of a network that divides square images into patches and predicts one class."""

    image_size: Size
    patch_size: Size
    num_channels: Size
    num_classes: Size
    drop_path_rate: DropRate = 0.0

    @property
    @abstractmethod
    def tokens_per_image(self) -> int:
        """Tokens of an image that most of the blocks see."""

    @property
    @abstractmethod
    def flops_per_image(self) -> float:
        """FLOPs of one image, forward and backward, without recomputation."""

    @property
    def task(self) -> Task:
        """Predict an image's class."""
        return "image_class"

    @property
    def takes(self) -> ImageInput:
        """Square images with a class each."""
        return ImageInput(self.image_size, self.num_channels, self.num_classes, self.tokens_per_image)

    def flops_per_token(self, sequence_length: int) -> float:
        """FLOPs of one image, divided by its tokens. sequence_length has no effect: an image has as many tokens as it has."""
        return self.flops_per_image / self.tokens_per_image

    def _projections(self, block_name: str, width: int, block: int) -> Shapes:
        """Yield the projections of attention in a block."""
        for layer in ("q_proj", "k_proj", "v_proj", "o_proj"):
            yield from linear(f"{block_name}.attention.{layer}", width, width, block=block)

    def _norms_and_mlp(self, block_name: str, width: int, block: int) -> Shapes:
        """Yield the two LayerNorms of a block, then its MLP, four times as wide."""
        yield from norm(f"{block_name}.layernorm_before", width, block=block)
        yield from norm(f"{block_name}.layernorm_after", width, block=block)
        yield from linear(f"{block_name}.mlp.fc1", 4 * width, width, block=block)
        yield from linear(f"{block_name}.mlp.fc2", width, 4 * width, block=block)

    def _patches(self, embeddings: str, width: int) -> Shapes:
        """Yield the convolution that embeds patches."""
        name = f"{embeddings}.patch_embeddings.projection"
        yield ParameterShape(f"{name}.weight", (width, self.num_channels, self.patch_size, self.patch_size))
        yield ParameterShape(f"{name}.bias", (width,))

    @property
    def patches_per_side(self) -> int:
        """Patches along a side of an image."""
        return self.image_size // self.patch_size

    @staticmethod
    def require_multiple(field: str, got: int, divisor: int, divisor_name: str) -> None:
        """Raise a `refusal` that names `field` if a size is no multiple of another."""
        if got % divisor:
            allowed = f"a multiple of {divisor_name}, {divisor}"
            raise refusal(field, got=got, allowed=allowed, change=f"Change model.{field} or the other size.")


class VisionSpec(SizedSpec[Sizes]):
    """The fields of images that a job may set for any of these families."""

    defaults: ClassVar[Mapping[str, object]] = {"num_channels": 3, "drop_path_rate": 0.0}

    image_size: Size | None = Field(default=None, description="pixels along a side of an image")
    patch_size: Size | None = Field(default=None, description="pixels along a side of a patch")
    num_channels: Size | None = Field(default=None, description="colours of a pixel; default: 3")
    num_classes: Size | None = None
    drop_path_rate: DropRate | None = Field(
        default=None, description="chance that an image skips the last block in training; grows linearly from 0 at the first"
    )
