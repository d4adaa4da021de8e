"""Counts what a warm request costs outside the frontend: SQL statements, bus messages, new connections to engines.

The objects of a real frontend in this process, without its loops, which would add their own statements.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
from bench.serving import places
from bench.serving.places import Place
from sqlalchemy import event
from sqlalchemy.engine import Engine
from tests.api.inference import Client
from tests.api.whole_frontend import site

from enginehouse.store import db
from enginehouse.store.db import Connection

REQUESTS = 200
CHAT = b'{"model":"stub","messages":[{"role":"user","content":"What is the capital of France?"}]}'


class Counted(msgspec.Struct):
    requests: int = REQUESTS
    statements: int = 0
    messages: int = 0
    connections: int = 0


async def count_warm_requests(scratch: Path, engine: Place) -> Counted:
    counted = Counted()
    place = scratch / "counting"
    place.mkdir()
    async with site(place) as made:

        def fill(connection: Connection) -> None:
            places.fill(connection, db.now(connection), places.replica_at(engine))

        await made.store.transaction(fill)
        await made.frontend.router.step()
        bearer = b"Bearer " + made.tokens["user"].encode()

        async def ask() -> None:
            client = Client(CHAT, [(b"authorization", bearer)])
            client.scope.update(method="POST", path="/v1/chat/completions", query_string=b"")
            await made.open(client.scope, client.receive, client.send)
            assert client.status == 200, client.body

        await ask()
        publish: Any = made.bus.publish

        async def counting(*given: Any, **named: Any) -> None:
            counted.messages += 1
            await publish(*given, **named)

        def on_statement(*_: object) -> None:
            counted.statements += 1

        made.bus.publish = counting  # type: ignore[method-assign]
        event.listen(Engine, "before_cursor_execute", on_statement)
        before = places.connections_to(engine)
        try:
            for _ in range(REQUESTS):
                await ask()
        finally:
            event.remove(Engine, "before_cursor_execute", on_statement)
        # The question itself is a connection too.
        counted.connections = places.connections_to(engine) - before - 1
    return counted
