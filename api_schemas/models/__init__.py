"""Which network to train: the union of all families, by the field `family`.

To add a family: its module here, its line in the union below, and the module of the same name in `worker/models/`.
"""

from api_schemas.models.base import FamilySizes, FamilySpec
from api_schemas.models.gpt import GPTSizes, GPTSpec

ModelSpec = GPTSpec
ModelSizes = GPTSizes
PRESETS: dict[str, FamilySizes] = {**GPTSpec.presets}

__all__ = ["PRESETS", "FamilySizes", "FamilySpec", "GPTSizes", "GPTSpec", "ModelSizes", "ModelSpec"]
