"""A frontend whose outside is in the test's hand: an engine that loads when it is told to, a file server that has
everything, and one of LocalAI's workers on a bus in memory.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Mapping
from typing import Any

import msgspec
from tests.bus.memory import MemoryBus
from tests.frontend.world import Time, WatchedStore, World, registration

from enginehouse.build_localai import LocalaiOutside
from enginehouse.core import node_api, subjects
from enginehouse.core.errors import EnginehouseError
from enginehouse.core.ids import IntentId, NodeId, OperationId
from enginehouse.core.intent import Intent
from enginehouse.core.model import Model, ModelFile
from enginehouse.core.node import Node
from enginehouse.core.operation import Operation
from enginehouse.fetch.worker_files import PutAnswer, RemoteFile, SentPart, WorkerPlace
from enginehouse.frontend.localai.file_sources import FindUpload, ReadableFile
from enginehouse.ports import EngineCall, EngineResponse, EngineTarget, Message
from enginehouse.store import db, operations, supersession

MODEL = Model(name="m", backend="image", files=(ModelFile("f", "https://example.org/f", "ab" * 32, 3),))
SECRET = "eh-admin-0123456789abcdef0123456789abcdef"
TOKEN = "the worker's token"


class ScriptedEngine:
    """Loads wait for `gate`; `error` is raised by the next."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.gate.set()
        self.error: EnginehouseError | None = None
        self.loaded: list[tuple[EngineTarget, Mapping[str, object], float]] = []

    async def load(self, target: EngineTarget, options: Mapping[str, object], *, limit_seconds: float) -> None:
        self.loaded.append((target, options, limit_seconds))
        await self.gate.wait()
        if self.error is not None:
            raise self.error

    async def send(self, call: EngineCall, *, connect_seconds: float, head_seconds: float) -> EngineResponse:
        raise AssertionError("nobody chats here")

    async def is_ready(self, target: EngineTarget) -> bool:
        return True

    async def checks_key(self, target: EngineTarget) -> bool:
        return True

    async def free(self, target: EngineTarget, *, limit_seconds: float) -> bool:
        return True

    def forget(self, address: str) -> None:
        pass

    async def close(self) -> None:
        pass


class FullServers:
    """Has every file already. Heads wait for `gate`."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.gate.set()
        self.asked: list[WorkerPlace] = []

    async def head(self, place: WorkerPlace, key: str, size_bytes: int) -> RemoteFile | None:
        self.asked.append(place)
        await self.gate.wait()
        return RemoteFile(size_bytes=3, path=f"/go/{key}", sha256="ab" * 32)

    async def put(self, place: WorkerPlace, key: str, part: SentPart, body: AsyncIterator[bytes]) -> PutAnswer:
        raise AssertionError("everything is there")

    async def last_lines(self, place: WorkerPlace, process_key: str, count: int) -> list[str]:
        return [f"the words of {process_key}"]


class NoSources:
    async def open(self, file: ModelFile) -> ReadableFile:
        raise AssertionError("nothing is read")


class MemoryWorker:
    """One of LocalAI's workers: processes by their keys, with the ports that it gave them."""

    def __init__(self, bus: MemoryBus, node_id: NodeId, *, has_stop: bool = True) -> None:
        self._bus = bus
        self._node_id = node_id
        self._has_stop = has_stop
        self.processes: dict[str, int] = {}
        self.heard: list[tuple[str, dict[str, Any]]] = []
        self.host = "h"
        self.error = ""

    async def listen(self) -> None:
        verbs = [subjects.INSTALL, subjects.RUNNING, subjects.STOP, subjects.DELETE_MODEL]
        for verb in [*verbs, *([subjects.STOP_MODEL] if self._has_stop else [])]:
            await self._bus.subscribe(subjects.node_subject(self._node_id, verb), self._take)

    def _take(self, message: Message) -> None:
        verb = message.subject.split(".", 2)[2]
        asked = msgspec.json.decode(message.payload)
        if verb != subjects.RUNNING:
            self.heard.append((verb, asked))
        reply = self._reply(verb, asked)
        if message.reply:
            self._bus.deliver(Message(message.reply, msgspec.json.encode(reply)))

    def _reply(self, verb: str, asked: dict[str, Any]) -> dict[str, Any]:
        if verb == subjects.RUNNING:
            keys = [(*key.rpartition("#")[::2], port) for key, port in self.processes.items()]
            rows = [
                {"model_id": one, "replica_index": int(slot), "address": f"127.0.0.1:{port}"}
                for one, slot, port in keys
            ]
            return {"models": rows}
        if verb == subjects.INSTALL and not self.error:
            key = f"{asked['model_id']}#{asked.get('replica_index', 0)}"
            self.processes[key] = 50_100 + len(self.heard)
            return {"success": True, "address": f"{self.host}:{self.processes[key]}"}
        if verb == subjects.STOP_MODEL:
            port = self.processes.get(asked["process_key"])
            is_same = asked["expected_address"] == f"127.0.0.1:{port}"
            if is_same:
                del self.processes[asked["process_key"]]
            return {"matched": True, "freed": is_same, "terminated": is_same, "process_key": asked["process_key"]}
        if verb == subjects.STOP:
            self.processes.pop(asked["backend"], None)
        return {"success": not self.error, **({"error": self.error} if self.error else {})}

    def verbs(self) -> list[str]:
        return [verb for verb, _ in self.heard]


class CarryingWorld(World):
    def __init__(self, store: WatchedStore, time: Time, *, owner: str = "me") -> None:
        self.engine, self.servers = ScriptedEngine(), FullServers()

        def open_sources(_find: FindUpload) -> NoSources:
            return NoSources()

        outside = LocalaiOutside(
            engine=self.engine, servers=self.servers, secret=lambda: SECRET, open_sources=open_sources
        )
        super().__init__(store, time, owner=owner, localai=outside)

    async def join_go(self, **fields: object) -> Node:
        plain: dict[str, object] = {"address": "h:50051", "http_address": "h:50050"} | fields
        registered = await self.nodes.register(registration("go", **plain))
        await self.nodes.approve(registered.node.id)
        await self.reports.heartbeat(registered.node.id, node_api.HeartbeatRequest())
        assert self.worker_tokens is not None
        await self.worker_tokens.learn(registered.node.id, TOKEN)
        return (await self.nodes.get(registered.node.id))[0]

    async def request_action(self, node: Node, action: Any) -> Intent:
        """An intent of its own operation, claimed by this frontend."""
        number = IntentId(str(uuid.uuid4()))

        def work(connection: db.Connection) -> None:
            now = db.now(connection)
            made = Operation(
                id=OperationId(number),
                kind="load",
                name="m",
                author="x",
                created_at=now,
                targets=(),
                is_steered=False,
            )
            operations.insert(connection, made)
            supersession.add_intent(connection, made.id, node.id, action, number, now)

        await self.store.transaction(work)
        await self.dispatcher.step()
        return await self.now_of(number)

    async def now_of(self, intent_id: str) -> Intent:
        found = await self.store.transaction(lambda connection: operations.intent(connection, IntentId(intent_id)))
        assert found is not None
        return found
