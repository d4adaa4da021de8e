"""One simulated machine: the real agent on parts in memory, in a process that can be killed and paused."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, cast

import msgspec
from tests.sim import frontends
from tests.sim.bus import SimBus
from tests.sim.disk import Disk, SimJournal
from tests.sim.engines import SimSupervisor
from tests.sim.ledgers import WorkerChecks
from tests.sim.loop import Process
from tests.sim.parts import SimActions, SimInstaller, SimModels, SimTrees
from tests.sim.rows import select_rows
from tests.sim.trace import Violation

from enginehouse.core.capacity import Capacity
from enginehouse.core.errors import EnginehouseError, Unavailable
from enginehouse.core.gallery_entry import Gallery
from enginehouse.core.ids import NodeId
from enginehouse.core.node_api import HeartbeatReply, HeartbeatRequest, RegisterReply, RegisterRequest
from enginehouse.frontend.fleet.nodes import token_hash
from enginehouse.loop import Signal
from enginehouse.worker.agent import Agent
from enginehouse.worker.backends.installation import InstallerOptions
from enginehouse.worker.backends.inventory import Inventory
from enginehouse.worker.backends.trees import Trees
from enginehouse.worker.commands.ports import CommandPorts
from enginehouse.worker.options import WorkerOptions
from enginehouse.worker.parts import AgentParts

if TYPE_CHECKING:
    from tests.sim.world import World

LINK_LIMIT_SECONDS = 4.0
RESTART_SECONDS = 1.0


class SimPlace(WorkerOptions, frozen=True):
    def make_directories(self) -> None:
        """Nothing of a simulated machine is on a real disk."""


class SimIdentity:
    def __init__(self, public_key: str) -> None:
        self.public_key = public_key

    def signed(self, request: RegisterRequest) -> RegisterRequest:
        return msgspec.structs.replace(request, public_key=self.public_key, signature="00")


class SimNodeFiles:
    def __init__(self, public_key: str) -> None:
        self._public_key = public_key

    def load_identity(self) -> SimIdentity:
        return SimIdentity(self._public_key)

    def write_node(self, node: RegisterReply) -> None:
        """Nothing reads it here."""

    def was_accepted(self) -> bool:
        return False

    def write_waiting(self, reason: str) -> None:
        """Nothing reads it here."""


class SimHardware:
    def capacity(self, _directory: Path) -> Capacity:
        return Capacity(cores=2, total_ram=2**34, available_ram=2**33, total_disk=2**40, available_disk=2**39)

    def capability(self) -> str:
        return "default"

    def platform(self) -> str:
        return "linux/amd64"


async def _no_galleries(_named: str) -> tuple[Gallery, ...]:
    return ()


class SimMachine:
    is_old = False
    is_lost = False  # killed, and never started again
    host = "10.0.0.1"  # the same for all where nobody connects to engines
    slots = 1  # replicas of one model

    def __init__(self, world: World, number: int) -> None:
        self._world = world
        self.name = f"node-{number}"
        self.public_key = hashlib.sha256(self.name.encode()).hexdigest()
        self.checks = WorkerChecks(self.name, world.loop.time, world.loop.fail)
        chance = world.chance(self.name)
        self.disk = Disk(self.name, world.trace, self.checks, world.disk_weather, chance)
        self.installer = SimInstaller(self.disk, world.install_weather, chance)
        self.process: Process | None = None
        self.actions: SimActions | None = None
        self.supervisor: SimSupervisor | None = None
        self._agent: Agent | None = None
        self.node_id = NodeId("")
        self.heard_at = 0.0  # when a heartbeat was last answered

    def start(self) -> None:
        self.process = self._world.loop.new_process(self.name)
        self.process.spawn(self._run())

    def stop(self) -> None:
        """Ask it to leave in order, as a signal does; whoever asks kills and starts it later."""
        if self.process is not None and self._agent is not None:
            self._world.trace.note(self.name, "is asked to stop")
            self.process.context.run(self._agent.stop)

    def kill(self, *, power_cut: bool = False) -> None:
        if self.process is None:
            return
        self._world.trace.note(self.name, "power cut" if power_cut else "killed")
        self.process.kill()
        self._world.network.remove_process(self.process)
        self.process = None
        if power_cut:
            self.disk.power_cut()
        else:
            self.disk.kill()

    def crash_engine(self, *, all_of_them: bool = False) -> None:
        if self.process is not None and self.supervisor is not None:
            self.process.context.run(self.supervisor.crash, all_of_them)

    def running(self) -> tuple[str, ...]:
        return self.actions.running() if self.actions is not None else ()

    def held_locks(self) -> list[str]:
        return self.actions.held_locks() if self.actions is not None else []

    async def _run(self) -> None:
        """The worker, and what starts it again when it ends for a reason that may heal."""
        place = SimPlace(
            directory=Path("/nowhere"),
            name=self.name,
            advertise_host=self.host,
            max_replicas_per_model=self.slots,
            installing=InstallerOptions(backends=Path("/nowhere/backends")),
        )
        while True:
            self._agent = Agent(place, self._parts(), SimLink(self._world, self), self._open_bus)
            try:
                await self._agent.run()
                self._world.trace.note(self.name, "has stopped")
                return
            except Unavailable as error:
                self._world.trace.note(self.name, f"ends with {error.code}")
                await asyncio.sleep(RESTART_SECONDS)
            except EnginehouseError as error:
                self._world.loop.fail(Violation("internal error", f"{self.name} gave up: {error!r}"))
                return

    def _parts(self) -> AgentParts:
        changed = Signal()
        self.supervisor = self._supervised(changed)
        trees = SimTrees(self.disk)
        ports = CommandPorts(
            trees=Inventory(cast(Trees, trees)),
            installer=self.installer,
            models=SimModels(self.disk),
            supervisor=self.supervisor,
            journal=SimJournal(self.disk),
            look_up=_no_galleries,
        )
        self.actions = SimActions(ports, changed, self.checks)
        return AgentParts(
            machine=self._hardware(),
            node_files=SimNodeFiles(self.public_key),
            generations=trees,
            inventory=ports.trees,
            installer=self.installer,
            models=SimModels(self.disk),
            supervisor=self.supervisor,
            journal=cast(SimJournal, ports.journal),
            executor=self.actions,
            look_up=ports.look_up,
            changed=changed,
        )

    def _supervised(self, changed: Signal) -> SimSupervisor:
        return SimSupervisor(self.disk, changed)

    def _hardware(self) -> SimHardware:
        return SimHardware()

    async def _open_bus(self, node: RegisterReply) -> SimBus:
        bus = SimBus(self._world.network)
        if not bus.is_connected:
            raise Unavailable("cannot reach the bus", code="bus_unavailable")
        self.node_id = node.id
        return bus


class SimLink:
    """`ports.Link` to whichever frontend answers, as behind a balancer."""

    def __init__(self, world: World, machine: SimMachine) -> None:
        self._world = world
        self._machine = machine
        self._chance = world.chance(f"link of {machine.name}")
        self._asked = self._answered = 0  # how often it has registered, and the last of these that was answered

    async def challenge(self, *, by_key: bool = False) -> str:
        return await self._frontend().call(lambda to: to.nodes.challenge(), LINK_LIMIT_SECONDS)

    async def register(self, request: RegisterRequest, *, by_key: bool = False) -> RegisterReply:
        self._asked += 1
        number = self._asked
        reply = await self._frontend().call(lambda to: frontends.register(to, request), LINK_LIMIT_SECONDS)
        self._answered = number
        return reply

    def _check_token(self, node_id: NodeId, node_token: str) -> None:
        """S2: what a worker got with its last registration is good until it registers again, or is removed."""
        query = "select token_hash, previous_token_hash from nodes where id = ?"
        rows = select_rows(self._world.database.connection, query, (node_id,))
        if rows and self._answered == self._asked and token_hash(node_token) not in rows[0]:
            self._world.loop.fail(Violation("S2", f"the token of {self._machine.name} was replaced by an older one"))

    async def heartbeat(self, node_id: NodeId, node_token: str, request: HeartbeatRequest) -> HeartbeatReply:
        self._check_token(node_id, node_token)
        reply = await self._frontend().call(lambda to: frontends.heartbeat(to, node_id, request), LINK_LIMIT_SECONDS)
        self._machine.heard_at = self._world.loop.time()
        return reply

    async def deregister(self, node_id: NodeId, node_token: str) -> None:
        await self._frontend().call(lambda to: to.nodes.set_health(node_id, "offline"), LINK_LIMIT_SECONDS)

    def local_address(self) -> str:
        return "10.0.0.1"

    def _frontend(self) -> frontends.SimFrontend:
        if self._machine.name in self._world.cut_links:
            raise Unavailable("cannot reach the frontend: no route", code="connection_refused")
        return self._chance.choice(self._world.frontends)
