"""`initialize`: make a model and its optimizer train at a precision level, in whatever loop they are used.

    model, optimizer = initialize(model, optimizer, opt_level="O2")
    loss.backward(); torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0); optimizer.step(); optimizer.zero_grad()

Linear layers are replaced in place; parameter objects stay, and the optimizer object stays and changes its class, so that
groups, learning rates, hooks and schedulers stay. Call it when the model is on its device; load checkpoints afterwards.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Any, Protocol

import torch
import torch.distributed as dist
from pydantic import ValidationError
from torch import Tensor, nn

from api_schemas.levels import LEVELS, Level
from api_schemas.precision import PrecisionSpec
from api_schemas.problem import explain
from worker.following import follow_health
from worker.fp8.accelerator import run_under_autocast
from worker.fp8.bf16 import HalfLinear
from worker.fp8.casts import guard_casts
from worker.fp8.convert import (
    ConversionReport,
    filter_layers,
    replace_layers,
    replaceable_linears,
    select_layers,
    table_borrowed_by,
)
from worker.fp8.fallback import Fallback
from worker.fp8.gate_forward import carry_activations
from worker.fp8.gathered import check_gathers, gather_in_fp8
from worker.fp8.gradient import RoundingPosition
from worker.fp8.health import LayerDemoted, StepKeeper
from worker.fp8.linear import Float8Linear
from worker.fp8.loss_scaling import STATE_BUFFER, LossScaling, scale_losses
from worker.fp8.norm_forward import carry_norms
from worker.fp8.norms import LibraryPrecision, replace_norms, select_norms
from worker.fp8.recipe import Recipe
from worker.fp8.recipe_kwargs import is_recipe_kwargs, precision_of
from worker.fp8.sequence import take_over_activations
from worker.fp8.speedups import DEFAULT_TOKENS, Chip
from worker.fp8.torchao_linear import torchao_converter
from worker.fp8.weights import encode_weight
from worker.metrics.memory import memory_report
from worker.optim import REPRESENTABLE, LowBitOptimizer, QuantizedWeight, adopt, check_adoptable, make_by_name, take_over
from worker.plain import save_plainly

MIN_COMPUTE_CAPABILITY = (8, 9)
MIN_MX_COMPUTE_CAPABILITY = (10, 0)

FIRST_GRADIENT_STREAM = 1 << 31
"""The first random stream of gradient accumulation; those below it are the optimizer's."""


@dataclass(frozen=True)
class Conversion:
    """A converted model. quantized: the weights that it holds as codes, with what an optimizer needs to step them."""

    model: nn.Module
    report: ConversionReport
    quantized: list[QuantizedWeight]


