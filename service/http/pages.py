"""Pages of lists. A page begins after a key, not at an offset, so it stays the same while items arrive."""

import gzip
import json
from collections.abc import Callable, Sequence
from typing import Annotated, Any, TypeVar

from fastapi import Query, Request, Response

from octet.api_schemas import Contract, Page

Item = TypeVar("Item", bound=Contract)

MIN_COMPRESSED_BYTES = 1400
"""A packet of a network: less is not sent faster."""

LimitQuery = Annotated[int, Query(ge=1, le=1000)]
AfterQuery = Annotated[int, Query(ge=0, le=2**53, description="last_id of the page before")]


def as_json(shown: Contract, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Answer with a model that is valid by construction, without the validation that FastAPI adds to every answer."""
    return Response(shown.model_dump_json(), status, headers, media_type="application/json")


def compressed_json(request: Request, text: str) -> Response:
    """Answer with JSON, by gzip if the client takes it and there is much of it."""
    body, headers = text.encode(), {"Vary": "Accept-Encoding"}
    if len(body) >= MIN_COMPRESSED_BYTES and "gzip" in request.headers.get("accept-encoding", ""):
        body, headers = gzip.compress(body, compresslevel=4), headers | {"Content-Encoding": "gzip"}
    return Response(body, headers=headers, media_type="application/json")


def page_as_json(rendered: Sequence[str], ids: Sequence[str], *, has_more: bool) -> Response:
    """Answer with a page of items that are JSON already."""
    items = list(zip(ids, rendered, strict=True))
    return Response(joined_page(items, has_more=has_more), media_type="application/json")


def joined_page(items: Sequence[tuple[str, str]], *, has_more: bool, **others: Any) -> str:
    """Write a page of items, each its id and JSON. others: fields of the page that not every list has."""
    first_id, last_id = (items[0][0], items[-1][0]) if items else (None, None)
    page = Page[Contract](data=(), has_more=has_more, first_id=first_id, last_id=last_id)
    rest = json.dumps(page.model_dump() | others, separators=(",", ":"))
    return rest.replace('"data":[]', f'"data":[{",".join(text for _, text in items)}]', 1)


def page_of(items: Sequence[Item], limit: int, key: Callable[[Item], str]) -> Page[Item]:
    """Make a page of `limit` items. `items` has one item more if there is a next page."""
    shown = tuple(items[:limit])
    return Page(
        data=shown,
        has_more=len(items) > limit,
        first_id=key(shown[0]) if shown else None,
        last_id=key(shown[-1]) if shown else None,
    )
