"""A worker as LocalAI's are, in as few words as it has: no reports, no progress, no intents.

It registers and beats without a report, answers what it is asked about its backends, installs by plain name unless
something is there already (or `force` says so all the same), and installs one at a time per backend; a delete waits for
nobody. It records no digest for images, only when it put them in place, by a clock of its own. It may be so old that
nobody listens for upgrades. It neither compares generations nor remembers attempts, so the guarantees about these
are not asked of it; that everything ends, and that what is called done was so, is.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable, Iterator
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import msgspec
from msgspec import Struct
from tests.sim import frontends
from tests.sim.bus import SimBus
from tests.sim.disk import Disk, DiskWeather
from tests.sim.frontends import HEARTBEAT_SECONDS, PATIENCE
from tests.sim.ledgers import WorkerChecks
from tests.sim.loop import Process
from tests.sim.options import BACKENDS
from tests.sim.rows import IntentRow
from tests.sim.store import EPOCH

from enginehouse.build_frontend import Frontend
from enginehouse.core import node_api, subjects, wire
from enginehouse.core.backend import InstalledBackend
from enginehouse.core.errors import Conflict, EnginehouseError, NotFound, Unavailable
from enginehouse.core.gallery import Catalogue
from enginehouse.core.ids import NodeId
from enginehouse.frontend.localai.poller import LOST_AFTER_BUDGETS
from enginehouse.ports import Message

if TYPE_CHECKING:
    from tests.sim.world import World

T = TypeVar("T")
AGAIN_SECONDS = 0.3
LIMIT_SECONDS = 4.0
IMAGE = BACKENDS[-1]
VERBS = (subjects.INSTALL, subjects.DELETE, subjects.LIST, subjects.RUNNING)


class SimOldMachine:
    """Struck by the same misfortunes as a `SimMachine`. Its disk never fails: it says nothing about that."""

    is_old = True
    is_lost = False
    heard_at = 0.0

    def __init__(self, world: World, number: int, *, knows_upgrades: bool) -> None:
        self._world = world
        self.name = f"node-{number}"
        self.public_key = ""  # it has none, and somebody has to let it in
        self.checks = WorkerChecks(self.name, world.loop.time, world.loop.fail)
        self.disk = Disk(self.name, world.trace, self.checks, DiskWeather(), world.chance(self.name))
        self.process: Process | None = None
        self.node_id = NodeId("")
        self._verbs = (*VERBS, subjects.UPGRADE) if knows_upgrades else VERBS
        self._catalogue = Catalogue(world.galleries)
        self._chance = world.chance(self.name)
        self._turns: dict[str, asyncio.Lock] = {}
        self._at_work = 0
        self._clock_ahead = self._chance.uniform(-1e6, 1e6)
        self._installed_at: dict[str, str] = {}
        self._installing: dict[str, list[tuple[int, float]]] = {}  # generations, and when they came
        self._done: set[tuple[str, int]] = set()  # intents and attempts
        # It worked for another cluster before, so there is something to upgrade.
        self.disk.swap(self._catalogue.explain(BACKENDS[0], "default", "linux/amd64").resolved, 0)

    def start(self) -> None:
        self._at_work = 0
        self._turns = {}
        self._installing = {}
        self.process = self._world.loop.new_process(self.name)
        self.process.spawn(self._run())

    def stop(self) -> None:
        """It knows no way to leave in order."""

    def crash_engine(self, *, all_of_them: bool = False) -> None:
        """It has none."""

    def kill(self, *, power_cut: bool = False) -> None:
        if self.process is not None:
            self._world.trace.note(self.name, "power cut" if power_cut else "killed")
            self.process.kill()
            self._world.network.remove_process(self.process)
            self.process = None
            self._at_work = 0

    def running(self) -> tuple[str, ...]:
        return ("something",) if self._at_work else ()

    def wrong_absence(self, intent: IntentRow) -> str:
        """A delete is not done while an older install goes on, which nobody has given up for its silence."""
        directory = intent.subject.partition(":")[2]
        if json.loads(intent.action)["type"] != "remove_backend":
            return ""
        # Judged from its sending, which may be earlier than its coming by as much as the bus is late.
        given_up = LOST_AFTER_BUDGETS * PATIENCE.install_seconds - self._world.bus_weather.late_seconds
        since = self._world.loop.time() - given_up
        older = [one for one in self._installing.get(directory, ()) if one[0] < intent.generation and one[1] > since]
        return f"{intent.id} succeeded while {older} of {directory} went on" if older else ""

    def held_locks(self) -> list[str]:
        return []

    async def _run(self) -> None:
        while True:
            try:
                self.node_id = await self._register()
                bus = SimBus(self._world.network)
                for verb in self._verbs:
                    await bus.subscribe(subjects.node_subject(self.node_id, verb), partial(self._receive, bus, verb))
                await self._beat()
            except NotFound:
                self._world.trace.note(self.name, "is unknown and registers anew")
                self._world.network.remove_process(self._here())
            except Unavailable:
                self._world.network.remove_process(self._here())
            await asyncio.sleep(AGAIN_SECONDS)

    async def _beat(self) -> None:
        said = node_api.HeartbeatRequest(available_ram=2**33)
        while True:
            with contextlib.suppress(Unavailable):
                await self._call(lambda to: frontends.heartbeat(to, self.node_id, said))
            await asyncio.sleep(HEARTBEAT_SECONDS)

    def _here(self) -> Process:
        assert self.process is not None, "this runs in it"
        return self.process

    async def _register(self) -> NodeId:
        """And have somebody let it in: it has no key to be known by."""
        request = node_api.RegisterRequest(
            name=self.name, address="10.0.0.1:50051", capability="default", platform="linux/amd64", total_ram=2**34
        )
        node = await self._call(lambda to: frontends.register(to, request))
        if node.status == "pending":
            with contextlib.suppress(Conflict):  # approved before, and the answer got lost
                await self._call(lambda to: to.nodes.approve(node.id))
        return node.id

    async def _call(self, work: Callable[[Frontend], Awaitable[T]]) -> T:
        if self.name in self._world.cut_links:
            raise Unavailable("cannot reach the frontend: no route", code="connection_refused")
        return await self._chance.choice(self._world.frontends).call(work, LIMIT_SECONDS)

    # What it is asked -----------------------------------------------------------------------------

    def _receive(self, bus: SimBus, verb: str, message: Message) -> None:
        self._here().spawn(self._take(bus, verb, message))

    async def _take(self, bus: SimBus, verb: str, message: Message) -> None:
        self._at_work += 1
        try:
            reply = await self._answer(verb, message.payload)
        finally:
            self._at_work -= 1
        with contextlib.suppress(Unavailable):
            await bus.publish(message.reply, wire.encode(reply))

    async def _answer(self, verb: str, payload: bytes) -> Struct:
        match verb:
            case subjects.LIST:
                # It does not tell where its pointers lead.
                listed = tuple(
                    InstalledBackend(
                        name=name,
                        is_system=False,
                        is_meta=False,
                        digest="" if name == IMAGE else tree.digest,
                        installed_at=self._installed_at.get(name, ""),
                    )
                    for name, tree in sorted(self.disk.trees.items())
                ) + tuple(
                    InstalledBackend(name=meta, is_system=False, is_meta=True)
                    for tree in self.disk.trees.values()
                    for meta in tree.metas
                )
                return wire.BackendListReply(backends=listed or None)
            case subjects.RUNNING:
                return wire.ModelsRunningReply(models=())
            case subjects.DELETE:
                return await self._delete(msgspec.json.decode(payload, type=wire.BackendDeleteRequest).backend)
        request = msgspec.json.decode(payload, type=wire.BackendInstallRequest)
        if request.model_id:
            return wire.BackendInstallReply(success=False, error="cannot load: no such model here")
        assert request.command is not None
        return await self._install(
            request.backend, request.command, is_forced=request.force or verb == subjects.UPGRADE
        )

    async def _install(self, name: str, command: wire.Command, *, is_forced: bool) -> Struct:
        try:
            resolved = self._catalogue.explain(name, "default", "linux/amd64").resolved
            if not resolved.digest:
                resolved = msgspec.structs.replace(resolved, digest=self._world.registry.digest(resolved.uri))
        except EnginehouseError as error:
            return wire.BackendInstallReply(success=False, error=error.message)
        async with self._turn(resolved.directory):
            with self._noted(resolved.directory, command):
                known = self.disk.trees.get(resolved.directory)
                # A name that it does not have yet is installed with its build, though that is there.
                if is_forced or known is None or (resolved.meta and resolved.meta not in known.metas):
                    weather = self._world.install_weather
                    await asyncio.sleep(weather.seconds * self._chance.uniform(0.5, 1.5))
                    if self._chance.random() < weather.failing_rate:
                        return wire.BackendInstallReply(success=False, error="failed to download")
                    self.disk.swap(resolved, 0)
                    here = self._world.loop.time() + EPOCH + self._clock_ahead
                    self._installed_at[resolved.directory] = datetime.fromtimestamp(here, UTC).isoformat()
        return wire.BackendInstallReply(success=True)

    @contextlib.contextmanager
    def _noted(self, directory: str, command: wire.Command) -> Iterator[None]:
        """Not where the bus has brought a message twice and the first is done: nobody can know of the second."""
        sent = (command.intent, command.attempt)
        at_work = self._installing.setdefault(directory, [])
        came = (command.generation, self._world.loop.time())
        if sent not in self._done:
            at_work.append(came)
        try:
            yield
        finally:
            self._done.add(sent)
            if came in at_work:
                at_work.remove(came)

    async def _delete(self, name: str) -> Struct:
        behind = [one for one, tree in self.disk.trees.items() if name in tree.metas]
        directory = behind[0] if behind else name
        if directory not in self.disk.trees:
            return wire.BackendUpgradeReply(success=False, error=f'backend "{directory}" not found')
        self.disk.remove(directory)
        self._installed_at.pop(directory, None)
        return wire.BackendUpgradeReply(success=True)

    def _turn(self, directory: str) -> asyncio.Lock:
        return self._turns.setdefault(directory, asyncio.Lock())
