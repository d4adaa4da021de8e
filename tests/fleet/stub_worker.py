"""A worker that does nothing, as a program of its own: `stub_worker.py NAME FRONTEND-URL NATS-URL`, with the join token
in ENGINEHOUSE_TOKEN.

It registers, listens, reports every second and answers installs after a second, with the product's own messages. It
keeps nothing on a disk: killed, it is gone; stopped and continued, it goes on as any process does.
"""

from __future__ import annotations

import asyncio
import os
import sys

from nacl.signing import SigningKey

from enginehouse.bus.nats import BusOptions, NatsBus
from enginehouse.core import node_api, subjects, wire
from enginehouse.core.backend import InstalledBackend
from enginehouse.core.ids import IntentId, NodeId
from enginehouse.core.intent import Outcome
from enginehouse.core.progress import Progress
from enginehouse.core.report import CommandResult, Report
from enginehouse.host import hardware
from enginehouse.link.client import FrontendClient
from enginehouse.link.worker import WorkerLink
from enginehouse.ports import Message
from enginehouse.worker.identity import Identity

WORK_SECONDS = 1.0
HEARTBEAT_SECONDS = 1.0


class Stub:
    def __init__(self, name: str, url: str, nats_url: str, token: str) -> None:
        self._name = name
        self._token = token
        self._nats_url = nats_url
        self._link = WorkerLink(FrontendClient(url, token, user_agent="stub"))
        self._key = SigningKey.generate()
        self._node_id = NodeId("")
        self._backends: dict[str, InstalledBackend] = {}
        self._results: list[CommandResult] = []
        self._running: set[IntentId] = set()

    async def run(self) -> None:
        """For ever."""
        request = node_api.RegisterRequest(
            name=self._name,
            address="127.0.0.1:50051",
            token=self._token,
            platform=hardware.platform(),
            capability="default",
            challenge=await self._link.challenge(),
        )
        node = await self._link.register(Identity(self._key).signed(request))
        self._node_id = node.id
        bus = await NatsBus.connect(BusOptions(url=self._nats_url, name=self._name), limit_seconds=30.0)
        async with asyncio.TaskGroup() as group:

            def take(message: Message) -> None:
                group.create_task(self._install(bus, message))

            await bus.subscribe(subjects.node_subject(node.id, subjects.INSTALL), take)
            await self._report(node)

    async def _report(self, node: node_api.RegisterReply) -> None:
        mark, sequence = node.mark, 0
        while True:
            sequence += 1
            report = Report(
                boot_id=self._name,
                sequence=sequence,
                mark=mark,
                boot_mark=node.mark,
                backends=tuple(self._backends.values()),
                results=tuple(self._results),
                running=tuple(self._running),
            )
            reply = await self._link.heartbeat(node.id, node.node_token, node_api.HeartbeatRequest(report=report))
            mark = reply.mark
            await asyncio.sleep(HEARTBEAT_SECONDS)

    async def _install(self, bus: NatsBus, message: Message) -> None:
        request = wire.decode(message.payload, wire.BackendInstallRequest, "the install request")
        command, build = request.command, request.resolved
        assert command is not None
        assert build is not None
        if command.intent in self._running:
            return  # the same again: the report will tell how it ended
        self._running.add(command.intent)
        told = Progress("downloading", "layer", 1, 2, command.attempt, 1)
        event = wire.progress_event(request.op_id, self._node_id, request.backend, command.intent, told)
        await bus.publish(subjects.progress_subject(self._node_id, request.op_id), wire.encode(event))
        await asyncio.sleep(WORK_SECONDS)
        self._backends[build.directory] = InstalledBackend(
            name=build.directory,
            is_system=False,
            is_meta=False,
            uri=build.uri,
            digest=build.digest,
            generation=command.generation,
        )
        outcome = Outcome(digest=build.digest)
        self._results.append(CommandResult(intent=command.intent, attempt=command.attempt, outcome=outcome))
        self._running.discard(command.intent)
        reply = wire.BackendInstallReply(success=True, outcome=outcome)
        await bus.publish(message.reply, wire.encode(reply))


if __name__ == "__main__":
    _, own_name, frontend_url, bus_url = sys.argv
    asyncio.run(Stub(own_name, frontend_url, bus_url, os.environ["ENGINEHOUSE_TOKEN"]).run())
