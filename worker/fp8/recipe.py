"""A recipe as the layer computes with it: each operand's format and kind of scale, and the products left in bf16."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from octet.api_schemas.recipe import GemmName, RecipeSpec
from octet.worker.kernels.scales import GRANULARITIES, OperandFormat, ScaleKind

ALL_GEMMS: frozenset[GemmName] = frozenset(("output", "grad_input", "grad_weight"))
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
_BY_TENSOR, _WIDE_RANGE = OperandFormat(), OperandFormat(E5M2)


@dataclass(frozen=True)
class Recipe:
    """The table that a converted layer follows; `str` prints it."""

    input: OperandFormat = _BY_TENSOR
    weight: OperandFormat = _BY_TENSOR
    grad_output: OperandFormat = _WIDE_RANGE
    amax_history_length: int = 0  # 0: the scale comes from the tensor at hand
    amax_compute_algorithm: str = "max"
    margin: int = 0
    interval: int = 1
    high_precision: frozenset[GemmName] = frozenset()
    fp8_in_evaluation: bool = True
    fast_grad_input: bool = False

    def __post_init__(self) -> None:
        """Refuse operands that no kernel multiplies, and histories of anything but tensors. ValueError."""
        for gemm, (left, right) in self.products().items():
            if gemm in self.high_precision:
                continue
            if left.dtype == right.dtype == E5M2:
                raise ValueError(f"{gemm} would multiply E5M2 by E5M2, which CUDA cannot. Make one operand E4M3.")
            both_square = left.kind.block[0] > 1 and right.kind.block[0] > 1
            widths = {operand.kind.block[1] if operand.kind.is_blockwise else 0 for operand in (left, right)}
            if both_square or len(widths) > 1:
                raise ValueError(
                    f"{gemm} would multiply {left.kind.value} by {right.kind.value} scales; allowed: tensor or row by "
                    f"tensor or row, block 1xN by 1xN or NxN. Change a kind, or leave {gemm} in high precision."
                )
        if self.amax_history_length and any(operand.kind is not ScaleKind.TENSOR for operand in self.operands().values()):
            raise ValueError(
                "delayed scaling keeps one amax for a tensor; allowed: tensor scales. Use them, or current scaling."
            )

    @classmethod
    def resolve(cls, spec: RecipeSpec) -> "Recipe":
        """Resolve a user's spec. The kinds of scale are those of its granularity in GRANULARITIES."""
        kind, kind_of_weights = GRANULARITIES[spec.granularity]
        return cls(
            input=OperandFormat(E4M3, kind),
            weight=OperandFormat(E4M3, kind_of_weights),
            grad_output=OperandFormat(E5M2 if spec.format == "HYBRID" else E4M3, kind),
            amax_history_length=spec.amax_history_length if spec.scaling == "delayed" else 0,
            amax_compute_algorithm=spec.amax_compute_algorithm,
            margin=spec.margin,
            interval=spec.interval,
            high_precision=frozenset(spec.high_precision_gemms),
            fp8_in_evaluation=spec.fp8_in_evaluation,
            fast_grad_input=spec.fast_grad_input,
        )

    def operands(self) -> Mapping[str, OperandFormat]:
        """The operands by name."""
        return {"input": self.input, "weight": self.weight, "grad_output": self.grad_output}

    def products(self) -> Mapping[GemmName, tuple[OperandFormat, OperandFormat]]:
        """The two operands of each product."""
        return {
            "output": (self.input, self.weight),
            "grad_input": (self.grad_output, self.weight),
            "grad_weight": (self.grad_output, self.input),
        }

    def __str__(self) -> str:
        when = f"delayed over {self.amax_history_length} steps" if self.amax_history_length else "current"
        by_gemm = [
            f"{gemm}: bf16" if gemm in self.high_precision else f"{gemm}: {left} x {right}"
            for gemm, (left, right) in self.products().items()
        ]
        by_gemm += ["grad_input with fast accumulation"] if self.fast_grad_input else []
        kinds = {name: operand.kind for name, operand in self.operands().items()}
        granularities = {kind.granularity for kind in kinds.values()}
        scales = (
            granularities.pop()
            if len(granularities) == 1
            else ", ".join(f"{name} {kind.value}" for name, kind in kinds.items())
        )
        return f"{'; '.join(by_gemm)}; {scales} scales, {when}"
