"""Bytes of a blob out of an answer: exactly those that were asked for, or an error.

Servers cut, shorten, lengthen and ignore ranges. Nothing here knows digests: a wrong byte is found by whoever hashes,
a byte in the wrong place is found here.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator

from enginehouse.core.artifact import Layer
from enginehouse.core.errors import Upstream
from enginehouse.fetch.http.answers import failure
from enginehouse.fetch.http.client import OutboundResponse

_CONTENT_RANGE = re.compile(r"bytes (\d{1,19})-(\d{1,19})/(\d{1,19}|\*)")


def range_header(start: int, end: int, size_bytes: int) -> dict[str, str]:
    """Nothing for the whole: a plain answer is the one that every server and cache can give."""
    return {} if start == 0 and end >= size_bytes else {"range": f"bytes={start}-{end - 1}"}


def ignores_range(response: OutboundResponse, start: int, end: int, size_bytes: int) -> bool:
    """Whether a range was asked for and the whole is being sent."""
    return response.status == 200 and bool(range_header(start, end, size_bytes))


async def body(response: OutboundResponse, layer: Layer, start: int, end: int, what: str) -> AsyncIterator[bytes]:
    """Bytes [start, end) of `layer`; where the whole is sent instead, [0, end) of it can still be had."""
    _check_head(response, layer, start, end, what)
    left = end - start
    is_whole = ignores_range(response, start, end, layer.size_bytes)
    async for piece in response.chunks():
        if len(piece) > left:
            if left:
                yield piece[:left]
            if is_whole:
                return
            raise Upstream(f"cannot use the answer for {what}: it has more bytes than it should")
        left -= len(piece)
        yield piece
        if left == 0 and is_whole:
            return
    if left:
        raise Upstream(f"cannot get all of {what}: the transfer was cut off {left} bytes before its end")


def _check_head(response: OutboundResponse, layer: Layer, start: int, end: int, what: str) -> None:
    if response.status not in (200, 206):
        if response.status >= 400:
            raise failure(response.status, what, response.headers)
        raise Upstream(f"cannot get {what}: the server answered with status {response.status}")
    if response.headers.get("content-encoding", "identity").lower() not in ("", "identity"):
        raise Upstream(f"cannot use the answer for {what}: it was compressed on the way")
    if ignores_range(response, start, end, layer.size_bytes):
        if start:
            raise Upstream(f"cannot get {what} from byte {start} on: the server sends only the whole", code="no_ranges")
        expected = layer.size_bytes
    else:
        expected = end - start
    if response.status == 206:
        found = _CONTENT_RANGE.fullmatch(response.headers.get("content-range", ""))
        if not found or (int(found[1]), int(found[2])) != (start, end - 1):
            raise Upstream(f"cannot use the answer for {what}: it has other bytes than those asked for")
        if found[3] not in ("*", str(layer.size_bytes)):
            raise Upstream(f"cannot use the answer for {what}: it is of {found[3]} bytes, not {layer.size_bytes}")
    announced = response.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > expected:
        raise Upstream(f"cannot use the answer for {what}: it has {announced} bytes, not {expected}")
