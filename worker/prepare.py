"""`initialize`: make a model and its optimizer train at a precision level, in whatever loop they are used.

    model, optimizer = initialize(model, optimizer, opt_level="O2")
    loss.backward(); torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0); optimizer.step(); optimizer.zero_grad()

Linear layers are replaced in place; parameter objects stay, so the optimizer's groups and learning rates stay. Call it
when the model is on its device; load checkpoints and make learning-rate schedulers afterwards.
"""

from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor, nn

from api_schemas.levels import LEVELS, Level
from api_schemas.precision import PrecisionSpec
from api_schemas.problem import explain
from worker.fp8.bf16 import HalfLinear
from worker.fp8.convert import (
    ConversionReport,
    filter_layers,
    replace_layers,
    replaceable_linears,
    select_layers,
    take_over_activations,
)
from worker.fp8.gradient import RoundingPosition
from worker.fp8.health import LayerDemoted, StepKeeper
from worker.fp8.linear import Fallback, Float8Linear
from worker.fp8.loss_scaling import LossScaling, scale_losses
from worker.fp8.recipe import Recipe
from worker.fp8.speedups import DEFAULT_TOKENS
from worker.fp8.statistics import OperandSample
from worker.fp8.torchao_linear import torchao_converter
from worker.fp8.weights import encode_weight
from worker.metrics.memory import memory_report
from worker.optim import REPRESENTABLE, LowBitOptimizer, QuantizedWeight, adopt

MIN_COMPUTE_CAPABILITY = (8, 9)

FIRST_GRADIENT_STREAM = 1 << 31
"""Below it are the optimizer's random streams, above it those of gradient accumulation."""


def initialize(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    opt_level: str | PrecisionSpec = "O2",
    *,
    seed: int = 0,
    tokens: int | None = None,
    on_event: Callable[[LayerDemoted], None] | None = None,
    **options: Any,
) -> tuple[nn.Module, torch.optim.Optimizer | None]:
    """Convert `model` to a level; returns it with an optimizer that holds its states as the level says.

    opt_level: a level's name, with the other fields of `PrecisionSpec` as options; or a whole spec. seed: of stochastic
    rounding. tokens: that a linear layer sees in one forward pass on one device, by which `auto_filter` tells what gains
    nothing in FP8; default 8192. on_event: told when a layer is demoted. `model.octet_report` tells what was done.
    Adam and AdamW become `LowBitAdamW`, which also skips steps with non-finite gradients; `LowBitAdamW` and `LowBitLion` keep
    their class. Another optimizer stays as it is where the level stores everything in fp32. Raises ValueError for
    options that do not exist or do not fit the level, for an optimizer that the level cannot represent, and for surprises
    under `strict`.
    """
    if hasattr(model, "octet_report"):
        raise ValueError("the model is initialized already. Build it anew to train it at another level.")
    if tokens is not None and tokens < 1:
        raise ValueError(f"tokens is {tokens}; allowed: 1 or more. Give batch size times sequence length, or leave it out.")
    precision = _read_options(opt_level, options)
    if optimizer is not None:
        _check_optimizer(optimizer, precision.storage)
    device = next((parameter.device for parameter in model.parameters()), None)
    capability = None
    if device is not None and device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        check_capability(capability, torch.cuda.get_device_name(device), precision.storage)
    selected, skipped = select_layers(model, precision)
    filtered = filter_layers(model, selected, precision, DEFAULT_TOKENS if tokens is None else tokens, capability)
    num_parameters = sum(model.get_parameter(f"{name}.weight".lstrip(".")).numel() for name in selected)
    originals: dict[Tensor, Tensor] = {}
    model = _convert(model, selected, precision, seed, originals)
    for layer in filtered:
        model.get_submodule(layer.name).fallback = Fallback.FILTERED  # type: ignore[assignment]
    if optimizer is not None and type(optimizer) in REPRESENTABLE:
        optimizer = adopt(optimizer, precision.storage, quantized=_quantized_weights(model, originals), seed=seed)
    _follow_steps(model, optimizer, precision, on_event)
    model.octet_report = ConversionReport(  # type: ignore[assignment]
        precision.level, tuple(selected), tuple(skipped), tuple(filtered), num_parameters, memory_report(model, optimizer)
    )
    return model, optimizer


def fp8_statistics(model: nn.Module) -> list[OperandSample]:
    """The newest samples of a model that was initialized with `statistics_every`, one for each operand of each layer."""
    keeper = getattr(model, "octet_steps", None)
    if not isinstance(keeper, StepKeeper):
        raise ValueError("the model samples no statistics. Initialize it at an FP8 level with statistics_every.")
    return keeper.samples


def _read_options(opt_level: str | PrecisionSpec, options: dict[str, Any]) -> PrecisionSpec:
    if isinstance(opt_level, PrecisionSpec):
        if options:
            raise ValueError(f"got a whole PrecisionSpec and {', '.join(options)} beside it. Put these into the spec.")
        return opt_level
    try:
        return PrecisionSpec.model_validate({"level": opt_level, **options})
    except ValidationError as error:
        complaints = [
            f"{violation.field}: got {violation.got}; allowed: {violation.allowed}. {violation.message}"
            for violation in explain(error, PrecisionSpec)
        ]
        raise ValueError("\n".join(complaints)) from None


