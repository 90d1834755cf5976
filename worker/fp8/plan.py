"""The plan of a layer's passes, made when the layer is converted and replaced when its inputs change.

A forward pass reads the plan and decides nothing. The inputs are attributes of the layer
(`PLANNED_BY`): setting one of them, as `train()`, `eval()`, a demotion or a sampled step does, makes
the layer take another plan.
"""

from dataclasses import dataclass
from enum import Enum
from functools import cache

from octet.api_schemas.recipe import GemmName
from octet.worker.fp8.recipe import ALL_GEMMS, Recipe
from octet.worker.kernels import LinearFormats, ScaleKind

PLANNED_BY = frozenset(("training", "fallback", "activation", "weight", "gathers_codes", "keeps_products", "may_recover"))
"""The attributes of a layer that its plan depends on. It is also sampled in some steps (`Float8Linear.start_step`)."""


class HeldAs(Enum):
    """The form in which a layer holds its weight, and the form that its products take."""

    VALUES = "values"
    SCALED = "codes of FP16, which the product quantizes"
    CODES = "codes that the product takes as they are"
    DECODED = "codes that are decoded, since the product takes scales of blocks"
    GATHERED = "codes that FSDP2 has gathered, which the product takes as they are"


@dataclass(frozen=True)
class LinearPlan:
    """The decisions that a pass of a layer reads.

    formats: of the operands; after_activation: the same where the layer also computes the
    activation before it. high_precision: the products that are computed in bf16. is_half: all
    products are, and the weight is held as values, as in a layer of bf16-amp. holds_codes: the weight
    is a `Float8Weight`. multiplies_codes: the products take the weight's codes as they are held.
    takes_weight_as_held: the products' ops quantize the weight by the amax that is held with it. An operand is
    quantized by the op of its product, unless something else has to see its codes or its amax:
    quantizes_input_first and quantizes_grad_first are True if it is quantized before.
    adds_bias_after: the autograd function leaves out the bias, since selective checkpointing
    computes a pass again only up to its last product; a sampled step does so too, so that its
    gradients arrive in the order that the golden runs have. owns_output: nothing else keeps the
    output, as selective checkpointing does. is_grouped: layers with this plan that
    hold the matrices of one stack multiply together (`grouped.py`).
    """

    formats: LinearFormats
    after_activation: LinearFormats
    high_precision: frozenset[GemmName]
    held_as: HeldAs
    holds_codes: bool
    multiplies_codes: bool
    takes_weight_as_held: bool
    is_half: bool
    is_sampled: bool
    quantizes_input_first: bool
    quantizes_grad_first: bool
    adds_bias_after: bool
    owns_output: bool
    is_grouped: bool


@cache
def plan_of(
    recipe: Recipe,
    held_as: HeldAs,
    activation: str | None,
    *,
    uses_fp8: bool,
    is_transposed: bool,
    is_sampled: bool,
    keeps_products: bool,
) -> LinearPlan:
    """Return the plan of a layer. Layers that are alike share one plan.

    uses_fp8: the layer multiplies in FP8 in its present mode, as far as the recipe wants it.
    keeps_products: selective checkpointing keeps only the results of products, so codes of the
    input have to be made outside of the product's op.
    """
    operands = (recipe.input, recipe.weight, recipe.grad_output, recipe.margin)
    high_precision = recipe.high_precision if uses_fp8 else ALL_GEMMS
    is_seen = bool(recipe.amax_history_length) or is_sampled
    is_plain = not is_sampled and not keeps_products and not high_precision and activation is None
    kinds = {recipe.input.kind, recipe.weight.kind, recipe.grad_output.kind}
    return LinearPlan(
        formats=LinearFormats(*operands, None, is_transposed, recipe.fast_grad_input),
        after_activation=LinearFormats(*operands, activation, is_transposed, recipe.fast_grad_input),
        high_precision=high_precision,
        held_as=held_as,
        holds_codes=held_as not in (HeldAs.VALUES, HeldAs.GATHERED),
        multiplies_codes=held_as in (HeldAs.CODES, HeldAs.GATHERED),
        takes_weight_as_held=held_as is HeldAs.SCALED and recipe.weight.kind is ScaleKind.TENSOR and not is_seen,
        is_half=high_precision == ALL_GEMMS and held_as is HeldAs.VALUES,
        is_sampled=is_sampled,
        quantizes_input_first=is_seen or keeps_products or "output" in high_precision,
        quantizes_grad_first=is_seen,
        adds_bias_after=(is_sampled or keeps_products) and "output" not in high_precision,
        owns_output=not keeps_products,
        is_grouped=is_plain and kinds == {ScaleKind.TENSOR} and held_as in (HeldAs.VALUES, HeldAs.SCALED, HeldAs.CODES),
    )
