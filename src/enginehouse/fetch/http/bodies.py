"""Range requests for blobs: exactly the requested bytes, or an error.

Servers truncate, extend and ignore ranges, so status, Content-Range and length are all checked. Digests are not: this
module detects bytes at the wrong offset, and the caller detects wrong bytes by their checksum.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from enginehouse.core.artifact import Layer
from enginehouse.core.errors import Upstream
from enginehouse.fetch.http.answers import failure

if TYPE_CHECKING:
    from enginehouse.fetch.http.connections import OutboundResponse

_CONTENT_RANGE = re.compile(r"bytes (\d{1,19})-(\d{1,19})/(\d{1,19}|\*)")


def range_header(start: int, end: int, size_bytes: int) -> dict[str, str]:
    """The Range header for [start, end). None for the whole blob: every server and cache supports a plain request."""
    return {} if start == 0 and end >= size_bytes else {"range": f"bytes={start}-{end - 1}"}


def ignores_range(response: OutboundResponse, start: int, end: int, size_bytes: int) -> bool:
    """Whether a range was requested and the server sends the whole blob."""
    return response.status == 200 and bool(range_header(start, end, size_bytes))


def no_ranges(what: str, start: int) -> Upstream:
    return Upstream(f"cannot resume {what} at byte {start}: the server does not support ranges", code="no_ranges")


async def body(response: OutboundResponse, layer: Layer, start: int, end: int, what: str) -> AsyncIterator[bytes]:
    """Yield bytes [start, end) of `layer`. If the server sends the whole blob, `start` must be 0."""
    _check_head(response, layer, start, end, what)
    left = end - start
    is_whole = ignores_range(response, start, end, layer.size_bytes)
    async for piece in response.chunks():
        if len(piece) > left:
            if left:
                yield piece[:left]
            if is_whole:
                return
            raise Upstream(f"cannot use the response for {what}: it is longer than requested")
        left -= len(piece)
        yield piece
        if left == 0 and is_whole:
            return
    if left:
        raise Upstream(f"cannot get all of {what}: the connection was cut off with {left} bytes missing")


def _check_head(response: OutboundResponse, layer: Layer, start: int, end: int, what: str) -> None:
    if response.status not in (200, 206):
        if response.status >= 400:
            raise failure(response.status, what, response.headers)
        raise Upstream(f"cannot get {what}: the server answered with status {response.status}")
    if response.is_encoded:
        raise Upstream(f"cannot use the response for {what}: it has an unrequested content encoding")
    if ignores_range(response, start, end, layer.size_bytes):
        if start:
            raise no_ranges(what, start)
        expected = layer.size_bytes
    else:
        expected = end - start
    if response.status == 206:
        found = _CONTENT_RANGE.fullmatch(response.headers.get("content-range", ""))
        if not found or (int(found[1]), int(found[2])) != (start, end - 1):
            raise Upstream(f"cannot use the response for {what}: it has another range than requested")
        if found[3] not in ("*", str(layer.size_bytes)):
            raise Upstream(f"cannot use the response for {what}: the total is {found[3]} bytes, not {layer.size_bytes}")
    announced = response.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > expected:
        raise Upstream(f"cannot use the response for {what}: it has {announced} bytes, not {expected}")
