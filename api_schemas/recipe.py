"""How the operands of FP8 products are scaled: chosen apart from the level, which says what is stored."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from api_schemas.base import Contract, refusal

GemmName = Literal["output", "grad_input", "grad_weight"]


class RecipeSpec(Contract):
    """Scales of the operands of the three products of a linear layer.

    `current` takes the scale from the tensor at hand; `delayed` from the largest values of past steps, with one scale for
    a tensor. HYBRID holds grad_output as E5M2 and the rest as E4M3; E4M3 holds everything so.
    """

    scaling: Literal["current", "delayed"] = "current"
    granularity: Literal["tensor", "row", "block"] = "tensor"
    format: Literal["HYBRID", "E4M3"] = "HYBRID"
    margin: Annotated[int, Field(ge=0, le=16)] = 0
    interval: Annotated[int, Field(ge=1)] = 1
    amax_history_length: Annotated[int, Field(ge=1, le=65_536)] = 16
    amax_compute_algorithm: Literal["max", "most_recent"] = "max"
    high_precision_gemms: frozenset[GemmName] = frozenset()
    fp8_in_evaluation: bool = True

    @model_validator(mode="after")
    def _history_is_of_tensors(self) -> Self:
        if self.scaling == "delayed" and self.granularity != "tensor":
            raise refusal(
                "granularity",
                got=self.granularity,
                allowed="tensor, where scaling is delayed: a history keeps one amax for a tensor",
                change="Set recipe.granularity to tensor, or recipe.scaling to current.",
            )
        return self
