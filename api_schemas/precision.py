"""The formats in which a job computes and stores: a level, and the options that change it."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from octet.api_schemas.base import Contract
from octet.api_schemas.levels import LEVELS, CommunicationDtype, Level
from octet.api_schemas.recipe import RecipeSpec
from octet.api_schemas.rules.precision import PRECISION

LevelName = Literal["fp32", "fp16-amp", "bf16-amp", "te", "ao", "O1", "O2", "O3", "O3-split", "O2-8bit", "O3-split-8bit"]
AskedLevel = Literal[LevelName, "auto"]
Ratio = Annotated[float, Field(ge=0, le=1)]
Globs = tuple[Annotated[str, Field(min_length=1, max_length=200)], ...]

GradientAccumulation = Literal["auto", "fp8", "fp32"]
MOST_FP8_MICRO_BATCHES = 4
"""Up to so many, the sum of independent micro-batches in FP8 is off by no more than the products (docs/log.md)."""

DEFAULT_STATISTICS_EVERY = 50
"""A sample takes one launch for each operand, over at most 131,072 of its elements."""

TORCHAO_RECIPES = {
    "tensorwise": RecipeSpec(),
    "rowwise": RecipeSpec(granularity="row", format="E4M3"),
    "rowwise_with_gw_hp": RecipeSpec(granularity="row", format="E4M3", high_precision_gemms=("grad_weight",)),
}
"""Torchao's own names of its recipes."""


class DemotionSpec(Contract):
    """Limits for FP8 operands. A layer computes in bf16 if an operand breaks a limit `patience` samples in a row.

    It stays there, unless `recovery` lets it come back.
    """

    max_overflow_ratio: Ratio = Field(default=0.01, description="share of elements clamped to the format's maximum")
    max_underflow_ratio: Ratio = Field(default=0.5, description="share of non-zero elements that became zero")
    min_sqnr_db: float = Field(default=15.0, description="signal to quantization noise; FP8 in range has 25 to 31 dB")
    patience: int = Field(default=3, ge=1)
    max_layers: Ratio = Field(
        default=1.0,
        description="share of the converted layers that may be demoted at once; beyond it the job goes on at the next level of "
        "precision.ladder, where there is one",
    )
    recovery: int = Field(
        default=0,
        ge=0,
        description="samples in a row within all limits after which a demoted layer multiplies in FP8 again; 0: it never does",
    )


class TorchaoSpec(Contract):
    """Options of torchao's Float8Linear beyond the recipe."""

    pad_inner_dim: bool = Field(default=False, description="pad inner dimensions to a multiple of 16 with zeros")
    fsdp_float8_all_gather: bool = Field(
        default=False,
        description="gather sharded weights in FP8 under FSDP2; only in a loop of your own, as jobs shard by zero_stage",
    )


