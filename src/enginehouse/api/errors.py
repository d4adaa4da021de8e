"""Errors as HTTP answers. Every route uses one shape: `{"error": {"message", "type", "code", "param"?, "request_id"}}`,
plus the details of the error as further objects.
"""

from __future__ import annotations

import math

import msgspec

from enginehouse.core import errors
from enginehouse.core.errors import EnginehouseError

Answer = tuple[int, list[tuple[bytes, bytes]], bytes]

# OpenAI's SDKs choose the exception class by status and show `type`; these are OpenAI's names.
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


def error_answer(error: EnginehouseError, request_id: str) -> Answer:
    """Status, headers and body for an error."""
    status = errors.http_status(error)
    described: dict[str, object] = {
        "message": error.message,
        "type": _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error"),
        "code": error.code,
        "request_id": request_id,
    }
    if error.param:
        described["param"] = error.param
    body = msgspec.json.encode({"error": described, **error.details})
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"x-request-id", request_id.encode()),
    ]
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    if error.retry_after_seconds is not None:
        headers.append((b"retry-after", str(math.ceil(error.retry_after_seconds)).encode()))
    return status, headers, body
