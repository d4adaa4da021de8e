"""A whole worker with a bus and a frontend in memory, and the messages that are sent to it."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
from tests.bus.memory import MemoryBus
from tests.ports import ports_of
from tests.worker.world import KEY, MemoryLink, tiny_chat, until

from enginehouse.build_worker import make_parts
from enginehouse.core import subjects, wire
from enginehouse.core.ids import IntentId, NodeId
from enginehouse.core.node_api import RegisterReply
from enginehouse.core.report import Report
from enginehouse.core.wire import Command
from enginehouse.engine.engines import Engines
from enginehouse.host import confinement
from enginehouse.worker.agent import Agent
from enginehouse.worker.backends.installation import InstallerOptions
from enginehouse.worker.options import WorkerOptions


class WholeWorker:
    """A worker and what it talks to."""

    def __init__(
        self, directory: Path, statuses: list[str] | None = None, *, allowed_hosts: tuple[str, ...] = ()
    ) -> None:
        chosen = confinement.choose("auto", "")
        installing = InstallerOptions(
            backends=directory / "backends",
            data=directory,
            allowed_hosts=allowed_hosts,
            confinement=chosen,
            may_link=chosen.protects_trees,
        )
        self.place = WorkerOptions(
            directory=directory,
            name="node-one",
            join_token="join",
            base_port=ports_of(directory),
            grace_seconds=2.0,
            installing=installing,
        )
        self.link = MemoryLink(statuses)
        self.buses: list[MemoryBus] = []
        self.engine = Engines()
        self.agent = Agent(self.place, make_parts(self.place, self.engine, os.environ), self.link, self._open)

    async def _open(self, registered: RegisterReply) -> MemoryBus:
        self.buses.append(MemoryBus())
        return self.buses[-1]

    @property
    def bus(self) -> MemoryBus:
        return self.buses[-1]

    @property
    def report(self) -> Report:
        report = self.link.heartbeats[-1].report
        assert report is not None
        return report

    async def tell(self, verb: str, message: msgspec.Struct, reply: str = "r") -> wire.AnyReply:
        answer = await self.bus.ask(subjects.node_subject(NodeId("node-1"), verb), wire.encode(message), reply)
        return wire.decode(answer, wire.AnyReply, "the reply")


@contextlib.asynccontextmanager
async def working(worker: WholeWorker) -> AsyncIterator[WholeWorker]:
    async with asyncio.TaskGroup() as group:
        task = group.create_task(worker.agent.run())
        await until(lambda: task.done() or bool(worker.link.heartbeats))
        try:
            yield worker
        finally:
            worker.agent.stop()
            await task
    await worker.engine.close()


def command(intent: str, generation: int = 1, attempt: int = 1) -> Command:
    return Command(intent=IntentId(intent), generation=generation, attempt=attempt, fence=attempt)


def start(intent: str = "start", generation: int = 1) -> wire.BackendInstallRequest:
    return wire.BackendInstallRequest(
        backend="xllamacpp",
        model_id="tiny-chat",
        op_id="op",
        command=command(intent, generation),
        model=wire.ModelStart(model=tiny_chat(), key=KEY),
    )
