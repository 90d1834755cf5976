"""Choose the linear layers of a model to convert, by rule, and report why each of the others was left.

Conversion replaces `nn.Linear` and Hugging Face's `Conv1D` modules in place; the converted layers keep the parameter
objects, so ties, parameter groups and whatever else refers to a parameter stay valid. Heads stay in 16 bits, as does every
layer that a rule or the user leaves out.
"""

import itertools
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from torch import nn

from octet.api_schemas.conversion import MIN_FEATURES, matches, names_at_the_ends, why_not_wanted
from octet.api_schemas.levels import LEVELS
from octet.api_schemas.precision import PrecisionSpec
from octet.api_schemas.recipe import RecipeSpec
from octet.worker.common.wrap import count_wrappers
from octet.worker.fp8.attention import computes_by_layers
from octet.worker.fp8.bf16 import HalfLinear
from octet.worker.fp8.casts import TRAINABLE_DTYPES
from octet.worker.fp8.health import StepKeeper
from octet.worker.fp8.layout import is_known_class, layout_of
from octet.worker.fp8.linear import Float8Linear
from octet.worker.fp8.recipe import Recipe
from octet.worker.fp8.speedups import Chip, borrowed_table, why_bf16

CALLERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
"""torch's own modules that call the linear layers below them."""


@dataclass(frozen=True)
class SkippedLayer:
    """A linear layer that stays as it is. by_request: by a glob of the user's, or by the rule for heads."""

    name: str
    reason: str
    by_request: bool = False


@dataclass(frozen=True)
class FilteredLayer:
    """A converted layer that multiplies in bf16, because FP8 is slower at its shape on this device."""

    name: str
    reason: str


@dataclass(frozen=True)
class ConversionReport:
    """Lists what was done to each linear layer, and the bytes that model and optimizer held right afterwards.

    `converted` layers hold the formats of the level's row, at `fp32` too, so that levels compare. They compute
    in them as well, except those in `filtered`. A checkpoint that is loaded later brings the filtered layers of its own run.
    """

    level: str
    converted: tuple[str, ...]
    skipped: tuple[SkippedLayer, ...]
    filtered: tuple[FilteredLayer, ...]
    num_converted_parameters: int
    borrowed_table: str | None = None
    """The origin of the speedups by which `filtered` was chosen, on a device that has none of its own."""
    norms: tuple[str, ...] = ()
    """Norms with weights and outputs in bf16."""
    skipped_norms: tuple[SkippedLayer, ...] = ()
    bytes_by_class: dict[str, int] = field(default_factory=dict)
    health: StepKeeper | None = field(default=None, repr=False, compare=False)
    model: nn.Module | None = field(default=None, repr=False, compare=False)
    """The converted model: a report that is printed lists the wrappers that the model has then."""

    def completed(self, bytes_by_class: dict[str, int], health: StepKeeper | None) -> "ConversionReport":
        """The report with what is known once the optimizer exists."""
        return replace(self, bytes_by_class=bytes_by_class, health=health)

    @property
    def why_filtered(self) -> str:
        """The reasons for bf16, each with its number of layers."""
        return _counted(self.filtered)

    @property
    def nothing_converted(self) -> str | None:
        """The reasons why the level converted no layer, in a line; None where it did, or converts none."""
        if self.converted or LEVELS[self.level].gemm == "fp32":
            return None
        return f"nothing was converted: {_counted(self.skipped) or 'the model has no linear layers'}"

    def __str__(self) -> str:
        in_bf16 = f" ({len(self.filtered)} of them multiply in bf16)" if self.filtered else ""
        lines = [f"level {self.level}: {len(self.converted)} layers converted{in_bf16}, {len(self.skipped)} skipped"]
        lines += [f"  {self.nothing_converted}"] if self.nothing_converted else []
        lines += [f"  layers in FP8 are chosen by speedups {self.borrowed_table}"] if self.borrowed_table else []
        reasons = {layer.name: f", in bf16: {layer.reason}" for layer in self.filtered}
        lines += [f"  converted {line}" for line in _joined(f"{name}{reasons.get(name, '')}" for name in self.converted)]
        lines += [f"  skipped   {layer.name}: {layer.reason}" for layer in self.skipped]
        lines += [f"  in bf16   {name}" for name in self.norms]
        lines += [f"  in fp32   {norm.name}: {norm.reason}" for norm in self.skipped_norms]
        lines += [f"  forward   {line}" for line in _wrapper_lines(self.model)]
        lines += [f"  {num_bytes:>15,} bytes of {kind}" for kind, num_bytes in self.bytes_by_class.items()]
        return "\n".join(lines)


