"""A small world for tests of the worker: real packages, real processes, a bus and a link in memory."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from urllib.error import URLError
from urllib.request import Request, urlopen

import msgspec
from tests.bus.memory import MemoryBus
from tests.ports import ports_of

from enginehouse.build_worker import make_parts
from enginehouse.core.backend import Resolved, package_digest
from enginehouse.core.errors import NotFound, Unavailable
from enginehouse.core.gallery import find_model, resolve
from enginehouse.core.ids import IntentId, NodeId
from enginehouse.core.model import Model
from enginehouse.core.node_api import BusCredential, HeartbeatReply, HeartbeatRequest, RegisterReply, RegisterRequest
from enginehouse.engine.engines import Engines
from enginehouse.fetch.galleries.sources import load_builtin
from enginehouse.host import confinement, hardware
from enginehouse.host.confinement import Confinement
from enginehouse.worker.backends.installation import InstallerOptions
from enginehouse.worker.backends.installer import Installer
from enginehouse.worker.backends.trees import Trees
from enginehouse.worker.commands.journal import Journal
from enginehouse.worker.engines.supervisor import Supervisor
from enginehouse.worker.models.files import ModelFiles
from enginehouse.worker.options import WorkerOptions

LIMIT_SECONDS = 30.0
KEY = "a-key-of-a-replica"


def xllamacpp(version: str = "") -> Resolved:
    """The built-in engine; another `version` is another digest of the same packages."""
    resolved = resolve((load_builtin(),), "llama-cpp", "default", hardware.platform())
    if not version:
        return resolved
    digest = package_digest(resolved.uri, resolved.requirements, resolved.launcher, version)
    return msgspec.structs.replace(resolved, version=version, digest=digest)


def tiny_chat() -> Model:
    model = find_model((load_builtin(),), "tiny-chat")
    assert model is not None
    return model


def ask(address: str, question: str, key: str = KEY) -> str:
    body = {"messages": [{"role": "user", "content": question}], "temperature": 0}
    request = Request(
        f"http://{address}/v1/chat/completions",
        msgspec.json.encode(body),
        {"Authorization": f"Bearer {key}", "Content-Type": "application/json"},
    )
    with urlopen(request, timeout=LIMIT_SECONDS) as response:
        answer = msgspec.json.decode(response.read())
    return str(answer["choices"][0]["message"]["content"])


def is_reachable(address: str) -> bool:
    try:
        with urlopen(f"http://{address}/health", timeout=2):
            return True
    except (URLError, OSError):
        return False


async def until(condition: Callable[[], bool], limit_seconds: float = LIMIT_SECONDS) -> None:
    end = time.monotonic() + limit_seconds
    while not condition():
        assert time.monotonic() < end, "it did not come true in time"
        await asyncio.sleep(0.01)


def silent(*_: object) -> None:
    """A report that nobody hears."""


async def nothing() -> None:
    """Nothing to do after a swap."""


def link_tree(source: Path, target: Path) -> None:
    """A tree that is already installed, at the cost of links."""
    shutil.copytree(source, target, symlinks=True, copy_function=os.link)


class World:
    """One worker's parts on a directory, without a bus."""

    def __init__(
        self,
        directory: Path,
        *,
        thread_budget: int = 0,
        base_port: int = 0,
        allowed_hosts: tuple[str, ...] = (),
        chosen: Confinement | None = None,
    ) -> None:
        chosen = chosen or confinement.choose("auto", "")
        installing = InstallerOptions(
            backends=directory / "backends",
            data=directory,
            stall_seconds=20.0,
            allowed_hosts=allowed_hosts,
            confinement=chosen,
            may_link=chosen.protects_trees,
        )
        self.place = WorkerOptions(
            directory=directory,
            name="world",
            # Away from the default, where a worker of this machine may be, and below the ports of clients.
            base_port=base_port or ports_of(directory),
            grace_seconds=2.0,
            thread_budget=thread_budget,
            installing=installing,
        )
        self.place.make_directories()
        self.engine = Engines()
        made = make_parts(self.place, self.engine, os.environ)
        self.made = made
        made.changed.connect(self._changed)
        assert isinstance(made.models, ModelFiles)
        assert isinstance(made.installer, Installer)
        assert isinstance(made.supervisor, Supervisor)
        assert isinstance(made.journal, Journal)
        assert isinstance(made.generations, Trees)
        self.models, self.installer, self.supervisor = made.models, made.installer, made.supervisor
        self.journal, self.trees, self.python = made.journal, made.generations, made.models._fetcher._python
        self.parts, self.actions = made.ports, made.executor
        self.changes = 0

    def _changed(self) -> None:
        self.changes += 1


