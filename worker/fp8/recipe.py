"""A recipe resolved to what the layer computes with: the format of each operand, and which products are not in FP8."""

from dataclasses import dataclass

import torch

from api_schemas.recipe import GemmName, RecipeSpec

ALL_GEMMS: frozenset[GemmName] = frozenset(("output", "grad_input", "grad_weight"))
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


@dataclass(frozen=True)
class Recipe:
    """The table that a converted layer follows; `str` prints it."""

    input: torch.dtype = E4M3
    weight: torch.dtype = E4M3
    grad_output: torch.dtype = E5M2
    granularity: str = "tensor"
    amax_history_length: int = 0  # 0: the scale comes from the tensor at hand
    amax_compute_algorithm: str = "max"
    margin: int = 0
    interval: int = 1
    high_precision: frozenset[GemmName] = frozenset()
    fp8_in_evaluation: bool = True

    @classmethod
    def resolve(cls, spec: RecipeSpec) -> "Recipe":
        """What a user's spec means."""
        return cls(
            grad_output=E5M2 if spec.format == "HYBRID" else E4M3,
            granularity=spec.granularity,
            amax_history_length=spec.amax_history_length if spec.scaling == "delayed" else 0,
            amax_compute_algorithm=spec.amax_compute_algorithm,
            margin=spec.margin,
            interval=spec.interval,
            high_precision=frozenset(spec.high_precision_gemms),
            fp8_in_evaluation=spec.fp8_in_evaluation,
        )

    def __str__(self) -> str:
        when = f"delayed over {self.amax_history_length} steps" if self.amax_history_length else "current"
        operands = {"output": (self.input, self.weight), "grad_input": (self.grad_output, self.weight)}
        operands["grad_weight"] = (self.grad_output, self.input)
        products = [
            f"{gemm}: bf16" if gemm in self.high_precision else f"{gemm}: {_short(left)} x {_short(right)}"
            for gemm, (left, right) in operands.items()
        ]
        return f"{'; '.join(products)}; {self.granularity} scales, {when}"


def _short(dtype: torch.dtype) -> str:
    return "e5m2" if dtype == E5M2 else "e4m3"
