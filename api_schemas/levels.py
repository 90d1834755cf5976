"""The table of precision levels: one row says what a level computes and stores in what format.

The service prints this table (`GET /v1/levels`), and the worker reads the same row. Code asks the row, never the level's
name. `bytes_per_parameter` limits the bytes per parameter that weight, master weight, weight gradient and both moments of a
converted layer take together on one rank, including scales; a test counts them from live storage.
"""

from typing import Any, Literal

from pydantic import Field

from octet.api_schemas.base import Contract
from octet.api_schemas.recipe import RecipeSpec

StateCodec = Literal["fp32", "fp16-block", "fp8-dre", "int8-companded", "uint8-companded"]

CommunicationDtype = Literal["fp32", "fp8"]


class Level(Contract):
    """One row: the format of every tensor that a training step touches."""

    name: str
    description: str
    gemm: Literal["fp32", "fp16", "bf16", "fp8"]
    engine: Literal["octet", "torchao"] = Field(default="octet", description="implementation of the FP8 linear layer")
    loss_scaling: bool = Field(default=False, description="scale the loss dynamically")
    recipe: RecipeSpec | None = Field(default=None, description="how FP8 operands are scaled unless the job says otherwise")
    gradient_communication: CommunicationDtype = "fp32"
    weight: Literal["fp32", "fp16+scale", "fp8"] = "fp32"
    master_weight: Literal["none", "fp16+scale", "int8-residual"] = "none"
    weight_gradient: Literal["fp32", "fp8"] = "fp32"
    exp_avg: StateCodec = "fp32"
    exp_avg_sq: StateCodec = "fp32"
    bytes_per_parameter: float = Field(default=16, gt=0)
    is_automatic: bool = Field(
        default=False, description="precision.level auto chooses among these, which come in the order of their precision"
    )

    @property
    def has_own_fp8(self) -> bool:
        """True if FP8 products are computed by our own linear layer."""
        return self.gemm == "fp8" and self.engine == "octet"

    @property
    def passes(self) -> str:
        """The row without its name, master weight and moments: levels that share it take the same bytes in both passes."""
        named = {"name", "description", "bytes_per_parameter", "is_automatic"}
        return self.model_dump_json(exclude={*named, "master_weight", "exp_avg", "exp_avg_sq"})


def _fp8(name: str, description: str, bytes_per_parameter: float, **columns: Any) -> Level:
    """Build the row of a level that holds and sends gradients in FP8."""
    return Level(
        name=name,
        description=description,
        bytes_per_parameter=bytes_per_parameter,
        gemm="fp8",
        recipe=RecipeSpec(),
        gradient_communication="fp8",
        weight_gradient="fp8",
        **columns,
    )


_SCALED = {"weight": "fp16+scale"}
_MASTERED = {"weight": "fp8", "master_weight": "fp16+scale"}
_SPLIT = {"weight": "fp8", "master_weight": "int8-residual"}
_STATES = {"exp_avg": "fp8-dre", "exp_avg_sq": "fp16-block"}
_8BIT_STATES = {"exp_avg": "int8-companded", "exp_avg_sq": "uint8-companded"}

_ROWS = (
    Level(name="fp32", description="Everything in fp32: the reference.", gemm="fp32"),
    Level(
        name="fp16-amp",
        description="Linear layers multiply in fp16, with a dynamically scaled loss; what lasts is fp32.",
        gemm="fp16",
        loss_scaling=True,
    ),
    Level(name="bf16-amp", description="Linear layers multiply in bf16; what lasts is fp32.", gemm="bf16", is_automatic=True),
    Level(
        name="te",
        description="Transformer Engine's way: FP8 products with delayed scaling; what lasts is fp32.",
        gemm="fp8",
        recipe=RecipeSpec(scaling="delayed", amax_history_length=1024, amax_compute_algorithm="max"),
        is_automatic=True,
    ),
    Level(
        name="ao",
        description="torchao's own Float8Linear: FP8 products with current scaling; what lasts is fp32.",
        gemm="fp8",
        engine="torchao",
        recipe=RecipeSpec(),
    ),
    _fp8("O1", "FP8 products and gradients; FP16 weights with scales; fp32 moments.", 11.1, **_SCALED, is_automatic=True),
    _fp8("O2", "O1 with an FP8 first and an FP16 second moment.", 6.2, **_SCALED, **_STATES, is_automatic=True),
    _fp8("O3", "O2 with FP8 weights and FP16 master weights.", 7.2, **_MASTERED, **_STATES),
    _fp8("O3-split", "O3 whose master weight is the INT8 rest of the FP8 weight.", 6.2, **_SPLIT, **_STATES, is_automatic=True),
    _fp8("O2-8bit", "O2 with both moments in 8 bits.", 5.2, **_SCALED, **_8BIT_STATES, is_automatic=True),
    _fp8("O3-split-8bit", "O3-split with both moments in 8 bits.", 5.2, **_SPLIT, **_8BIT_STATES, is_automatic=True),
)

LEVELS: dict[str, Level] = {row.name: row for row in _ROWS}
AUTOMATIC = tuple(name for name, row in LEVELS.items() if row.is_automatic)
"""The choices of precision.level auto, the most precise first; not those for comparisons, nor O3, which takes more than O2."""
