"""What every precision level computes and stores in what: one row per level, and nothing else decides.

The service prints this table (`GET /v1/levels`), the worker reads the same row. Code asks the row, never the
level's name. `bytes_per_parameter` is the most that weight, master weight, weight gradient and both moments of a
converted layer may take together on one rank, scales included; a test counts it from live storage.
"""

from typing import Literal

from pydantic import Field

from api_schemas.base import Contract

StateCodec = Literal["fp32", "bf16-sr", "fp16-block", "fp8-tensor", "fp8-block", "fp8-dre", "int8-companded", "uint8-companded"]


class Level(Contract):
    """One row: the format of every tensor that a training step touches."""

    name: str
    description: str
    gemm: Literal["fp32", "fp16", "bf16", "fp8"]
    gradient_communication: Literal["fp32", "fp8"]
    weight: Literal["fp32", "fp16+scale"]
    master_weight: Literal["none"]
    weight_gradient: Literal["fp32", "fp8"]
    exp_avg: StateCodec
    exp_avg_sq: StateCodec
    bytes_per_parameter: float = Field(gt=0)


_ROWS = (
    Level(
        name="fp32",
        description="Everything in fp32: the reference.",
        gemm="fp32",
        gradient_communication="fp32",
        weight="fp32",
        master_weight="none",
        weight_gradient="fp32",
        exp_avg="fp32",
        exp_avg_sq="fp32",
        bytes_per_parameter=16,
    ),
    Level(
        name="bf16-amp",
        description="Linear layers multiply in bf16; everything that lasts longer than a layer is fp32.",
        gemm="bf16",
        gradient_communication="fp32",
        weight="fp32",
        master_weight="none",
        weight_gradient="fp32",
        exp_avg="fp32",
        exp_avg_sq="fp32",
        bytes_per_parameter=16,
    ),
    Level(
        name="O2",
        description="FP8 matrix products, gradients and first moment; FP16 weights and second moment with scales.",
        gemm="fp8",
        gradient_communication="fp8",
        weight="fp16+scale",
        master_weight="none",
        weight_gradient="fp8",
        exp_avg="fp8-dre",
        exp_avg_sq="fp16-block",
        bytes_per_parameter=6.2,
    ),
)

LEVELS: dict[str, Level] = {row.name: row for row in _ROWS}
