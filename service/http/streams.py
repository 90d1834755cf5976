"""Server-sent events: a job's events or log lines as they arrive, until the job is over. The id of each is its number.

A client that was cut off sends the last id it saw (Last-Event-ID) and misses nothing. One reader polls the database, which
is the one thing that all processes share, for all streams of this process together: what is new is read and rendered once,
and handed to every stream that waits for it. A stream that is further behind reads for itself.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from anyio import CapacityLimiter
from anyio.to_thread import run_sync
from fastapi.responses import StreamingResponse
from sqlalchemy.orm import Session

from octet.api_schemas import Contract
from octet.service import store
from octet.service.db.engine import Database
from octet.service.store.jobs import Head

EVENT_STREAM = "text/event-stream"
POLL_S = 0.1
KEEP_ALIVE_S = 15.0
_AT_ONCE = 500
_READ_AT_ONCE = 25
_MOST_CHARACTERS = 128 << 10
"""The most of a part of a stream. A client that does not read holds it in memory until its connection is ended."""
_KEPT_CHARACTERS = 1 << 20
_THREADS = 4

Item = TypeVar("Item", bound=Contract)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Source(Generic[Item]):
    """The items that a stream sends.

    `read(session, job_id, after, limit)` lists items in order; `key` is an item's number; `last` is the number of the job's
    last item.
    """

    name: str
    read: Callable[[Session, str, int, int], list[Item]]
    key: Callable[[Item], int]
    last: Callable[[Head], int]


@dataclass(frozen=True)
class _News:
    """Rendered items, from the one that follows number `after` up to number `last`."""

    after: int
    last: int
    text: str


@dataclass(eq=False)
class _Feed:
    """The state shared by the streams of one job and source. `last`: the number up to which it was read, None at first."""

    job_id: str
    source: Source[Any]
    num_streams: int = 0
    last: int | None = None
    is_over: bool = False
    error: Exception | None = None
    news: dict[int, _News] = field(default_factory=dict)  # by `after`, oldest first
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def show(self, last: int, is_over: bool, news: Sequence[_News], error: Exception | None = None) -> None:
        """Wake the streams if there is something new."""
        if (last, is_over, error) == (self.last, self.is_over, None):
            return
        self.last, self.is_over, self.error = last, is_over, error
        self.news |= {each.after: each for each in news}
        while sum(len(each.text) for each in self.news.values()) > _KEPT_CHARACTERS:
            del self.news[next(iter(self.news))]
        self.changed.set()
        self.changed = asyncio.Event()


class Streams:
    """All streams of one process. They live in one event loop; reads of the database have threads of their own."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._feeds: dict[tuple[str, str], _Feed] = {}
        self._reader: asyncio.Task[None] | None = None
        self._looked: asyncio.Event | None = None
        self._threads = CapacityLimiter(_THREADS)

    def open(self, job_id: str, source: Source[Item], after: int) -> StreamingResponse:
        """Answer with the job's items after number `after`."""
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        return StreamingResponse(self._messages(job_id, source, after), media_type=EVENT_STREAM, headers=headers)

    async def _messages(self, job_id: str, source: Source[Item], after: int) -> AsyncIterator[str]:
        yield ": here\n\n"
        with self._following(job_id, source) as feed:
            while True:
                changed = feed.changed  # what comes after this moment sets it
                if feed.error is not None:
                    raise feed.error
                news = feed.news.get(after)
                if news is None and (feed.last is None or after < feed.last):
                    news = await run_sync(self._read_after, feed, after, limiter=self._threads)
                if news is not None:
                    after = news.last
                    yield news.text
                    continue
                if feed.last is not None and feed.is_over:
                    break
                try:
                    await asyncio.wait_for(changed.wait(), KEEP_ALIVE_S)
                except TimeoutError:
                    yield ": still here\n\n"

        if not self._feeds:
            await self.close()

    async def close(self) -> None:
        """Wait until the reader does not use the database; it ends once there are no streams."""
        if self._looked is not None:
            await self._looked.wait()

    @contextmanager
    def _following(self, job_id: str, source: Source[Item]) -> Iterator[_Feed]:
        key = (source.name, job_id)
        feed = self._feeds.setdefault(key, _Feed(job_id, source))
        feed.num_streams += 1
        if self._reader is None or self._reader.done():
            self._reader = asyncio.get_running_loop().create_task(self._look_again_and_again())
        try:
            yield feed
        finally:
            feed.num_streams -= 1
            if not feed.num_streams:
                del self._feeds[key]

    async def _look_again_and_again(self) -> None:
        while self._feeds:
            feeds = list(self._feeds.values())
            looked = self._looked = asyncio.Event()
            try:
                shown = await run_sync(self._look, feeds, limiter=self._threads)
            except Exception as error:
                logger.exception("the events of jobs cannot be read; their streams end")
                for feed in feeds:
                    feed.show(feed.last or 0, feed.is_over, (), error)
            else:
                for feed, (last, is_over, news) in zip(feeds, shown, strict=True):
                    feed.show(last, is_over, news)
            finally:
                looked.set()
            if all(feed.last is not None for feed in self._feeds.values()):
                await asyncio.sleep(POLL_S)

    def _look(self, feeds: Sequence[_Feed]) -> list[tuple[int, bool, list[_News]]]:
        """Read what is new in each feed: the number of its last item, whether its job is over, and the rendered items."""
        with self._database.read() as session:
            heads = store.jobs.heads(session, {feed.job_id for feed in feeds})
            return [self._look_at(session, feed, heads.get(feed.job_id)) for feed in feeds]

    def _look_at(self, session: Session, feed: _Feed, head: Head | None) -> tuple[int, bool, list[_News]]:
        if head is None:
            return feed.last or 0, True, []
        target = feed.source.last(head)
        last, news, num_characters = target if feed.last is None else feed.last, list[_News](), 0
        while last < target and (each := _read(session, feed, last)) is not None:
            news.append(each)
            last, num_characters = each.last, num_characters + len(each.text)
            if num_characters > _KEPT_CHARACTERS:
                return target, head.is_over, news  # the streams read the rest for themselves
        return last, head.is_over, news

    def _read_after(self, feed: _Feed, after: int) -> _News | None:
        with self._database.read() as session:
            return _read(session, feed, after)


def read_part(
    session: Session, job_id: str, source: Source[Item], after: int, limit: int, most_characters: int
) -> tuple[list[tuple[int, str]], bool]:
    """Read the next items of a job, each as its number and JSON. True comes with them if there was no room for another.

    There are `limit` of them, or fewer: those that have `most_characters` together, and one at least.
    """
    part: list[tuple[int, str]] = []
    num_characters = 0
    while len(part) < limit:
        num_wanted = min(_READ_AT_ONCE, limit - len(part))
        items = source.read(session, job_id, part[-1][0] if part else after, num_wanted)
        for item in items:
            text = item.model_dump_json()
            num_characters += len(text)
            if part and num_characters > most_characters:
                return part, True
            part.append((source.key(item), text))
        if len(items) < num_wanted:
            break
    return part, False


def _read(session: Session, feed: _Feed, after: int) -> _News | None:
    """Read and render the next items; None if there are none."""
    source = feed.source
    part, _ = read_part(session, feed.job_id, source, after, _AT_ONCE, _MOST_CHARACTERS)
    if not part:
        return None
    return _News(after, part[-1][0], "".join([f"id: {key}\nevent: {source.name}\ndata: {text}\n\n" for key, text in part]))
