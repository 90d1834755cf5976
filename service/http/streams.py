"""Server-sent events: a job's events or log lines as they arrive, or all that one browser shows in one stream.

A client that was cut off sends the last id it saw (Last-Event-ID) and misses nothing. The id is an item's number; in a
stream of several sources it has the place in each of them. One reader polls the database, which is the one thing that all
processes share, for all streams of this process together: what is new is read and rendered once, and handed to every stream
that waits for it. A stream that is further behind reads for itself. Lists of jobs have a present and no history: a stream
sends one whole at first, and then what changes in it.
"""

import asyncio
import json
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Generic, NamedTuple, TypeVar

from anyio import CancelScope, CapacityLimiter
from anyio.to_thread import run_sync
from fastapi import Request
from fastapi.responses import StreamingResponse
from sqlalchemy.orm import Session
from starlette.types import Receive, Scope, Send

from octet.api_schemas import Contract
from octet.service import store
from octet.service.access.authentication import REMEMBERED_S
from octet.service.db.engine import Database
from octet.service.deps import context_of, principal_of
from octet.service.errors import NotReady
from octet.service.http.problems import DATABASE_AWAY
from octet.service.store.jobs import Head

EVENT_STREAM = "text/event-stream"
POLL_S = 0.1
LIST_POLL_S = 0.8
"""With the second between two redraws of a page, what is shown is at most two seconds old."""
KEEP_ALIVE_S = 15.0
_AT_ONCE = 500
_READ_AT_ONCE = 25
_MOST_CHARACTERS = 128 << 10
"""The most of a part of a stream. A client that does not read holds it in memory until its connection is ended."""
_KEPT_CHARACTERS = 1 << 20
_THREADS = 4

Item = TypeVar("Item", bound=Contract)
Place = Any
"""The progress of a stream in a source: a number or a tuple of numbers, which grows with the source."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Source(Generic[Item]):
    """The items that a stream sends.

    `read(session, job_id, after, limit)` lists items in order; `key` is an item's place; `last` is the place of the job's
    last item.
    """

    name: str
    read: Callable[[Session, str, Place, int], list[Item]]
    key: Callable[[Item], Place]
    last: Callable[[Head], Place]


class Subscription(NamedTuple):
    """A source of a job, from the item that follows `after`."""

    source: Source[Any]
    job_id: str
    after: Place


class ListState(NamedTuple):
    """A list as it is now: how many there are in all, and those in sight, each with its id and JSON."""

    total: int
    items: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class ListSource:
    """A list that streams show. Sources of the same name and owner share what is read."""

    name: str
    owner: str | None
    read: Callable[[Session], ListState] = field(compare=False)


@dataclass(frozen=True)
class _News:
    """Rendered items, each with its place: from the one that follows `after` up to the one at `last`."""

    name: str
    after: Place
    last: Place
    items: Sequence[tuple[Place, str]]

    @cached_property
    def text(self) -> str:
        """The messages of a stream of this source alone."""
        return "".join([f"id: {key}\nevent: {self.name}\ndata: {text}\n\n" for key, text in self.items])

    @cached_property
    def data(self) -> str:
        """The items as an array."""
        return f"[{','.join(text for _, text in self.items)}]"


@dataclass(eq=False)
class _Feed:
    """The state shared by the streams of one job and source.

    `last`: the place up to which it was read; None before the first item that was seen, also if the job is deleted by then.
    """

    job_id: str
    source: Source[Any]
    num_streams: int = 0
    last: Place | None = None
    is_over: bool = False
    is_read: bool = False
    error: Exception | None = None
    news: dict[Place, _News] = field(default_factory=dict)  # by `after`, oldest first
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def show(self, last: Place | None, is_over: bool, news: Sequence[_News], error: Exception | None = None) -> bool:
        """Wake the streams of this source alone, and return True, if there is something new."""
        self.is_read = True
        if (last, is_over, error) == (self.last, self.is_over, None):
            return False
        self.last, self.is_over, self.error = last, is_over, error
        self.news |= {each.after: each for each in news}
        while sum(len(each.text) for each in self.news.values()) > _KEPT_CHARACTERS:
            del self.news[next(iter(self.news))]
        self.changed.set()
        self.changed = asyncio.Event()
        return True


@dataclass(eq=False)
class _ListFeed:
    """The state shared by the streams that show one list. `due_at`: when it is read next, by the event loop's clock."""

    source: ListSource
    num_streams: int = 0
    due_at: float = 0.0
    state: ListState | None = None
    error: Exception | None = None

    def show(self, state: ListState, due_at: float) -> bool:
        """Take what was read. Returns True if the list has changed; otherwise it stays the same object."""
        self.due_at, self.error = due_at, None
        if state == self.state:
            return False
        self.state = state
        return True


