"""Files on web servers: name, size, and for GGUF files the header, read from the first bytes.

One request: a GET of the first bytes as a range. A server that ignores the range is left after the same number of
bytes. The body of the file is fetched by workers, never here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from msgspec import Struct

from enginehouse.core.errors import Hopeless, Invalid
from enginehouse.core.gguf import PREFIX_BYTES, GgufHeader, is_gguf, read_gguf
from enginehouse.core.model_source import plain_file_name
from enginehouse.core.reference import shown_uri
from enginehouse.fetch.http.answers import failure
from enginehouse.fetch.http.client import Client, OutboundRequest
from enginehouse.fetch.models.credentials import gated

_TOTAL = re.compile(r"bytes \d{1,19}-\d{1,19}/(\d{1,19})")
_FILE_NAME = re.compile(r"""filename="?([^";]+)"?""")
_SHA256 = re.compile(r'"?([0-9a-f]{64})"?')
_PAGE = (b"<!doctype", b"<html")


class Probe(Struct, frozen=True, kw_only=True):
    """The beginning of a file."""

    name: str
    size_bytes: int
    sha256: str = ""  # if the server states it
    header: GgufHeader | None = None


async def probe(client: Client, url: str, headers: Mapping[str, str] = {}, *, credential: str = "") -> Probe:
    """Read the beginning of the file at `url`."""
    what = shown_uri(url)
    wanted = {**headers, "range": f"bytes=0-{PREFIX_BYTES - 1}"}
    async with client.open(OutboundRequest(url=url, headers=wanted)) as response:
        if response.status in (401, 403):
            raise gated(what, credential)
        if response.status == 416:
            raise Invalid(f"cannot use {what}: the file is empty", code="unsupported", param="source")
        if response.status >= 400:
            raise failure(response.status, what, response.headers)
        if response.status not in (200, 206) or response.is_encoded:
            raise Hopeless(f"cannot read {what}: the server answered with status {response.status}", code="unsupported")
        content = bytearray()
        async for piece in response.chunks():
            content += piece
            if len(content) >= PREFIX_BYTES:
                break
        head = bytes(content[:PREFIX_BYTES])
        size_bytes = _size(response.status, response.headers, len(content))
        found = _SHA256.fullmatch(response.headers.get("x-linked-etag", ""))
        name = _name(response.headers) or plain_file_name(url)
    if head[:9].lower().startswith(_PAGE):
        raise Invalid(
            f"cannot use {what}: it is a web page and not a file; copy the address of the download",
            code="unsupported",
            param="source",
        )
    is_named = name.lower().endswith(".gguf")
    header = read_gguf(head, size_bytes) if is_gguf(head) or is_named else None
    return Probe(name=name, size_bytes=size_bytes, sha256=found[1] if found else "", header=header)


def _size(status: int, headers: Mapping[str, str], received: int) -> int:
    total = _TOTAL.fullmatch(headers.get("content-range", "")) if status == 206 else None
    if total is not None:
        return int(total[1])
    length = headers.get("content-length", "") if status == 200 else ""
    return int(length) if length.isdecimal() else received if received < PREFIX_BYTES else 0


def _name(headers: Mapping[str, str]) -> str:
    found = _FILE_NAME.search(headers.get("content-disposition", ""))
    return plain_file_name(found[1].strip().replace("\\", "/")) if found else ""
