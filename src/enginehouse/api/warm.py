"""uvicorn's HTTP connection with a short path for inference: a request that arrives whole goes straight to its route.

The short path is for the paths of a table, and for requests that came in one read and alone. Everything else
(other paths, long or slow bodies, pipelined requests, upgrades) takes uvicorn's own path, and so does a request that
turns out to be one of them halfway. Both paths end in the same ASGI application, so limits, errors and authorization
are the same. A route can ask to be told at once when its client disconnects, without a task that waits for it.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Mapping
from typing import Any, cast

from starlette.types import ASGIApp, Message
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from enginehouse.api.requests import ABORT, SEND_BUFFER, WHEN_GONE

Callback = Callable[[], None]


class WarmConnection(HttpToolsProtocol):
    """One connection of a client. `endpoints` are the routes of the short path, by their path."""

    def __init__(self, *, endpoints: Mapping[bytes, tuple[str, ASGIApp]], app_state: dict[str, Any], **given: Any):
        of_connection = {ABORT: self._abort, SEND_BUFFER: self._bound, WHEN_GONE: self._tell_when_gone}
        super().__init__(app_state={**app_state, **of_connection}, **given)
        self._endpoints = endpoints
        self._arriving: tuple[str, ASGIApp] | None = None  # the route of a request whose body is not complete
        self._body = b""
        self._when_gone: Callback | None = None
        self._is_gone = False
        self._idle_since: float | None = None
        self._idle_timer: asyncio.TimerHandle | None = None

    # For routes, through the state of their requests ---------------------------------------------------------------

    def _abort(self) -> None:
        self.transport.abort()

    def _bound(self, size_bytes: int) -> None:
        self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, size_bytes)

    def _tell_when_gone(self, callback: Callback | None) -> None:
        """Call `callback` when the client disconnects; None ends that. A connection has one request at a time."""
        self._when_gone = callback
        if callback is not None and self._is_gone:
            self.loop.call_soon(callback)

    # Called by the transport ----------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._arriving is not None:
            self._take_the_long_path()

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_gone = True
        self._arriving = None
        super().connection_lost(exc)
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        if self._when_gone is not None:
            self._when_gone()

    # Called by the parser -------------------------------------------------------------------------------------------

    def on_headers_complete(self) -> None:
        endpoint = self._endpoints.get(self.url)
        if endpoint is not None and self._is_plain():
            self._arriving = endpoint
            self._body = b""
        else:
            super().on_headers_complete()

    def _is_plain(self) -> bool:
        """A POST that is alone on its connection and waits for nothing."""
        return (
            self.parser.get_method() == b"POST"
            and (self.cycle is None or self.cycle.response_complete)
            and not self.expect_100_continue
            and not self.parser.should_upgrade()
        )

    def on_body(self, body: bytes) -> None:
        if self._arriving is None:
            super().on_body(body)
        else:
            self._body = self._body + body if self._body else body

    def on_message_complete(self) -> None:
        if self._arriving is None:
            super().on_message_complete()
            return
        path, endpoint = self._arriving
        self._arriving = None
        scope: Any = self.scope
        scope["method"] = "POST"
        scope["path"] = path
        scope["raw_path"] = self.url
        scope["query_string"] = b""
        version = self.parser.get_http_version()
        if version != "1.1":
            scope["http_version"] = version
        self.cycle = WarmCycle(self, self._body, keep_alive=version != "1.0" and self.parser.should_keep_alive())
        self._start_asgi_task(self.cycle, cast(Any, endpoint))

    def _take_the_long_path(self) -> None:
        """The body did not come with its head: uvicorn waits for the rest of it, within the limits of its route."""
        self._arriving = None
        if self.transport.is_closing():
            return
        super().on_headers_complete()
        if self._body:
            super().on_body(self._body)
            self._body = b""

    # Idle connections -----------------------------------------------------------------------------------------------

    # One timer per connection looks whether it is idle, instead of a new timer after each answer.

    def _unset_keepalive_if_required(self) -> None:
        self._idle_since = None

    def on_response_complete(self) -> None:
        if self.pipeline:
            super().on_response_complete()
            return
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        self.flow.resume_reading()
        self._idle_since = self.loop.time()
        if self._idle_timer is None:
            self._idle_timer = self.loop.call_later(self.timeout_keep_alive, self._close_if_idle)

    def _close_if_idle(self) -> None:
        self._idle_timer = None
        if self._idle_since is None:
            return  # the end of the next answer sets the timer again
        left = self._idle_since + self.timeout_keep_alive - self.loop.time()
        if left <= 0:
            self.timeout_keep_alive_handler()
        else:
            self._idle_timer = self.loop.call_later(left, self._close_if_idle)


class WarmCycle(RequestResponseCycle):
    """The request and response of the short path, as ASGI. The body is complete from the start."""

    def __init__(self, connection: WarmConnection, body: bytes, *, keep_alive: bool) -> None:
        super().__init__(
            scope=connection.scope,
            transport=connection.transport,
            flow=connection.flow,
            logger=connection.logger,
            access_logger=connection.access_logger,
            access_log=False,
            default_headers=connection.server_state.default_headers,
            message_event=asyncio.Event(),
            expect_100_continue=False,
            keep_alive=keep_alive,
            on_response=connection.on_response_complete,
        )
        self._whole: bytes | None = body
        self._held = b""  # the head of an answer, for one write with what follows at once
        self._call_soon = connection.loop.call_soon
        self.more_body = False

    async def receive(self) -> Any:
        if self._whole is not None and not self.disconnected:
            body, self._whole = self._whole, None
            return {"type": "http.request", "body": body, "more_body": False}
        return await super().receive()

    async def send(self, message: Any) -> None:
        flow: FlowControl = self.flow
        if flow.write_paused and not self.disconnected:
            await flow.drain()
        if self.disconnected:
            return
        if not self.response_started:
            self._begin(message)
        elif self.response_complete:
            await super().send(message)  # raises: nothing may follow
        elif self.chunked_encoding:
            self._pass_on(message)
        else:
            self._answer(message)

    def _begin(self, message: Message) -> None:
        assert message["type"] == "http.response.start", "an answer begins with its head"
        self.response_started = True
        self.chunked_encoding = True
        headers = [*self.default_headers, *message["headers"]]
        for name, value in headers:
            if name == b"content-length":
                self.chunked_encoding = False
                self.expected_content_length = int(value)
        if self.chunked_encoding:
            headers.append((b"transfer-encoding", b"chunked"))
        if not self.keep_alive:
            headers.append((b"connection", b"close"))
        block = b"".join([b"%b: %b\r\n" % header for header in headers])
        if block.count(b"\n") != len(headers) or block.count(b"\r") != len(headers) or b"\x00" in block:
            raise RuntimeError("cannot send the head of an answer: a header contains a line break")
        self._held = b"%b%b\r\n" % (STATUS_LINE[message["status"]], block)
        if self.chunked_encoding:
            self._call_soon(self._write_head)  # the first token may be seconds away

    def _write_head(self) -> None:
        if self._held and not self.disconnected:
            self.transport.write(self._held)
            self._held = b""

    def _answer(self, message: Message) -> None:
        """A part of a plain answer. All of it together with its head is one write, and one system call."""
        body, is_last = message.get("body", b""), not message.get("more_body", False)
        self.expected_content_length -= len(body)
        if self.expected_content_length < 0 or (is_last and self.expected_content_length):
            raise RuntimeError("cannot send an answer: its length is not the announced one")
        self.transport.write(self._held + body)
        self._held = b""
        if is_last:
            self._complete()

    def _pass_on(self, message: Message) -> None:
        """A part of a stream as one chunk."""
        body, is_last = message["body"], not message.get("more_body", False)
        chunk = b"%x\r\n%b\r\n" % (len(body), body) if body else b""
        if is_last:
            chunk += b"0\r\n\r\n"
        if self._held:
            chunk, self._held = self._held + chunk, b""
        self.transport.write(chunk)
        if is_last:
            self._complete()

    def _complete(self) -> None:
        self.response_complete = True
        self.message_event.set()
        if not self.keep_alive:
            self.transport.close()
        self.on_response()
