"""`GET /v1/stream`: everything that a browser shows in one stream, which goes on where it was cut off."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from fastapi.testclient import TestClient

from octet.api_schemas import EvaluationReport, EventReport, FailureReason, FinishedReport, LogReport
from octet.api_schemas.curve import Points
from octet.service.http import streams
from octet.service.http.streams import ListSource, Streams, Subscription, cursor_of, places_of
from octet.service.routes.records import EVENTS, LOGS
from octet.service.routes.rows import RowsQuery, read_rows
from octet.service.routes.stream import POINTS, _places
from octet.service.store.curves import CurvePlace
from tests.service.databases import ON_SQLITE
from tests.service.world import World, step

Message = tuple[str, str, Any]


def parsed(text: str) -> Message | None:
    fields = dict(line.split(": ", 1) for line in text.strip().split("\n") if not line.startswith(":"))
    return (fields["event"], fields.get("id", ""), json.loads(fields["data"])) if fields else None


class Browser:
    """Follows a stream and keeps what a page would: the curve, the numbers of events and log lines, the rows."""

    def __init__(self) -> None:
        self.curve: dict[int, float | None] = {}
        self.evaluations: dict[int, float | None] = {}
        self.numbers: dict[str, list[int]] = {"event": [], "log_line": []}
        self.rows: dict[str, Any] = {}
        self.ids: list[str] = []
        self.total = 0
        self.last_id = ""

    def take(self, message: Message) -> None:
        event, id_, data = message
        self.last_id = id_ or self.last_id
        if event == "rows":
            self.ids, self.total = data["ids"] if data["ids"] is not None else self.ids, data["total"]
            self.rows |= {row["id"]: row for row in data["changed"]}
        elif event == "points":
            for item in data["data"]:
                self._add(Points.model_validate(item))
        else:
            self.numbers[event] += [item["seq"] for item in data["data"]]

    def _add(self, points: Points) -> None:
        self.curve = {number: loss for number, loss in self.curve.items() if number <= points.after}
        self.evaluations = {at: loss for at, loss in self.evaluations.items() if at <= points.evaluated_after}
        assert not self.curve.keys() & set(points.step), "a step came twice"
        self.curve |= dict(zip(points.step, points.loss, strict=True))
        self.evaluations |= dict(zip(points.evaluation_step, points.evaluation_loss, strict=True))

    async def follow(self, ours: Streams, job_id: str, enough: Callable[[], bool]) -> None:
        """Follow all of a job from the last id until there is enough; then go away, as a killed connection does."""
        places = _places(self.last_id or None)
        start = {POINTS: CurvePlace(0, 0, 0), EVENTS: 0, LOGS: 0}
        wanted = [Subscription(each, job_id, places.get((each.name, job_id), start[each])) for each in start]
        opened = ours.open_many(wanted, [])
        body: AsyncIterator[Any] = opened.body_iterator  # type: ignore[assignment]
        async for text in body:
            message = parsed(str(text))
            if message is not None:
                self.take(message)
            if enough():
                break
        await body.aclose()  # type: ignore[attr-defined]


@ON_SQLITE
def test_a_stream_that_is_cut_off_loses_nothing_and_doubles_nothing(world: World) -> None:
    """Each part is read by another server, as after a kill, while the job trains, is evaluated, logs, and is resumed."""
    job_id, rank = world.start(steps=100, max_failures=1)
    browser = Browser()

    async def read_until(enough: Callable[[], bool]) -> None:
        ours = Streams(world.database)
        await browser.follow(ours, job_id, enough)
        await ours.close()

    def at_step(number: int) -> Callable[[], bool]:
        return lambda: number in browser.curve

    for begin in range(1, 40, 10):
        rank.train(*range(begin, begin + 10))
        rank.send(LogReport(level="INFO", message=f"line {begin}"), EventReport(type="test.event", message="x"))
        asyncio.run(read_until(at_step(begin + 9)))
        rank.send(EvaluationReport(step=begin + 4, loss=float(begin), tokens=1))
    rank.send(FinishedReport(outcome="failed", reason=FailureReason.WORKER_LOST, message="gone"))
    world.dispatch()
    world.turn(10)
    world.dispatch()
    again = world.rank_of(job_id)
    again.begin(resumed_from_step=20)
    again.send(*[step(number, loss=9.0) for number in range(21, 31)])
    asyncio.run(read_until(lambda: browser.curve.get(30) == 9.0))
    assert max(browser.curve) == 30
    again.send(EvaluationReport(step=25, loss=7.0, tokens=1))
    again.send(*[step(number, loss=9.0) for number in range(31, 41)])
    again.succeed()

    def is_whole() -> bool:
        with world.database.read() as session:
            head = streams.store.jobs.heads(session, [job_id])[job_id]
        ends = [numbers[-1:] for numbers in browser.numbers.values()]
        return 40 in browser.curve and ends == [[head.last_event_seq], [head.last_log_seq]] and 25 in browser.evaluations

    asyncio.run(read_until(is_whole))
    expected = {number: 5 / number for number in range(1, 21)} | dict.fromkeys(range(21, 41), 9.0)
    assert browser.curve == pytest.approx(expected, rel=1e-5)
    assert browser.evaluations == {5: 1.0, 15: 11.0, 25: 7.0}
    for numbers in browser.numbers.values():
        assert numbers == list(range(1, len(numbers) + 1))


@ON_SQLITE
def test_rows_come_whole_and_then_as_they_change(world: World, client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "LIST_POLL_S", 0.05)
    context, query, browser = client.app.state.context, RowsQuery(limit=2), Browser()  # type: ignore[attr-defined]
    first, rank = world.start(name="one")
    sizes: list[int] = []

    def read(session: Any) -> streams.ListState:
        rows, total = read_rows(session, context, query, query.filter_for(None))
        return streams.ListState(total, rows[: query.limit])

    async def follow() -> None:
        ours = Streams(world.database)
        body: Any = ours.open_many([], [ListSource("limit=2", None, read)]).body_iterator
        steps = iter([lambda: rank.train(1, 2), lambda: world.submit(name="two"), lambda: world.submit(name="three")])
        async for text in body:
            message = parsed(str(text))
            if message is None:
                continue
            browser.take(message)
            sizes.append(len(message[2]["changed"]))
            change = next(steps, None)
            if change is None:
                break
            await asyncio.to_thread(change)
        await body.aclose()
        await ours.close()

    asyncio.run(follow())
    assert sizes == [1, 1, 1, 1]
    assert browser.total == 3
    assert [browser.rows[id_]["name"] for id_ in browser.ids] == ["three", "two"]
    assert browser.rows[first]["step"] == 2


@ON_SQLITE
def test_a_stream_without_news_says_that_it_is_there(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "KEEP_ALIVE_S", 0.05)
    monkeypatch.setattr(streams, "LIST_POLL_S", 0.0)
    empty = ListSource("", None, lambda _: streams.ListState(0, ()))

    async def follow() -> list[str]:
        ours = Streams(world.database)
        body: Any = ours.open_many([Subscription(EVENTS, world.submit(), 1)], [empty]).body_iterator
        parts: list[str] = []
        while not parts or not parts[-1].startswith("event: rows"):
            parts = [str(await anext(body))]
        parts = [str(await anext(body)) for _ in range(2)]
        await body.aclose()
        await ours.close()
        return parts

    assert asyncio.run(follow()) == [": still here\n\n"] * 2


@ON_SQLITE
def test_the_route_refuses_what_it_cannot_show(client: TestClient, world: World) -> None:
    job_id = world.submit()
    wrong = ("", "?rows=limit%3D0", "?rows=nothing%3D1", "?points=x", f"?points={job_id}&after=x", "?jobs=1")
    for query in (*wrong, f"?points={job_id}&after=points.{job_id}.1", f"?logs={job_id}&after=logs.{job_id}.1"):
        answer = client.get(f"/v1/stream{query}")
        assert answer.status_code == 422, query
        assert answer.json()["errors"], query
    assert client.get("/v1/stream?events=job_01kg9ys7g0zcz3435ebr0e41d0").status_code == 404


def test_a_cursor_reads_as_it_was_written() -> None:
    places = {("points", "job_a"): (1, 20, 3), ("event", "job_b"): (5,)}
    assert places_of(",".join(cursor_of(*key, place) for key, place in places.items())) == places


@ON_SQLITE
def test_a_reader_that_is_behind_gets_500_steps_at_a_time(world: World) -> None:
    job_id, rank = world.start(steps=2000)
    for begin in range(1, 1200, 400):
        rank.train(*range(begin, begin + 400))
    browser = Browser()
    num_messages = 0

    async def follow() -> None:
        nonlocal num_messages
        ours = Streams(world.database)
        body: Any = ours.open_many([Subscription(POINTS, job_id, CurvePlace(0, 0, 0))], []).body_iterator
        async for text in body:
            message = parsed(str(text))
            if message is not None:
                num_messages += 1
                browser.take(message)
            if 1200 in browser.curve:
                break
        await body.aclose()
        await ours.close()

    asyncio.run(follow())
    assert (sorted(browser.curve), num_messages) == (list(range(1, 1201)), 3)
