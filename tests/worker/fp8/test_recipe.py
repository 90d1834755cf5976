"""Every recipe computes the three products within what its formats can hold, on operands of mixed magnitude."""

import pytest
import torch
from torch import Tensor, nn

from octet.api_schemas.levels import LEVELS
from octet.api_schemas.recipe import RecipeSpec
from octet.worker.fp8.linear import Float8Linear
from octet.worker.fp8.recipe import E4M3, E5M2, Recipe
from octet.worker.fp8.weights import encode_weight
from octet.worker.kernels import ScaledCodes, ScaleKind
from octet.worker.kernels.scales import OperandFormat

# Signal to noise of a product of independently rounded operands (NUMERICS.md 7): 28.5 and 24.6 dB in theory.
E4M3_PRODUCT_DB, E5M2_PRODUCT_DB, BF16_PRODUCT_DB = 28.0, 24.0, 45.0


def spread(rows: int, columns: int, seed: int, *, by: str) -> Tensor:
    """Gaussian numbers; rows, or bands of 128 rows, have magnitudes of their own, from 1e-3 to 1e3."""
    values = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    if by == "tensor":
        return values
    num_rows = {"row": 1, "block": 128}[by]
    magnitude = torch.logspace(-3, 3, -(-rows // num_rows))
    return values * magnitude.repeat_interleave(num_rows)[:rows, None]


def sqnr_db(actual: Tensor, exact: Tensor) -> float:
    """The ratio of the worst band of 128 rows; rows count alike, so that an error cannot hide behind larger ones."""
    noise_ratio = (actual.double() - exact).square().sum(1) / exact.square().sum(1)
    return (-10 * torch.log10(torch.stack([band.mean() for band in noise_ratio.split(128)]))).amin().item()


def products(layer: Float8Linear, input_TK: Tensor, grad_output_TN: Tensor) -> dict[str, Tensor]:
    input_TK = input_TK.requires_grad_()
    output_TN = layer(input_TK)
    output_TN.backward(grad_output_TN)
    return {"output": output_TN.detach(), "grad_input": input_TK.grad, "grad_weight": layer.weight.grad}


def exact_products(weight_NK: Tensor, input_TK: Tensor, grad_output_TN: Tensor) -> dict[str, Tensor]:
    weight_NK, input_TK, grad_output_TN = (tensor.detach().double() for tensor in (weight_NK, input_TK, grad_output_TN))
    return {
        "output": input_TK @ weight_NK.T,
        "grad_input": grad_output_TN @ weight_NK,
        "grad_weight": grad_output_TN.T @ input_TK,
    }


def make(spec: RecipeSpec, weight_NK: Tensor, level: str = "te") -> Float8Linear:
    linear = nn.Linear(weight_NK.shape[1], weight_NK.shape[0], bias=False)
    linear.weight.data = weight_NK.clone()
    return Float8Linear(linear, Recipe.resolve(spec), encode_weight(linear.weight, LEVELS[level]))


@pytest.mark.parametrize("level", ["te", "O2", "O3", "O3-split"])
@pytest.mark.parametrize("granularity", ["tensor", "row", "block"])
@pytest.mark.parametrize("operand_format", ["HYBRID", "E4M3"])
def test_products_are_as_good_as_the_formats(granularity: str, operand_format: str, level: str) -> None:
    input_TK = spread(200, 288, seed=1, by="row" if granularity == "row" else "tensor")
    weight_NK = spread(144, 288, seed=2, by="tensor")
    grad_output_TN = spread(200, 144, seed=3, by="tensor")
    layer = make(RecipeSpec(granularity=granularity, format=operand_format), weight_NK, level)
    backward_db = E5M2_PRODUCT_DB if operand_format == "HYBRID" else E4M3_PRODUCT_DB
    bounds = {"output": E4M3_PRODUCT_DB, "grad_input": backward_db, "grad_weight": backward_db}
    exact = exact_products(weight_NK, input_TK, grad_output_TN)
    for name, actual in products(layer, input_TK, grad_output_TN).items():
        few_terms_db = 0.5 if granularity == "row" and name == "grad_weight" else 0  # a few large tokens are the sum
        assert sqnr_db(actual, exact[name]) >= bounds[name] - few_terms_db, name


@pytest.mark.parametrize("granularity", ["row", "block"])
def test_finer_scales_keep_small_rows_and_tiles_where_one_scale_loses_them(granularity: str) -> None:
    input_TK = spread(384, 256, seed=1, by=granularity)
    weight_NK = spread(256, 256, seed=2, by="tensor")
    exact = exact_products(weight_NK, input_TK, torch.zeros(384, 256))
    worst = {
        granularity: sqnr_db(make(RecipeSpec(granularity=granularity), weight_NK)(input_TK).detach(), exact["output"])
        for granularity in (granularity, "tensor")
    }
    assert worst[granularity] >= E4M3_PRODUCT_DB
    assert worst["tensor"] < 10


@pytest.mark.parametrize("gemm", ["output", "grad_input", "grad_weight"])
@pytest.mark.parametrize("level", ["te", "O2", "O3"])
def test_a_product_left_in_bf16_is_that_good_and_the_others_are_not(gemm: str, level: str) -> None:
    input_TK, weight_NK = spread(64, 96, seed=1, by="tensor"), spread(80, 96, seed=2, by="tensor")
    grad_output_TN = spread(64, 80, seed=3, by="tensor")
    layer = make(RecipeSpec(high_precision_gemms=(gemm,)), weight_NK, level)
    exact = exact_products(layer.weight_values(), input_TK, grad_output_TN)
    for name, actual in products(layer, input_TK, grad_output_TN).items():
        assert (sqnr_db(actual, exact[name]) > BF16_PRODUCT_DB) == (name == gemm), name


@pytest.mark.parametrize("level", ["te", "O2", "O3"])
def test_evaluation_may_leave_fp8(level: str) -> None:
    input_TK, weight_NK = spread(64, 96, seed=1, by="tensor"), spread(80, 96, seed=2, by="tensor")
    layer = make(RecipeSpec(fp8_in_evaluation=False), weight_NK, level)
    exact = input_TK.double() @ layer.weight_values().double().T
    assert sqnr_db(layer(input_TK).detach(), exact) < 32
    assert sqnr_db(layer.eval()(input_TK).detach(), exact) > BF16_PRODUCT_DB
    layer(input_TK).sum().backward()
    assert layer.weight.grad is not None


def codes_of_weight(layer: Float8Linear) -> ScaledCodes:
    """The codes of the values that a layer holds, for the output."""
    rows, _ = layer.weight_scaling.quantize(layer.weight_values(), columns=False)
    assert rows is not None
    return rows


def test_a_margin_leaves_headroom() -> None:
    plain, spacious = (Recipe.resolve(RecipeSpec(margin=margin)) for margin in (0, 2))
    weight_NK = spread(32, 32, seed=0, by="tensor")
    scales = [codes_of_weight(make(RecipeSpec(margin=margin), weight_NK)).dequant_scale for margin in (0, 2)]
    assert plain != spacious
    assert scales[1] == 4 * scales[0]


def test_the_recipe_prints_itself() -> None:
    spec = RecipeSpec(scaling="delayed", amax_history_length=32, high_precision_gemms=("grad_weight",), fast_grad_input=True)
    assert str(Recipe.resolve(spec)) == (
        "output: e4m3 x e4m3; grad_input: e5m2 x e4m3; grad_weight: bf16; grad_input with fast accumulation; "
        "tensor scales, delayed over 32 steps"
    )


TENSOR, ROW, NARROW, SQUARE, MX, *_ = ScaleKind
MIXED = [  # input, weight, grad_output
    (ROW, TENSOR, TENSOR),
    (TENSOR, ROW, ROW),
    (NARROW, NARROW, NARROW),
    (SQUARE, NARROW, NARROW),
    (NARROW, NARROW, SQUARE),
    (MX, MX, MX),
]


@pytest.mark.parametrize("level", ["te", "O2", "O3"])
@pytest.mark.parametrize("kinds", MIXED)
def test_operands_may_each_have_their_own_kind_of_scale(kinds: tuple[ScaleKind, ...], level: str) -> None:
    input_TK, weight_NK = spread(200, 288, seed=1, by="tensor"), spread(144, 288, seed=2, by="tensor")
    grad_output_TN = spread(200, 144, seed=3, by="tensor")
    exact = exact_products(weight_NK, input_TK, grad_output_TN)
    recipe = Recipe(*(OperandFormat(E4M3, kind) for kind in kinds))
    linear = nn.Linear(288, 144, bias=False)
    linear.weight.data = weight_NK.clone()
    layer = Float8Linear(linear, recipe, encode_weight(linear.weight, LEVELS[level]))
    scalings = layer.scalings().values()
    assert tuple(scaling.format.kind for scaling in scalings) == kinds
    for name, actual in products(layer, input_TK, grad_output_TN).items():
        assert sqnr_db(actual, exact[name]) >= E4M3_PRODUCT_DB, name
    if level == "te":
        assert codes_of_weight(layer).kind is kinds[1]


def test_a_recipe_that_no_kernel_can_follow_is_refused() -> None:
    by_row, in_e5m2 = OperandFormat(E4M3, ROW), OperandFormat(E5M2)
    with pytest.raises(
        ValueError, match=r"output would multiply block 1x128 by tensor scales; allowed: .*row by tensor or row"
    ):
        Recipe(input=OperandFormat(E4M3, NARROW))
    with pytest.raises(ValueError, match="output would multiply block 1x32 by block 128x128"):
        Recipe(OperandFormat(E4M3, MX), OperandFormat(E4M3, SQUARE), OperandFormat(E4M3, MX))
    with pytest.raises(ValueError, match="output would multiply block 128x128 by block 128x128"):
        Recipe(*[OperandFormat(E4M3, SQUARE)] * 3)
    with pytest.raises(ValueError, match="grad_input would multiply E5M2 by E5M2"):
        Recipe(weight=in_e5m2)
    with pytest.raises(ValueError, match="one amax for a tensor; allowed: tensor scales"):
        Recipe(input=by_row, amax_history_length=4)
    Recipe(input=OperandFormat(E4M3, NARROW), high_precision=frozenset(("output", "grad_weight")))


def test_a_recipe_prints_the_scales_of_its_operands() -> None:
    assert str(Recipe.resolve(RecipeSpec(granularity="block"))).endswith("; block scales, current")
    mx = str(Recipe.resolve(RecipeSpec(granularity="mx")))
    assert mx == "output: e4m3 x e4m3; grad_input: e4m3 x e4m3; grad_weight: e4m3 x e4m3; mx scales, current"
    assert str(Recipe(input=OperandFormat(E4M3, ROW))).endswith(
        "; input row, weight tensor, grad_output tensor scales, current"
    )
