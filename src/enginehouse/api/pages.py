"""The web page: its files, as they are in `web/`, read once at the start and served compressed.

The files are public and have nothing of a cluster in them; what the page shows comes from the API and needs a session.
Every answer has the policy that lets the page load only its own files, so text from elsewhere can never become script.
A file is fetched again only when it changed (`ETag`).
"""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Iterable
from pathlib import Path

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from enginehouse.core.errors import NotFound
from enginehouse.core.name import shown

ROOT = Path(__file__).parent / "web"
INDEX = "index.html"
THEME = "theme.js"  # the one script that is no module
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


class PageFile(Struct, frozen=True):
    media_type: str
    plain: bytes
    packed: bytes
    etag: str


class PageRoutes:
    def __init__(self) -> None:
        found = (path for path in sorted(ROOT.rglob("*")) if path.is_file() and path.suffix in _KINDS)
        self._files = {path.relative_to(ROOT).as_posix(): _page_file(path, path.read_bytes()) for path in found}
        self._index = _page_file(ROOT / INDEX, _with_modules(ROOT / INDEX, self._files))

    async def index(self, request: Request) -> Response:
        return _answer(self._index, request)

    async def file(self, request: Request) -> Response:
        path = str(request.path_params["path"])
        found = self._files.get(path)
        if found is None:
            raise NotFound(f"cannot find {shown(path)}: the page has no such file")
        return _answer(found, request)


def _page_file(path: Path, plain: bytes) -> PageFile:
    # Without a time in it, so the bytes are the same on every frontend.
    packed = gzip.compress(plain, mtime=0)
    etag = f'"{hashlib.sha256(plain).hexdigest()[:32]}"'
    return PageFile(f"{_KINDS[path.suffix]}; charset=utf-8", plain, packed, etag)


def _with_modules(index: Path, names: Iterable[str]) -> bytes:
    """The first file with the names of all modules, so that a browser asks for them at once and not one after the other
    as it finds out who needs whom.
    """
    modules = [name for name in sorted(names) if name.endswith(".js") and name != THEME]
    links = "\n".join(f'<link rel="modulepreload" href="/web/{name}">' for name in modules)
    return index.read_bytes().replace(b"</head>", links.encode() + b"\n</head>")


def _answer(file: PageFile, request: Request) -> Response:
    headers = {**PAGE_HEADERS, "etag": file.etag}
    if file.etag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    if "gzip" in request.headers.get("accept-encoding", ""):
        return Response(file.packed, media_type=file.media_type, headers={**headers, "content-encoding": "gzip"})
    return Response(file.plain, media_type=file.media_type, headers=headers)
