"""Turns an engine's answer into ours: selected headers, complete events only, and errors in our shape.

Pure. Engines report errors in different shapes; clients see one shape with a stable string as `code`. The engine's
message is kept, because it says what is wrong with the request.
"""

from __future__ import annotations

import msgspec
from msgspec import Struct

from enginehouse.api.errors import Answer
from enginehouse.ports import Headers

# Connection headers belong to one hop, and the engine's name and cookies are not for clients.
_PASSED = (b"content-type", b"cache-control", b"x-accel-buffering")
MAX_HELD_BYTES = 1024 * 1024  # of an incomplete event; a larger one is passed on incomplete
MAX_MESSAGE = 1000

_TYPES = {400: "invalid_request_error", 404: "not_found_error", 429: "rate_limit_error"}
_CODES = {404: "not_found", 413: "too_large", 429: "rate_limited", 503: "resource_exhausted"}


def passed_headers(headers: Headers, request_id: str) -> tuple[list[tuple[bytes, bytes]], bool]:
    """The headers for the client, and whether the body is a stream of events."""
    passed = [header for header in headers if header[0] in _PASSED]
    is_stream = False
    for name, value in passed:
        if name == b"content-type" and value.startswith(b"text/event-stream"):
            is_stream = True
    if is_stream:
        names = {name for name, _ in passed}
        if b"cache-control" not in names:
            passed.append((b"cache-control", b"no-cache"))
        if b"x-accel-buffering" not in names:
            passed.append((b"x-accel-buffering", b"no"))  # otherwise nginx buffers the tokens
    encoded = request_id.encode()
    passed += ((b"x-request-id", encoded), (b"x-correlation-id", encoded))
    return passed, is_stream


class EventPasser:
    """Passes complete events only, so that an error event after a broken stream does not follow half an event."""

    def __init__(self) -> None:
        self._held = b""

    def feed(self, chunk: bytes) -> bytes:
        received = self._held + chunk if self._held else chunk
        if received.endswith((b"\n\n", b"\n\r\n")):
            self._held = b""
            return received
        bare, carried = received.rfind(b"\n\n"), received.rfind(b"\n\r\n")
        end = max(bare + 2 if bare >= 0 else 0, carried + 3 if carried >= 0 else 0)
        if len(received) - end > MAX_HELD_BYTES:
            end = len(received)
        self._held = received[end:]
        return received[:end]

    def finish(self) -> bytes:
        """Return what is held. The engine ended the stream itself, so an incomplete event is passed on too."""
        return self._held


class _EngineError(Struct):
    message: str
    type: str | None = None
    code: object = None
    param: str | None = None


class _NestedError(Struct):
    error: _EngineError


class _FlatError(Struct):
    message: str = ""
    detail: object = None
    error: object = None


def engine_error(status: int, headers: list[tuple[bytes, bytes]], body: bytes, request_id: str) -> Answer:
    """An engine's error in our shape; one that already has that shape is unchanged."""
    described = _described(body)
    if described.type and isinstance(described.code, str):
        return status, [*headers, (b"content-length", str(len(body)).encode())], body
    kind = described.type or _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    code = described.code if isinstance(described.code, str) else None
    error: dict[str, object] = {
        "message": described.message or f"cannot answer: the engine refused with status {status} and no reason",
        "type": kind,
        # The engine's type is more specific than the status, and as stable.
        "code": code or _CODES.get(status) or described.type or ("upstream_error" if status >= 500 else "unsupported"),
        "request_id": request_id,
    }
    if described.param:
        error["param"] = described.param
    shown = msgspec.json.encode({"error": error})
    kept = [(name, value) for name, value in headers if name != b"content-type"]
    kept += [(b"content-type", b"application/json"), (b"content-length", str(len(shown)).encode())]
    if status == 503:
        kept.append((b"retry-after", b"1"))
    return status, kept, shown


def _described(body: bytes) -> _EngineError:
    """OpenAI's nested object, FastAPI's `detail`, a flat `message` or `error`, or plain text."""
    try:
        return msgspec.json.decode(body, type=_NestedError).error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        pass
    try:
        flat = msgspec.json.decode(body, type=_FlatError)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return _EngineError(message=body[:MAX_MESSAGE].decode(errors="replace").strip())
    for said in (flat.message, flat.error, flat.detail):
        if said:
            text = said if isinstance(said, str) else msgspec.json.encode(said).decode()
            return _EngineError(message=text[:MAX_MESSAGE])
    return _EngineError(message="")
