"""Serves the catalogue of states: `python -m tests.window.catalogue` and open the address that it prints.

Each state is a host name of its own (`mixed.localhost:PORT`), which browsers take to this machine, so the page is used
as it is shipped: its own files, its own requests, a real stream of events. Nothing can be changed: every other request
is refused in the API's shape.
"""

from __future__ import annotations

import asyncio
import html
import json
import os
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response, StreamingResponse
from starlette.routing import Route
from tests.window.states import SCENES, Scene

from enginehouse.api.pages import PageRoutes

PAGES = ("fleet", "operations", "backends", "models", "chat", "logs", "access", "settings")


class Catalogue:
    def __init__(self, flood_per_second: float = 0.0) -> None:
        """`flood_per_second`: progress events that the stream of every scene goes on with."""
        self._pages = PageRoutes()
        self._flood = flood_per_second
        self._scenes: dict[str, Scene] = {}
        self.sent_bytes = 0

    def scene(self, request: Request) -> Scene | None:
        name = (request.url.hostname or "").partition(".")[0]
        if name not in SCENES:
            return None
        return self._scenes.setdefault(name, SCENES[name]())

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/", self.index),
                Route("/web/{path:path}", self._pages.file),
                Route("/{path:path}", self.answer, methods=["GET", "POST", "PUT", "PATCH", "DELETE"]),
            ]
        )

    async def index(self, request: Request) -> Response:
        if self.scene(request) is not None:
            return await self._pages.index(request)
        port = request.url.port
        links = "".join(
            f"<li>{html.escape(name)}: "
            + " ".join(f'<a href="http://{name}.localhost:{port}/#/{page}">{page}</a>' for page in PAGES)
            for name in SCENES
        )
        return HTMLResponse(f"<!doctype html><title>States</title><h1>States</h1><ul>{links}</ul>")

    async def answer(self, request: Request) -> Response:
        scene = self.scene(request)
        path = request.url.path
        if scene is None:
            return _refused(404, "not_found", "there is no such state")
        if path == "/api/session" and request.method == "GET":
            if not scene.role:
                return _refused(401, "unauthenticated", "cannot answer without a token")
            return _json({"name": scene.role, "role": scene.role, "version": "0.1.0", "frontend": "box"})
        if request.method != "GET":
            return _refused(403, "forbidden", "cannot do this here: the catalogue of states only shows")
        if scene.stream == "silent" and path.startswith("/api/"):
            await asyncio.sleep(3600)
        if path == "/api/events":
            return self._events(scene)
        known = {**_answers(scene), **scene.answers}
        if path in known:
            return _json(known[path])
        if path.startswith("/api/operations/"):
            for one in scene.operations:
                if one.jobID == path.rpartition("/")[2]:
                    return _json(one)
        return _refused(404, "not_found", f"cannot find {path}")

    def _events(self, scene: Scene) -> Response:
        if scene.stream == "refused":
            return _refused(403, "forbidden", "cannot do this with a user token: it needs the role viewer")
        return StreamingResponse(self._stream(scene), media_type="text/event-stream")

    async def _stream(self, scene: Scene) -> AsyncIterator[bytes]:
        yield _event("hello", {})
        for one in scene.operations:
            if one.status in ("queued", "running"):
                yield _event("operation", one)
        if scene.pulse is not None:
            yield _event("pulse", {**scene.pulse, "at": time.time()})
        if scene.stream == "ending":
            return
        running = next((one for one in scene.operations if one.status == "running"), None)
        count = 0
        while True:
            if not self._flood or running is None:
                await asyncio.sleep(5)
                yield b": keep-alive\n\n"
                continue
            # In pieces of a twentieth of a second, as a busy cluster sends them.
            await asyncio.sleep(0.05)
            pieces = []
            for _ in range(max(1, round(self._flood / 20))):
                count += 1
                pieces.append(_event("operation", _progressed(running, count)))
            yield b"".join(pieces)


def _progressed(running: Any, count: int) -> dict[str, Any]:
    """The next event of an operation: one of its rows is a little further."""
    rows = [one for one in running.nodes if one.status == "downloading"]
    chosen = rows[count % len(rows)]
    done = min(chosen.total_bytes or 1, (chosen.current_bytes or 0) + count * 10_000)
    row = msgspec.to_builtins(chosen) | {
        "current_bytes": done,
        "percentage": min(99.0, 100.0 * done / (chosen.total_bytes or 1)),
    }
    summary = msgspec.to_builtins(msgspec.structs.replace(running, nodes=[], targets=(), excluded=()))
    changed: dict[str, Any] = summary | {
        "nodes": [row],
        "partial": True,
        "revision": 10 + count,
        "currentBytes": running.currentBytes + count * 10_000,
    }
    return changed


