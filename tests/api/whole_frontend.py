"""The real application as `build_frontend` makes it, driven as ASGI; only the bus is one in memory."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, MutableMapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct
from tests.bus.memory import MemoryBus, MemoryNetwork

from enginehouse.api.app import Application, build
from enginehouse.api.openai import CLIENT_GONE
from enginehouse.api.routes import ApiRoute
from enginehouse.build_frontend import Frontend, make_entries, make_frontend
from enginehouse.build_outside import make_outside
from enginehouse.core.gallery_source import GallerySource
from enginehouse.engine.openai.client import HttpEngine
from enginehouse.fetch.models.sources import ModelFinder
from enginehouse.loop import Wakes
from enginehouse.settings.programs import FrontendSettings
from enginehouse.store.db import Store

LOCAL = (("host", "127.0.0.1:8080"),)


class Answer(Struct, frozen=True):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, str]:
        """The error, after a look at its shape."""
        error: dict[str, str] = self.json["error"]
        assert set(error) >= {"message", "type", "code", "request_id"}
        assert set(error) <= {"message", "type", "code", "request_id", "param"}
        assert all(isinstance(value, str) and value for value in error.values())
        assert error["message"].startswith("cannot ")
        assert error["request_id"] == self.headers["x-request-id"]
        assert "Traceback" not in error["message"]
        return error


class Site:
    def __init__(self, store: Store, frontend: Frontend, bus: MemoryBus, wakes: Wakes, routes: list[ApiRoute]) -> None:
        self.store = store
        self.frontend = frontend
        self.bus = bus
        self.wakes = wakes
        self.routes = routes
        self.open = self.app(is_loopback=False)
        self.tokens: dict[str, str] = {"": ""}

    def app(self, *, is_loopback: bool, extra: Sequence[ApiRoute] = ()) -> Application:
        frontend = self.frontend
        routes = [*self.routes, *extra]
        return build(routes, frontend.keys, frontend.metrics, frontend.access.audit, is_loopback=is_loopback)

    async def ask(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        token: str = "",
        headers: Sequence[tuple[str, str]] = LOCAL,
        app: Application | None = None,
        client: str = "10.0.0.9",
        stays: bool = False,
    ) -> Answer:
        """One request. A `body` that is not bytes is sent as JSON; the client leaves after its last byte unless it
        `stays`.
        """
        content = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        given = [(key.encode(), value.encode("latin-1")) for key, value in headers]
        if token:
            given.append((b"authorization", f"Bearer {token}".encode()))
        plain, _, query = path.partition("?")
        scope: MutableMapping[str, Any] = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": plain,
            "raw_path": plain.encode(),
            "query_string": query.encode(),
            "root_path": "",
            "headers": given,
            "client": (client, 1234),
            "server": ("127.0.0.1", 8080),
        }
        messages: list[MutableMapping[str, Any]] = [{"type": "http.request", "body": content}]
        sent: list[MutableMapping[str, Any]] = []

        async def receive() -> MutableMapping[str, Any]:
            if not messages and stays:
                await asyncio.Event().wait()  # the answer ends this
            return messages.pop(0) if messages else {"type": "http.disconnect"}

        async def send(message: MutableMapping[str, Any]) -> None:
            sent.append(message)

        await (app or self.open)(scope, receive, send)
        if not sent:
            return Answer(CLIENT_GONE, {}, b"")  # this client leaves when its request is sent
        return Answer(
            int(sent[0]["status"]),
            {key.decode(): value.decode() for key, value in sent[0]["headers"]},
            b"".join(message.get("body", b"") for message in sent[1:]),
        )


@asynccontextmanager
async def site(
    data: Path,
    database_url: str = "",
    *,
    sources: ModelFinder | None = None,
    model_galleries: tuple[GallerySource, ...] = (),
) -> AsyncIterator[Site]:
    """A frontend with one token of each role, and a keyless node `old` whose token is that of the role `node`; on
    SQLite, unless another database is named.
    """
    settings = FrontendSettings(data=data, nats_url="nats://127.0.0.1:4222", model_load_wait_seconds=0.1)
    allowed = ("127.0.0.1",) if sources is not None else ()
    settings = msgspec.structs.replace(settings, allowed_hosts=allowed, model_galleries=model_galleries)
    if sources is not None:
        settings = msgspec.structs.replace(settings, backend_galleries=())  # no gallery that is still to be fetched
    store = await Store.open(database_url or f"sqlite:///{data / 'test.db'}")
    bus, wakes, engine = MemoryBus(MemoryNetwork(tells_no_responders=False)), Wakes(), HttpEngine()
    outside = make_outside(settings, store, bus)
    if sources is not None:
        models = msgspec.structs.replace(outside.models, sources=sources)
        outside = msgspec.structs.replace(outside, models=models)
    frontend = make_frontend(settings, outside, wakes)
    await frontend.collector.listen(bus)
    made = Site(store, frontend, bus, wakes, make_entries(settings, frontend, engine, bus, wakes))
    for role in ("admin", "viewer", "user", "join"):
        made.tokens[role] = (await frontend.keys.create(role, "test")).token
    try:
        machine = {"name": "old", "platform": "linux/amd64", "capability": "default"}
        answer = await made.ask("POST", "/api/node/register", machine, token=made.tokens["join"])
        made.tokens["node"] = answer.json["node_token"]
        made.tokens["node id"] = answer.json["id"]
        yield made
    finally:
        await engine.close()
        store.close()
