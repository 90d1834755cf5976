"""The envelope of every list."""

from typing import Generic, Literal, TypeVar

from api_schemas.base import Contract

Item = TypeVar("Item")


class Page(Contract, Generic[Item]):
    """A part of a list. Ask for the next part with `after=<last_id>`; paging is stable while new items arrive."""

    object: Literal["list"] = "list"
    data: tuple[Item, ...]
    has_more: bool
    first_id: str | None
    last_id: str | None
