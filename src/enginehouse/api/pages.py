"""The web page: its files, as they are in `web/`, read once at the start and served compressed.

The files are public and have nothing of a cluster in them; what the page shows comes from the API and needs a session.
Every answer has the policy that lets the page load only its own files, so text from elsewhere can never become script.
A file is fetched again only when it changed (`ETag`). It is compressed when it is first asked for: a start needs none.
"""

from __future__ import annotations

import gzip
import hashlib
import posixpath
import re
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from enginehouse.core.errors import NotFound
from enginehouse.core.name import shown

ROOT = Path(__file__).parent / "web"
INDEX = "index.html"
SHEETS = "styles.css"  # all style sheets of the first file in one
FIRST = ("main.js", "pages/fleet.js")  # what is shown first; other pages are imported when they are
_SHEET = re.compile(rb'<link rel="stylesheet" href="/web/([^"]+)">\n')
_IMPORT = re.compile(rb'^(?:import|export) .*?from "(\.[^"]+)";', re.MULTILINE | re.DOTALL)
_KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
PAGE_HEADERS = {
    # Pictures and sounds of a chat are `blob:` and `data:`; nothing is loaded from another server.
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; "
    "media-src 'self' data: blob:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=(self)",
    "cache-control": "no-cache",
    "vary": "accept-encoding",
}


class PageFile:
    def __init__(self, name: str, plain: bytes) -> None:
        self.plain = plain
        self.media_type = f"{_KINDS[posixpath.splitext(name)[1]]}; charset=utf-8"

    @cached_property
    def packed(self) -> bytes:
        # Without a time in it, so the bytes are the same on every frontend.
        return gzip.compress(self.plain, mtime=0)

    @cached_property
    def etag(self) -> str:
        return f'"{hashlib.sha256(self.plain).hexdigest()[:32]}"'


class PageRoutes:
    def __init__(self) -> None:
        # All at once: a new version may be put in their place while this frontend runs.
        found = (path for path in sorted(ROOT.rglob("*")) if path.suffix in _KINDS)
        names = {path.relative_to(ROOT).as_posix(): path for path in found}
        self._files = {name: PageFile(name, path.read_bytes()) for name, path in names.items()}
        sheets = [name.decode() for name in _SHEET.findall(self._files[INDEX].plain)]
        self._files[SHEETS] = PageFile(SHEETS, b"".join(self._files[name].plain for name in sheets))

    @cached_property
    def _index(self) -> PageFile:
        return PageFile(INDEX, _with_modules(_with_one_sheet(self._files[INDEX].plain), self._files))

    async def index(self, request: Request) -> Response:
        return _answer(self._index, request)

    async def file(self, request: Request) -> Response:
        path = str(request.path_params["path"])
        found = self._files.get(path)
        if found is None:
            raise NotFound(f"cannot find {shown(path)}: the page has no such file")
        return _answer(found, request)


def _with_one_sheet(index: bytes) -> bytes:
    """The first file with all of its style sheets in one, because nothing is shown before the last of them is here."""
    first = _SHEET.search(index)
    assert first is not None, f"{INDEX} has no style sheet"
    one = first.group(0).replace(first.group(1), SHEETS.encode())
    return index[: first.start()] + one + _SHEET.sub(b"", index[first.start() :])


def _with_modules(index: bytes, files: Mapping[str, PageFile]) -> bytes:
    """The first file with the names of the modules of the first page, so that a browser asks for them at once and not
    one after the other as it finds out who needs whom. Those of other pages come later.
    """
    links = "\n".join(f'<link rel="modulepreload" href="/web/{name}">' for name in _needed(FIRST, files))
    return index.replace(b"</head>", links.encode() + b"\n</head>")


def _needed(names: Iterable[str], files: Mapping[str, PageFile]) -> list[str]:
    """These modules and all that they import, each once."""
    found = dict.fromkeys(names)
    for name in (waiting := list(found)):
        for path in _IMPORT.findall(files[name].plain):
            imported = posixpath.normpath(posixpath.join(posixpath.dirname(name), path.decode()))
            if imported not in found:
                found[imported] = None
                waiting.append(imported)
    return list(found)


def _answer(file: PageFile, request: Request) -> Response:
    headers = {**PAGE_HEADERS, "etag": file.etag}
    if file.etag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    if "gzip" in request.headers.get("accept-encoding", ""):
        return Response(file.packed, media_type=file.media_type, headers={**headers, "content-encoding": "gzip"})
    return Response(file.plain, media_type=file.media_type, headers=headers)
