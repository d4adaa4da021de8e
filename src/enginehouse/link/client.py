"""Blocking HTTP client of a frontend, for the CLI, and for the worker in threads. Standard library only, because the
CLI pays for every import.

It must not retry a request that may have been carried out: only a GET on a kept connection that turned out to be closed
is sent again. Every failure on the way to the frontend becomes one error (`frontend_unreachable`) that says what to
check; errors of the frontend keep their class and code.
"""

from __future__ import annotations

import contextlib
import http.client
import socket
import ssl
import time
from collections.abc import Iterator, Mapping
from typing import TypeVar
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct

from enginehouse.core.errors import EnginehouseError, Invalid, Unavailable, from_status
from enginehouse.link.sse import EventParser, SseEvent

T = TypeVar("T")

MAX_ANSWER_BYTES = 64 * 1024 * 1024  # far above any listing; a wrong server must not fill our memory
REUSE_SECONDS = 2.0  # the frontend closes idle connections after 5 s; well below that there is no race
NOT_UNDERSTOOD = "not_understood"  # the answer did not come from a frontend
REQUEST_SECONDS = 30.0  # above the frontend's own limits for every route that does not wait for a model
# The frontend sends a comment every few seconds, so a silence this long means that it is dead.
EVENT_SILENCE_SECONDS = 20.0
ANSWER_SILENCE_SECONDS = 900.0  # a long prompt on a slow machine takes minutes before its first token

_Connection = http.client.HTTPConnection


class RawBody(Struct, frozen=True):
    """A body that is sent as it is, with its own headers."""

    content: bytes
    headers: dict[str, str] = {}


class _Described(Struct):
    message: str
    code: str | int = ""  # a Go frontend repeats the status here
    param: str | None = None


class _ErrorAnswer(Struct):
    error: _Described | str  # some routes of a Go frontend return only a sentence


