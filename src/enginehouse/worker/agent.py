"""The worker itself: joins, listens, reports what it has, and leaves in order.

It keeps no truth that others rely on except what is on its disk: a report says what *is*, and is sent every few
seconds and whenever something changed. Losing the bus or the frontend for any time stops nothing that runs here, and
without the bus heartbeats go on and say so. It joins again when the frontend no longer knows it. Leaving: no more
messages, goodbye, then the engines stop.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable

import msgspec

import enginehouse
from enginehouse.core.errors import Denied, EnginehouseError, NotFound, Unauthenticated, Unavailable
from enginehouse.core.node_api import BUS_AWAY, HeartbeatReply, HeartbeatRequest, RegisterReply
from enginehouse.core.report import Report
from enginehouse.host import disk
from enginehouse.host.blocking import in_thread
from enginehouse.loop import Loop
from enginehouse.ports import Bus, Link
from enginehouse.worker.options import WorkerOptions
from enginehouse.worker.parts import AgentParts, Signer
from enginehouse.worker.protocol.listener import Listener
from enginehouse.worker.registration import Joined, join
from enginehouse.worker.renewal import Renewal

log = logging.getLogger(__name__)

OpenBus = Callable[[RegisterReply], Awaitable[Bus]]

HEARTBEAT_SECONDS = 10.0  # when neither the frontend nor a setting says
TICK_SECONDS = 0.5  # how often it is looked whether a heartbeat is due, and the pause after a failed one
FAR_AWAY_SECONDS = 20.0  # a bus away for so long may have moved: the frontend knows
# A bus that is being opened is not called away before: whoever ignores that would send commands that nobody hears.
OPENING_SECONDS = 5.0
LEAVE_SECONDS = 5.0  # for the goodbye: a frontend that does not hear it notices the silence


class Agent:
    """`run` works until `stop` is called, or ends with the error that refused it for good."""

    def __init__(self, options: WorkerOptions, parts: AgentParts, link: Link, open_bus: OpenBus) -> None:
        self._options = options
        self._parts = parts
        self._link = link
        self._open_bus = open_bus
        self._stop = asyncio.Event()
        self._turn = asyncio.Event()  # serving must end: told to stop, or to join again
        self._heartbeat = Loop("worker.heartbeat", self._beat, TICK_SECONDS)
        self._is_due = True
        self._is_unheard = False
        self._due_at = 0.0
        self._connected_at = 0.0  # when commands were last known to reach us
        self._is_listening = False
        self._said_away = False
        self._is_known = False  # a heartbeat was answered: whoever leaves says goodbye
        self._boot_id = uuid.uuid4().hex
        self._sequence = 0
        self._mark = 0.0
        self._boot_mark = 0.0
        self._renewal = Renewal(lambda: asyncio.get_running_loop().time())
        self._bus: Bus | None = None
        self._node: RegisterReply | None = None
        parts.changed.connect(self._wake)

    def stop(self) -> None:
        """Ask `run` to leave in order. On the loop's thread."""
        self._stop.set()
        self._turn.set()

    async def run(self) -> None:
        identity = await in_thread(self._prepare)
        self._connected_at = asyncio.get_running_loop().time()
        async with self._parts.supervisor:
            try:
                while not self._stop.is_set():
                    joined = await join(self._options, self._parts.machine, self._link, identity, self._stop)
                    if joined is not None:
                        await self._serve(joined)
            finally:
                await self._leave()
                await self._parts.close()

    def _prepare(self) -> Signer:
        """Everything on disk as it must be before the first message: finished or undone, and known."""
        try:
            self._options.make_directories()
            identity = self._parts.node_files.load_identity()
            self._parts.journal.load()
            self._parts.installer.recover()
            self._parts.models.recover()
        except OSError as error:
            raise disk.storage_error(error, f"use the data directory {self._options.directory}") from error
        return identity

    def _wake(self) -> None:
        self._is_due = True
        self._heartbeat.wake()

    async def _serve(self, joined: Joined) -> None:
        """Listen and report until told to stop or to join again."""
        node = joined.node
        self._parts.supervisor.listen_on(joined.host)
        if not self._stop.is_set():
            self._turn.clear()
        try:
            await self._become(node)
        except OSError as error:
            log.warning("worker.cannot_write %s", disk.storage_error(error, "write down which node this is"))
            await asyncio.sleep(TICK_SECONDS)
            return
        self._node = node
        # What was sent before this registration can no longer be heard; reports say so from now on.
        self._mark = self._boot_mark = node.mark
        self._renewal.begin(node.nats_life_seconds)
        refused: EnginehouseError | None = None
        async with asyncio.TaskGroup() as group:
            # Beside the opening of the bus: heartbeats do not wait for it.
            reporting = group.create_task(self._heartbeat.run())
            try:
                await self._listen(node)
            except EnginehouseError as error:
                refused = error  # raised below: a task group would wrap it
            finally:
                reporting.cancel()
        if refused is not None:
            raise refused

    async def _listen(self, node: RegisterReply) -> None:
        """Take commands until told to stop or to join again; so too where the bus stays away."""
        while not self._turn.is_set():
            try:
                # As it is now: heartbeats may have brought a new credential or a new address.
                bus = await self._opened(self._node or node)
                if bus is not None:
                    await self._hear(bus, node)
                return
            except (Unavailable, OSError) as error:
                log.warning("worker.bus_unavailable %s", error)
                await asyncio.sleep(TICK_SECONDS)
            except Denied as error:
                if not node.nats_jwt:
                    raise  # of a setting, which does not change by asking again
                # It ended, or was revoked, before it was used: whoever gave it gives another, or says why not.
                log.warning("worker.bus_refused %s", error)
                await asyncio.sleep(TICK_SECONDS)
                return

    async def _hear(self, bus: Bus, node: RegisterReply) -> None:
        self._bus = bus
        listener = Listener(bus, node.id, self._parts.ports, self._parts.executor, self.stop)
        listening = asyncio.Event()
        try:
            async with asyncio.TaskGroup() as group:
                noting = group.create_task(self._note_listening(listening, node))
                refused: Unavailable | None = None
                try:
                    await listener.run(listening, self._turn)
                except Unavailable as error:
                    refused = error
                finally:
                    noting.cancel()
            if refused is not None:
                raise refused
        finally:
            self._bus, self._is_listening = None, False
            await bus.close()

    async def _note_listening(self, listening: asyncio.Event, node: RegisterReply) -> None:
        # The first report that calls the bus connected makes the node healthy, so commands may come: not before they
        # can be heard.
        await listening.wait()
        log.info("worker.joined node=%s name=%s", node.id, node.name)
        self._is_listening = True
        self._connected_at = asyncio.get_running_loop().time()
        self._wake()

    async def _opened(self, node: RegisterReply) -> Bus | None:
        """None when told to stop or to join again meanwhile: one that is not there is tried for long."""

        async def attempt() -> Bus | EnginehouseError | OSError:
            try:
                return await self._open_bus(node)
            except (EnginehouseError, OSError) as error:
                return error  # a group would wrap it

        async with asyncio.TaskGroup() as group:
            opening, stopping = group.create_task(attempt()), group.create_task(self._turn.wait())
            await asyncio.wait((opening, stopping), return_when=asyncio.FIRST_COMPLETED)
            for task in (opening, stopping):
                task.cancel()
        found = None if opening.cancelled() else opening.result()
        if isinstance(found, Exception):
            raise found
        return found

    async def _become(self, node: RegisterReply) -> None:
        """Remember which node this worker is, and count anew where it is another one than before."""
        await in_thread(self._parts.node_files.write_node, node)
        if node.id != self._parts.journal.node_id:
            # The trees first: a kill between the two is then the same as one before both.
            await in_thread(self._parts.generations.forget_generations)
            await self._parts.journal.belong_to(node.id)

    async def _beat(self) -> None:
        """One heartbeat, if it is due."""
        if self._node is None or not self._is_time():
            return
        is_away = not self._hears()
        self._is_due = False
        try:
            request = await self._measure()
        except OSError as error:
            # This machine is there, and what is on it nobody can tell now: no report is better than a wrong one.
            log.warning("worker.cannot_report %s", disk.storage_error(error, "look at what is installed"))
            request = HeartbeatRequest()
        if is_away or not self._hears():
            request = msgspec.structs.replace(request, bus=BUS_AWAY)
            if not self._said_away:
                log.warning("worker.bus_away heartbeats go on; commands wait until the bus is back")
        self._said_away = request.bus == BUS_AWAY
        if self._renewal.is_due(self._is_far_away()):
            request = msgspec.structs.replace(request, renew=True)
        try:
            reply = await self._link.heartbeat(self._node.id, self._node.node_token, request)
        except (NotFound, Unauthenticated) as error:
            log.warning("worker.unknown %s", error)
            self._turn.set()
        except Unavailable as error:
            if not self._is_unheard:
                log.warning("worker.heartbeat_failed %s", error)
            self._is_due = self._is_unheard = True
        else:
            self._mark, self._is_known = reply.mark, True
            await self._take_renewed(reply)
            for intent in reply.cancelled:
                self._parts.executor.cancel(intent)
            self._is_unheard = False
            interval = self._options.heartbeat_seconds or self._node.heartbeat_seconds or HEARTBEAT_SECONDS
            self._due_at = asyncio.get_running_loop().time() + interval
            await in_thread(self._parts.supervisor.tidy)

    async def _take_renewed(self, reply: HeartbeatReply) -> None:
        """Use what a heartbeat has brought: a new token, a new credential. What is being done goes on."""
        node, given = self._node, reply.credential
        assert node is not None
        if reply.node_token:
            node = msgspec.structs.replace(node, node_token=reply.node_token)
        if given is not None:
            has_moved = given.nats_url != node.nats_url
            node = msgspec.structs.replace(
                node, nats_jwt=given.nats_jwt, nats_user_seed=given.nats_user_seed, nats_url=given.nats_url
            )
            self._renewal.begin(given.nats_life_seconds)
            if has_moved and self._bus is not None and not self._parts.executor.running():
                self._turn.set()
        self._node = node
        if given is not None and given.nats_jwt and self._bus is not None:
            await self._bus.renew(given.nats_jwt, given.nats_user_seed)

    def _is_far_away(self) -> bool:
        """Whether the bus is away for so long that it may have moved, or that our credential may have ended."""
        return not self._hears() and asyncio.get_running_loop().time() - self._connected_at > FAR_AWAY_SECONDS

    def _hears(self) -> bool:
        """Whether commands reach us, as far as can be known."""
        return self._is_listening and self._bus is not None and self._bus.is_connected

    def _is_time(self) -> bool:
        now = asyncio.get_running_loop().time()
        if self._hears():
            self._connected_at = now
            return self._is_due or self._said_away or now >= self._due_at
        away = now - self._connected_at
        # A frontend of LocalAI's gives a credential to who registers, and to nobody else; to register ends its drain,
        # so that is done for nothing less. And what is being done here comes first, because joining again ends it.
        is_refused = self._bus is not None and self._bus.is_refused and not self._renewal.is_possible
        if is_refused and away > FAR_AWAY_SECONDS and not self._parts.executor.running():
            log.warning("worker.joins_again bus_away_seconds=%.0f", away)
            self._turn.set()
        is_opening = not self._is_listening and away < OPENING_SECONDS
        return not is_opening and (self._is_due or now >= self._due_at)

    async def _measure(self) -> HeartbeatRequest:
        """What is so now. What lives in memory is read in one go, so that a command is never in neither list; and what
        was under way at any moment of looking at the disk is called so, because it may have been seen half done.
        """
        before = self._parts.executor.running()
        capacity = await in_thread(self._parts.machine.capacity, self._options.models)
        backends = await self._parts.inventory.list_installed()
        models = await in_thread(self._parts.models.held_models)
        replicas, results, running = (
            self._parts.supervisor.running(),
            self._parts.journal.results(),
            self._parts.executor.running(),
        )
        self._sequence += 1
        report = Report(
            boot_id=self._boot_id,
            sequence=self._sequence,
            mark=self._mark,
            boot_mark=self._boot_mark,
            version=enginehouse.__version__,
            confinement=self._options.confinement.described,
            backends=backends,
            models=models,
            replicas=replicas,
            results=results,
            running=tuple(dict.fromkeys((*before, *running))),
        )
        return HeartbeatRequest(
            available_ram=capacity.available_ram,
            available_disk=capacity.available_disk,
            total_disk=capacity.total_disk,
            gpu_vendor=capacity.gpu_vendor,
            report=report,
        )

    async def _leave(self) -> None:
        if self._node is None or not self._is_known:
            return
        try:
            async with asyncio.timeout(LEAVE_SECONDS):
                await self._link.deregister(self._node.id, self._node.node_token)
        except (EnginehouseError, TimeoutError) as error:
            log.warning("worker.goodbye_unheard %s", error)