def _joined(lines: Iterable[str]) -> Iterator[str]:
    """Yield lines, those of a mixture's experts as one: a model of 48 layers with 128 experts has 12,288."""
    for line, run in itertools.groupby(lines, _without_expert):
        same = list(run)
        yield same[0] if len(same) == 1 else f"{line} ({len(same)} experts)"


def _without_expert(line: str) -> str:
    return re.sub(r"(experts\.\w+)\.[0-9]+\b", r"\1", line)


def select_layers(model: nn.Module, rules: PrecisionSpec) -> tuple[list[str], list[SkippedLayer]]:
    """Split the linear layers of a model into those to convert and those to leave, with the reason. Changes nothing.

    A layer is converted if `include` matches its name, unless `exclude` or another rule speaks against it.

    Raises ValueError under `strict` if a layer is left out that no option leaves out, or a glob matches no layer.
    """
    linears = _linears(model)
    users = Counter(id(parameter) for module in model.modules() for parameter in module.parameters(recurse=False))
    selected, skipped = [], []
    ends = names_at_the_ends(list(linears), rules)
    for name, linear in linears.items():
        reason = why_not_wanted(name, rules, ends)
        layer = SkippedLayer(name, reason, by_request=True) if reason else None
        if layer is None:
            reason = _why_not_possible(name, linear, model, rules, num_users=users[id(linear.weight)])
            layer = SkippedLayer(name, reason) if reason else None
        if layer is None:
            selected.append(name)
        else:
            skipped.append(layer)
    if rules.strict:
        _refuse_surprises(linears, skipped, rules)
    return selected, skipped


def filter_layers(
    model: nn.Module, names: Collection[str], rules: PrecisionSpec, tokens: int, chip: Chip | None
) -> list[FilteredLayer]:
    """Find the named linear layers that gain nothing in FP8. Changes nothing.

    tokens: the number that a layer sees in a forward pass. chip: None on any device but CUDA's, where nothing is filtered.
    """
    recipe = _recipe_to_filter_by(rules)
    if recipe is None:
        return []
    filtered = []
    for name in names:
        layout = layout_of(model.get_submodule(name))
        assert layout is not None
        reason = why_bf16(layout.in_features, layout.out_features, tokens, rules.storage, recipe, chip)
        filtered += [FilteredLayer(name, reason)] if reason else []
    return filtered


def table_borrowed_by(chip: Chip | None, rules: PrecisionSpec) -> str | None:
    """Name the table by which layers are filtered on a chip without one; None where it has one, or nothing is filtered."""
    recipe = _recipe_to_filter_by(rules)
    return None if recipe is None else borrowed_table(recipe, chip)


def _recipe_to_filter_by(rules: PrecisionSpec) -> RecipeSpec | None:
    return rules.resolved_recipe if rules.auto_filter and rules.storage.has_own_fp8 else None


def replace_layers(model: nn.Module, names: Collection[str], convert: Callable[[Any], nn.Module]) -> nn.Module:
    """Replace the named linear layers under every name each is known by. Returns the model, or what replaced it."""
    converted: dict[nn.Module, nn.Module] = {}
    for name in names:
        linear = model.get_submodule(name)
        assert layout_of(linear) is not None
        converted[linear] = convert(linear)
        vars(converted[linear]).update(_attributes_of_its_own(linear))
    put_in_place(model, converted)
    return converted.get(model, model)


def put_in_place(model: nn.Module, converted: dict[nn.Module, nn.Module]) -> None:
    """Put each value in the place of its key, under every name that it has below the model."""
    for owner in list(model.modules()):
        for attribute, child in list(owner._modules.items()):
            if child in converted:
                setattr(owner, attribute, converted[child])


def replaceable_linears(model: nn.Module) -> list[str]:
    """The names of all linear layers that may be replaced by another module."""
    return [name for name, linear in _linears(model).items() if _why_opaque(name, linear, model) is None]


def _linears(model: nn.Module) -> dict[str, nn.Module]:
    return {name: module for name, module in model.named_modules() if layout_of(module) is not None}


