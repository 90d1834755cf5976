"""Pages of lists. A page begins after a key, not at an offset, so it stays the same while items arrive."""

from collections.abc import Callable, Sequence
from typing import Annotated, TypeVar

from fastapi import Query, Response

from octet.api_schemas import Contract, Page

Item = TypeVar("Item", bound=Contract)

LimitQuery = Annotated[int, Query(ge=1, le=1000)]
AfterQuery = Annotated[int, Query(ge=0, le=2**53, description="last_id of the page before")]


def as_json(shown: Contract, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Answer with a model that is valid by construction, without the validation that FastAPI adds to every answer."""
    return Response(shown.model_dump_json(), status, headers, media_type="application/json")


def page_as_json(rendered: Sequence[str], ids: Sequence[str], *, has_more: bool) -> Response:
    """Answer with a page of items that are JSON already."""
    first_id, last_id = (ids[0], ids[-1]) if ids else (None, None)
    rest = Page[Contract](data=(), has_more=has_more, first_id=first_id, last_id=last_id).model_dump_json()
    return Response(rest.replace('"data":[]', f'"data":[{",".join(rendered)}]', 1), media_type="application/json")


def page_of(items: Sequence[Item], limit: int, key: Callable[[Item], str]) -> Page[Item]:
    """Make a page of `limit` items. `items` has one item more if there is a next page."""
    shown = tuple(items[:limit])
    return Page(
        data=shown,
        has_more=len(items) > limit,
        first_id=key(shown[0]) if shown else None,
        last_id=key(shown[-1]) if shown else None,
    )
