"""What the end of a gRPC call means: status, message, and the HTTP status of a peer that is no gRPC server.

Pure. An error that carries a status is the engine's own word; failures of the transport are not made here.
"""

from __future__ import annotations

from math import ceil
from urllib.parse import unquote_to_bytes

from enginehouse.core.errors import EnginehouseError, Upstream
from enginehouse.engine.localai.hpack import Header

(OK, CANCELLED, UNKNOWN, INVALID_ARGUMENT, DEADLINE_EXCEEDED, NOT_FOUND, ALREADY_EXISTS, PERMISSION_DENIED) = range(8)
RESOURCE_EXHAUSTED, FAILED_PRECONDITION, ABORTED, OUT_OF_RANGE, UNIMPLEMENTED, INTERNAL = range(8, 14)
UNAVAILABLE, DATA_LOSS, UNAUTHENTICATED = range(14, 17)
NAMES = (
    "OK",
    "CANCELLED",
    "UNKNOWN",
    "INVALID_ARGUMENT",
    "DEADLINE_EXCEEDED",
    "NOT_FOUND",
    "ALREADY_EXISTS",
    "PERMISSION_DENIED",
    "RESOURCE_EXHAUSTED",
    "FAILED_PRECONDITION",
    "ABORTED",
    "OUT_OF_RANGE",
    "UNIMPLEMENTED",
    "INTERNAL",
    "UNAVAILABLE",
    "DATA_LOSS",
    "UNAUTHENTICATED",
)
# What a peer that answers in plain HTTP would have said in gRPC; anything else is UNKNOWN.
_OF_HTTP = {
    400: INTERNAL,
    401: UNAUTHENTICATED,
    403: PERMISSION_DENIED,
    404: UNIMPLEMENTED,
    429: UNAVAILABLE,
    502: UNAVAILABLE,
    503: UNAVAILABLE,
    504: UNAVAILABLE,
}


class GrpcError(Upstream):
    """The engine ended a call with a status other than OK; `detail` is its own message."""

    def __init__(self, address: str, status: int, detail: str) -> None:
        name = NAMES[status] if status < len(NAMES) else f"status {status}"
        super().__init__(
            f"cannot complete the call to the engine at {address}: {name}{f': {detail}' if detail else ''}",
            code="upstream_timeout" if status == DEADLINE_EXCEEDED else None,
        )
        self.status = status
        self.detail = detail


def refused_head(headers: list[Header], address: str) -> EnginehouseError | None:
    """Why the head of a response is not that of a gRPC answer; None if it is."""
    values = dict(headers)
    status = values.get(b":status", b"")
    if not _is_number(status):
        return Upstream(f"cannot read the answer of the engine at {address}: it has no HTTP status")
    if status != b"200":
        return GrpcError(address, _OF_HTTP.get(int(status), UNKNOWN), f"HTTP status {int(status)}")
    if not values.get(b"content-type", b"").startswith(b"application/grpc"):
        return Upstream(f"cannot read the answer of the engine at {address}: its content type is not that of gRPC")
    return None


def ended(trailers: list[Header], address: str) -> EnginehouseError | None:
    """How a call ended by its trailers; None for OK."""
    values = dict(trailers)
    status = values.get(b"grpc-status", b"")
    if not _is_number(status):
        return Upstream(f"cannot read the answer of the engine at {address}: it ended without a gRPC status")
    if int(status) == OK:
        return None
    detail = unquote_to_bytes(values.get(b"grpc-message", b"")).decode("utf-8", "replace")
    return GrpcError(address, int(status), detail)


def has_status(headers: list[Header]) -> bool:
    return any(name == b"grpc-status" for name, _ in headers)


def is_interim(headers: list[Header]) -> bool:
    """Whether this is `100 Continue` or the like, which precedes the head of the response."""
    return any(name == b":status" and len(value) == 3 and value[:1] == b"1" for name, value in headers)


def timeout_value(seconds: float) -> bytes:
    """`grpc-timeout`: at most eight digits and a unit."""
    thousandths = max(1, ceil(seconds * 1000))
    return b"%dm" % thousandths if thousandths < 10**8 else b"%dS" % min(round(seconds), 10**8 - 1)


def _is_number(text: bytes) -> bool:
    return 0 < len(text) <= 9 and text.isdigit()