Key = TypeVar("Key", bound=Hashable)
AnyFeed = TypeVar("AnyFeed", _Feed, _ListFeed)


class Streams:
    """All streams of one process. They live in one event loop; reads of the database have threads of their own."""

    def __init__(self, database: Database, most: int = 0, most_of_address: int = 0) -> None:
        """most, most_of_address: streams at once, all together and of one address; 0 for no limit."""
        self._database = database
        self._most, self._most_of_address = most, most_of_address
        self._num_open: Counter[str] = Counter()
        self._num_of_tenant: Counter[str] = Counter()
        self._feeds: dict[tuple[str, str], _Feed] = {}
        self._lists: dict[ListSource, _ListFeed] = {}
        self._changed = asyncio.Event()
        self._reader: asyncio.Task[None] | None = None
        self._looked: asyncio.Event | None = None
        self._threads = CapacityLimiter(_THREADS)

    def open(self, job_id: str, source: Source[Item], after: Place) -> StreamingResponse:
        """Answer with the job's items after number `after`, until the job is over."""
        return _Answer(self, self._messages(job_id, source, after))

    def open_many(self, subscriptions: Sequence[Subscription], lists: Sequence[ListSource]) -> StreamingResponse:
        """Answer with the items of several sources, and with lists as they change, until the client goes away."""
        return _Answer(self, self._messages_of_many(subscriptions, lists))

    @contextmanager
    def place_for(self, address: str, tenant: str) -> Iterator[None]:
        """Count a stream of an address and a tenant while it is open. Raises NotReady if there are as many as there may be.

        A stream keeps its connection for hours. If streams could take all connections, the ranks of that address could not
        report, and their leases would run out.
        """
        limits = (
            (self._most_of_address, self._num_open[address], f" of {address}"),
            (self._most // 2, self._num_of_tenant[tenant], f" of tenant {tenant}"),
            (self._most, self._num_open.total(), ""),
        )
        for most, num_open, whose in limits:
            if most and num_open >= most:
                raise NotReady(f"{num_open} event streams{whose} are open, as many as may be at once; close some")
        self._num_open[address] += 1
        self._num_of_tenant[tenant] += 1
        try:
            yield
        finally:
            self._num_open -= Counter((address,))  # drops what is 0
            self._num_of_tenant -= Counter((tenant,))

    async def _messages_of_many(self, subscriptions: Sequence[Subscription], lists: Sequence[ListSource]) -> AsyncIterator[str]:
        yield ": here\n\n"
        places = {(source.name, job_id): after for source, job_id, after in subscriptions}
        sent: dict[ListSource, ListState] = {}
        with ExitStack() as following:
            feeds = [following.enter_context(self._following(job_id, source)) for source, job_id, _ in subscriptions]
            list_feeds = [following.enter_context(self._watching(source)) for source in lists]
            while True:
                changed = self._changed  # what comes after this moment sets it
                is_quiet = True
                for feed in feeds:
                    key = feed.source.name, feed.job_id
                    while (news := await self._next(feed, places[key])) is not None:
                        places[key], is_quiet = news.last, False
                        cursors = ",".join(cursor_of(*of, place) for of, place in places.items())
                        yield f'id: {cursors}\nevent: {news.name}\ndata: {{"job_id":"{feed.job_id}","data":{news.data}}}\n\n'
                for of_list in list_feeds:
                    if of_list.error is not None:
                        raise of_list.error
                    state = of_list.state
                    if state is not None and state is not sent.get(of_list.source):
                        is_quiet = False
                        yield _changes(of_list.source.name, sent.get(of_list.source), state)
                        sent[of_list.source] = state
                if is_quiet:
                    try:
                        await asyncio.wait_for(changed.wait(), KEEP_ALIVE_S)
                    except TimeoutError:
                        yield ": still here\n\n"

    async def _next(self, feed: _Feed, after: Place) -> _News | None:
        """Return what follows a place in a source; None if there is nothing yet."""
        if feed.error is not None:
            raise feed.error
        news = feed.news.get(after)
        if news is None and (feed.last is None or after < feed.last):
            news = await run_sync(self._read_after, feed, after, limiter=self._threads)
        return news

    async def _messages(self, job_id: str, source: Source[Item], after: Place) -> AsyncIterator[str]:
        yield ": here\n\n"
        with self._following(job_id, source) as feed:
            while True:
                changed = feed.changed  # what comes after this moment sets it
                news = await self._next(feed, after)
                if news is not None:
                    after = news.last
                    yield news.text
                    continue
                if feed.is_over:
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
    def _shared(self, feeds: dict[Key, AnyFeed], key: Key, new: AnyFeed) -> Iterator[AnyFeed]:
        """Read a feed that all streams with this key share, as long as one of them is open. new: used by the first of them."""
        feed = feeds.setdefault(key, new)
        feed.num_streams += 1
        self._start_reader()
        try:
            yield feed
        finally:
            feed.num_streams -= 1
            if not feed.num_streams:
                del feeds[key]

    def _following(self, job_id: str, source: Source[Item]) -> AbstractContextManager[_Feed]:
        return self._shared(self._feeds, (source.name, job_id), _Feed(job_id, source))

    def _watching(self, source: ListSource) -> AbstractContextManager[_ListFeed]:
        return self._shared(self._lists, source, _ListFeed(source))

    def _start_reader(self) -> None:
        if self._reader is None or self._reader.done():
            self._reader = asyncio.get_running_loop().create_task(self._look_again_and_again())

    async def _look_again_and_again(self) -> None:
        while self._feeds or self._lists:
            feeds, now = list(self._feeds.values()), asyncio.get_running_loop().time()
            due = [feed for feed in self._lists.values() if now >= feed.due_at]
            looked = self._looked = asyncio.Event()
            try:
                shown = await run_sync(self._look, feeds, limiter=self._threads)
                states = await run_sync(self._look_at_lists, due, limiter=self._threads) if due else []
            except Exception as error:
                logger.exception("the events of jobs cannot be read; their streams end")
                has_changed = [feed.show(feed.last, feed.is_over, (), error) for feed in feeds]
                for of_list in due:
                    of_list.error = error
                    has_changed.append(True)
            else:
                has_changed = [feed.show(*each) for feed, each in zip(feeds, shown, strict=True)]
                has_changed += [each.show(state, now + LIST_POLL_S) for each, state in zip(due, states, strict=True)]
            finally:
                looked.set()
            if any(has_changed):
                self._changed.set()
                self._changed = asyncio.Event()
            if all(feed.is_read for feed in self._feeds.values()):
                await asyncio.sleep(POLL_S)

    def _look_at_lists(self, feeds: "Sequence[_ListFeed]") -> list[ListState]:
        with self._database.read() as session:
            return [feed.source.read(session) for feed in feeds]

    def _look(self, feeds: Sequence[_Feed]) -> list[tuple[Place | None, bool, list[_News]]]:
        """Read what is new in each feed: the place of its last item, whether its job is over, and the rendered items."""
        if not feeds:
            return []
        with self._database.read() as session:
            heads = store.jobs.heads(session, {feed.job_id for feed in feeds})
            return [self._look_at(session, feed, heads.get(feed.job_id)) for feed in feeds]

    def _look_at(self, session: Session, feed: _Feed, head: Head | None) -> tuple[Place | None, bool, list[_News]]:
        if head is None:  # the job was deleted
            return feed.last, True, []
        target = feed.source.last(head)
        last, news, num_characters = target if feed.last is None else feed.last, list[_News](), 0
        while last < target and (each := _read(session, feed, last)) is not None:
            news.append(each)
            last, num_characters = each.last, num_characters + len(each.text)
            if num_characters > _KEPT_CHARACTERS:
                return target, head.is_over, news  # the streams read the rest for themselves
        return last, head.is_over, news

    def _read_after(self, feed: _Feed, after: Place) -> _News | None:
        with self._database.read() as session:
            return _read(session, feed, after)


def read_part(
    session: Session, job_id: str, source: Source[Item], after: Place, limit: int, most_characters: int
) -> tuple[list[tuple[Place, str]], bool]:
    """Read the next items of a job, each as its number and JSON. True comes with them if there was no room for another.

    There are `limit` of them, or fewer: those that have `most_characters` together, and one at least.
    """
    part: list[tuple[Place, str]] = []
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


def _read(session: Session, feed: _Feed, after: Place) -> _News | None:
    """Read and render the next items; None if there are none."""
    source = feed.source
    part, _ = read_part(session, feed.job_id, source, after, _AT_ONCE, _MOST_CHARACTERS)
    if not part:
        return None
    return _News(source.name, after, part[-1][0], part)


class _Answer(StreamingResponse):
    """The answer with a stream, which takes a place for as long as it is sent."""

    def __init__(self, streams: Streams, messages: AsyncIterator[str]) -> None:
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        super().__init__(messages, media_type=EVENT_STREAM, headers=headers)
        self._streams = streams

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        address, tenant = (scope.get("client") or ("",))[0], principal_of(Request(scope)).tenant
        with self._streams.place_for(address, tenant):
            is_whole = await while_the_key_works(scope, super().__call__(scope, receive, send))
        if not is_whole:
            await send({"type": "http.response.body", "body": b"", "more_body": False})


async def while_the_key_works(scope: Scope, sending: Awaitable[None]) -> bool:
    """Send an answer that may last for hours. Returns False if the key or token of its request ended before it did."""
    with CancelScope() as until_then:
        watcher = asyncio.create_task(_end_with_the_key(Request(scope), until_then))
        try:
            await sending
        finally:
            watcher.cancel()
    return not until_then.cancelled_caught


async def _end_with_the_key(request: Request, sending: CancelScope) -> None:
    """Cancel an answer once the key or token of its request ends. Keys of the settings last as long as we do."""
    principal, authentication = principal_of(request), context_of(request).authentication
    while principal.may_end:
        await asyncio.sleep(REMEMBERED_S)
        try:
            is_current = await authentication.is_current(principal)
        except DATABASE_AWAY:
            continue  # nobody can say; the stream's own reads end it if this lasts
        if not is_current:
            sending.cancel()
            return


def _changes(name: str, before: ListState | None, now: ListState) -> str:
    """Write the message that brings a list up to date. `ids` are null where they are the same, in the same order."""
    known = dict(before.items) if before is not None else {}
    ids = [id_ for id_, _ in now.items]
    changed = ",".join(text for id_, text in now.items if known.get(id_) != text)
    head = json.dumps({"rows": name, "total": now.total, "ids": None if before is not None and ids == list(known) else ids})
    return f'event: rows\ndata: {head[:-1]}, "changed": [{changed}]}}\n\n'


def cursor_of(name: str, job_id: str, place: Place) -> str:
    """Write a place in a source of a job, for the id of a stream of several."""
    numbers = place if isinstance(place, tuple) else (place,)
    return ".".join([name, job_id, *map(str, numbers)])


def places_of(cursors: str) -> Mapping[tuple[str, str], tuple[int, ...]]:
    """Read the id of a stream of several sources: the numbers of each place, by source and job. Raises ValueError."""
    parts = [cursor.split(".") for cursor in cursors.split(",")]
    return {(name, job_id): tuple(map(int, numbers)) for name, job_id, *numbers in parts}
