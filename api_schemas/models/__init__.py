"""The network to train: the union of all families, selected by the field `family` or by the preset's name.

To add a family: write its module here, add its lines in this file, and write the module of the same name in `worker/models/`.
"""

from typing import Annotated

from pydantic import Tag

from api_schemas.models.base import FamilySizes, FamilySpec
from api_schemas.models.gpt import GPTSizes, GPTSpec
from api_schemas.models.llama import LlamaSizes, LlamaSpec
from api_schemas.union import by_field

ModelSpec = Annotated[
    Annotated[GPTSpec, Tag("gpt")] | Annotated[LlamaSpec, Tag("llama")],
    by_field("family", default="gpt", hint="preset"),
]
ModelSizes = GPTSizes | LlamaSizes
PRESETS: dict[str, FamilySizes] = {**GPTSpec.presets, **LlamaSpec.presets}

__all__ = [
    "PRESETS",
    "FamilySizes",
    "FamilySpec",
    "GPTSizes",
    "GPTSpec",
    "LlamaSizes",
    "LlamaSpec",
    "ModelSizes",
    "ModelSpec",
]
