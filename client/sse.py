"""Server-sent events, as the WHATWG HTML standard (section 9.2) defines the stream.

Lines are split on bytes: `httpx.Response.iter_lines` would also split at U+2028 and its like, which JSON may hold.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class ServerSentEvent:
    """One dispatched event. `id` is the last id that the stream has named so far, "" before the first."""

    event: str
    data: str
    id: str


def parse_sse(chunks: Iterable[bytes]) -> Iterator[ServerSentEvent]:
    """Yield each event at its blank line. An event that the end of the stream cuts off is dropped, as it must be."""
    event, data, last_id = "", list[str](), ""
    for line in _lines(chunks):
        if not line:
            if data:
                yield ServerSentEvent(event or "message", "\n".join(data), last_id)
            event, data = "", []
            continue
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        match field:  # a comment has an empty field name
            case "event":
                event = value
            case "data":
                data.append(value)
            case "id" if "\0" not in value:
                last_id = value


def _lines(chunks: Iterable[bytes]) -> Iterator[str]:
    pending = b""
    for chunk in chunks:
        lines = (pending + chunk).splitlines(keepends=True)
        # The last line may go on in the next chunk; one that ends in \r too, for \n may follow.
        pending = lines.pop() if lines and not lines[-1].endswith(b"\n") else b""
        for line in lines:
            yield line.rstrip(b"\r\n").decode("utf-8", "replace")
