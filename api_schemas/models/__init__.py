"""The network to train: the union of all families, selected by the field `family`, by the preset's name or by `path`.

To add a family: write its module here, add its lines in this file, and write the module of the same name in `worker/models/`.
"""

from collections.abc import Mapping
from typing import Annotated

from pydantic import Tag

from octet.api_schemas.models.base import Capabilities, FamilySizes, FamilySpec, SizedSpec
from octet.api_schemas.models.deit import DeiTSizes, DeiTSpec
from octet.api_schemas.models.gpt import GPTSizes, GPTSpec
from octet.api_schemas.models.huggingface import HuggingFaceSizes, HuggingFaceSpec
from octet.api_schemas.models.llama import LlamaSizes, LlamaSpec
from octet.api_schemas.models.python import PythonSizes, PythonSpec
from octet.api_schemas.models.roberta import RobertaSizes, RobertaSpec
from octet.api_schemas.models.swin import SwinSizes, SwinSpec
from octet.api_schemas.union import by_field, tagged_members

ModelSpec = Annotated[
    Annotated[GPTSpec, Tag("gpt")]
    | Annotated[LlamaSpec, Tag("llama")]
    | Annotated[RobertaSpec, Tag("roberta")]
    | Annotated[DeiTSpec, Tag("deit")]
    | Annotated[SwinSpec, Tag("swin")]
    | Annotated[HuggingFaceSpec, Tag("huggingface")]
    | Annotated[PythonSpec, Tag("python")],
    by_field(
        "family",
        default="gpt",
        hint="preset",
        other_hints=(("vit", "deit"),),
        own_fields=(("path", "huggingface"), ("architecture", "huggingface"), ("entrypoint", "python")),
    ),
]
ModelSizes = GPTSizes | LlamaSizes | RobertaSizes | DeiTSizes | SwinSizes | HuggingFaceSizes | PythonSizes
FAMILIES: Mapping[str, type[FamilySpec]] = tagged_members(ModelSpec)[1]
"""Every family by its name."""
PRESETS: dict[str, FamilySizes] = {name: sizes for family in FAMILIES.values() for name, sizes in family.presets.items()}


def families_with(capability: str) -> tuple[str, ...]:
    """Return the names of the families that declare a field of `Capabilities`."""
    return tuple(name for name, family in FAMILIES.items() if getattr(family.sizes_type.declared, capability))


__all__ = [
    "FAMILIES",
    "PRESETS",
    "Capabilities",
    "DeiTSizes",
    "DeiTSpec",
    "FamilySizes",
    "FamilySpec",
    "GPTSizes",
    "GPTSpec",
    "HuggingFaceSizes",
    "HuggingFaceSpec",
    "LlamaSizes",
    "LlamaSpec",
    "ModelSizes",
    "ModelSpec",
    "PythonSizes",
    "PythonSpec",
    "RobertaSizes",
    "RobertaSpec",
    "SizedSpec",
    "SwinSizes",
    "SwinSpec",
    "families_with",
]
