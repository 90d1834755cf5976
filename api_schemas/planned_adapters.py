"""The bytes that a rank of a job with adapters holds: those of the frozen model, and of adapters as any trained parameters.

A frozen weight has no gradient, no moments, and no master weight but the residual that completes its codes. Embeddings and
layers that stay in 16 bits are held in bf16 where the level holds codes (`worker/prepare/adapters.py`).
"""

import math
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from fnmatch import fnmatchcase

from octet.api_schemas.conversion import HEADS, matches
from octet.api_schemas.formats import weight_bytes
from octet.api_schemas.levels import Level
from octet.api_schemas.models.shapes import ParameterShape
from octet.api_schemas.training import AdapterSpec

ELEMENT_BYTES = {"bf16": 2, "fp32": 4}


def adapter_shapes(spec: AdapterSpec, shapes: Sequence[ParameterShape]) -> Iterator[ParameterShape]:
    """Yield the two factors of each adapted layer. Heads have none, nor have experts of a mixture."""
    for shape in shapes:
        name = shape.layer
        is_adapted = any(fnmatchcase(name, target) or name.endswith(f".{target}") for target in spec.targets)
        if shape.is_linear and is_adapted and not matches(name, HEADS) and ".experts." not in f".{name}.":
            out_features, in_features = shape.shape
            yield ParameterShape(f"adapters.{name}.a", (spec.rank, in_features), block=shape.block)
            yield ParameterShape(f"adapters.{name}.b", (out_features, spec.rank), block=shape.block)


def frozen_bytes(level: Level, shapes: Sequence[ParameterShape], converted: Collection[str]) -> tuple[Counter[str], int]:
    """Return the bytes, by class, of frozen parameters, and those of parameters outside of converted layers."""
    if level.master_weight != "int8-residual":
        level = level.model_copy(update={"master_weight": "none"})
    in_codes = level.weight != "fp32"
    found, plain = Counter[str](), 0
    for shape in shapes:
        if shape.tied_to is not None:
            continue
        num_elements = math.prod(shape.shape)
        is_converted = shape.name in converted
        if is_converted or not in_codes or len(shape.shape) != 2:
            num_bytes = weight_bytes(level, is_converted, num_elements, num_elements)
        else:
            num_bytes = {"weights": ELEMENT_BYTES["bf16"] * num_elements}
        found.update(num_bytes)
        plain += 0 if is_converted else sum(num_bytes.values())
    return found, plain
