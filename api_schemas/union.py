"""Unions of contracts: one field selects the member, and a document may leave that field out.

DataSpec = Annotated[Annotated[TextSpec, Tag("text")] | Annotated[TokensSpec, Tag("tokens")], by_field("source", "text")]
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, get_args, get_origin

from pydantic import Discriminator, Tag
from pydantic.fields import FieldInfo


@dataclass(frozen=True)
class FieldTag:
    """Reads the tag of a document or instance.

    `hint`: another field; its value up to the first "-" serves as the tag. `other_hints`: such values that stand for another
    tag, each with the tag. `own_fields`: fields that only one member has, each with its tag.
    """

    field: str
    default: str
    hint: str | None = None
    other_hints: tuple[tuple[str, str], ...] = ()
    own_fields: tuple[tuple[str, str], ...] = ()

    __name__ = "FieldTag"  # pydantic asks a discriminator for its name

    def __call__(self, value: Any) -> str:
        if not isinstance(value, Mapping):
            return str(getattr(value, self.field, self.default))
        hinted = str(value.get(self.hint) or "").partition("-")[0] if self.hint else ""
        owner = next((tag for name, tag in self.own_fields if value.get(name) is not None), None)
        return str(value.get(self.field) or dict(self.other_hints).get(hinted, hinted) or owner or self.default)


def by_field(
    field: str,
    default: str,
    hint: str | None = None,
    other_hints: tuple[tuple[str, str], ...] = (),
    own_fields: tuple[tuple[str, str], ...] = (),
) -> Discriminator:
    """Build the metadata with which `field` selects the member of a union of tagged contracts."""
    return Discriminator(FieldTag(field, default, hint, other_hints, own_fields))


def member_for(annotation: Any, value: Any) -> Any:
    """Return the member of such a union that a value belongs to, or None. Other annotations are returned unchanged."""
    tag_of, members = tagged_members(annotation)
    return annotation if tag_of is None else members.get(tag_of(value))


def annotation_of(field: FieldInfo) -> Any:
    """Return the annotation of a model's field together with the metadata that pydantic separates from it."""
    return Annotated[(field.annotation, *field.metadata)] if field.metadata else field.annotation


def tagged_members(annotation: Any) -> tuple[FieldTag | None, dict[str, Any]]:
    """Return the tag's reader and the members by tag; (None, {}) if an annotation is not such a union."""
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
