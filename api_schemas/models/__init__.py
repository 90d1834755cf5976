"""The network to train: the union of all families, selected by the field `family`, by the preset's name or by `path`.

To add a family: write its module here, add its lines in this file, and write the module of the same name in `worker/models/`.
"""

from typing import Annotated

from pydantic import Tag

from api_schemas.models.base import FamilySizes, FamilySpec, SizedSpec
from api_schemas.models.deit import DeiTSizes, DeiTSpec
from api_schemas.models.gpt import GPTSizes, GPTSpec
from api_schemas.models.huggingface import HuggingFaceSizes, HuggingFaceSpec
from api_schemas.models.llama import LlamaSizes, LlamaSpec
from api_schemas.models.python import PythonSizes, PythonSpec
from api_schemas.models.roberta import RobertaSizes, RobertaSpec
from api_schemas.models.swin import SwinSizes, SwinSpec
from api_schemas.union import by_field

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
FAMILIES_WITH_PRESETS: dict[str, type[SizedSpec]] = {
    "gpt": GPTSpec,
    "llama": LlamaSpec,
    "roberta": RobertaSpec,
    "deit": DeiTSpec,
    "swin": SwinSpec,
}
PRESETS: dict[str, FamilySizes] = {
    name: sizes for family in FAMILIES_WITH_PRESETS.values() for name, sizes in family.presets.items()
}

__all__ = [
    "FAMILIES_WITH_PRESETS",
    "PRESETS",
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
]
