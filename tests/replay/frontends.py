"""Two frontends of ours in this process: the objects, loops and routes of `build_frontend`, on a real bus and a real
database which they share. Only sockets are missing: requests go in as ASGI.

Times are short, so that a test sees in tenths of a second what takes minutes; a test may make them longer.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from sqlalchemy import text
from tests.api.whole_frontend import Answer, Site
from tests.replay.lab import Lab

from enginehouse.build_frontend import Frontend, make_entries, make_frontend, make_loops
from enginehouse.build_outside import make_outside
from enginehouse.bus.nats import BusOptions, NatsBus
from enginehouse.core.gallery_source import decode_sources
from enginehouse.engine.openai.client import HttpEngine
from enginehouse.loop import Wakes
from enginehouse.settings.programs import FrontendSettings
from enginehouse.store.db import Connection, Store

T = TypeVar("T")
LIMIT_SECONDS = 60.0  # an absent node takes ten, and as long again after each pause of a busy machine
OPEN = ("queued", "running")
# As patient with workers as the defaults, and ten times as fast in everything that a test waits for.
SETTINGS = FrontendSettings(
    data=Path(),
    heartbeat_seconds=0.2,
    stale_seconds=5.0,
    lease_seconds=5.0,
    reconcile_seconds=0.05,
    allowed_hosts=("127.0.0.1",),
)


async def until(probe: Callable[[], Awaitable[T]], what: str, limit_seconds: float = LIMIT_SECONDS) -> T:
    """The first true answer."""
    end = time.monotonic() + limit_seconds
    while not (found := await probe()):
        assert time.monotonic() < end, f"waited in vain for {what}"
        await asyncio.sleep(0.01)
    return found


class RunningFrontend:
    def __init__(self, site: Site, store: Store, admin: str, join: str) -> None:
        self._site = site
        self._store = store
        self._admin = admin
        self.join_token = join

    @property
    def wakes(self) -> Wakes:
        return self._site.wakes

    @property
    def objects(self) -> Frontend:
        """For a test that takes a step itself."""
        return self._site.frontend

    async def ask(self, method: str, path: str, body: object = None, *, token: str = "") -> Answer:
        # The workers of the recordings were on the frontend's own machine, and say so in their addresses.
        return await self._site.ask(method, path, body, token=token or self._admin, client="127.0.0.1")

    async def get(self, path: str) -> Any:
        answer = await self.ask("GET", path)
        assert answer.status == 200, answer.body
        return answer.json

    async def post(self, path: str, body: object = None) -> Any:
        answer = await self.ask("POST", path, body)
        assert answer.status in (200, 202), answer.body
        return answer.json

    async def operation(self, operation_id: str) -> dict[str, Any]:
        found: dict[str, Any] = await self.get(f"/api/operations/{operation_id}")
        return found

    async def ended(self, operation_id: str) -> dict[str, Any]:
        async def over() -> dict[str, Any] | None:
            found = await self.operation(operation_id)
            return found if found["status"] not in OPEN else None

        found = await until(over, f"the end of {operation_id}")
        assert found is not None
        return found

    async def shows(self, operation_id: str, node: str, **fields: object) -> dict[str, Any]:
        """The row of a node, once it has these values."""

        async def probe() -> dict[str, Any] | None:
            row = rows_of(await self.operation(operation_id))[node]
            return row if all(row.get(key) == value for key, value in fields.items()) else None

        found = await until(probe, f"{node} to show {fields}")
        assert found is not None
        return found

    async def node(self, name: str) -> dict[str, Any]:
        return next(one for one in await self.get("/api/nodes") if one["name"] == name)

    async def sees(self, name: str, status: str) -> None:
        async def probe() -> bool:
            return str((await self.node(name))["status"]) == status

        await until(probe, f"{name} to be {status}")

    async def lists(self, node: str, *backends: str) -> None:
        """Wait until the node is known to have exactly these."""

        async def probe() -> bool:
            return {one["name"] for one in await self.get(f"/api/nodes/{node}/backends")} == set(backends)

        await until(probe, f"{node} to have {backends}")

    async def hurry(self) -> None:
        """What waits for a later attempt is due now, as if the pause were over."""

        def work(connection: Connection) -> None:
            connection.execute(text("update intents set due_at = 0 where state = 'waiting'"))

        await self._store.transaction(work)
        self.wakes.of("dispatch")()

    async def run_sql(self, statement: str, **values: object) -> list[Any]:
        """As another program would, past everything that this one knows."""
        return await self.run_all((statement, values))

    async def run_all(self, *statements: tuple[str, dict[str, object]]) -> list[Any]:
        """The same in one transaction; what the last statement gave."""

        def work(connection: Connection) -> list[Any]:
            for statement, values in statements:
                result = connection.execute(text(statement), values)
            return list(result) if result.returns_rows else []

        return await self._store.transaction(work)


class Frontends:
    """The first is the one that people talk to."""

    def __init__(self, first: RunningFrontend, second: RunningFrontend, bus_url: str) -> None:
        self.first = first
        self.second = second
        self.bus_url = bus_url

    @property
    def both(self) -> tuple[RunningFrontend, RunningFrontend]:
        return self.first, self.second


def rows_of(operation: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["node_name"]: row for row in operation.get("nodes", ())}


@asynccontextmanager
async def open_frontends(
    database_url: str, bus_url: str, lab: Lab, directory: Path, **times: float
) -> AsyncIterator[Frontends]:
    async with AsyncExitStack() as stack:
        made = []
        for name in ("first", "second"):
            settings = msgspec.structs.replace(
                SETTINGS,
                data=directory / name,
                nats_url=bus_url,
                backend_galleries=decode_sources(lab.galleries),
                **times,
            )
            made.append(await stack.enter_async_context(_open(settings, database_url)))
        yield Frontends(made[0], made[1], bus_url)


@asynccontextmanager
async def _open(settings: FrontendSettings, database_url: str) -> AsyncIterator[RunningFrontend]:
    """What `build_frontend.run` does, without a socket."""
    settings.data.mkdir(parents=True)
    store, wakes, engine = await Store.open(database_url), Wakes(), HttpEngine()
    options = BusOptions(url=settings.nats_url, name=settings.data.name, on_connected=wakes.of("dispatch"))
    bus = await NatsBus.connect(options, limit_seconds=10)
    frontend = make_frontend(settings, make_outside(settings, store, bus), wakes)
    await frontend.galleries.step()
    await frontend.board.restore()
    await frontend.collector.listen(bus)
    await frontend.poller.listen(bus)
    wakes.loops = make_loops(settings, frontend)
    tokens = [(await frontend.keys.create(role, settings.data.name)).token for role in ("admin", "join")]
    routes = make_entries(settings, frontend, engine, bus, wakes)
    site = Site(store, frontend, bus, wakes, routes)  # type: ignore[arg-type]  # the real bus instead of one in memory
    try:
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(loop.run(), name=loop.name) for loop in wakes.loops.values()]
            yield RunningFrontend(site, store, *tokens)
            for task in running:
                task.cancel()
        failed = {name: loop.failures for name, loop in wakes.loops.items() if loop.failures}
        assert not failed, f"loops failed: {failed}"
    finally:
        await bus.close()
        await engine.close()
        await frontend.galleries.close()
        store.close()
