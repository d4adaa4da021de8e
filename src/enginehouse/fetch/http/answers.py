"""What a server outside said, as our errors: which statuses may heal, and when asking again makes sense.

Bodies of error answers are never repeated: they are somebody else's text.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from email.utils import parsedate_to_datetime

from msgspec import Struct

from enginehouse.core.errors import Denied, EnginehouseError, Hopeless, NotFound, Upstream

_MAY_HEAL = {408, 425, 429}
LONGEST_RETRY_AFTER_SECONDS = 3600.0  # a server that says "tomorrow" is asked again within the hour


class Document(Struct, frozen=True):
    """A small answer as a whole; names of headers are in small letters, `url` is the last one after redirects."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    url: str


def failure(status: int, what: str, headers: Mapping[str, str]) -> EnginehouseError:
    """The error for an answer of 400 or above about `what`."""
    if status in (404, 410):
        return NotFound(f"cannot find {what}: the server does not have it; check the name", code="not_found")
    if status in (401, 403):
        return Denied(
            f"cannot get {what}: the server does not let us (status {status}); it may not exist, or credentials for "
            "it are missing or wrong",
            code="forbidden",
        )
    if status >= 500 or status in _MAY_HEAL:
        error = Upstream(f"cannot get {what}: the server answered with status {status}", code="upstream_error")
        error.retry_after_seconds = retry_after(headers)
        return error
    return Hopeless(f"cannot get {what}: the server answered with status {status}", code="upstream_error")


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds from a Retry-After header in either of its forms; None where there is none that can be read."""
    text = headers.get("retry-after", "").strip()
    if text.isdecimal():
        return min(float(text[:9]), LONGEST_RETRY_AFTER_SECONDS)
    try:
        moment = parsedate_to_datetime(text).timestamp()
    except (TypeError, ValueError):
        return None
    return min(max(0.0, moment - time.time()), LONGEST_RETRY_AFTER_SECONDS)
