"""A linear layer's three products in fp64, of operands rounded as a recipe says, and the window of delayed scaling.

    output = input @ weight.T      grad_input = grad_output @ weight      grad_weight = grad_output.T @ input

Written from NUMERICS.md, sections 3 and 4. Matrices: input (T, K), weight (N, K), grad_output (T, N).
"""

from dataclasses import dataclass, field

import numpy as np

from tests.numerics.oracle.formats import decode, dequant_scale, encode, rounded

E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"
SQUARE = (128, 128)


@dataclass
class Window:
    """The amaxes of past steps for one operand.

    length: steps until the scale comes from the window; until then it is exact. interval: finite steps between two changes.
    """

    length: int
    algorithm: str = "max"
    interval: int = 1
    margin: int = 0
    slot: float = 0.0  # the largest of the present step's micro-batches
    amaxes: list[float] = field(default_factory=list)  # of all steps since the last that was not finite
    chosen: float = 0.0

    def round(self, x: np.ndarray, dtype: str, *, is_training: bool = True) -> np.ndarray:
        """The values, fp64, of x at the window's scale. Evaluation leaves no trace."""
        own = float(np.max(np.abs(x)))
        if is_training:
            self.slot = float(np.maximum(self.slot, own))  # NaN stays
        amax = self.chosen if len(self.amaxes) >= self.length else own
        scale = float(dequant_scale(amax, dtype, self.margin))
        return decode(encode(x, scale, dtype), dtype) * scale

    def close_step(self) -> None:
        """Take the step's largest value into the window; one that is not finite empties it."""
        slot, self.slot = self.slot, 0.0
        if slot == 0.0:
            return
        self.amaxes = [*self.amaxes, slot] if np.isfinite(slot) else []
        count = len(self.amaxes)
        if self.amaxes and (count <= self.length or count % self.interval == 0):
            self.chosen = max(self.amaxes[-self.length :]) if self.algorithm == "max" else self.amaxes[-1]


def products(
    input_TK: np.ndarray,
    weight_NK: np.ndarray,
    grad_output_TN: np.ndarray,
    granularity: str,
    gradient_dtype: str,
    weight_granularity: str = "",
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(output, grad_input, grad_weight) in fp64 with current scaling. Each operand is scaled along the summed dimension.

    weight_granularity: where it is not that of the others, as for a weight that is held in codes with one scale.
    """
    weight_granularity = weight_granularity or granularity

    def row(x: np.ndarray, dtype: str) -> np.ndarray:
        return rounded(x, dtype, granularity)

    weight_block = SQUARE if granularity == "block" else (1, 128)
    output = row(input_TK, E4M3) @ rounded(weight_NK, E4M3, weight_granularity, weight_block).T
    grad_input = row(grad_output_TN, gradient_dtype) @ rounded(weight_NK.T, E4M3, weight_granularity, weight_block).T
    grad_weight = row(grad_output_TN.T, gradient_dtype) @ row(input_TK.T, E4M3).T
    return output, grad_input, grad_weight


def worst_tile_db(actual: np.ndarray, expected: np.ndarray) -> float:
    """Signal to noise, in decibels, of the worst 128×128 tile. NaNs in the same places are equal; in others they are -inf."""
    if not np.array_equal(np.isnan(actual), np.isnan(expected)):
        return -np.inf
    actual, expected = np.nan_to_num(actual.astype(np.float64)), np.nan_to_num(expected)
    worst = np.inf
    for row in range(0, expected.shape[0], 128):
        for column in range(0, expected.shape[1], 128):
            tile = (slice(row, row + 128), slice(column, column + 128))
            signal, noise = np.sum(expected[tile] ** 2), np.sum((actual[tile] - expected[tile]) ** 2)
            if noise > 0:
                worst = min(worst, 10 * float(np.log10(max(signal, 1e-300) / noise)))
    return worst
