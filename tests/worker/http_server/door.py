"""The worker's HTTP server on a directory, and a client that sends exactly what it is told to."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import io
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from msgspec import Struct
from tests.ports import ports_in_a_row
from yarl import URL

from enginehouse.core.ids import NodeId
from enginehouse.core.node_api import RegisterReply
from enginehouse.worker.engines.logs import EngineLogs
from enginehouse.worker.http_server.server import HttpOptions, PresentedToken, WorkerHttpServer
from enginehouse.worker.http_server.storage import Roots

TOKEN = "the-token-of-registrations"
BASE_PORT = ports_in_a_row()


class Reply(Struct, frozen=True):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return msgspec.json.decode(self.body)


def node(node_token: str = "") -> RegisterReply:
    """What a LocalAI frontend answers; with a token of the node, what one of ours does."""
    return RegisterReply(
        id=NodeId("n"), name="n", node_type="backend", status="healthy", created_at="", node_token=node_token
    )


class Door:
    def __init__(
        self, server: WorkerHttpServer, roots: Roots, port: int, session: aiohttp.ClientSession, logs: EngineLogs
    ) -> None:
        self.logs = logs
        self.server = server
        self.roots = roots
        self.port = port
        self._session = session

    async def ask(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: dict[str, str] | None = None,
        *,
        token: str | None = TOKEN,
    ) -> Reply:
        """`path` goes over the wire as it is."""
        given = {**({"Authorization": f"Bearer {token}"} if token is not None else {}), **(headers or {})}
        url = URL(f"http://127.0.0.1:{self.port}{path}", encoded=True)
        sent = io.BytesIO(body) if body is not None else None
        async with self._session.request(method, url, data=sent, headers=given, allow_redirects=False) as answer:
            return Reply(answer.status, dict(answer.headers), await answer.read())

    async def put(self, key: str, content: bytes, start: int = 0, end: int | None = None, sha256: str = "") -> Reply:
        """One range of a file, as a LocalAI frontend sends it."""
        last = len(content) if end is None else end
        headers = {
            "Content-Range": f"bytes {start}-{last - 1}/{len(content)}",
            "X-Content-SHA256": sha256 or hashlib.sha256(content).hexdigest(),
        }
        return await self.ask("PUT", f"/v1/files/{key}", content[start:last], headers)

    async def raw(self, head: bytes, content: bytes, *, is_cut: bool) -> bytes:
        """Send bytes by hand; cut off after them, or wait for the answer."""
        async with asyncio.timeout(10):
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
            writer.write(head + content)
            await writer.drain()
            answer = b"" if is_cut else await reader.read(65536)
            writer.close()
            await writer.wait_closed()
            return answer


def options(roots: Roots, token: str, *, port: int | None = None, logs: EngineLogs | None = None) -> HttpOptions:
    return HttpOptions(
        roots=roots,
        join_token=token,
        base_port=BASE_PORT,
        port=port,
        logs=logs or EngineLogs(),
        program_log=roots.models.parent / "worker.log",
        token=PresentedToken(),
    )


@contextlib.asynccontextmanager
async def opened(directory: Path, *, token: str = TOKEN, port: int | None = None) -> AsyncIterator[Door]:
    roots = Roots(models=directory / "models", data=directory / "data", staging=directory / "staging")
    for root in (roots.models, roots.data, roots.staging):
        root.mkdir(parents=True, exist_ok=True)
    logs = EngineLogs((token,))
    server = WorkerHttpServer(options(roots, token, port=port, logs=logs))
    bound = await server.listen("127.0.0.1")
    server.joined(node())
    try:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=20)) as session:
            yield Door(server, roots, bound, session, logs)
    finally:
        await server.close()
