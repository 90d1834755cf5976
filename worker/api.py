"""`initialize`: make a model and its optimizer train at a precision level, in whatever loop they are used.

    model, optimizer = initialize(model, optimizer, opt_level="O2")
    loss.backward(); torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0); optimizer.step(); optimizer.zero_grad()

Linear layers are replaced in place; parameter objects stay, so the optimizer's groups and learning rates stay. Call it
when the model is on its device; load checkpoints and make learning-rate schedulers afterwards.
"""

from dataclasses import replace
from difflib import get_close_matches
from itertools import count
from typing import Any

import torch
from torch import nn

from api_schemas.levels import LEVELS, Level
from worker.fp8.convert import ConversionReport, LayerRules, replace_layers, replaceable_linears, select_layers
from worker.fp8.gradient import RoundingPosition
from worker.fp8.half import HalfLinear
from worker.fp8.linear import Float8Linear
from worker.fp8.recipe import Recipe
from worker.memory import memory_report
from worker.optim import QuantizedWeight, adopt
from worker.optim.adopt import REPRESENTABLE

FIRST_GRADIENT_STREAM = 1 << 31
"""Below it are the optimizer's random streams, above it those of gradient accumulation."""

_WEIGHT_CODES = {"fp32": None, "fp16+scale": torch.float16}


def initialize(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    opt_level: str = "O2",
    *,
    seed: int = 0,
    **rules: Any,
) -> tuple[nn.Module, torch.optim.Optimizer | None]:
    """Convert `model` to the level; returns it with an optimizer that holds its states as the level says.

    `seed` is that of stochastic rounding, `rules` are the fields of `LayerRules`. `model.octet_report` tells what was done.
    Adam and AdamW become `LowBitAdamW`, which also skips steps with non-finite gradients; another optimizer stays as it
    is where the level stores everything in fp32, and is refused elsewhere. Raises ValueError for that, for an unknown
    level, and for surprises under `strict`.
    """
    level = find_level(opt_level)
    if optimizer is not None:
        _check_optimizer(optimizer, level)
    model, report = _convert(model, level, LayerRules(**rules), seed)
    if optimizer is not None and type(optimizer) in REPRESENTABLE:
        quantized = _quantized_weights(model)
        optimizer = adopt(optimizer, level.exp_avg, level.exp_avg_sq, quantized=quantized, seed=seed)
    model.octet_report = replace(report, bytes_by_class=memory_report(model, optimizer))  # type: ignore[assignment]
    return model, optimizer


def find_level(name: str) -> Level:
    """The row of the level table; ValueError with what is allowed otherwise."""
    if name in LEVELS:
        return LEVELS[name]
    with_letter = {known.lower(): known for known in LEVELS}.get(name.lower().replace("0", "o", 1))
    close = [with_letter] if with_letter else get_close_matches(name, LEVELS, n=1)
    hint = f"Did you mean {close[0]!r}?" if close else "Choose one of these."
    raise ValueError(f"unknown opt_level {name!r}; allowed: {', '.join(LEVELS)}. {hint}")


def _convert(model: nn.Module, level: Level, rules: LayerRules, seed: int) -> tuple[nn.Module, ConversionReport]:
    selected, skipped = select_layers(model, rules)
    num_parameters = sum(model.get_parameter(f"{name}.weight" if name else "weight").numel() for name in selected)
    report = ConversionReport(level.name, tuple(selected), tuple(skipped), num_parameters)
    if level.gemm == "fp32":
        return model, report
    in_half = replaceable_linears(model)
    if level.gemm == "fp8":
        in_half = [name for name in in_half if name not in set(selected)]
        streams = count(FIRST_GRADIENT_STREAM)

        def to_float8(linear: nn.Linear) -> Float8Linear:
            position = RoundingPosition(seed, stream=next(streams)) if level.weight_gradient == "fp8" else None
            return Float8Linear(linear, Recipe(), weight_codes=_WEIGHT_CODES[level.weight], gradient_position=position)

        model = replace_layers(model, selected, to_float8)
    compute_dtype = torch.float16 if level.gemm == "fp16" else torch.bfloat16
    return replace_layers(model, in_half, lambda linear: HalfLinear(linear, compute_dtype)), report


def _check_optimizer(optimizer: torch.optim.Optimizer, level: Level) -> None:
    """Refuse before anything is changed."""
    stores_fp32 = (level.weight, level.weight_gradient, level.exp_avg, level.exp_avg_sq) == ("fp32",) * 4
    if type(optimizer) not in REPRESENTABLE and not stores_fp32:
        raise ValueError(
            f"level {level.name} cannot hold the states of {type(optimizer).__name__}; allowed: "
            f"{', '.join(known.__name__ for known in REPRESENTABLE)}. Use one of these, or a level of fp32 states."
        )


def _quantized_weights(model: nn.Module) -> list[QuantizedWeight]:
    layers = [module for module in model.modules() if isinstance(module, Float8Linear)]
    return [
        QuantizedWeight(layer.weight, layer.weight_dequant_scale) for layer in layers if layer.weight_dequant_scale is not None
    ]
