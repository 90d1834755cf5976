"""The event stream parser, on the cases that the standard (HTML, section 9.2.6) describes."""

import itertools
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octet.client.connection import ServerSentEvent, parse_sse

STREAM = (
    b": keep-alive\n\n"
    b'id: 1\nevent: event\ndata: {"a": 1}\n\n'
    b"id: 2\ndata: first\ndata: second\n\n"
    b"data:no space\nretry: 10\nunknown: x\n\n"
    b"event: without data\n\n"
    b"id: 3\r\ndata: \xe2\x80\xa8 is no line break\r\n\r\n"
)
EVENTS = [
    ServerSentEvent("event", '{"a": 1}', "1"),
    ServerSentEvent("message", "first\nsecond", "2"),
    ServerSentEvent("message", "no space", "2"),
    ServerSentEvent("message", "\u2028 is no line break", "3"),
]


def test_a_stream_in_one_piece() -> None:
    assert list(parse_sse([STREAM])) == EVENTS


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_a_stream_in_small_pieces(size: int) -> None:
    pieces = [STREAM[start : start + size] for start in range(0, len(STREAM), size)]
    assert list(parse_sse(pieces)) == EVENTS


@given(st.lists(st.integers(0, len(STREAM)), max_size=8))
def test_where_it_is_cut_makes_no_difference(cuts: list[int]) -> None:
    edges = [0, *sorted(cuts), len(STREAM)]
    assert list(parse_sse(STREAM[start:end] for start, end in itertools.pairwise(edges))) == EVENTS


def test_an_event_that_the_end_cuts_off_is_dropped() -> None:
    assert list(parse_sse([b"data: whole\n\ndata: half\n"])) == [ServerSentEvent("message", "whole", "")]


def test_an_id_with_a_zero_byte_is_ignored() -> None:
    assert [event.id for event in parse_sse([b"id: 1\ndata: x\n\nid: 2\0\ndata: y\n\n"])] == ["1", "1"]


def test_an_event_is_there_as_soon_as_its_blank_line_is() -> None:
    def live() -> Iterator[bytes]:
        yield b"data: now\n\n"
        raise AssertionError("read further than needed")

    assert next(parse_sse(live())).data == "now"
