"""The scaling of the operands of FP8 products. The recipe is chosen apart from the level, which says what is stored."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from octet.api_schemas.base import Contract
from octet.api_schemas.rules.parts import RECIPE

GemmName = Literal["output", "grad_input", "grad_weight"]


class RecipeSpec(Contract):
    """Formats and scales of the operands of a linear layer's three products."""

    scaling: Literal["current", "delayed"] = Field(
        default="current", description="current: from the present tensor; delayed: from the largest values of past steps"
    )
    granularity: Literal["tensor", "row", "block", "mx"] = Field(
        default="tensor",
        description="elements that share a scale; block: 1x128 for activations and gradients, 128x128 for weights; mx: OCP's "
        "MXFP8, 1x32 for all, on compute capability 10.0 or later",
    )
    format: Literal["HYBRID", "E4M3"] = Field(
        default="HYBRID",
        description="HYBRID: output gradients in E5M2, the rest in E4M3; E4M3: everything, the default for block and mx scales",
    )
    margin: Annotated[int, Field(ge=0, le=16)] = Field(default=0, description="powers of two of headroom above the amax")
    interval: Annotated[int, Field(ge=1)] = Field(default=1, description="delayed: steps between two changes of a scale")
    amax_history_length: Annotated[int, Field(ge=1, le=65_536)] = Field(default=16, description="delayed: steps remembered")
    amax_compute_algorithm: Literal["max", "most_recent"] = "max"
    high_precision_gemms: tuple[GemmName, ...] = Field(default=(), description="products left in bf16")
    fp8_in_evaluation: bool = Field(default=True, description="false: evaluation computes in bf16")
    fast_grad_input: bool = Field(
        default=False,
        description="sum the input's gradient by Hopper's fast accumulation, as outputs are; tensor scales only. On "
        "a CPU, and in our kernel for experts, it changes nothing",
    )

    @model_validator(mode="before")
    @classmethod
    def _blocks_are_e4m3(cls, fields: Any) -> Any:
        """Use E4M3 for blocks, as Transformer Engine does. They need no larger range, and by 128 cuBLASLt takes no other."""
        if isinstance(fields, dict) and fields.get("granularity") in ("block", "mx"):
            return {"format": "E4M3", **fields}
        return fields

    @model_validator(mode="after")
    def _check_fields(self) -> Self:
        RECIPE.check_part("precision.recipe", self)
        return self

    @property
    def grad_input_in_bf16(self) -> bool:
        """True if the product of the input's gradient is left in bf16."""
        return "grad_input" in self.high_precision_gemms

    def __str__(self) -> str:
        """Describe the recipe in one line, for people."""
        parts = [f"{self.format}, {self.granularity} scales, {self.scaling}"]
        if self.scaling == "delayed":
            parts[0] += f" over {self.amax_history_length} steps ({self.amax_compute_algorithm}, every {self.interval})"
        parts += [f"margin {self.margin}"] if self.margin else []
        parts += [f"{', '.join(self.high_precision_gemms)} in bf16"] if self.high_precision_gemms else []
        parts += [] if self.fp8_in_evaluation else ["evaluation in bf16"]
        parts += ["fast accumulation for grad_input"] if self.fast_grad_input else []
        return "; ".join(parts)
