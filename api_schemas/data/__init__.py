"""What a job trains on: the union of all sources, by the field `source`.

To add a source: its module here, its line in the union below, and the module of the same name in `worker/data/`.
"""

from api_schemas.data.base import Needs, SourceSpec, Unfit
from api_schemas.data.text import TextSpec

DataSpec = TextSpec

__all__ = ["DataSpec", "Needs", "SourceSpec", "TextSpec", "Unfit"]
