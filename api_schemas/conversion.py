"""The rules by which a job chooses the linear layers that its level converts, as far as names and shapes decide."""

from collections.abc import Collection, Sequence
from fnmatch import fnmatchcase
from functools import lru_cache

from octet.api_schemas.models.shapes import ParameterShape
from octet.api_schemas.precision import PrecisionSpec

MIN_FEATURES = 16
"""FP8 products on CUDA work on multiples of 16; a dimension below that would be mostly padding."""

HEADS = ("head", "*.head", "*lm_head*", "*embed_out", "*classifier*", "score", "*.score", "*predictions*", "*qa_outputs")
"""The names that torchvision, timm and transformers give to the layer that makes the logits."""


def names_at_the_ends(names: Sequence[str], rules: PrecisionSpec) -> frozenset[str]:
    """Return the first and last linear layers that the rules leave in 16 bits. names: of all linear layers, in order."""
    last = names[max(0, len(names) - rules.skip_last_layers) :]
    return frozenset((*names[: rules.skip_first_layers], *last))


def why_not_wanted(name: str, rules: PrecisionSpec, ends: Collection[str]) -> str | None:
    """Return the reason for which a layer's name leaves it in 16 bits; None if nothing speaks against it."""
    if matches(name, rules.exclude):
        return "excluded by name"
    if not matches(name, rules.include):
        return "not included by name"
    if name in ends:
        return f"among the first {rules.skip_first_layers} or last {rules.skip_last_layers} linear layers"
    if matches(name, HEADS) and not rules.convert_heads:
        return "a head: its rounding error would go straight into the loss"
    return None


def is_hidden_matrix(shape: ParameterShape) -> bool:
    """Return True for a parameter that Muon orthogonalizes: the weight of a linear layer, but of no head."""
    return shape.is_linear and shape.tied_to is None and not matches(shape.layer, HEADS)


def matches(name: str, globs: Collection[str]) -> bool:
    """Return True if one of the globs matches the whole name."""
    return _matches(name, tuple(globs))


@lru_cache(1 << 16)  # a plan looks at each layer of each level on each rank of a pipeline
def _matches(name: str, globs: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, glob) for glob in globs)
