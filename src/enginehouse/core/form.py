"""Reads one short field of a `multipart/form-data` body, such as the model of a request with a sound file.

Pure, and only as much of RFC 7578 as routing needs: the body is passed on to the engine unchanged.
"""

from __future__ import annotations

import re

FORM = "multipart/form-data"
MAX_PARTS = 64  # that are looked at; clients send a handful
MAX_HEAD_BYTES = 4096  # of one part
MAX_FIELD_BYTES = 1024
_BOUNDARY = re.compile(r"""multipart/form-data\s*;(?:[^;]*;)*?\s*boundary=(?:"([^"]*)"|([^\s;,"]*))\s*(?:;|$)""", re.I)
_TOKEN = re.compile(r"[0-9A-Za-z'+_.-]+")
# The characters that RFC 2046 allows in a boundary.
_PLAIN = re.compile(r"[0-9A-Za-z'()+_,./:=? -]{0,69}[0-9A-Za-z'()+_,./:=?-]")
_NAME = re.compile(rb'^content-disposition:\s*form-data\s*;(?:[^\r\n]*;)?\s*name="?([^";\r\n]*)"?', re.I | re.M)


def boundary_of(content_type: str) -> str | None:
    """The boundary of a form; None if this is no form, or its boundary is not allowed."""
    found = _BOUNDARY.match(content_type.strip())
    boundary = (found[1] or found[2] or "") if found is not None else ""
    return boundary if _PLAIN.fullmatch(boundary) else None


def form_type(boundary: str) -> str:
    """The content type of a form with this boundary."""
    return f"{FORM}; boundary={boundary}" if _TOKEN.fullmatch(boundary) else f'{FORM}; boundary="{boundary}"'


def field_of(body: bytes, boundary: str, name: str) -> str | None:
    """The text of a field; None if the form has none of this name among its first parts, or it is not short text."""
    mark = b"--" + boundary.encode()
    place = 0 if body.startswith(mark) else body.find(b"\r\n" + mark)
    for _ in range(MAX_PARTS):
        begin = body.find(b"\r\n", place + len(mark)) if place >= 0 else -1
        head_end = body.find(b"\r\n\r\n", begin, begin + MAX_HEAD_BYTES) if begin >= 0 else -1
        if head_end < 0:
            return None
        place = body.find(b"\r\n" + mark, head_end + 2)
        found = _NAME.search(body[begin + 2 : head_end])
        if found is not None and found[1] == name.encode() and place >= 0:
            content = body[head_end + 4 : place]
            return _text(content) if len(content) <= MAX_FIELD_BYTES else None
        place = place + 2 if place >= 0 else -1
    return None


def _text(content: bytes) -> str | None:
    try:
        return content.decode()
    except UnicodeDecodeError:
        return None