class WeightSource(Protocol):
    """Where the values of a model come from whose parameters are on `meta`."""

    device: torch.device

    def fill(self, layer: nn.Module) -> None:
        """Give a layer's own parameters their values, right before it is converted."""

    def finish(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        """Give the rest of the model its values, and the optimizer the new parameters."""


@dataclass(frozen=True)
class Prepared:
    """What `prepare` made. health: follows FP8 from step to step; None at levels that have nothing to follow."""

    model: nn.Module
    optimizer: torch.optim.Optimizer | None
    report: ConversionReport
    health: StepKeeper | None


def initialize(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    opt_level: str | PrecisionSpec | None = None,
    *,
    optimizer_name: str | None = None,
    seed: int = 0,
    tokens: int | None = None,
    on_event: Callable[[LayerDemoted], None] | None = None,
    **options: Any,
) -> tuple[nn.Module, torch.optim.Optimizer | None]:
    """Convert `model` to a level; returns it with an optimizer that holds its states as the level says.

    opt_level: a level's name, with the other fields of `PrecisionSpec` as options; or a whole spec; default "O2". The option
    `recipe` may be one of Accelerate's (TERecipeKwargs, AORecipeKwargs, MSAMPRecipeKwargs, FP8RecipeKwargs), which then says
    the level unless opt_level does. The option `norms="bf16"` gives LayerNorm and RMSNorm weights and outputs in bf16, with
    fp32 statistics. optimizer_name: adamw, adam, lion or sgd, with default hyperparameters, for all parameters; without it
    and an optimizer there is none. seed: for stochastic rounding. tokens: how many a linear layer sees in one forward pass
    on one device, by which `auto_filter` tells what gains nothing in FP8; default 8192. on_event: told when a layer is
    demoted. `model.octet_report` tells what was done.
    On an accelerator the converted model, and each part of it, enters `torch.autocast` by itself when it is called: in fp16
    where the level's products are fp16, else in bf16. An autocast that is on already stays as it is.
    The given optimizer itself becomes what is returned: schedulers, hooks and groups that refer to it stay valid. Adam and
    AdamW become `LowBitAdamW`, which also skips steps with non-finite gradients; `LowBitAdamW`, `LowBitLion` and `LowBitSGD`
    keep their class. Another optimizer stays as it is where the level stores everything in fp32. Raises ValueError for
    options that do not exist or do not fit the level, for an optimizer that the level cannot represent, and for surprises
    under `strict`. Warns where nothing was converted.
    """
    if any(hasattr(module, "octet_report") for module in model.modules()):
        raise ValueError("the model, or a part of it, is initialized already. Build a new one to train it at another level.")
    if is_recipe_kwargs(options.get("recipe")) and not isinstance(opt_level, PrecisionSpec):
        meant = precision_of(options.pop("recipe"), opt_level, model, is_sharded=_is_sharded(optimizer, optimizer_name))
        opt_level, options = meant.level, meant.model_dump(exclude={"level"}, exclude_defaults=True) | options
    precision = read_options("O2" if opt_level is None else opt_level, options)
    if optimizer_name is not None:
        if optimizer is not None:
            raise ValueError("got both an optimizer and optimizer_name; allowed: one of them. Leave one out.")
        optimizer = make_by_name(optimizer_name, model)
    prepared = prepare(model, optimizer, precision, seed=seed, tokens=tokens, on_event=on_event)
    if dist.is_available() and dist.is_initialized():
        share_rounding(prepared.model, dist.get_rank(), dist.get_world_size())
    if prepared.report.nothing_converted:
        warnings.warn(prepared.report.nothing_converted, stacklevel=2)
    return prepared.model, prepared.optimizer


def _is_sharded(optimizer: torch.optim.Optimizer | None, optimizer_name: str | None) -> bool:
    """Whether a model may be sharded by FSDP2 after `initialize`: one of several ranks, and no optimizer yet."""
    in_ranks = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    return in_ranks and optimizer is None and optimizer_name is None


def prepare(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    precision: PrecisionSpec,
    *,
    seed: int = 0,
    tokens: int | None = None,
    on_event: Callable[[LayerDemoted], None] | None = None,
    source: WeightSource | None = None,
) -> Prepared:
    """Check everything, convert the model, then make its optimizer. Arguments and errors as for `initialize`.

    source: gives a model on `meta` its values. `model.octet_report` is the report.
    """
    if tokens is not None and tokens < 1:
        raise ValueError(f"tokens is {tokens}; allowed: 1 or more. Give batch size times sequence length, or leave it out.")
    if optimizer is not None:
        _check_optimizer(optimizer, model, precision.storage)
        check_gathers(precision)
    wants_norms = isinstance(precision, LibraryPrecision) and precision.norms == "bf16"
    norms, skipped_norms = select_norms(model) if wants_norms else ([], [])
    if norms and optimizer is not None and type(optimizer) not in REPRESENTABLE:
        raise ValueError(
            f"norms is bf16 and the optimizer a {type(optimizer).__name__}; allowed: one that rounds bf16 weights "
            f"stochastically ({', '.join(known.__name__ for known in REPRESENTABLE)}). Use one of these, or leave norms out."
        )
    conversion = convert(model, precision, seed=seed, tokens=DEFAULT_TOKENS if tokens is None else tokens, source=source)
    if isinstance(precision, LibraryPrecision) and precision.fsdp_float8_all_gather:
        gather_in_fp8(conversion.model)
    replace_norms(conversion.model, norms)
    carry_norms(conversion.model)
    carry_activations(conversion.model)
    if source is not None:
        source.finish(conversion.model, optimizer)
    if optimizer is not None and type(optimizer) in REPRESENTABLE:
        adopted = adopt(optimizer, precision.storage, quantized=conversion.quantized, seed=seed)
        optimizer = take_over(optimizer, adopted)
    for weight in conversion.quantized:  # masters exist now; a layer that is not trained, or not yet, has none
        weight.holder.initial_values = None
    health = follow_health(conversion.model, optimizer, precision, on_event)
    scales_losses = precision.storage.loss_scaling and any(parameter.requires_grad for parameter in model.parameters())
    keep = (STATE_BUFFER,) if scales_losses else ()
    if precision.storage.gemm == "fp8" or isinstance(optimizer, LowBitOptimizer) or keep:
        guard_casts(conversion.model, keep)
    save_plainly(conversion.model)
    run_under_autocast(conversion.model, _half_dtype(precision.storage))
    if scales_losses:
        scaling = scale_losses(conversion.model)
        if optimizer is not None:
            optimizer.register_step_post_hook(partial(_rescale, scaling))
    report = conversion.report.completed(memory_report(conversion.model, optimizer), health)
    report = replace(report, norms=tuple(norms), skipped_norms=tuple(skipped_norms))
    conversion.model.octet_report = report  # type: ignore[assignment]
    return Prepared(conversion.model, optimizer, report, health)


def share_rounding(model: nn.Module, rank: int, num_ranks: int) -> None:
    """Let this rank round its FP8 gradients with numbers of its own: it trains one of `num_ranks` parts of each batch."""
    for layer in model.modules():
        if isinstance(layer, Float8Linear) and layer.gradient_position is not None:
            layer.gradient_position.share, layer.gradient_position.num_shares = rank, num_ranks


def convert(
    model: nn.Module,
    precision: PrecisionSpec,
    *,
    seed: int = 0,
    tokens: int = DEFAULT_TOKENS,
    source: WeightSource | None = None,
) -> Conversion:
    """Put the layers of a level into a model. Raises ValueError, before anything is changed, for what cannot be done."""
    device, chip = _device_of(model, source), None
    if device is not None and device.type == "cuda":
        chip = Chip(torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device))
        check_chip(chip, precision)
    selected, skipped = select_layers(model, precision)
    filtered = filter_layers(model, selected, precision, tokens, chip)
    weights = [model.get_parameter(f"{name}.weight".lstrip(".")) for name in selected]
    needs_master = precision.storage.master_weight == "fp16+scale" and source is None
    originals = {weight: weight.detach() for weight in weights} if needs_master else {}
    model = _replace(model, selected, precision, seed, source)
    for layer in filtered:
        model.get_submodule(layer.name).fallback = Fallback.FILTERED  # type: ignore[assignment]
    num_parameters = sum(weight.numel() for weight in weights)
    borrowed = table_borrowed_by(chip, precision) if selected else None
    report = ConversionReport(precision.level, tuple(selected), tuple(skipped), tuple(filtered), num_parameters, borrowed)
    return Conversion(model, report, _quantized_weights(model, originals))