def _check_optimizer(optimizer: torch.optim.Optimizer, level: Level) -> None:
    """Refuse before anything is changed."""
    if type(optimizer) not in REPRESENTABLE and not _takes_any_optimizer(level):
        others = ", ".join(name for name, row in LEVELS.items() if _takes_any_optimizer(row))
        raise ValueError(
            f"level {level.name} cannot hold the states of {type(optimizer).__name__}; allowed: "
            f"{', '.join(known.__name__ for known in REPRESENTABLE)}. Use one of these, or a level of {others}."
        )


def check_capability(capability: tuple[int, int], device_name: str, level: Level) -> None:
    """Refuse a level whose products a CUDA device has no instructions for. ValueError."""
    if level.has_own_fp8 and capability < MIN_COMPUTE_CAPABILITY:
        major, minor = capability
        raise ValueError(
            f"level {level.name} multiplies in FP8; {device_name} has compute capability {major}.{minor}; allowed: 8.9 or "
            "later (Ada, Hopper, Blackwell). Use bf16-amp or fp16-amp there."
        )


def _takes_any_optimizer(level: Level) -> bool:
    """Whether everything that an optimizer reads and writes is fp32, and no step has to be skipped."""
    return {level.weight, level.weight_gradient, level.exp_avg, level.exp_avg_sq} == {"fp32"} and not level.loss_scaling


def _convert(
    model: nn.Module, selected: list[str], precision: PrecisionSpec, seed: int, originals: dict[Tensor, Tensor]
) -> nn.Module:
    """The model with the layers of the level in it. `originals` receives the values of weights that need a master."""
    row = precision.storage
    if row.gemm == "fp32":
        return model
    in_half = replaceable_linears(model)
    if row.gemm == "fp8":
        in_half = [name for name in in_half if name not in set(selected)]
        if row.engine == "torchao":
            convert = torchao_converter(precision, next(model.parameters()).device)
        else:
            convert = _float8_converter(precision, seed, originals)
        model = replace_layers(model, selected, convert)
        take_over_activations(model)
    compute_dtype = torch.float16 if row.gemm == "fp16" else torch.bfloat16
    return replace_layers(model, in_half, lambda linear: HalfLinear(linear, compute_dtype))


def _float8_converter(precision: PrecisionSpec, seed: int, originals: dict[Tensor, Tensor]) -> Callable[[nn.Linear], nn.Module]:
    row, spec = precision.storage, precision.resolved_recipe
    assert spec is not None
    recipe, streams = Recipe.resolve(spec), count(FIRST_GRADIENT_STREAM)
    holds_fp8_gradients = row.weight_gradient == "fp8" and precision.gradient_accumulation == "fp8"

    def convert(linear: nn.Linear) -> nn.Module:
        if row.master_weight == "fp16+scale":
            originals[linear.weight] = linear.weight.detach()
        position = RoundingPosition(seed, next(streams)) if holds_fp8_gradients else None
        return Float8Linear(linear, recipe, encode_weight(linear.weight, row), position, precision.resolved_statistics_every)

    return convert


def _quantized_weights(model: nn.Module, originals: dict[Tensor, Tensor]) -> list[QuantizedWeight]:
    layers = [module for module in model.modules() if isinstance(module, Float8Linear)]
    return [
        QuantizedWeight(
            layer.weight,
            layer.weight_dequant_scale,
            layer.weight_residual,
            layer.weight_amax,
            initial_values=originals.pop(layer.weight, None),
        )
        for layer in layers
        if layer.weight_dequant_scale is not None
    ]


def _follow_steps(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    precision: PrecisionSpec,
    on_event: Callable[[LayerDemoted], None] | None,
) -> None:
    """Let the model do after each step of the optimizer what its precision needs done."""
    recipe = precision.resolved_recipe
    layers = {name: module for name, module in model.named_modules() if isinstance(module, Float8Linear)}
    if layers and recipe is not None and (recipe.scaling == "delayed" or precision.resolved_statistics_every):
        keeper = StepKeeper(layers, precision.demotion, on_event)
        model.octet_steps = keeper  # type: ignore[assignment]
        if optimizer is not None:
            optimizer.register_step_post_hook(partial(_keep, keeper))
    if precision.storage.loss_scaling:
        scaling = scale_losses(model)
        if optimizer is not None:
            optimizer.register_step_post_hook(partial(_rescale, scaling))


def _keep(keeper: StepKeeper, *_step: Any) -> None:
    keeper.after_step()


def _rescale(scaling: LossScaling, optimizer: torch.optim.Optimizer, *_step: Any) -> None:
    assert isinstance(optimizer, LowBitOptimizer)
    scaling.update(optimizer.num_skipped_steps)
