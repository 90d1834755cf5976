"""Options of `initialize`, and the checks that they and the optimizer pass at first."""

from typing import Any, Literal, Self

import torch
from pydantic import Field, ValidationError, model_validator
from torch import nn

from octet.api_schemas.base import refusal
from octet.api_schemas.levels import LEVELS, Level
from octet.api_schemas.precision import PrecisionSpec
from octet.api_schemas.problem import explain
from octet.worker.fp8.convert import SkippedLayer
from octet.worker.fp8.norms import select_norms
from octet.worker.optim import REPRESENTABLE, check_adoptable


class LibraryPrecision(PrecisionSpec):
    """The precision of a model in a user's loop: `initialize` has one option more than a job.

    gradient_accumulation: without `auto`, as a user's loop alone knows its number of micro-batches.
    """

    gradient_accumulation: Literal["fp8", "fp32"] = Field(
        default="fp8",
        description="format between micro-batches; fp8 rounds stochastically, fp32 takes 4 bytes per parameter and is worth it "
        "above 4 micro-batches",
    )

    fsdp_float8_all_gather: bool = Field(
        default=False, description="at te: gather sharded weights as FP8 codes under FSDP2; at ao it is an option of torchao's"
    )

    @model_validator(mode="after")
    def _gathers_fit(self) -> Self:
        """Check that every product is made of codes, since no values are gathered."""
        row, recipe = self.storage, self.resolved_recipe
        if not self.fsdp_float8_all_gather:
            return self
        if recipe is None or not row.has_own_fp8 or row.weight != "fp32":
            change = "Give it as torchao={'fsdp_float8_all_gather': True}." if row.engine == "torchao" else "Remove it."
            raise self._gather_refusal(f"level {self.level}", "level te, whose weights are values and products FP8", change)
        if recipe.granularity != "tensor":
            changed = "Set recipe.granularity to tensor, or remove fsdp_float8_all_gather."
            raise self._gather_refusal(f"recipe.granularity {recipe.granularity}", "one scale for each weight", changed)
        wide = [name for name in recipe.high_precision_gemms if name != "grad_weight"]
        if wide or not recipe.fp8_in_evaluation:
            got = f"recipe.high_precision_gemms {', '.join(wide)}" if wide else "recipe.fp8_in_evaluation false"
            changed = "Change the recipe, or remove fsdp_float8_all_gather."
            raise self._gather_refusal(got, "all products with the weight in FP8", changed)
        if self.statistics_every or self.demotion is not None:
            changed = "Remove statistics_every and demotion, or fsdp_float8_all_gather."
            raise self._gather_refusal("statistics_every or demotion", "no samples: FSDP2's optimizer is not known", changed)
        return self

    def _gather_refusal(self, got: str, allowed: str, change: str) -> Exception:
        return refusal("fsdp_float8_all_gather", got=f"True with {got}", allowed=allowed, change=change)


def read_options(opt_level: str | PrecisionSpec, options: dict[str, Any]) -> PrecisionSpec:
    """Return the spec of a level's name with the other fields as options, or of a whole spec.

    ValueError as `initialize`.
    """
    if isinstance(opt_level, PrecisionSpec):
        if options:
            raise ValueError(f"got a whole PrecisionSpec and also {', '.join(options)}. Put these into the spec.")
        return opt_level
    try:
        return LibraryPrecision.model_validate({"level": opt_level, **options})
    except ValidationError as error:
        complaints = [
            f"{violation.field}: got {violation.got}; allowed: {violation.allowed}. {violation.message}"
            for violation in explain(error, LibraryPrecision)
        ]
        raise ValueError("\n".join(complaints)) from None


def check_tokens(tokens: int | None) -> None:
    """Refuse a number of tokens that no layer can see. ValueError."""
    if tokens is not None and tokens < 1:
        raise ValueError(f"tokens is {tokens}; allowed: 1 or more. Give batch size times sequence length, or leave it out.")


def check_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module, precision: PrecisionSpec) -> None:
    """Refuse an optimizer that the level cannot represent, or of another model, or made too early.

    ValueError.
    """
    level = precision.storage
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError(f"optimizer is a {type(optimizer).__name__}; allowed: a torch.optim.Optimizer, or None.")
    _check_ownership(optimizer, model)
    if type(optimizer) not in REPRESENTABLE and not _takes_any_optimizer(level):
        others = ", ".join(name for name, row in LEVELS.items() if _takes_any_optimizer(row))
        raise ValueError(
            f"level {level.name} cannot hold the states of {type(optimizer).__name__}; allowed: "
            f"{', '.join(known.__name__ for known in REPRESENTABLE)}. Use one of these, or a level of {others}."
        )
    if type(optimizer) in REPRESENTABLE:
        check_adoptable(optimizer, level)
    _check_gathers(precision)


def select_half_norms(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, precision: PrecisionSpec
) -> tuple[list[str], list[SkippedLayer]]:
    """Return the names of the norms that will be in bf16, and those that stay, with the reason.

    Changes nothing.

    Both are empty unless the option `norms` is bf16. Raises ValueError where no norm can be in
    bf16, and for an optimizer that would round bf16 weights to nearest.
    """
    if precision.norms != "bf16":
        return [], []
    norms, skipped_norms = select_norms(model)
    if optimizer is not None and type(optimizer) not in REPRESENTABLE:
        raise ValueError(
            f"norms is bf16 and the optimizer a {type(optimizer).__name__}; allowed: one that rounds bf16 weights "
            f"stochastically ({', '.join(known.__name__ for known in REPRESENTABLE)}). Use one of these, or leave norms out."
        )
    return norms, skipped_norms


def gathers_weights(precision: PrecisionSpec) -> bool:
    """Return whether FSDP2 gathers our layers' weights as FP8 codes; torchao has its own option."""
    return isinstance(precision, LibraryPrecision) and precision.fsdp_float8_all_gather


def _check_ownership(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    known = set(model.parameters())
    foreign = [parameter for group in optimizer.param_groups for parameter in group["params"] if parameter not in known]
    if foreign:
        raise ValueError(
            f"{len(foreign)} of the optimizer's parameters are not of the model, the first of shape {tuple(foreign[0].shape)}; "
            "allowed: parameters of the model. Make the optimizer from model.parameters(), and another for the rest."
        )


def _takes_any_optimizer(level: Level) -> bool:
    """Return whether an optimizer reads and writes fp32 alone, and no step has to be skipped."""
    return {level.weight, level.weight_gradient, level.exp_avg, level.exp_avg_sq} == {"fp32"} and not level.loss_scaling


def _check_gathers(precision: PrecisionSpec) -> None:
    """Raise ValueError where weights will be gathered in FP8 and an optimizer holds them already."""
    at_te = gathers_weights(precision)
    if at_te or (precision.torchao is not None and precision.torchao.fsdp_float8_all_gather):
        raise ValueError(
            f"{'' if at_te else 'torchao.'}fsdp_float8_all_gather is True and there is an optimizer; allowed: none yet, as "
            "FSDP2 replaces the weights by shards. Call initialize(model, None, ...), then fully_shard, then make torch's "
            "optimizer of the shards; or leave the option out."
        )
