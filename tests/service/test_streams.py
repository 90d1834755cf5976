"""Many streams of one job: the database is read once for all of them, and each of them gets everything."""

import asyncio
from collections import Counter

import pytest
from fastapi.testclient import TestClient
from sqlalchemy.orm import Session

from octet.api_schemas import Event, EventReport, LogReport
from octet.service.http import streams
from octet.service.http.streams import Source, Streams
from octet.service.routes import records
from octet.service.routes.records import EVENTS, LOGS
from tests.service.databases import ON_SQLITE
from tests.service.world import Rank, World

NUM_STREAMS = 30
NUM_REPORTS = 4


async def text_of(opened: streams.StreamingResponse) -> str:
    return "".join([str(part) async for part in opened.body_iterator])


def numbers(text: str) -> list[int]:
    return [int(line.removeprefix("id: ")) for line in text.split("\n") if line.startswith("id: ")]


async def follow(world: World, job_id: str, rank: Rank, source: Source[Event]) -> list[str]:
    """Open all streams, let the job report when they have caught up, and end the job."""
    ours = Streams(world.database)
    following = [asyncio.create_task(text_of(ours.open(job_id, source, after=0))) for _ in range(NUM_STREAMS)]
    for number in range(NUM_REPORTS):
        await asyncio.sleep(3 * streams.POLL_S)
        await asyncio.to_thread(rank.send, EventReport(type="test.event", message=f"number {number}"))
    await asyncio.to_thread(rank.succeed)
    texts = await asyncio.gather(*following)
    await ours.close()
    return texts


@ON_SQLITE
@pytest.mark.parametrize("kept_characters", [1 << 20, 0])
def test_every_stream_gets_everything_once(world: World, monkeypatch: pytest.MonkeyPatch, kept_characters: int) -> None:
    """With no room for what was rendered, each stream reads for itself."""
    monkeypatch.setattr(streams, "_KEPT_CHARACTERS", kept_characters)
    job_id, rank = world.start()
    reads: Counter[int] = Counter()

    def read(session: Session, job_id: str, after: int, limit: int) -> list[Event]:
        reads[after] += 1
        return EVENTS.read(session, job_id, after, limit)

    texts = asyncio.run(follow(world, job_id, rank, Source("event", read, EVENTS.key, EVENTS.last)))
    assert len(set(texts)) == 1 or kept_characters == 0
    with world.database.read() as session:
        expected = [event.seq for event in EVENTS.read(session, job_id, 0, 1000)]
    assert {tuple(numbers(text)) for text in texts} == {tuple(expected)}
    read_by_streams = sum(count for after, count in reads.items() if after == 0)
    read_for_all = sum(count for after, count in reads.items() if after > 0)
    assert read_by_streams <= NUM_STREAMS + 1
    if kept_characters:
        assert NUM_REPORTS <= read_for_all <= NUM_STREAMS + NUM_REPORTS + 2, "a few may have asked before the first look"
    else:
        assert read_for_all > NUM_STREAMS * NUM_REPORTS


@ON_SQLITE
def test_long_lines_come_in_small_parts(world: World, client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that does not read holds one part of its stream in memory, not five hundred lines of 16 KiB."""
    job_id, rank = world.start()
    for _ in range(3):
        rank.send(*[LogReport(level="INFO", message="\u0001" * 16_384) for _ in range(20)])
    longest = streams._MOST_CHARACTERS + 6 * 16_384

    async def parts() -> list[str]:
        ours = Streams(world.database)
        opened = ours.open(job_id, LOGS, 0)
        found = [str(part) async for part in opened.body_iterator]
        await ours.close()
        return found

    rank.succeed()
    found = asyncio.run(parts())
    assert numbers("".join(found)) == list(range(1, 61))
    assert max(map(len, found)) <= longest
    seqs, pages, after = list[int](), list[int](), "0"
    while True:
        answer = client.get(f"/v1/jobs/{job_id}/logs?limit=1000&after={after}")
        assert len(answer.content) <= records._MOST_CHARACTERS + 6 * 16_384
        page = answer.json()
        pages.append(len(page["data"]))
        seqs += [line["seq"] for line in page["data"]]
        if not page["has_more"]:
            break
        after = page["last_id"]
    assert seqs == list(range(1, 61))
    assert len(pages) > 1


@ON_SQLITE
def test_a_burst_is_not_rendered_for_streams_that_are_far_behind(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "_KEPT_CHARACTERS", 1 << 14)
    monkeypatch.setattr(streams, "_MOST_CHARACTERS", 1 << 12)
    job_id, rank = world.start()
    ours, feed = Streams(world.database), streams._Feed(job_id, LOGS, last=0)
    rank.send(*[LogReport(level="INFO", message="a" * 1000) for _ in range(200)])
    [(last, is_over, news)] = ours._look([feed])
    assert (last, is_over) == (200, False)
    assert sum(len(each.text) for each in news) <= (1 << 14) + (1 << 12) + 3000


@ON_SQLITE
def test_streams_end_with_an_error_if_the_database_cannot_be_read(world: World) -> None:
    job_id, _ = world.start()

    def read(session: Session, job_id: str, after: int, limit: int) -> list[Event]:
        raise ValueError("a row that nobody can read")

    async def fail() -> None:
        ours = Streams(world.database)
        with pytest.raises(ValueError, match="nobody can read"):
            await text_of(ours.open(job_id, Source("event", read, EVENTS.key, EVENTS.last), 0))
        await ours.close()

    asyncio.run(fail())
