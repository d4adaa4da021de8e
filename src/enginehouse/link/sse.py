"""Parser for server-sent events: the part of the standard that frontends and engines use.

Pure. Bytes may be split anywhere. An event is complete only with its closing blank line, so a broken stream never
yields half an event. Comments and unknown fields are skipped. The size of an event is bounded, because the other side
is not trusted.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct

from enginehouse.core.errors import Upstream

MAX_EVENT_BYTES = 1024 * 1024  # for one line or event; an operation on a hundred nodes takes a tenth of it


class SseEvent(Struct, frozen=True):
    """`event` is "message" if the stream gives no name, as in the standard."""

    id: str
    event: str
    data: bytes


class EventParser:
    """Accepts bytes and yields complete events."""

    def __init__(self) -> None:
        self._rest = b""
        self._id = ""
        self._event = ""
        self._lines: list[bytes] = []
        self._size = 0

    def feed(self, received: bytes) -> Iterator[SseEvent]:
        lines = (self._rest + received).split(b"\n")
        self._rest = lines.pop()
        if len(self._rest) > MAX_EVENT_BYTES:
            raise Upstream(f"cannot read the events: a line of more than {MAX_EVENT_BYTES} bytes")
        for line in lines:
            event = self._take(line.removesuffix(b"\r"))
            if event is not None:
                yield event

    def _take(self, line: bytes) -> SseEvent | None:
        if not line:
            return self._dispatch()
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if field == b"data":
            self._size += len(value)
            if self._size > MAX_EVENT_BYTES:
                raise Upstream(f"cannot read the events: an event of more than {MAX_EVENT_BYTES} bytes")
            self._lines.append(value)
        elif field == b"event":
            self._event = value.decode(errors="replace")
        elif field == b"id":
            self._id = value.decode(errors="replace")
        return None

    def _dispatch(self) -> SseEvent | None:
        lines, name = self._lines, self._event
        self._lines, self._event, self._size = [], "", 0
        return SseEvent(self._id, name or "message", b"\n".join(lines)) if lines else None
