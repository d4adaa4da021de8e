"""Server-sent events, whole and cut anywhere."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from enginehouse.core.errors import Upstream
from enginehouse.link.sse import MAX_EVENT_BYTES, EventParser, SseEvent

STREAM = (
    b": keep-alive\n\n"
    b'id: 7\nevent: operation\ndata: {"id":"a"}\n\n'
    b"data: one\r\ndata:two\r\n\r\n"
    b"retry: 10\nunknown\ndata\n\n"
    b"data: [DONE]\n\ndata: never ended\n"
)
EVENTS = [
    SseEvent("7", "operation", b'{"id":"a"}'),
    SseEvent("7", "message", b"one\ntwo"),
    SseEvent("7", "message", b""),
    SseEvent("7", "message", b"[DONE]"),
]


def feed_all(parser: EventParser, pieces: list[bytes]) -> list[SseEvent]:
    return [event for piece in pieces for event in parser.feed(piece)]


@given(st.lists(st.integers(0, len(STREAM))))
def test_the_same_events_come_out_wherever_the_bytes_are_cut(cuts: list[int]) -> None:
    borders = [0, *sorted(cuts), len(STREAM)]
    pieces = [STREAM[start:end] for start, end in pairwise(borders)]
    assert feed_all(EventParser(), pieces) == EVENTS


def test_a_line_that_never_ends_is_refused() -> None:
    with pytest.raises(Upstream):
        feed_all(EventParser(), [b"x" * (MAX_EVENT_BYTES // 10)] * 20)


def test_an_event_of_endless_lines_is_refused() -> None:
    with pytest.raises(Upstream):
        feed_all(EventParser(), [b"data: " + b"x" * (MAX_EVENT_BYTES // 10) + b"\n"] * 20)
