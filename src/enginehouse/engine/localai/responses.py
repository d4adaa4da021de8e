"""Responses of translated calls: the same shape as a response over HTTP.

A whole response exists when its last message has arrived. A stream begins when its first messages have arrived, so a
call that fails at once gets its own status instead of a broken stream.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

from enginehouse.ports import Headers

JSON: Headers = ((b"content-type", b"application/json"),)
EVENTS: Headers = ((b"content-type", b"text/event-stream"),)


class WholeResponse:
    """A complete answer."""

    def __init__(self, status: int, body: bytes, headers: Headers = JSON) -> None:
        self.status = status
        self.headers = headers
        self._body = body

    async def chunks(self) -> AsyncIterator[bytes]:
        yield self._body

    async def close(self) -> None:
        """Nothing is open."""


class StreamedResponse:
    """Events made from messages as they arrive. Closing it early cancels its calls, which stops the engine."""

    def __init__(self, events: AsyncIterator[bytes], cancel: Callable[[], None]) -> None:
        self.status = 200
        self.headers = EVENTS
        self._events = events
        self._cancel = cancel

    def chunks(self) -> AsyncIterator[bytes]:
        return self._events

    async def close(self) -> None:
        self._cancel()