def _answers(scene: Scene) -> dict[str, Any]:
    listed = [msgspec.to_builtins(one) | {"nodes": [], "excluded_count": len(one.excluded)} for one in scene.operations]
    return {
        "/api/nodes": scene.nodes,
        "/api/models": scene.models,
        "/api/operations": {"operations": listed},
        "/api/nodes/scheduling": [
            {"model_name": "qwen", "min_replicas": 2, "max_replicas": 0},
            {"model_name": "gemma", "min_replicas": 1, "max_replicas": 0},
        ],
        "/api/history": _history(scene),
        "/backends/available": scene.offers,
        "/backends/upgrades": scene.upgrades,
        "/backends/galleries": [
            {
                "name": "localai",
                "url": "",
                "status": "stale",
                "error": "no answer from the gallery for 3 h",
                "entries": len(scene.offers),
                "skipped": [],
            }
        ],
        "/models/available": [],
        "/api/replicas": [],
        "/api/tokens": [{"id": "1", "role": "admin", "name": "admin", "created_at": "2026-01-01T00:00:00Z"}],
        "/api/sessions": [],
        "/api/usage": {
            "from": "2026-01-01T00:00:00Z",
            "to": "2026-01-08T00:00:00Z",
            "by": ["token", "model"],
            "usage": [
                {
                    "token": "shop",
                    "model": "qwen",
                    "requests": 12345,
                    "errors": 12,
                    "prompt_tokens": 1234567,
                    "completion_tokens": 7654321,
                }
            ],
            "total": {"requests": 12345, "errors": 12, "prompt_tokens": 1234567, "completion_tokens": 7654321},
            "truncated": False,
        },
        "/api/audit": {"audit": []},
        "/api/settings": {
            "settings": [
                {
                    "name": "stale_seconds",
                    "value": 30,
                    "source": "default",
                    "from": "",
                    "flag": "--stale",
                    "variable": "ENGINEHOUSE_STALE",
                    "help": "Silence after which a node is unhealthy",
                    "is_secret": False,
                }
            ],
            "frontend": {"id": "f1", "host": "box", "version": "0.1.0", "started_at": "2026-01-01T00:00:00Z"},
            "database": "sqlite",
            "data": "/data",
        },
    }


def _history(scene: Scene) -> dict[str, Any]:
    wave = [None] * 60 + [round(8 + 5 * ((at * 7919) % 97) / 97, 2) for at in range(300)]
    series = (
        "requests_per_second",
        "tokens_per_second",
        "time_to_first_token_seconds",
        "errors_per_second",
        "queued",
        "in_flight",
    )
    figures = {
        name: [value and value * scale for value in wave]
        for name, scale in zip(series, (1, 30, 0.02, 0, 0.2, 0.3), strict=True)
    }
    nodes = {
        one.id: {
            "used_ram": [value and value * 10**9 for value in wave],
            "used_vram": wave if one.total_vram else [None] * 360,
            "used_cores": wave,
        }
        for one in scene.nodes
    }
    return {"step_seconds": 10, "ends_at": time.time(), "series": figures, "nodes": nodes, "models": {}}


def _event(kind: str, body: object) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (kind.encode(), msgspec.json.encode(body))


def _json(value: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


def _refused(status: int, code: str, message: str) -> Response:
    return Response(
        json.dumps({"error": {"message": message, "code": code, "type": "error", "request_id": "r1"}}),
        status,
        media_type="application/json",
    )


@contextmanager
def serving(catalogue: Catalogue, port: int = 0) -> Iterator[int]:
    """Serve on a free port until the end of the block."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port))
    server = uvicorn.Server(uvicorn.Config(catalogue.app(), log_level="critical", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield int(listener.getsockname()[1])
    finally:
        server.should_exit = True
        thread.join(30)
        listener.close()


if __name__ == "__main__":
    with serving(Catalogue(), int(os.environ.get("PORT", "8099"))) as chosen:
        print(f"http://localhost:{chosen}/ (Ctrl-C ends it)")
        with suppress(KeyboardInterrupt):
            threading.Event().wait()
