"""The header `traceparent`, read as W3C Trace Context has it read: what is wrong in any part is ignored as a whole."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octet.api_schemas.trace_context import TraceContext

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
CONTEXTS = st.builds(
    TraceContext,
    trace_id=st.integers(1, 2**128 - 1).map(lambda number: f"{number:032x}"),
    span_id=st.integers(1, 2**64 - 1).map(lambda number: f"{number:016x}"),
    flags=st.integers(0, 3),
)


@given(CONTEXTS)
def test_what_is_written_is_read_again(context: TraceContext) -> None:
    assert TraceContext.parse(context.header) == context


@given(CONTEXTS)
def test_a_child_has_the_trace_and_the_flags_and_a_span_of_its_own(context: TraceContext) -> None:
    child = context.child()
    assert (child.trace_id, child.flags) == (context.trace_id, context.flags)
    assert child.span_id != context.span_id
    assert TraceContext.parse(child.header) == child


@given(st.text(max_size=80))
def test_any_text_is_a_context_or_none(text: str) -> None:
    found = TraceContext.parse(text)
    assert found is None or TraceContext.parse(found.header) == found


@pytest.mark.parametrize(
    "header",
    [
        "",
        f"00-{TRACE}-{SPAN}",
        f"00-{TRACE}-{SPAN}-1",
        f"00-{TRACE}-{SPAN}-01-more",  # version 00 has four parts
        f"00-{TRACE}-{SPAN}-01-",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{TRACE[:-1]}-{SPAN}-01",
        f"00-{TRACE}0-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE}-{SPAN}-0g",
        f"0-{TRACE}-{SPAN}-01",
        f" 00-{TRACE}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01\n",
        f"00_{TRACE}_{SPAN}_01",
        f"00-{TRACE}-{SPAN}-٠١",
    ],
)
def test_a_wrong_one_is_ignored(header: str) -> None:
    assert TraceContext.parse(header) is None


def test_a_later_version_is_read_as_far_as_it_is_known() -> None:
    for header in (f"01-{TRACE}-{SPAN}-ff", f"cc-{TRACE}-{SPAN}-ff-what-will-be"):
        assert TraceContext.parse(header) == TraceContext(TRACE, SPAN, 0b11)
    assert TraceContext.parse(f"01-{TRACE}-{SPAN}-01.what") is None


def test_a_new_trace_is_sampled() -> None:
    first, second = TraceContext.begin(), TraceContext.begin()
    assert first.flags == 1
    assert TraceContext.parse(first.header) == first
    assert {first.trace_id, first.span_id}.isdisjoint({second.trace_id, second.span_id})
