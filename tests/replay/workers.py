"""Two real workers of ours on a real bus, and somebody who sends them what a Go frontend sent.

The workers are the programs themselves, registered at a frontend of ours; the sender is a third client of the bus. One
subscription hears everything, so what came before a reply is known to have come before it.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
from tests.fleet.cluster import Fleet
from tests.replay.lab import Lab
from tests.replay.recordings import (
    FIRST_NODE,
    SECOND_NODE,
    SECOND_NODE_LATER,
    Exchange,
    Payload,
    filled_in,
)

from enginehouse.bus.nats import BusOptions, NatsBus
from enginehouse.core import subjects
from enginehouse.core.ids import NodeId
from enginehouse.core.installation import PRIVATE
from enginehouse.ports import Message

REPLY_SECONDS = 20.0
INBOX = "_INBOX.go-frontend"
FIRST, SECOND = "worker-1", "worker-2"
RECORDED = {FIRST_NODE: FIRST, SECOND_NODE: SECOND, SECOND_NODE_LATER: SECOND}


class GoFrontend:
    """Sends what was recorded, and hears what is said."""

    def __init__(self, fleet: Fleet, lab: Lab, bus: NatsBus) -> None:
        self._fleet = fleet
        self._lab = lab
        self._bus = bus
        self._numbers = itertools.count()
        self._replies: dict[str, asyncio.Future[Payload]] = {}
        self.node_ids = {name: str(fleet.node(name)["id"]) for name in (FIRST, SECOND)}
        self.events: list[tuple[str, Payload]] = []  # progress, with its subject

    async def listen(self) -> None:
        await self._bus.subscribe(">", self._receive)

    def _receive(self, message: Message) -> None:
        if message.subject in self._replies:
            assert not message.no_responders, f"nobody listens for {message.subject}"
            self._replies.pop(message.subject).set_result(msgspec.json.decode(message.payload))
        elif message.subject.endswith(".progress"):
            self.events.append((message.subject, msgspec.json.decode(message.payload)))

    async def ask(self, worker: str, verb: str, payload: object) -> Payload:
        """The reply of a worker, as it stands on the wire; the events that came with it are in `events`."""
        self.events.clear()
        reply = f"{INBOX}.{next(self._numbers)}"
        self._replies[reply] = asyncio.get_running_loop().create_future()
        answer = self._replies[reply]
        subject = subjects.node_subject(NodeId(self.node_ids[worker]), verb)
        await self._bus.publish(subject, msgspec.json.encode(payload), reply)
        return await asyncio.wait_for(answer, REPLY_SECONDS)

    async def replay(self, exchange: Exchange) -> Payload:
        """Send a recorded request, with nothing but ids and addresses changed."""
        return await self.ask(RECORDED[exchange.node_id], exchange.verb, self.own(exchange.request))

    def own(self, value: Any) -> Any:
        nodes = {recorded: self.node_ids[worker] for recorded, worker in RECORDED.items()}
        return filled_in(value, {**self._lab.replacements, **nodes})

    async def install(self, worker: str, name: str, **more: object) -> Payload:
        request = {"backend": name, "backend_galleries": self._lab.galleries, **more}
        reply = await self.ask(worker, subjects.INSTALL, request)
        assert reply["success"], reply
        return reply

    async def listed(self, worker: str) -> dict[str, Payload]:
        reply = await self.ask(worker, subjects.LIST, {})
        return {row["name"]: row for row in reply["backends"] or ()}

    def directories(self, worker: str) -> set[str]:
        """What is on the worker's disk, whatever it says."""
        return set(os.listdir(self.backends(worker))) - {PRIVATE}

    def backends(self, worker: str) -> Path:
        return self._fleet.backends_of(worker)

    def residue(self, worker: str) -> list[str]:
        return self._fleet.residue_of(worker)

    async def clear(self) -> None:
        """Nothing is installed anywhere, as when the first recording began."""
        for worker in (FIRST, SECOND):
            for name in await self.listed(worker):
                await self.ask(worker, subjects.DELETE, {"backend": name})
            assert self.directories(worker) == set()


@asynccontextmanager
async def go_frontend(fleet: Fleet, lab: Lab) -> AsyncIterator[GoFrontend]:
    bus = await NatsBus.connect(BusOptions(url=fleet.nats_url, name="go-frontend"), limit_seconds=10)
    try:
        made = GoFrontend(fleet, lab, bus)
        await made.listen()
        await lab.move_tag(lab.old)
        await made.clear()
        yield made
    finally:
        await bus.close()
