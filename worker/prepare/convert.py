"""Put the layers of a level into a model."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from octet.api_schemas.levels import Level
from octet.api_schemas.precision import PrecisionSpec
from octet.worker.fp8.bf16 import HalfLinear, HalfNNLinear
from octet.worker.fp8.convert import (
    ConversionReport,
    filter_layers,
    replace_layers,
    replaceable_linears,
    select_layers,
    table_borrowed_by,
)
from octet.worker.fp8.fallback import Fallback
from octet.worker.fp8.linear import Float8Linear, Float8NNLinear
from octet.worker.fp8.recipe import Recipe
from octet.worker.fp8.rounding_position import RoundingPosition
from octet.worker.fp8.sequence import take_over_activations
from octet.worker.fp8.speedups import DEFAULT_TOKENS, Chip
from octet.worker.fp8.torchao_linear import torchao_converter
from octet.worker.fp8.weight import is_float8_weight
from octet.worker.fp8.weights import encode_weight

MIN_COMPUTE_CAPABILITY = (8, 9)
MIN_MX_COMPUTE_CAPABILITY = (10, 0)

FIRST_GRADIENT_STREAM = 1 << 31
"""The first random stream of gradient accumulation; those below it are the optimizer's."""


@dataclass(frozen=True)
class Conversion:
    """A converted model."""

    model: nn.Module
    report: ConversionReport


class WeightSource(Protocol):
    """Gives a model whose parameters are on `meta` their values."""

    device: torch.device

    def fill(self, layer: nn.Module) -> None:
        """Give a layer's own parameters their values, right before it is converted."""

    def dequant_scale(self, weight: Tensor) -> Tensor | None:
        """Return the scale, fp32 (), at which a filled weight's values are E4M3 codes without rounding; None if unknown."""

    def finish(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        """Give the rest of the model its values, and the optimizer the new parameters."""


def convert(
    model: nn.Module,
    precision: PrecisionSpec,
    *,
    seed: int = 0,
    tokens: int = DEFAULT_TOKENS,
    source: WeightSource | None = None,
) -> Conversion:
    """Put the layers of a level into a model.

    Raises ValueError, before anything is changed, for what cannot be done.
    """
    device, chip = _device_of(model, source), None
    if device is not None and device.type == "cuda":
        chip = Chip(torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device))
        check_chip(chip, precision)
    selected, skipped = select_layers(model, precision)
    filtered = filter_layers(model, selected, precision, tokens, chip)
    weights = [model.get_parameter(f"{name}.weight".lstrip(".")) for name in selected]
    num_parameters = sum(weight.numel() for weight in weights)
    needs_master = precision.storage.master_weight == "fp16+scale" and source is None
    originals = {weight: weight.data for weight in weights} if needs_master else {}
    model = _replace(model, selected, precision, seed, source)
    _let_values_wait(originals)
    for layer in filtered:
        model.get_submodule(layer.name).fallback = Fallback.TOO_SMALL  # type: ignore[assignment]
    borrowed = table_borrowed_by(chip, precision) if selected else None
    report = ConversionReport(precision.level, tuple(selected), tuple(skipped), tuple(filtered), num_parameters, borrowed)
    return Conversion(model, report)


def check_chip(chip: Chip, precision: PrecisionSpec) -> None:
    """Refuse a level, or a recipe, whose products a CUDA device has no instructions for.

    ValueError.
    """
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


def _device_of(model: nn.Module, source: WeightSource | None) -> torch.device | None:
    """Return the device that the model is on, or will be."""
    return next((parameter.device for parameter in model.parameters()), None) if source is None else source.device


def _replace(
    model: nn.Module, selected: list[str], precision: PrecisionSpec, seed: int, source: WeightSource | None
) -> nn.Module:
    """Replace selected layers by the level's own, and others, where possible, by 16-bit layers."""
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
            make = _float8_converter(precision, seed, source)
        model = replace_layers(model, selected, make if source is None else _filled(make, source))
        take_over_activations(model)

    def in_16_bits(linear: nn.Module) -> nn.Module:
        layer = HalfNNLinear if isinstance(linear, nn.Linear) else HalfLinear
        return layer(linear, half_dtype(storage))

    return replace_layers(model, in_half, in_16_bits)


def half_dtype(level: Level) -> torch.dtype:
    """Return the dtype of a level's 16-bit products, and of its autocast on an accelerator."""
    return torch.float16 if level.gemm == "fp16" else torch.bfloat16


def _filled(make: Callable[[Any], nn.Module], source: WeightSource) -> Callable[[Any], nn.Module]:
    def fill_and_make(linear: nn.Module) -> nn.Module:
        source.fill(linear)
        return make(linear)

    return fill_and_make


def _float8_converter(precision: PrecisionSpec, seed: int, source: WeightSource | None) -> Callable[[nn.Linear], nn.Module]:
    storage, spec = precision.storage, precision.resolved_recipe
    assert spec is not None
    recipe, streams = Recipe.resolve(spec), count(FIRST_GRADIENT_STREAM)

    def make(linear: nn.Linear) -> nn.Module:
        position = RoundingPosition(seed, next(streams)) if precision.holds_fp8_gradients else None
        dequant_scale = None if source is None else source.dequant_scale(linear.weight)
        encoded = encode_weight(linear.weight, storage, dequant_scale)
        layer = Float8NNLinear if isinstance(linear, nn.Linear) else Float8Linear
        return layer(linear, recipe, encoded, position, precision.resolved_statistics_every)

    return make


def _let_values_wait(originals: dict[nn.Parameter, Tensor]) -> None:
    """Keep the fp32 values of weights that need a master until the optimizer has made it."""
    for weight, values in originals.items():
        if is_float8_weight(weight):
            weight.state.wide, weight.state.is_assigned = values, True


def share_rounding(model: nn.Module, rank: int, num_ranks: int) -> None:
    """Let this rank, one of `num_ranks`, round its FP8 gradients with numbers of its own."""
    for layer in model.modules():
        if isinstance(layer, Float8Linear) and layer.gradient_position is not None:
            layer.gradient_position.share, layer.gradient_position.num_shares = rank, num_ranks
