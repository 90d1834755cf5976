"""The data that a job trains on: the union of all sources, selected by the field `source`.

To add a source: write its module here, add its lines in this file, and write the module of the same name in `worker/data/`.
"""

from typing import Annotated

from pydantic import Tag

from octet.api_schemas.data.base import Needs, SourceSpec
from octet.api_schemas.data.datasets import DatasetsSpec
from octet.api_schemas.data.files import ANY_FILE, Files
from octet.api_schemas.data.images import ImagesSpec
from octet.api_schemas.data.jsonl import JsonlSpec
from octet.api_schemas.data.text import TextSpec
from octet.api_schemas.data.tokens import TokensSpec
from octet.api_schemas.union import by_field

DataSpec = Annotated[
    Annotated[TextSpec, Tag("text")]
    | Annotated[TokensSpec, Tag("tokens")]
    | Annotated[JsonlSpec, Tag("jsonl")]
    | Annotated[ImagesSpec, Tag("images")]
    | Annotated[DatasetsSpec, Tag("datasets")],
    by_field("source", default="text"),
]

__all__ = [
    "ANY_FILE",
    "DataSpec",
    "DatasetsSpec",
    "Files",
    "ImagesSpec",
    "JsonlSpec",
    "Needs",
    "SourceSpec",
    "TextSpec",
    "TokensSpec",
]
