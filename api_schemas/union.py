"""Unions of contracts that one field tells apart, with a default where a document leaves that field out.

DataSpec = Annotated[Annotated[TextSpec, Tag("text")] | Annotated[TokensSpec, Tag("tokens")], by_field("source", "text")]
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, get_args, get_origin

from pydantic import Discriminator, Tag
from pydantic.fields import FieldInfo


@dataclass(frozen=True)
class FieldTag:
    """Reads the tag of a document or of an instance. `hint`: another field, whose value up to the first "-" is the tag."""

    field: str
    default: str
    hint: str | None = None

    __name__ = "FieldTag"  # pydantic asks a discriminator for its name

    def __call__(self, value: Any) -> str:
        if not isinstance(value, Mapping):
            return str(getattr(value, self.field, self.default))
        hinted = str(value.get(self.hint) or "").partition("-")[0] if self.hint else ""
        return str(value.get(self.field) or hinted or self.default)


def by_field(field: str, default: str, hint: str | None = None) -> Discriminator:
    """The metadata that makes a union of tagged contracts one that `field` tells apart."""
    return Discriminator(FieldTag(field, default, hint))


def member_for(annotation: Any, value: Any) -> Any:
    """The member of such a union that a value belongs to, or None; any other annotation is returned as it is."""
    tag_of, members = tagged_members(annotation)
    return annotation if tag_of is None else members.get(tag_of(value))


def annotation_of(field: FieldInfo) -> Any:
    """The annotation of a model's field with the metadata that pydantic takes off it."""
    return Annotated[(field.annotation, *field.metadata)] if field.metadata else field.annotation


def tagged_members(annotation: Any) -> tuple[FieldTag | None, dict[str, Any]]:
    """How the tag is read, and the members by tag; (None, {}) for an annotation that is no such union."""
    if get_origin(annotation) is not Annotated:
        return None, {}
    union, *metadata = get_args(annotation)
    found = [item.discriminator for item in metadata if isinstance(item, Discriminator)]
    tag_of = next((item for item in found if isinstance(item, FieldTag)), None)
    if tag_of is None:
        return None, {}
    members = {}
    for member in get_args(union):
        contract, *tags = get_args(member)
        members.update({item.tag: contract for item in tags if isinstance(item, Tag)})
    return tag_of, members