class EventStream(Iterator[SseEvent]):
    """The events of one response as they arrive. Closing it early ends the connection and the work behind it."""

    def __init__(self, client: FrontendClient, connection: _Connection, response: http.client.HTTPResponse) -> None:
        self._client = client
        self._connection = connection
        self._response = response
        self._parser = EventParser()
        self._ready: list[SseEvent] = []
        self.heard_at = time.monotonic()  # when anything arrived last, comments too

    def __next__(self) -> SseEvent:
        while not self._ready:
            try:
                received = self._response.read1(65536)
            except (OSError, http.client.HTTPException, ValueError) as error:
                self.close()
                raise self._client.unreachable(error) from error
            if not received:
                self.close()
                raise StopIteration
            self.heard_at = time.monotonic()
            self._ready = list(self._parser.feed(received))[::-1]
        return self._ready.pop()

    def close(self) -> None:
        self._response.close()
        self._connection.close()

    def interrupt(self) -> None:
        """End the iteration that waits in another thread. Closing under its read could block both."""
        connected = self._connection.sock
        if connected is not None:
            with contextlib.suppress(OSError):
                connected.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> EventStream:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class FrontendClient:
    """One frontend, one token. Thread-safe: each request takes its own connection."""

    def __init__(self, url: str, token: str, *, user_agent: str) -> None:
        self.url = url.rstrip("/")
        self._token = token
        self._user_agent = user_agent
        self._idle: list[tuple[float, _Connection]] = []
        self._local_address = ""
        try:
            parts = urlsplit(self.url)
            self._port = parts.port
        except ValueError as error:
            raise Invalid(f"cannot use {url!r} as the address of a frontend: {error}", code="invalid_uri") from error
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise Invalid(
                f"cannot use {url!r} as the address of a frontend: it must look like http://HOST:8080",
                code="invalid_uri",
            )
        self._host, self._prefix = parts.hostname, parts.path
        self._context = ssl.create_default_context() if parts.scheme == "https" else None

    def request(
        self,
        method: str,
        path: str,
        body: object | None,
        kind: type[T],
        *,
        token: str | None = None,
        timeout_seconds: float = REQUEST_SECONDS,
        key: str = "",
    ) -> T:
        """Return the response as `kind`; raise unless it is a success. The same `key` makes it the same request."""
        content = self.request_bytes(method, path, body, token=token, timeout_seconds=timeout_seconds, key=key)
        try:
            # An answer without content (204) reads as null.
            return msgspec.json.decode(content or b"null", type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise Unavailable(
                f"cannot read the answer of {self.url}{path}: {error}. "
                "Check that this is the address of an Enginehouse frontend of this version",
                code=NOT_UNDERSTOOD,
            ) from error

    def request_bytes(
        self,
        method: str,
        path: str,
        body: object | None = None,
        *,
        token: str | None = None,
        timeout_seconds: float = REQUEST_SECONDS,
        key: str = "",
    ) -> bytes:
        connection, response = self._exchange(method, path, body, token, timeout_seconds, key)
        content = self._finish(connection, response)
        if response.status >= 300:
            raise self._refused(response, content)
        return content

    def head(self, path: str, *, timeout_seconds: float = REQUEST_SECONDS) -> tuple[int, dict[str, str]]:
        """The status and the headers (lowercase) that a GET would have; an error has no body that could be read."""
        connection, response = self._exchange("HEAD", path, None, None, timeout_seconds)
        self._finish(connection, response)
        return response.status, {name.lower(): value for name, value in response.headers.items()}

    def stream_events(
        self, path: str, *, silence_seconds: float = EVENT_SILENCE_SECONDS, last_event_id: str = ""
    ) -> EventStream:
        """The events of a GET. The iteration ends when the frontend ends the stream; the caller reconnects, with the
        id of the last event if it wants what it missed.
        """
        more = {"Last-Event-ID": last_event_id} if last_event_id else {}
        return self._stream("GET", path, None, silence_seconds, more)

    def post_stream(self, path: str, body: object, *, silence_seconds: float = ANSWER_SILENCE_SECONDS) -> EventStream:
        """The events of a POST with a streamed response; the data of the last one is `[DONE]`."""
        return self._stream("POST", path, body, silence_seconds)

    def open(
        self, path: str, headers: dict[str, str], *, token: str | None = None, timeout_seconds: float = REQUEST_SECONDS
    ) -> tuple[_Connection, http.client.HTTPResponse]:
        """Open a GET whose body the caller reads, and then closes its connection. Raises unless it is a success."""
        connection, response = self._exchange("GET", path, None, token, timeout_seconds, more=headers)
        if response.status >= 300:
            raise self._refused(response, self._finish(connection, response))
        return connection, response

    def local_address(self) -> str:
        """The local address of the last connection; "" before the first."""
        return self._local_address

    def close(self) -> None:
        while self._idle:
            self._idle.pop()[1].close()

    def unreachable(self, error: Exception) -> Unavailable:
        advice = "Check that `enginehouse up` is running there and that the address is correct"
        if isinstance(error, ssl.SSLCertVerificationError):
            cause = f"its certificate is not trusted on this machine ({error.verify_message})"
            advice = "Set SSL_CERT_FILE to a file with the certificate of its authority"
        elif isinstance(error, TimeoutError):
            cause = "no answer in time"
        elif isinstance(error, ConnectionRefusedError):
            cause = "the connection was refused"
        elif isinstance(error, ssl.SSLError):
            cause = f"the secure connection failed ({error.reason or error})"
        elif isinstance(error, http.client.HTTPException) and not isinstance(error, http.client.RemoteDisconnected):
            cause = f"the answer is not HTTP or was cut off ({type(error).__name__})"
        else:
            cause = str(getattr(error, "strerror", None) or error or type(error).__name__)
        return Unavailable(f"cannot reach the frontend at {self.url}: {cause}. {advice}", code="frontend_unreachable")

    def _stream(
        self, method: str, path: str, body: object | None, silence_seconds: float, more: Mapping[str, str] = {}
    ) -> EventStream:
        connection, response = self._exchange(method, path, body, None, silence_seconds, more=more)
        kind = response.headers.get_content_type()
        if response.status >= 300 or kind != "text/event-stream":
            content = self._finish(connection, response)
            if response.status < 300:
                raise Unavailable(
                    f"cannot read {self.url}{path}: the answer is {kind}, not a stream of events. "
                    "Check that this is the address of an Enginehouse frontend",
                    code="frontend_unreachable",
                )
            raise self._refused(response, content)
        return EventStream(self, connection, response)

    def _exchange(
        self,
        method: str,
        path: str,
        body: object | None,
        token: str | None,
        timeout_seconds: float,
        key: str = "",
        more: Mapping[str, str] = {},
    ) -> tuple[_Connection, http.client.HTTPResponse]:
        headers = {"User-Agent": self._user_agent, "Accept": "application/json, text/event-stream", **more}
        if key:
            headers["Idempotency-Key"] = key
        bearer = self._token if token is None else token
        if bearer:
            headers["Authorization"] = f"Bearer {bearer}"
        content = None
        if isinstance(body, RawBody):
            content = body.content
            headers.update(body.headers)
        elif body is not None:
            content = msgspec.json.encode(body)
            headers["Content-Type"] = "application/json"
        elif method not in ("GET", "HEAD"):
            content = b""
        while True:
            connection, reused = self._take(timeout_seconds)
            # Also for Ctrl-C while waiting: a connection in an unknown state must not be kept.
            with contextlib.ExitStack() as unless_answered:
                unless_answered.callback(connection.close)
                try:
                    connection.request(method, self._prefix + path, content, headers)
                    self._local_address = connection.sock.getsockname()[0]
                    response = connection.getresponse()
                except (OSError, http.client.HTTPException, ValueError) as error:
                    if reused and method == "GET" and isinstance(error, ConnectionError):
                        continue
                    raise self.unreachable(error) from error
                unless_answered.pop_all()
                return connection, response

    def _take(self, timeout_seconds: float) -> tuple[_Connection, bool]:
        while self._idle:
            try:
                since, connection = self._idle.pop()
            except IndexError:  # another thread took it
                break
            if time.monotonic() - since < REUSE_SECONDS and connection.sock is not None:
                connection.sock.settimeout(timeout_seconds)
                return connection, True
            connection.close()
        if self._context is not None:
            return http.client.HTTPSConnection(
                self._host, self._port, timeout=timeout_seconds, context=self._context
            ), False
        return _Connection(self._host, self._port, timeout=timeout_seconds), False

    def _finish(self, connection: _Connection, response: http.client.HTTPResponse) -> bytes:
        """Read the whole body; keep the connection only if it was read to the end."""
        try:
            content = response.read(MAX_ANSWER_BYTES + 1)
            if len(content) <= MAX_ANSWER_BYTES and response.length:
                # A read with a size treats the end of the connection as the end of the body.
                raise http.client.IncompleteRead(content, response.length)
        except (OSError, http.client.HTTPException, ValueError) as error:
            connection.close()
            raise self.unreachable(error) from error
        if len(content) > MAX_ANSWER_BYTES:
            connection.close()
            raise Unavailable(
                f"cannot read the answer of {self.url}: more than {MAX_ANSWER_BYTES} bytes",
                code="frontend_unreachable",
            )
        if response.isclosed() and not response.will_close:
            self._idle.append((time.monotonic(), connection))
        else:
            connection.close()
        return content

    def _refused(self, response: http.client.HTTPResponse, content: bytes) -> EnginehouseError:
        try:
            described = msgspec.json.decode(content, type=_ErrorAnswer).error
        except (msgspec.DecodeError, UnicodeDecodeError):
            return Unavailable(
                f"cannot read the answer of {self.url}: status {response.status} without an error body. "
                "Check that this is the address of an Enginehouse frontend",
                code=NOT_UNDERSTOOD,
            )
        if isinstance(described, str):
            described = _Described(message=described)
        code = described.code if isinstance(described.code, str) else ""
        error = from_status(response.status, described.message, code=code or "upstream_error", param=described.param)
        extra = msgspec.json.decode(content, type=dict[str, object])
        error.details = {name: value for name, value in extra.items() if name != "error"}
        wait = response.headers.get("Retry-After", "")
        if wait.isdecimal():
            error.retry_after_seconds = float(wait)
        return error