class PrecisionSpec(Contract):
    """A level by name (a row of `GET /v1/levels`), how FP8 operands are scaled, and which layers are converted."""

    level: AskedLevel = Field(
        default="O2",
        description="auto: the most precise level that fits the pool's devices, chosen once, before the job starts",
    )
    ladder: tuple[LevelName, ...] = Field(
        default=(),
        max_length=4,
        description="further levels: if the loss is not finite or diverges, or more layers are demoted than "
        "demotion.max_layers allows, the job goes on at the next one, from its last checkpoint before that",
    )
    recipe: RecipeSpec | None = Field(default=None, description="scaling of FP8 products; default: the level's recipe")
    include: Globs = Field(default=("*",), description="names of linear layers to convert, as globs")
    exclude: Globs = Field(default=(), description="names of linear layers to leave in bf16, as globs")
    convert_heads: bool = Field(default=False, description="convert classifiers and language model heads too")
    skip_first_layers: int = Field(default=0, ge=0, description="linear layers left in bf16 at the model's start")
    skip_last_layers: int = Field(default=0, ge=0, description="linear layers left in bf16 at the model's end")
    strict: bool = Field(default=False, description="fail if a layer would be skipped that no field above excludes")
    auto_filter: bool = Field(default=True, description="leave layers in bf16 if their shapes gain nothing in FP8 here")
    norms: Literal["fp32", "bf16"] = Field(
        default="fp32",
        description="dtype of the weights and outputs of LayerNorm and RMSNorm, whose statistics are fp32; bf16 is what "
        "Transformer Engine's norms have at a bf16 dtype",
    )
    gradient_accumulation: GradientAccumulation = Field(
        default="auto",
        description="format between micro-batches; fp8 rounds stochastically, fp32 takes 4 bytes per parameter; auto: fp32 "
        f"above {MOST_FP8_MICRO_BATCHES} micro-batches that a rank adds up itself, which it does below zero_stage 2, else fp8",
    )
    statistics_every: int | None = Field(
        default=None,
        ge=0,
        description=f"steps between two samples of FP8 statistics; 0: none; default: {DEFAULT_STATISTICS_EVERY} in our own FP8",
    )
    demotion: DemotionSpec | None = None
    torchao: TorchaoSpec | None = None
    not_applied: tuple[str, ...] = Field(
        default=(),
        max_length=64,
        description="settings of an Accelerate configuration that are no precision, with what to set; filled in when read",
    )

    @property
    def storage(self) -> Level:
        """The level's row: the format of everything that is computed and stored. Raises ValueError at level auto."""
        if self.level == "auto":
            raise ValueError("a level by its name: only a service chooses one, for precision.level auto")
        return LEVELS[self.level]

    @property
    def is_resolved(self) -> bool:
        """True unless the level is still to be chosen."""
        return self.level != "auto"

    @property
    def repeats_a_level(self) -> bool:
        """True if a rung of the ladder is the level itself or another rung."""
        return len({self.level, *self.ladder}) <= len(self.ladder)

    @property
    def resolved_recipe(self) -> RecipeSpec | None:
        """The recipe that the job runs with; None if no product is in FP8, and at level auto."""
        return self.recipe or (self.storage.recipe if self.is_resolved else None)

    @property
    def gradient_communication(self) -> CommunicationDtype:
        """The format in which ranks exchange gradients of converted layers: the level's, or fp32 if kept in fp32."""
        return "fp32" if self.gradient_accumulation == "fp32" else self.storage.gradient_communication

    @property
    def holds_fp8_gradients(self) -> bool:
        """True if gradients of converted layers are held in FP8. An `auto` that no job resolved is fp8."""
        return self.storage.weight_gradient == "fp8" and self.gradient_accumulation != "fp32"

    def resolved(self, num_added: int) -> Self:
        """Return the spec with `gradient_accumulation` settled. num_added: micro-batches that a rank adds up in a step."""
        if self.gradient_accumulation != "auto":
            return self
        return self.model_copy(update={"gradient_accumulation": "fp32" if num_added > MOST_FP8_MICRO_BATCHES else "fp8"})

    @property
    def resolved_statistics_every(self) -> int:
        """Steps between two samples of FP8 statistics; 0: none are taken."""
        if self.statistics_every is not None:
            return self.statistics_every
        return DEFAULT_STATISTICS_EVERY if self.is_resolved and self.storage.has_own_fp8 else 0

    @property
    def torchao_recipe(self) -> str:
        """torchao's own name for the recipe."""
        return next(name for name, recipe in TORCHAO_RECIPES.items() if recipe == self.resolved_recipe)

    @property
    def torchao_recipes(self) -> tuple[RecipeSpec, ...]:
        """The recipes that torchao has."""
        return tuple(TORCHAO_RECIPES.values())

    @property
    def changed_torchao_recipes(self) -> str:
        """The recipes that torchao has, for a message."""
        return "; ".join(f"{name}: {_changed(recipe)}" for name, recipe in TORCHAO_RECIPES.items())

    @property
    def changed_recipe(self) -> str:
        """The recipe that the job runs with, for a message."""
        return _changed(self.resolved_recipe)

    @model_validator(mode="after")
    def _check_fields(self) -> Self:
        PRECISION.check_part("precision", self)
        return self


def _changed(recipe: RecipeSpec | None) -> str:
    """Describe a recipe as a user would write it: only what differs from the default."""
    fields = recipe.model_dump(mode="json", exclude_defaults=True) if recipe else {}
    return ", ".join(f"{name} {value}" for name, value in fields.items()) or "the default"
