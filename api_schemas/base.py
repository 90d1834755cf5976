"""Shared parts of all contracts: the base class, time stamps, the error that names a field, and the envelope of lists.

Contracts are strict when a user or a peer writes (`Contract` refuses unknown fields) and tolerant when we read what
we stored (`read_stored` drops fields that this version no longer knows, so an old row still loads).
"""

import types
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, Generic, Literal, Self, TypeVar, Union, get_args, get_origin

from pydantic import AfterValidator, AwareDatetime, BaseModel, ConfigDict, PlainSerializer, ValidationError
from pydantic_core import PydanticCustomError

from octet.api_schemas.union import annotation_of, member_for

JsonScalar = str | int | float | bool | None


def _in_utc(moment: datetime) -> datetime:
    try:
        return moment.astimezone(UTC)
    except OverflowError as error:
        raise ValueError("a moment that exists in UTC, from year 1 to 9999") from error


def rfc3339(moment: datetime) -> str:
    """Write a moment as all contracts do: in UTC, with microseconds."""
    return moment.astimezone(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


Timestamp = Annotated[AwareDatetime, AfterValidator(_in_utc), PlainSerializer(rfc3339, return_type=str, when_used="json")]
"""A moment in time; RFC 3339 in UTC on the wire."""


class Contract(BaseModel):
    """Base of everything that crosses a boundary. Instances are frozen; unknown fields are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, ser_json_inf_nan="null")

    @classmethod
    def read_stored(cls, stored: Mapping[str, Any]) -> Self:
        """Read a document that another version may have written. Fields that this version does not know are dropped."""
        try:
            return cls.model_validate(stored)  # this version wrote it, as it did nearly all
        except ValidationError:
            return cls.model_validate(_known_fields(cls, stored))


def refusal(field: str, *, got: Any, allowed: str, change: str) -> PydanticCustomError:
    """Build the error of a cross-field rule. field: path of the field to change, relative to the model that checks."""
    context = {"field": field, "got": got, "allowed": allowed, "change": change}
    return PydanticCustomError("refused", "got {got}; allowed: {allowed}. {change}", context)


class SpecConflict(ValueError):
    """A part of a job does not fit the rest, or the data. Names the field, what was got, what is allowed and what to change."""

    def __init__(self, field: str, got: object, allowed: str, change: str) -> None:
        super().__init__(f"{field}: got {got}; allowed: {allowed}. {change}")
        self.field, self.got, self.allowed, self.change = field, str(got), allowed, change

    def moved_to(self, field: str, shown: str = "") -> "SpecConflict":
        """Return the same conflict for a path that another field gave. shown: what to change, by default the field."""
        return SpecConflict(field, self.got, self.allowed, self.change.replace("data.path", shown or field))

    def as_refusal(self, path: str = "") -> PydanticCustomError:
        """Return the error that a validator raises. path: the part of the job that the validator checks."""
        field = self.field.removeprefix(path).removeprefix(".") if path else self.field
        return refusal(field, got=self.got, allowed=self.allowed, change=self.change)


Item = TypeVar("Item")


class Page(Contract, Generic[Item]):
    """A part of a list. Ask for the next part with `after=<last_id>`; paging is stable while new items arrive."""

    object: Literal["list"] = "list"
    data: tuple[Item, ...]
    has_more: bool
    first_id: str | None
    last_id: str | None


def merge_patch(document: Any, patch: Mapping[str, Any]) -> dict[str, Any]:
    """Apply a merge patch (RFC 7396): null removes a field, mappings are merged, and all else replaces what was there."""
    merged = dict(document) if isinstance(document, Mapping) else {}
    for name, value in patch.items():
        if value is None:
            merged.pop(name, None)
        else:
            merged[name] = merge_patch(merged.get(name), value) if isinstance(value, Mapping) else value
    return merged


def _known_fields(annotation: Any, value: Any) -> Any:
    model = contract_in(member_for(annotation, value))
    if model is not None and isinstance(value, Mapping):
        known = {key: item for key, item in value.items() if key in model.model_fields}
        return {key: _known_fields(annotation_of(model.model_fields[key]), item) for key, item in known.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        element = next(iter(get_args(annotation)), Any)
        return [_known_fields(element, item) for item in value]
    return value


def contract_in(annotation: Any) -> type[BaseModel] | None:
    """Return the only model class in an annotation such as `X`, `X | None` or `Annotated[X, …]`; None if none or several."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if get_origin(annotation) in (Union, types.UnionType, Annotated):
        found = [model for model in map(contract_in, get_args(annotation)) if model is not None]
        return found[0] if len(found) == 1 else None
    return None
