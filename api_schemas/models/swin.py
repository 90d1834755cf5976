"""The Swin family: attention in shifted windows; each stage halves the image's sides and doubles the width.

Liu et al. 2021, arXiv 2103.14030. Parameters are those of transformers' SwinForImageClassification.
"""

from collections.abc import Iterator, Mapping
from typing import Annotated, ClassVar, Literal, NamedTuple

from pydantic import Field

from octet.api_schemas.base import refusal
from octet.api_schemas.models.base import Capabilities, FamilySizes, Size
from octet.api_schemas.models.shapes import ParameterShape, Shapes, linear, norm
from octet.api_schemas.models.vision import DropRate, Images, VisionSizes, VisionSpec

PresetName = Literal["swin-tiny", "swin-t", "swin-1.0b"]
MAX_STAGES = 8
DEFAULT_DROP_PATH_RATE = 0.1
IN_SMALL_PATCHES = Images(patch_size=4)
PerStage = Annotated[tuple[Size, ...], Field(min_length=1, max_length=MAX_STAGES)]


class Stage(NamedTuple):
    """The blocks between two mergers. side: tokens along a side of the image."""

    width: int
    num_blocks: int
    num_heads: int
    side: int


class SwinSizes(VisionSizes):
    """Every size of a Swin, resolved. MLPs are four times as wide as their stage."""

    declared: ClassVar[Capabilities] = Capabilities(cuda_graphs=True)

    embed_dim: Size
    depths: PerStage
    num_heads: PerStage
    window_size: Size
    drop_path_rate: DropRate = DEFAULT_DROP_PATH_RATE

    @property
    def stages(self) -> Iterator[Stage]:
        """Yield the stages from the first, which has the most tokens."""
        for number, (depth, num_heads) in enumerate(zip(self.depths, self.num_heads, strict=True)):
            yield Stage(self.embed_dim << number, depth, num_heads, self.patches_per_side >> number)

    @property
    def tokens_per_image(self) -> int:
        """Tokens of the stage with the most blocks."""
        return max(self.stages, key=lambda stage: stage.num_blocks).side ** 2

    @property
    def num_parameters(self) -> int:
        """Parameters of the network, with its classifier."""
        last = self.embed_dim << (len(self.depths) - 1)
        patches = self._num_patch_weights + 3 * self.embed_dim  # a bias and a LayerNorm
        biases = sum(
            stage.num_blocks * (13 * stage.width + (2 * self.window_size - 1) ** 2 * stage.num_heads) for stage in self.stages
        )
        norms_of_mergers = sum(4 * stage.width for stage in self._merging)
        return patches + self.num_block_weights + biases + 2 * norms_of_mergers + 2 * last + (last + 1) * self.num_classes

    @property
    def num_block_weights(self) -> int:
        """Elements of the weight matrices inside the blocks and the mergers, which a level converts."""
        blocks = sum(12 * stage.width**2 * stage.num_blocks for stage in self.stages)
        return blocks + sum(8 * stage.width**2 for stage in self._merging)

    def parameters(self) -> Shapes:
        """Yield the parameters in the order in which the network registers them."""
        yield from self._patches("network.swin.embeddings", self.embed_dim)
        yield from norm("network.swin.embeddings.norm", self.embed_dim)
        stages, block = list(self.stages), 0
        for number, stage in enumerate(stages):
            holder = f"network.swin.encoder.layers.{number}"
            for index in range(stage.num_blocks):
                name, width = f"{holder}.blocks.{index}", stage.width
                yield from self._projections(name, width, block)
                table = f"{name}.attention.relative_position_bias.relative_position_bias_table"
                yield ParameterShape(table, ((2 * self.window_size - 1) ** 2, stage.num_heads), block=block)
                yield from self._norms_and_mlp(name, width, block)
                block += len(stages) > 1  # a single stage is a list of one block
            if number < len(stages) - 1:
                yield from linear(f"{holder}.downsample.reduction", 2 * stage.width, 4 * stage.width, bias=False)
                yield from norm(f"{holder}.downsample.norm", 4 * stage.width)
        yield from norm("network.swin.layernorm", stages[-1].width)
        yield from linear("network.classifier", self.num_classes, stages[-1].width)

    @property
    def buffer_bytes(self) -> int:
        """A table of positions in a window for each block, int64."""
        return 8 * self.window_size**4 * sum(self.depths)

    @property
    def flops_per_image(self) -> float:
        """FLOPs of one image: 6 per parameter in a product and token, and 12·D·W² for each token's attention in its window."""
        window = self.window_size**2
        blocks = sum(
            stage.side**2 * stage.num_blocks * (6.0 * 12 * stage.width**2 + 12.0 * stage.width * window)
            for stage in self.stages
        )
        mergers = sum(6.0 * 8 * stage.width**2 * (stage.side // 2) ** 2 for stage in self._merging)
        last = self.embed_dim << (len(self.depths) - 1)
        return blocks + mergers + 6.0 * (self.patches_per_side**2 * self._num_patch_weights + last * self.num_classes)

    @property
    def _merging(self) -> list[Stage]:
        """The stages that a merger follows: all but the last."""
        return list(self.stages)[:-1]

    @property
    def _num_patch_weights(self) -> int:
        return self.num_channels * self.patch_size**2 * self.embed_dim

    def check(self) -> None:
        if len(self.depths) != len(self.num_heads):
            raise refusal(
                "num_heads",
                got=list(self.num_heads),
                allowed=f"as many numbers as model.depths has stages, {len(self.depths)}",
                change="Change model.num_heads or model.depths.",
            )
        for number, stage in enumerate(self.stages):
            self.require_multiple(
                "embed_dim", stage.width, stage.num_heads, f"num_heads of stage {number}, counted at its width"
            )
        whole_windows = self.patch_size * self.window_size << (len(self.depths) - 1)
        if self.image_size % whole_windows:
            raise refusal(
                "image_size",
                got=self.image_size,
                allowed=f"a multiple of {whole_windows}: whole windows of {self.window_size} × {self.window_size} patches in "
                f"each of {len(self.depths)} stages",
                change="Change model.image_size, model.patch_size or model.window_size.",
            )


def swin_sizes(
    embed_dim: int,
    depths: tuple[int, ...],
    num_heads: tuple[int, ...],
    window_size: int,
    images: Images = IN_SMALL_PATCHES,
) -> SwinSizes:
    """Build the sizes of a network from positional values."""
    return SwinSizes(embed_dim=embed_dim, depths=depths, num_heads=num_heads, window_size=window_size, **images._asdict())


class SwinSpec(VisionSpec[SwinSizes]):
    """A Swin by preset, by sizes, or by preset with some sizes changed. Sizes have transformers' names."""

    sizes_type: ClassVar[type[FamilySizes]] = SwinSizes
    presets: ClassVar[Mapping[str, SwinSizes]] = {
        "swin-tiny": swin_sizes(32, (2, 2), (2, 4), 4, Images(32, 4, 10)),
        "swin-t": swin_sizes(96, (2, 2, 6, 2), (3, 6, 12, 24), 7),
        "swin-1.0b": swin_sizes(448, (2, 2, 18, 2), (14, 28, 56, 112), 7),
    }

    defaults: ClassVar[Mapping[str, object]] = {**VisionSpec.defaults, "drop_path_rate": DEFAULT_DROP_PATH_RATE}

    family: Literal["swin"] = "swin"
    preset: PresetName | None = None
    embed_dim: Size | None = Field(default=None, description="width of the first stage")
    depths: PerStage | None = Field(default=None, description="blocks of each stage")
    num_heads: PerStage | None = Field(default=None, description="heads of each stage")
    window_size: Size | None = Field(default=None, description="tokens along a side of a window")
