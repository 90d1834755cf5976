"""Server-sent events: a job's events or log lines as they arrive, until the job is over. The id of each is its number.

A client that was cut off sends the last id it saw (Last-Event-ID) and misses nothing. The stream polls the database,
because that is the one thing that all processes share.
"""

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import anyio
from anyio.to_thread import run_sync
from fastapi.responses import StreamingResponse
from sqlalchemy.orm import Session

from api_schemas import Contract
from service import store
from service.db.engine import Database

EVENT_STREAM = "text/event-stream"
POLL_S = 0.25
KEEP_ALIVE_S = 15.0
_AT_ONCE = 500

Item = TypeVar("Item", bound=Contract)


@dataclass(frozen=True)
class Source(Generic[Item]):
    """What a stream sends. `read(session, job_id, after, limit)` lists items in order; `key` is an item's number as text."""

    name: str
    read: Callable[[Session, str, int, int], list[Item]]
    key: Callable[[Item], str]


def stream(database: Database, job_id: str, source: Source[Item], after: int) -> StreamingResponse:
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    return StreamingResponse(_messages(database, job_id, source, after), media_type=EVENT_STREAM, headers=headers)


async def _messages(database: Database, job_id: str, source: Source[Item], after: int) -> AsyncIterator[str]:
    silent_s = 0.0
    yield ": here\n\n"
    while True:
        items, is_over = await run_sync(_read, database, job_id, source, after)
        for item in items:
            yield f"id: {source.key(item)}\nevent: {source.name}\ndata: {item.model_dump_json()}\n\n"
        if items:
            after, silent_s = int(source.key(items[-1])), 0.0
        elif is_over:
            return
        else:
            await anyio.sleep(POLL_S)
            silent_s += POLL_S
        if silent_s >= KEEP_ALIVE_S:
            silent_s = 0.0
            yield ": still here\n\n"


def _read(database: Database, job_id: str, source: Source[Item], after: int) -> tuple[list[Item], bool]:
    with database.read() as session:
        job = store.jobs.find_job(session, job_id)
        return source.read(session, job_id, after, _AT_ONCE), job is None or job.state.is_terminal