@contextlib.asynccontextmanager
async def running_world(
    directory: Path, *, thread_budget: int = 0, chosen: Confinement | None = None
) -> AsyncIterator[World]:
    world = World(directory, thread_budget=thread_budget, chosen=chosen)
    async with world.supervisor:
        yield world
    await world.engine.close()


class MemoryLink:
    """A frontend that lets workers in, in the order of `statuses`, and keeps their heartbeats."""

    def __init__(self, statuses: list[str] | None = None) -> None:
        self.statuses = statuses or []
        self.registrations: list[RegisterRequest] = []
        self.by_key: list[bool] = []  # whether these came without the join token
        self.heartbeats: list[HeartbeatRequest] = []
        self.deregistered: list[str] = []
        self.forgets = False
        self.fails: Exception | None = None
        self.cancels: tuple[IntentId, ...] = ()
        self.loses = 0  # the answers to so many heartbeats
        self.confirms = False  # that it has the report, as frontends of this version do
        self._address = ""
        self.challenges = 0
        self.life_seconds = 0.0  # of a credential; 0 is one that this frontend does not renew
        self.nats_url = "nats://here:4222"
        self.renewals = 0
        self.tokens: list[str] = []  # as heartbeats showed them
        self.node_token = "token"  # "" is what a LocalAI frontend gives

    async def challenge(self, *, by_key: bool = False) -> str:
        self.challenges += 1
        return f"challenge-{self.challenges}"

    async def register(self, request: RegisterRequest, *, by_key: bool = False) -> RegisterReply:
        self._address = "127.0.0.1"
        self.registrations.append(request)
        self.by_key.append(by_key)
        if self.fails is not None:
            raise self.fails
        self.forgets = False
        status = self.statuses.pop(0) if self.statuses else "healthy"
        return RegisterReply(
            id=NodeId("node-1"),
            name=request.name,
            node_type="backend",
            status=status,
            created_at="",
            node_token=self.node_token,
            heartbeat_seconds=0.2,
            nats_url=self.nats_url,
            nats_life_seconds=self.life_seconds,
        )

    async def heartbeat(self, node_id: NodeId, node_token: str, request: HeartbeatRequest) -> HeartbeatReply:
        if self.forgets:
            raise NotFound(f"cannot find the node {node_id}")
        self.heartbeats.append(request)
        self.tokens.append(node_token)
        if self.loses:
            self.loses -= 1
            raise Unavailable("cannot get an answer", code="frontend_unreachable")
        confirmed = request.report_digest if self.confirms else ""
        mark = float(len(self.heartbeats))
        reply = HeartbeatReply(message="ok", mark=mark, cancelled=self.cancels, report_digest=confirmed)
        if not request.renew:
            return reply
        self.renewals += 1
        credential = BusCredential(
            nats_jwt=f"jwt-{self.renewals}",
            nats_user_seed=f"seed-{self.renewals}",
            nats_url=self.nats_url,
            nats_life_seconds=self.life_seconds,
        )
        return msgspec.structs.replace(reply, credential=credential, node_token=f"token-{self.renewals}")

    async def deregister(self, node_id: NodeId, node_token: str) -> None:
        self.deregistered.append(node_id)

    def local_address(self) -> str:
        return self._address


OpenBus = Callable[[RegisterReply], Awaitable[MemoryBus]]
