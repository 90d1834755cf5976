"""Adapters: a few trained weights next to the frozen weights of a model (LoRA, Hu et al. 2021, arXiv 2106.09685)."""

from typing import Annotated, Literal

from pydantic import Field

from api_schemas.base import Contract

TargetGlob = Annotated[str, Field(min_length=1, max_length=256, pattern=r"^[^\x00]+$")]


class AdapterSpec(Contract):
    """output = frozen(input) + (alpha / rank) · b · a · input, with a (rank, in) and b (out, rank) for each adapted layer.

    The model itself is frozen and held as the level holds weights that need no update: at O3 as FP8 codes, a byte each.
    """

    rank: int = Field(default=16, ge=1, le=1024)
    alpha: float = Field(default=32.0, gt=0.0, le=65_536.0)
    targets: tuple[TargetGlob, ...] = Field(
        default=("*",),
        min_length=1,
        max_length=64,
        description="globs over the names of linear layers, or last parts of their names, such as q_proj; heads are left out",
    )
    dtype: Literal["bf16", "fp32"] = Field(default="bf16", description="of the adapters; bf16 is rounded stochastically")
