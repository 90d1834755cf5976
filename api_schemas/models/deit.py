"""The DeiT family: plain vision transformers with a class token, without distillation (Touvron et al. 2021; Dosovitskiy 2021).

Parameters are those of transformers' ViTForImageClassification, and of timm's `deit_small_patch16_224` and its siblings.
"""

from collections.abc import Mapping
from typing import ClassVar, Literal

from octet.api_schemas.models.base import Capabilities, FamilySizes, Size
from octet.api_schemas.models.shapes import ParameterShape, Shapes, linear, norm
from octet.api_schemas.models.vision import IMAGENET, Images, VisionSizes, VisionSpec

PresetName = Literal["deit-tiny", "deit-s", "deit-b", "vit-1.2b"]


class DeiTSizes(VisionSizes):
    """Every size of a DeiT, resolved. The MLP is four times as wide as the residual stream."""

    declared: ClassVar[Capabilities] = Capabilities(cuda_graphs=True)

    hidden_size: Size
    num_layers: Size
    num_heads: Size

    @property
    def tokens_per_image(self) -> int:
        """Patches and the class token."""
        return self.patches_per_side**2 + 1

    @property
    def num_parameters(self) -> int:
        """Parameters of the network, with its classifier."""
        width = self.hidden_size
        patches = self._num_patch_weights + width
        tokens = width + self.tokens_per_image * width
        blocks = self.num_block_weights + self.num_layers * 13 * width
        return patches + tokens + blocks + 2 * width + (width + 1) * self.num_classes

    @property
    def num_block_weights(self) -> int:
        """Elements of the weight matrices inside the blocks, which a level converts."""
        return 12 * self.hidden_size**2 * self.num_layers

    def parameters(self) -> Shapes:
        """Yield the parameters in the order in which the network registers them."""
        width, embeddings = self.hidden_size, "network.vit.embeddings"
        yield ParameterShape(f"{embeddings}.cls_token", (1, 1, width))
        yield ParameterShape(f"{embeddings}.position_embeddings", (1, self.tokens_per_image, width))
        yield from self._patches(embeddings, width)
        for block in range(self.num_layers):
            name = f"network.vit.layers.{block}"
            yield from self._projections(name, width, block)
            yield from self._norms_and_mlp(name, width, block)
        yield from norm("network.vit.layernorm", width)
        yield from linear("network.classifier", self.num_classes, width)

    @property
    def flops_per_image(self) -> float:
        """FLOPs of one image: 6 per parameter in a product and token, and 12·L·D·T for each token's attention."""
        num_tokens, width = self.tokens_per_image, self.hidden_size
        blocks = 6.0 * self.num_block_weights + 12.0 * self.num_layers * width * num_tokens
        return num_tokens * blocks + 6.0 * (self.patches_per_side**2 * self._num_patch_weights + width * self.num_classes)

    @property
    def _num_patch_weights(self) -> int:
        return self.num_channels * self.patch_size**2 * self.hidden_size

    def check(self) -> None:
        self.require_multiple("image_size", self.image_size, self.patch_size, "patch_size")
        self.require_multiple("hidden_size", self.hidden_size, self.num_heads, "num_heads")


def deit_sizes(hidden_size: int, num_layers: int, num_heads: int, images: Images = IMAGENET) -> DeiTSizes:
    """Build the sizes of a network from positional values."""
    return DeiTSizes(hidden_size=hidden_size, num_layers=num_layers, num_heads=num_heads, **images._asdict())


class DeiTSpec(VisionSpec[DeiTSizes]):
    """A DeiT or ViT by preset, by sizes, or by preset with some sizes changed."""

    sizes_type: ClassVar[type[FamilySizes]] = DeiTSizes
    presets: ClassVar[Mapping[str, DeiTSizes]] = {
        "deit-tiny": deit_sizes(64, 4, 4, Images(32, 4, 10)),
        "deit-s": deit_sizes(384, 12, 6),
        "deit-b": deit_sizes(768, 12, 12),
        "vit-1.2b": deit_sizes(2048, 24, 32),
    }

    family: Literal["deit"] = "deit"
    preset: PresetName | None = None
    hidden_size: Size | None = None
    num_layers: Size | None = None
    num_heads: Size | None = None
