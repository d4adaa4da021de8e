"""HTTP status codes of remote servers, translated into errors.

Decides which statuses are temporary and reads Retry-After. The body of an error response is never included in a
message, because its text is not trusted.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from email.utils import parsedate_to_datetime

from msgspec import Struct

from enginehouse.core.errors import Denied, EnginehouseError, Hopeless, NotFound, Upstream

_TEMPORARY = {408, 425, 429}
LONGEST_RETRY_AFTER_SECONDS = 3600.0  # upper bound for servers that ask for a pause of days


class Document(Struct, frozen=True):
    """A complete small response. Header names are lowercase; `url` is the last one after redirects."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    url: str


def failure(status: int, what: str, headers: Mapping[str, str]) -> EnginehouseError:
    """Return the error for a response of status 400 or above to a request for `what`."""
    if status in (404, 410):
        return NotFound(f"cannot find {what}: the server does not have it; check the name", code="not_found")
    if status in (401, 403):
        return Denied(
            f"cannot get {what}: access denied (status {status}); check that it exists and that the credentials "
            "for it are right",
            code="forbidden",
        )
    if status >= 500 or status in _TEMPORARY:
        error = Upstream(f"cannot get {what}: the server answered with status {status}", code="upstream_error")
        error.retry_after_seconds = retry_after(headers)
        return error
    return Hopeless(f"cannot get {what}: the server answered with status {status}", code="upstream_error")


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds from a Retry-After header, in either of its forms. None if it is missing or malformed."""
    text = headers.get("retry-after", "").strip()
    if text.isdecimal():
        return min(float(text[:9]), LONGEST_RETRY_AFTER_SECONDS)
    try:
        moment = parsedate_to_datetime(text).timestamp()
    except (TypeError, ValueError):
        return None
    return min(max(0.0, moment - time.time()), LONGEST_RETRY_AFTER_SECONDS)
