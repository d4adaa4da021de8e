"""The page's real files with a large canned cluster behind them: 100 nodes, 1,000 entries, 1,000 operations.

Run as a program of its own, so that it shares no interpreter with what measures. It prints its port and ends with its
input. Answers that do not change are made once: what is measured is the page and not this.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import re
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.routing import Route

sys.path.insert(0, str(Path(__file__).parents[2]))  # this is run as a script

from tests.window.catalogue import Catalogue, serving
from tests.window.states import Scene, hundred, operation, row

NODES, ENTRIES, OPERATIONS = 100, 1000, 1000
PULSE_SECONDS = 5.0  # as a frontend sends them
LISTED = 50  # operations in an answer that was asked for no number
EMPTY = "<!doctype html><html lang=en><title>Empty</title><p>Empty"
KEPT = {
    "/api/nodes",
    "/api/models",
    "/api/nodes/scheduling",
    "/api/history",
    "/backends/available",
    "/backends/upgrades",
    "/backends/galleries",
}


def large() -> Scene:
    """`hundred` with a long past, a tenth of which failed."""
    scene = hundred()
    going = next(one for one in scene.operations if one.status == "running")
    ended = []
    for number in range(OPERATIONS - 1):
        rows = [row(one, "success") for one in scene.nodes[:3]]
        if number % 10 == 3:
            rows[0] = row(scene.nodes[0], "error", attempt=3, error="manifest unknown")
        status = "partial" if number % 10 == 3 else "succeeded"
        ended.append(operation(number + 10, "install", f"backend-{number}", status, rows))
    scene.operations = [going, *ended]
    assert (len(scene.nodes), len(scene.offers), len(scene.operations)) == (NODES, ENTRIES, OPERATIONS)
    return scene


def _listed(one: Any) -> dict[str, Any]:
    summary: dict[str, Any] = msgspec.to_builtins(one)
    return summary | {"nodes": [], "excluded_count": len(one.excluded)}


class LargeCatalogue(Catalogue):
    """The catalogue of states with one state, whatever its address."""

    def __init__(self, flood_per_second: float) -> None:
        super().__init__(flood_per_second)
        self._large = large()
        newest = sorted(self._large.operations, key=lambda one: one.createdAt, reverse=True)
        self._identities = [one.jobID for one in newest]
        self._rows = [msgspec.Raw(msgspec.json.encode(_listed(one))) for one in newest]
        self._kept: dict[str, bytes] = {}
        self._sent_events = 0

    def scene(self, request: Request) -> Scene | None:
        return self._large

    def app(self) -> Starlette:
        app = super().app()
        app.router.routes[:0] = [Route("/empty", self.empty), Route("/sent", self.sent)]
        return app

    async def empty(self, request: Request) -> Response:
        return HTMLResponse(EMPTY)

    async def sent(self, request: Request) -> Response:
        """How many events all streams have had so far."""
        return PlainTextResponse(str(self._sent_events))

    async def answer(self, request: Request) -> Response:
        path = request.url.path
        if request.method != "GET" or path not in KEPT | {"/api/operations"}:
            return await super().answer(request)
        if path == "/api/operations":
            return _json(self._page(request))
        if path not in self._kept:
            self._kept[path] = bytes((await super().answer(request)).body)
        body = self._kept[path]
        if path == "/api/history":
            body = re.sub(rb'"ends_at":[0-9.]+', b'"ends_at":%.3f' % time.time(), body, count=1)
        return _json(body)

    def _page(self, request: Request) -> bytes:
        """As the API has them: the newest, or those before one."""
        limit, before = int(request.query_params.get("limit", LISTED)), request.query_params.get("before")
        first = self._identities.index(before) + 1 if before else 0  # type: ignore[arg-type]
        last = first + limit
        more = {"next": self._identities[last - 1]} if last < len(self._rows) else {}
        return msgspec.json.encode({"operations": self._rows[first:last], **more})

    async def _stream(self, scene: Scene) -> AsyncIterator[bytes]:
        loop = asyncio.get_running_loop()
        due, turn = loop.time() + PULSE_SECONDS, 0
        async for content in super()._stream(scene):
            self._sent_events += content.count(b"event: ")
            yield content
            if loop.time() >= due:
                due, turn = due + PULSE_SECONDS, turn + 1
                yield b"event: pulse\ndata: %s\n\n" % msgspec.json.encode(self._pulse(turn))

    def _pulse(self, turn: int) -> dict[str, Any]:
        """As with heartbeats every ten seconds: half of the nodes were heard since the one before."""
        now, first = time.time(), self._large.pulse or {}
        nodes = {}
        for number, (node_id, figures) in enumerate(first["nodes"].items()):
            if number % 2 == turn % 2 and figures["used_cores"] is not None:
                free = int(figures["available_ram"] * random.uniform(0.5, 1))
                heard = {"heard_at": now - random.random() * PULSE_SECONDS, "available_ram": free}
                nodes[node_id] = {**figures, **heard, "used_cores": round(16 * random.random(), 1)}
        return {**first, "at": now, "nodes": nodes}


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json")


@contextmanager
def served(flood_per_second: float = 0.0) -> Iterator[int]:
    """The port of one in a process of its own."""
    argv = [sys.executable, __file__, "--flood", str(flood_per_second)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            yield int(child.stdout.readline())
        finally:
            child.stdin.close()
            child.wait(30)


def main() -> None:
    parser = argparse.ArgumentParser(description="Serve the page with a large canned cluster until the input ends.")
    parser.add_argument("--flood", type=float, default=0.0, help="events per second in every stream")
    with serving(LargeCatalogue(parser.parse_args().flood)) as port:
        print(port, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