def check_chip(chip: Chip, precision: PrecisionSpec) -> None:
    """Refuse a level, or a recipe, whose products a CUDA device has no instructions for. ValueError."""
    level, recipe, (major, minor) = precision.storage, precision.resolved_recipe, chip.capability
    if level.gemm == "fp8" and chip.capability < MIN_COMPUTE_CAPABILITY:
        raise ValueError(
            f"level {level.name} multiplies in FP8; {chip.name} has compute capability {major}.{minor}; allowed: 8.9 or "
            "later (Ada, Hopper, Blackwell). Use bf16-amp or fp16-amp there."
        )
    if recipe is not None and recipe.granularity == "mx" and chip.capability < MIN_MX_COMPUTE_CAPABILITY:
        raise ValueError(
            f"recipe.granularity mx multiplies blocks of 32 elements with E8M0 scales; {chip.name} has compute capability "
            f"{major}.{minor}; allowed: 10.0 or later (Blackwell). Use granularity block, row or tensor there."
        )


def read_options(opt_level: str | PrecisionSpec, options: dict[str, Any]) -> PrecisionSpec:
    """Return the spec of a level's name with the other fields as options, or of a whole spec. ValueError as `initialize`."""
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


def _check_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module, level: Level) -> None:
    """Refuse an optimizer that the level cannot represent, or of another model, before anything is changed."""
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


