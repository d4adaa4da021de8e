"""Serves HTTP: health, files as LocalAI's frontends place them, logs of engines, files of models for other nodes.

aiohttp's low-level server is used because it has streamed bodies and WebSockets and is a dependency already; there is
no router, because a router would clean paths before they are checked. Every answer outside health needs a credential
(`access`). Errors are plain text, as LocalAI's. The server listens where engines do: at the address at which the
frontend reaches this machine, not at every address.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from pathlib import Path

from aiohttp import web
from msgspec import Struct

from enginehouse.core.errors import Conflict, EnginehouseError, Invalid, NotFound
from enginehouse.core.node_api import RegisterReply
from enginehouse.host import disk, listen
from enginehouse.host.blocking import in_thread
from enginehouse.worker.engines.logs import EngineLogs
from enginehouse.worker.http_server import storage
from enginehouse.worker.http_server.access import Access
from enginehouse.worker.http_server.logs import LogAnswers
from enginehouse.worker.http_server.model_files import HeldFiles, ModelFileAnswers, is_digest_of_file
from enginehouse.worker.http_server.storage import Roots
from enginehouse.worker.http_server.uploads import FileUploads, RefusedRequest, plain
from enginehouse.worker.models.peers import PATH as MODEL_FILES

log = logging.getLogger(__name__)

PORTS_TRIED = 100
CLOSE_SECONDS = 2.0
SWEEP_SECONDS = 600.0  # between two looks for old files in the staging directory
FILES, LISTS, LOGS = "/v1/files/", "/v1/files-list/", "/v1/backend-logs"
PROGRAM_LOG = "/v1/worker-log"


class PresentedToken:
    """The token that a frontend of ours gave this node, for requests to it; "" before joining."""

    def __init__(self) -> None:
        self.current = ""


class HttpOptions(Struct, frozen=True, kw_only=True):
    roots: Roots
    join_token: str
    base_port: int
    logs: EngineLogs
    program_log: Path | None = None  # of the worker itself
    token: PresentedToken
    files: HeldFiles | None = None
    port: int | None = None  # None means the one below the base port, or the next free one below that


class WorkerHttpServer:
    """`listen` starts it, `close` ends it."""

    def __init__(self, options: HttpOptions) -> None:
        self._options = options
        self._roots = options.roots
        self._access = Access(options.join_token, _now)
        self._uploads = FileUploads(options.roots)
        self._logs = LogAnswers(options.logs, options.program_log, (options.join_token,))
        self._model_files = ModelFileAnswers(options.files)
        self._runner: web.ServerRunner | None = None
        self._bound = ("", 0)
        self._is_bus_away = False
        self._swept_at = float("-inf")

    async def listen(self, host: str) -> int:
        if self._bound[0] == host and self._runner is not None:
            return self._bound[1]
        port = self._bound[1]
        await self.close()
        try:
            listener = await in_thread(self._bind, host, port)
        except EnginehouseError as error:
            if self._options.port is not None:
                raise
            log.warning("http.not_listening host=%s error=%s", host, error)
            return 0
        self._runner = web.ServerRunner(web.Server(self._answer, access_log=None), shutdown_timeout=CLOSE_SECONDS)
        self._logs.start()
        await self._runner.setup()
        await web.SockSite(self._runner, listener).start()
        self._bound = (host, listener.getsockname()[1])
        log.info("http.listening address=%s port=%d", host, self._bound[1])
        return self._bound[1]

    def joined(self, node: RegisterReply) -> None:
        self._access.joined(node)
        self._options.token.current = node.node_token

    def heard(self, mark: float, *, is_bus_away: bool) -> None:
        self._access.marked(mark)
        self._is_bus_away = is_bus_away

    async def close(self) -> None:
        self._logs.stop()
        if self._runner is not None:
            runner, self._runner = self._runner, None
            await runner.cleanup()

    def _bind(self, host: str, before: int) -> socket.socket:
        """Bind the port that was given, or the first free one from the base port down. Blocks."""
        if self._options.port is not None:
            return listen.bind(host, self._options.port)
        first = self._options.base_port - 1
        tried = [port for port in (before, *range(first, first - PORTS_TRIED, -1)) if port > 1023]
        for port in tried:
            try:
                return listen.bind(host, port)
            except Conflict:
                continue
        raise Conflict(
            f"cannot listen on {host}: {PORTS_TRIED} ports from {first} down are in use; choose one with --http-port",
            code="port_in_use",
        )

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        try:
            return await self._route(request)
        except RefusedRequest as refused:
            return refused.answer
        except NotFound:
            return plain(404, "file not found\n")
        except Invalid as error:
            return plain(400, f"{error.message}\n")
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:
                return plain(400, "the key is too long\n")
            return plain(500, f"{disk.storage_error(error, 'use the file').message}\n")

    async def _route(self, request: web.BaseRequest) -> web.StreamResponse:
        path = request.path
        if path in ("/healthz", "/readyz"):
            return self._health(path, request.method)
        if path.startswith(("/v1/files/", "/v1/files-list/")) or path == "/v1/files":
            if not self._access.may_use_files(request.headers.get("Authorization", "")):
                return plain(401, "unauthorized\n")
            if path.startswith(LISTS):
                return await self._list(request, path.removeprefix(LISTS))
            return await self._file(request, path.removeprefix(FILES) if path.startswith(FILES) else "")
        if path == LOGS or path.startswith(f"{LOGS}/"):
            if not self._access.may_read_logs(request.headers.get("Authorization", "")):
                return plain(401, "unauthorized\n")
            return await self._logs.answer(request, path.removeprefix(LOGS).removeprefix("/"))
        if path == PROGRAM_LOG:
            if not self._access.may_read_program_log(request.headers.get("Authorization", "")):
                return plain(401, "unauthorized\n")
            return await self._logs.program(request)
        if path.startswith(MODEL_FILES) and is_digest_of_file(sha256 := path.removeprefix(MODEL_FILES)):
            if not self._access.may_read_file(request.headers.get("Authorization", ""), sha256):
                return plain(401, "unauthorized\n")
            return await self._model_files.answer(request, sha256)
        return plain(404, "404 page not found\n")

    def _health(self, path: str, method: str) -> web.Response:
        if method not in ("GET", "HEAD"):
            return plain(405, "method not allowed\n")
        if path == "/readyz" and self._is_bus_away:
            return plain(503, "not ready: NATS is unavailable\n")
        return plain(200, "ok")

    async def _file(self, request: web.BaseRequest, key: str) -> web.StreamResponse:
        if not key:
            return plain(400, "key is required\n")
        if request.method == "POST" and key == "temp":
            self._sweep_now_and_then()
            return web.json_response({"local_path": str(await in_thread(storage.make_output, self._roots))})
        if request.method not in ("GET", "HEAD", "PUT"):
            return plain(405, "method not allowed\n")
        path = await in_thread(storage.path_of, self._roots, key)
        match request.method:
            case "HEAD":
                return await self._uploads.head(path)
            case "PUT":
                return await self._uploads.put(request, key, path)
        return await self._send(path)

    async def _send(self, path: Path) -> web.StreamResponse:
        if not await in_thread(path.is_file):
            raise NotFound(f"cannot find {path.name}")
        return web.FileResponse(path, chunk_size=1024 * 1024, headers={"Content-Type": "application/octet-stream"})

    async def _list(self, request: web.BaseRequest, prefix: str) -> web.Response:
        if request.method != "GET":
            return plain(405, "method not allowed\n")
        try:
            path = await in_thread(storage.path_of, self._roots, prefix.rstrip("/"))
            return web.json_response({"files": await in_thread(storage.listed, path)})
        except NotFound:
            return plain(404, "directory not found\n")

    def _sweep_now_and_then(self) -> None:
        now = _now()
        if now - self._swept_at > SWEEP_SECONDS:
            self._swept_at = now
            asyncio.get_running_loop().run_in_executor(None, storage.sweep_staging, self._roots)


def _now() -> float:
    return asyncio.get_running_loop().time()
