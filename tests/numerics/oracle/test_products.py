"""The three products of a converted layer against fp64, tile by tile: of codes that are forced, and of rounded operands."""

import numpy as np
import pytest
import torch
from torch import nn

from octet.api_schemas.levels import LEVELS
from octet.worker import initialize
from tests.numerics.oracle import held
from tests.numerics.oracle.formats import MAX, decode, rounded
from tests.numerics.oracle.layer import E4M3, E5M2, products, worst_tile_db

EXACT_DB = 90.0  # fp32 accumulation over 384 products; a wrong code or scale leaves less than 60 dB
HELD_GRADIENT_DB = 60.0  # held in E4M3, where a sum at the edge of two codes may take the other one
OWN_LEVELS = tuple(name for name, level in LEVELS.items() if level.has_own_fp8)
DEFAULT_LEVELS = ("te", "O3-split")
NUM_TOKENS, IN_FEATURES, OUT_FEATURES = 160, 256, 384
Products = Operands = tuple[np.ndarray, np.ndarray, np.ndarray]


def forced_codes(rng: np.random.Generator, shape: tuple[int, int], dtype: str, exponent: int) -> np.ndarray:
    """Values that are codes × 2^exponent: every finite code of the format, the largest among them."""
    codes = rng.integers(0, 256, shape, dtype=np.uint8)
    values = decode(codes, dtype)
    values[~np.isfinite(values)] = 0.0
    values.flat[0] = MAX[dtype]
    return values * 2.0**exponent


def mixed_operands(seed: int) -> Operands:
    """(input, weight, grad_output) as fp32 has them, whose 128×128 tiles each have their own magnitude.

    Small tiles meet large ones: every tile counts in every product, and a scale that has to hold both loses the small one.
    """
    rng = np.random.default_rng(seed)

    def large_and_small(length: int) -> np.ndarray:
        return np.repeat([10.0 ** (2.5 * (-1) ** tile) for tile in range(-(-length // 128))], 128)[:length]

    of_T, of_K, of_N = (large_and_small(length) for length in (NUM_TOKENS, IN_FEATURES, OUT_FEATURES))
    magnitudes = np.outer(of_T, of_K), np.outer(1 / of_N, 1 / of_K), np.outer(1 / of_T, of_N)
    input_TK, weight_NK, grad_output_TN = (
        (rng.standard_normal(each.shape) * each).astype(np.float32).astype(np.float64) for each in magnitudes
    )
    return input_TK, weight_NK, grad_output_TN


def run_layer(
    level: str, input_TK: np.ndarray, weight_NK: np.ndarray, grad_output_TN: np.ndarray, recipe: dict[str, object] | None = None
) -> tuple[nn.Module, Products]:
    """Convert a layer with these weights; returns it with its three products."""
    model = nn.Sequential(nn.Linear(IN_FEATURES, OUT_FEATURES, bias=False))
    model[0].weight.data = torch.from_numpy(weight_NK).float()
    options = {} if recipe is None else {"recipe": recipe}
    model, _ = initialize(model, torch.optim.AdamW(model.parameters()), level, statistics_every=0, **options)
    input = torch.from_numpy(input_TK).float().requires_grad_()
    output = model(input)
    output.backward(torch.from_numpy(grad_output_TN).float())
    assert input.grad is not None
    return model[0], (output.detach().numpy(), input.grad.numpy(), held.gradient(model[0].weight))


def assert_products(actual: Products, expected: Products, level: str) -> None:
    held_db = HELD_GRADIENT_DB if LEVELS[level].weight_gradient == "fp8" else EXACT_DB
    for name, one, other, min_db in zip(
        ("output", "grad_input", "grad_weight"), actual, expected, (EXACT_DB, EXACT_DB, held_db), strict=True
    ):
        assert worst_tile_db(one, other) >= min_db, name


def as_held(grad_weight: np.ndarray, level: str) -> np.ndarray:
    return rounded(grad_weight, E4M3, "tensor") if LEVELS[level].weight_gradient == "fp8" else grad_weight


@pytest.mark.parametrize("level", OWN_LEVELS)
def test_forced_codes_are_multiplied_without_rounding(level: str) -> None:
    """Operands that the formats hold exactly: what the products give is the product, with nothing of a quantizer in between."""
    rng = np.random.default_rng(0)
    input_TK = forced_codes(rng, (NUM_TOKENS, IN_FEATURES), E4M3, -5)
    weight_NK = forced_codes(rng, (OUT_FEATURES, IN_FEATURES), E4M3, -12)
    grad_output_TN = forced_codes(rng, (NUM_TOKENS, OUT_FEATURES), E5M2, 3)
    _, actual = run_layer(level, input_TK, weight_NK, grad_output_TN)
    grad_weight = grad_output_TN.T @ input_TK
    assert_products(actual, (input_TK @ weight_NK.T, grad_output_TN @ weight_NK, as_held(grad_weight, level)), level)


@pytest.mark.parametrize(
    ("level", "granularity", "format"),
    [
        pytest.param(level, granularity, format, marks=() if level in DEFAULT_LEVELS else pytest.mark.matrix)
        for level in OWN_LEVELS
        for granularity, format in (("tensor", "HYBRID"), ("tensor", "E4M3"), ("row", "HYBRID"), ("block", "E4M3"))
    ],
)
def test_rounded_operands(level: str, granularity: str, format: str) -> None:
    input_TK, weight_NK, grad_output_TN = mixed_operands(seed=1)
    recipe = {"granularity": granularity, "format": format, "scaling": "current"}
    layer, actual = run_layer(level, input_TK, weight_NK, grad_output_TN, recipe)
    weight_NK = held.refined_weight(layer) if granularity == "block" else held.operand_weight(layer)
    gradient_dtype = E5M2 if format == "HYBRID" else E4M3
    weight_granularity = "tensor" if LEVELS[level].weight == "fp8" and granularity == "row" else granularity
    output, grad_input, grad_weight = products(
        input_TK, weight_NK, grad_output_TN, granularity, gradient_dtype, weight_granularity
    )
    assert_products(actual, (output, grad_input, as_held(grad_weight, level)), level)


def test_the_measure_sees_a_wrong_granularity() -> None:
    """On these operands, each of the three products tells the granularities apart."""
    operands = mixed_operands(seed=1)
    by_tensor, by_row, by_block = (products(*operands, granularity, E4M3) for granularity in ("tensor", "row", "block"))
    for one, other in ((by_tensor, by_row), (by_row, by_block), (by_tensor, by_block)):
        assert all(worst_tile_db(*pair) < 60 for pair in zip(one, other, strict=True))