def _check_ownership(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    known = set(model.parameters())
    foreign = [parameter for group in optimizer.param_groups for parameter in group["params"] if parameter not in known]
    if foreign:
        raise ValueError(
            f"{len(foreign)} of the optimizer's parameters are not of the model, the first of shape {tuple(foreign[0].shape)}; "
            "allowed: parameters of the model. Make the optimizer from model.parameters(), and another for the rest."
        )


def _takes_any_optimizer(level: Level) -> bool:
    """Whether everything that an optimizer reads and writes is fp32, and no step has to be skipped."""
    return {level.weight, level.weight_gradient, level.exp_avg, level.exp_avg_sq} == {"fp32"} and not level.loss_scaling


def _device_of(model: nn.Module, source: WeightSource | None) -> torch.device | None:
    """The device that the model is on, or will be."""
    return next((parameter.device for parameter in model.parameters()), None) if source is None else source.device


def _replace(
    model: nn.Module, selected: list[str], precision: PrecisionSpec, seed: int, source: WeightSource | None
) -> nn.Module:
    """Replace the selected layers by the level's own, and all others that can be by layers of 16 bits."""
    storage = precision.storage
    if storage.gemm == "fp32":
        return model
    in_half = replaceable_linears(model)
    if storage.gemm == "fp8":
        in_half = [name for name in in_half if name not in set(selected)]
        if storage.engine == "torchao":
            device = _device_of(model, source)
            assert device is not None
            make = torchao_converter(precision, device)
        else:
            make = _float8_converter(precision, seed)
        model = replace_layers(model, selected, make if source is None else _filled(make, source))
        take_over_activations(model)
    return replace_layers(model, in_half, lambda linear: HalfLinear(linear, _half_dtype(storage)))


def _half_dtype(level: Level) -> torch.dtype:
    """The dtype of a level's 16-bit products, and of its autocast on an accelerator."""
    return torch.float16 if level.gemm == "fp16" else torch.bfloat16


def _filled(make: Callable[[Any], nn.Module], source: WeightSource) -> Callable[[Any], nn.Module]:
    def fill_and_make(linear: nn.Module) -> nn.Module:
        source.fill(linear)
        return make(linear)

    return fill_and_make


def _float8_converter(precision: PrecisionSpec, seed: int) -> Callable[[nn.Linear], nn.Module]:
    storage, spec = precision.storage, precision.resolved_recipe
    assert spec is not None
    recipe, streams = Recipe.resolve(spec), count(FIRST_GRADIENT_STREAM)
    holds_fp8_gradients = storage.weight_gradient == "fp8" and precision.gradient_accumulation == "fp8"

    def make(linear: nn.Linear) -> nn.Module:
        position = RoundingPosition(seed, next(streams)) if holds_fp8_gradients else None
        encoded = encode_weight(linear.weight, storage)
        return Float8Linear(linear, recipe, encoded, position, precision.resolved_statistics_every)

    return make


def _quantized_weights(model: nn.Module, originals: dict[nn.Parameter, Tensor]) -> list[QuantizedWeight]:
    """originals: fp32 values of weights that need a master."""
    layers = [
        module for module in model.modules() if isinstance(module, Float8Linear) and module.weight_dequant_scale is not None
    ]
    for layer in layers:
        layer.initial_values = originals.pop(layer.weight, None)
    return [QuantizedWeight(layer) for layer in layers]


def _rescale(scaling: LossScaling, optimizer: torch.optim.Optimizer, *_step: Any) -> None:
    assert isinstance(optimizer, LowBitOptimizer)
    scaling.update(optimizer.skipped_steps)