def _wrapper_lines(model: nn.Module | None) -> list[str]:
    """Name each kind of wrapper of a model, in the order in which they nest, with the modules that have it."""
    counts = {} if model is None else count_wrappers(model)
    return [
        f"by {wrapper}: {', '.join(f'{count} {kind}' for kind, count in kinds.items())}" for wrapper, kinds in counts.items()
    ]


def _counted(layers: Collection[SkippedLayer | FilteredLayer]) -> str:
    """The reasons, each with its number of layers."""
    counts = Counter(layer.reason for layer in layers)
    return "; ".join(f"{count} of {reason}" for reason, count in counts.items())


def _why_not_possible(name: str, linear: nn.Module, model: nn.Module, rules: PrecisionSpec, num_users: int) -> str | None:
    layout = layout_of(linear)
    assert layout is not None
    if num_users > 1:
        return "its weight is shared with another module"
    if min(layout.in_features, layout.out_features) < MIN_FEATURES:
        return f"{layout.in_features} -> {layout.out_features} features; FP8 products need at least {MIN_FEATURES}"
    if layout.is_transposed and rules.storage.engine == "torchao":
        return f"{type(linear).__name__} stores its weight as (in, out); torchao converts nn.Linear alone"
    return _why_opaque(name, linear, model)


def _why_opaque(name: str, linear: nn.Module, model: nn.Module) -> str | None:
    """Return why a replacement would change more than the precision; None if it would not."""
    if not is_known_class(linear):
        base = "nn.Linear" if isinstance(linear, nn.Linear) else "Conv1D"
        return f"{type(linear).__name__} is a subclass of {base} that may compute something else"
    if any(hooks for attribute, hooks in vars(linear).items() if "_hooks" in attribute and hooks):
        return "it has hooks, which would be lost"
    held = [*linear._parameters, *linear._buffers, *linear._modules]
    others = [attribute for attribute in held if attribute not in ("weight", "bias")]
    if others:
        return f"it also holds {', '.join(others)}"
    if "forward" in vars(linear):
        return "its forward was replaced"
    lost = sorted(set(_attributes_of_its_own(linear)) & _taken_names())
    if lost:
        return f"its attribute {', '.join(lost)} would be lost"
    dtype = linear.get_parameter("weight").dtype
    if dtype not in TRAINABLE_DTYPES:
        return f"its weight is {dtype}; only {', '.join(map(str, TRAINABLE_DTYPES))} are converted"
    owner = model.get_submodule(name.rpartition(".")[0]) if name else model
    if _reads_weights(owner):
        return f"its owner, a {type(owner).__name__}, reads the weight itself"
    return None


def _reads_weights(owner: nn.Module) -> bool:
    """Return True for a module of torch that multiplies by the weights of its linear layers, and does not call them."""
    if isinstance(owner, nn.MultiheadAttention):
        return not computes_by_layers(owner)
    return type(owner).__module__.startswith("torch.nn.modules") and not isinstance(owner, (nn.Linear, *CALLERS))


def _attributes_of_its_own(linear: nn.Module) -> dict[str, Any]:
    """Return the attributes that a user has set on a linear layer."""
    usual = {*vars(nn.Linear(1, 1, device="meta")), "nf", "nx"}  # the latter are Conv1D's
    return {name: value for name, value in vars(linear).items() if name not in usual}


@cache
def _taken_names() -> frozenset[str]:
    """The attributes of the layers that take a linear layer's place."""
    linear = nn.Linear(MIN_FEATURES, MIN_FEATURES, device="meta")
    layers = (Float8Linear(linear, Recipe()), HalfLinear(linear, torch.bfloat16))
    return frozenset(name for layer in layers for name in dir(layer))


def _refuse_surprises(names: Collection[str], skipped: Collection[SkippedLayer], rules: PrecisionSpec) -> None:
    surprises = [f"{layer.name}: {layer.reason}" for layer in skipped if not layer.by_request]
    surprises += [
        f"the glob {glob!r} matches no linear layer"
        for glob in (*rules.include, *rules.exclude)
        if not any(matches(name, (glob,)) for name in names)
    ]
    if surprises:
        raise ValueError(
            f"strict conversion, but {'; '.join(surprises)}. Name these layers in exclude, correct the glob, or drop strict."
        )
