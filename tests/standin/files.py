"""The file server of a LocalAI worker, from the fact sheet alone: routes, headers, statuses and sidecars, strictly.

What a frontend must not send is answered with 400 and noted as a violation, also where LocalAI would be lenient. Faults
that a test may set: `token` (another one is expected), `cut` (connections are cut at once), `quota_bytes` (then the
disk is full), `bytes_per_second`, `cut_after_bytes` (of one upload), `broken` (a status for every request).
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from pathlib import Path
from urllib.parse import unquote

from aiohttp import web
from tests.standin.control import Control

_RANGE = re.compile(r"bytes ([0-9]+)-([0-9]+)/([0-9]+)")
_SHA256 = re.compile(r"[0-9a-f]{64}")
MAX_BODY_BYTES = 50 * 1024**3


class FileServer:
    def __init__(self, models: Path, token: str, control: Control) -> None:
        self._models = models
        self._token = token
        self._control = control
        self.log_lines: dict[str, list[str]] = {}

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        raw = str(request.rel_url.raw_path)
        if self._control.get("cut"):
            return self._cut_off(request)
        if raw == "/healthz":
            return web.Response(text="ok")
        entry = {"method": request.method, "path": raw, "headers": dict(request.headers)}
        if request.headers.get("Authorization") != f"Bearer {self._control.get('token') or self._token}":
            self._control.note("http", **entry, status=401)
            return web.Response(status=401, text="unauthorized\n")
        received = 0
        if raw.startswith("/v1/backend-logs/"):
            answer: web.StreamResponse = self._logs(unquote(raw.removeprefix("/v1/backend-logs/")))
        elif not raw.startswith("/v1/files/"):
            answer = web.Response(status=404, text="not found\n")
        elif status := self._control.get("broken"):
            answer = web.Response(status=int(status), text="out of order\n")
        else:
            key = unquote(raw.removeprefix("/v1/files/"))
            path = self._path_of(key)
            if path is None:
                answer = web.Response(status=400, text="outside\n")
            elif request.method == "HEAD":
                answer = await self._head(path)
            elif request.method == "PUT":
                answer, received = await self._put(request, path)
            else:
                answer = web.Response(status=405)
        self._control.note("http", **entry, status=answer.status, received=received)
        return answer

    def _cut_off(self, request: web.BaseRequest) -> web.Response:
        assert request.transport is not None
        request.transport.abort()
        return web.Response(status=500)

    def _path_of(self, key: str) -> Path | None:
        root, _, rest = key.partition("/")
        path = (self._models / rest).resolve()
        is_inside = root == "models" and bool(rest) and path.is_relative_to(self._models.resolve())
        return path if is_inside else None

    def _logs(self, name: str) -> web.Response:
        lines = [{"timestamp": "", "stream": "stderr", "text": line} for line in self.log_lines.get(name, ())]
        return web.json_response(lines)

    async def _head(self, path: Path) -> web.Response:
        if path.is_dir():
            return web.Response(status=400)
        if not path.exists():
            return web.Response(status=404, text="not found\n")
        size = str(path.stat().st_size)
        headers = {"X-File-Size": size, "Content-Length": size, "X-Local-Path": str(path), "Accept-Ranges": "bytes"}
        if _beside(path, ".sha256.target").exists():
            return web.Response(headers={**headers, "X-Target-Sha256": _beside(path, ".sha256.target").read_text()})
        return web.Response(headers={**headers, "X-Content-Sha256": await asyncio.to_thread(_digest, path)})

    async def _put(self, request: web.BaseRequest, path: Path) -> tuple[web.Response, int]:
        declared, wanted = request.headers.get("X-Content-SHA256", ""), request.headers.get("Content-Range")
        why = self._violation(request, declared)
        if why:
            self._control.note("violation", why=why)
            return web.Response(status=400, text=why), 0
        path.parent.mkdir(parents=True, exist_ok=True)
        if wanted is None:
            _forget(path)
            received = await self._append(request, path)
            if received < 0:
                return web.Response(status=500, text=f"write {path}: no space left on device\n"), 0
            return await self._finish(path, declared), received
        found = _RANGE.fullmatch(wanted)
        if found is None or not int(found[1]) <= int(found[2]) < int(found[3]):
            self._control.note("violation", why=f"Content-Range {wanted}")
            return web.Response(status=400, text="invalid Content-Range\n"), 0
        return await self._take_part(request, path, declared, (int(found[1]), int(found[2]), int(found[3])))

    async def _take_part(
        self, request: web.BaseRequest, path: Path, declared: str, part: tuple[int, int, int]
    ) -> tuple[web.Response, int]:
        start, end, total = part
        target = _beside(path, ".sha256.target")
        known = target.read_text() if target.exists() else (_digest(path) if path.exists() else "")
        if start == 0 and path.exists() and (not declared or declared != known):
            _forget(path)
        if start > 0 and target.exists() and target.read_text() != declared:
            _forget(path)
            return web.Response(status=409, text="X-Content-SHA256 mismatch with in-progress upload\n"), 0
        size = path.stat().st_size if path.exists() else 0
        if start != size:
            headers = {"Content-Range": f"bytes */{total}", "X-File-Size": str(size)}
            return web.Response(status=416, text="start does not match\n", headers=headers), 0
        if declared:
            target.write_text(declared)
        received = await self._append(request, path)
        if received < 0:
            return web.Response(status=500, text=f"write {path}: no space left on device\n"), 0
        if received != end - start + 1:
            return web.Response(status=400, text="short chunk\n"), received
        if end + 1 < total:
            return web.Response(status=308, headers={"Range": f"bytes=0-{end}", "X-File-Size": str(end + 1)}), received
        return await self._finish(path, declared), received

    async def _append(self, request: web.BaseRequest, path: Path) -> int:
        """How much was received; -1 if the disk is full. What was written stays."""
        received = 0
        with path.open("ab") as file:
            while True:
                try:
                    piece = await request.content.read(65536)
                except (ConnectionError, web.PayloadAccessError):
                    return received
                if not piece:
                    return received
                quota, cut = self._control.get("quota_bytes"), self._control.get("cut_after_bytes")
                if quota is not None and file.tell() + len(piece) > quota:
                    await _skip(request)
                    return -1
                file.write(piece)
                file.flush()
                received += len(piece)
                if cut is not None and received >= cut:
                    self._cut_off(request)
                    return received
                if rate := self._control.get("bytes_per_second"):
                    await asyncio.sleep(len(piece) / rate)

    async def _finish(self, path: Path, declared: str) -> web.Response:
        digest = await asyncio.to_thread(_digest, path)
        if declared and digest != declared:
            _forget(path)
            return web.Response(status=400, text=f"sha256 mismatch: expected {declared} got {digest}\n")
        _beside(path, ".sha256").write_text(digest)
        _beside(path, ".sha256.target").unlink(missing_ok=True)
        return web.Response(text=json.dumps({"local_path": str(path)}), content_type="application/json")

    def _violation(self, request: web.BaseRequest, declared: str) -> str:
        if request.headers.get("Content-Type") != "application/octet-stream":
            return "Content-Type"
        if request.content_length is None or request.headers.get("Transfer-Encoding"):
            return "Content-Length"
        if request.content_length > MAX_BODY_BYTES:
            return "more than 50 GiB"
        if declared and not _SHA256.fullmatch(declared):
            return "X-Content-SHA256"
        return ""


async def _skip(request: web.BaseRequest) -> None:
    """What Go's server reads after a handler that did not, so that the client sees the answer."""
    left = 256 * 1024
    while left > 0 and (piece := await request.content.read(min(left, 65536))):
        left -= len(piece)


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)


def _forget(path: Path) -> None:
    for suffix in ("", ".sha256", ".sha256.target"):
        _beside(path, suffix).unlink(missing_ok=True)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
