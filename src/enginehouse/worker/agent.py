"""The main loop of a worker: join the cluster, take commands, send reports, shut down in order.

The only durable state is on the worker's disk. A report describes the current state; it is taken every few seconds and
after every change, and sent whole unless the last answer confirmed it. An outage of the bus or the frontend, however
long, stops no engine. While the bus is away, heartbeats continue and say so. The worker joins again when the frontend
no longer knows it.
Shutdown order: stop taking messages, deregister, stop the engines.
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
from enginehouse.core.report import Report, ReportStamp, digest_of
from enginehouse.host import disk
from enginehouse.host.blocking import in_thread
from enginehouse.loop import Loop
from enginehouse.ports import Bus, Link
from enginehouse.worker.options import WorkerOptions
from enginehouse.worker.parts import AgentParts, Signer
from enginehouse.worker.protocol.listener import Listener
from enginehouse.worker.registration import Desk, Joined, join
from enginehouse.worker.renewal import Renewal

log = logging.getLogger(__name__)

OpenBus = Callable[[RegisterReply], Awaitable[Bus]]

HEARTBEAT_SECONDS = 10.0  # the default, if neither the frontend nor a setting gives one
TICK_SECONDS = 0.5  # between checks whether a heartbeat is due, and after a failed one
FAR_AWAY_SECONDS = 20.0  # a bus that is away for longer may have moved; the frontend knows its address
# While the bus is being opened, heartbeats wait at most this long. A frontend that ignores `bus` in a heartbeat would
# send commands that the worker cannot receive.
OPENING_SECONDS = 5.0
ANSWER_SECONDS = 15.0  # for answers under way when the worker stops in order
LEAVE_SECONDS = 5.0  # for deregistering; if it fails, the frontend notices the missing heartbeats


class Agent:
    """`run` returns after `stop`, or raises the error of a final refusal."""

    def __init__(self, options: WorkerOptions, parts: AgentParts, link: Link, open_bus: OpenBus) -> None:
        self._options = options
        self._parts = parts
        self._link = link
        self._open_bus = open_bus
        self._stop = asyncio.Event()
        self._turn = asyncio.Event()  # serving must end, to stop or to join again
        self._heartbeat = Loop("worker.heartbeat", self._beat, TICK_SECONDS)
        self._is_due = True
        self._has_failed = False
        self._due_at = 0.0
        self._connected_at = 0.0  # when the bus was last known to deliver commands
        self._is_listening = False
        self._said_away = False
        self._is_known = False  # a heartbeat was answered, so leaving has to deregister
        self._boot_id = uuid.uuid4().hex
        self._sequence = 0
        self._mark = 0.0
        self._boot_mark = 0.0
        self._confirmed_digest = ""  # of the report that the store has, by the last answer
        self._renewal = Renewal(lambda: asyncio.get_running_loop().time())
        self._bus: Bus | None = None
        self._node: RegisterReply | None = None
        parts.changed.connect(self._wake)

    def stop(self) -> None:
        """Make `run` shut down in order. Call it on the loop's thread."""
        self._stop.set()
        self._turn.set()

    async def run(self) -> None:
        identity = await in_thread(self._prepare)
        self._connected_at = asyncio.get_running_loop().time()
        server = self._parts.http_server
        files = self._parts.node_files
        desk = Desk(
            machine=self._parts.machine, link=self._link, identity=identity, serve=server.listen, node_files=files
        )
        async with self._parts.supervisor:
            try:
                while not self._stop.is_set():
                    joined = await join(self._options, desk, self._stop)
                    if joined is not None:
                        await self._serve(joined)
            finally:
                await server.close()
                await self._leave()
                await self._parts.close()

    def _prepare(self) -> Signer:
        """Bring the disk into a consistent state before the first message: interrupted work is finished or undone."""
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
        """Take commands and send reports until the worker must stop or join again."""
        node = joined.node
        self._parts.supervisor.listen_on(joined.host)
        if not self._stop.is_set():
            self._turn.clear()
        try:
            await self._become(node)
        except OSError as error:
            log.warning("worker.cannot_write error=%s", disk.storage_error(error, "record the identity of this node"))
            await asyncio.sleep(TICK_SECONDS)
            return
        self._node = node
        self._connected_at = asyncio.get_running_loop().time()  # the bus is opened now, however long this took
        self._parts.http_server.joined(node)
        self._parts.http_server.heard(node.mark, is_bus_away=False)
        # Commands sent before this registration can no longer arrive; reports say so from now on.
        self._mark = self._boot_mark = node.mark
        self._renewal.begin(node.nats_life_seconds)
        refused: EnginehouseError | None = None
        async with asyncio.TaskGroup() as group:
            # Concurrent with opening the bus: heartbeats do not wait for it.
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
        """Take commands until the worker must stop or join again. An unavailable bus is retried."""
        while not self._turn.is_set():
            try:
                # The current node: a heartbeat may have brought a new credential or address.
                bus = await self._opened(self._node or node)
                if bus is not None:
                    await self._hear(bus, node)
                return
            except (Unavailable, OSError) as error:
                log.warning("worker.bus_unavailable error=%s", error)
                await asyncio.sleep(TICK_SECONDS)
            except Denied as error:
                if not node.nats_jwt:
                    raise  # the credential comes from a setting, so a retry is pointless
                # The credential expired or was revoked before its use. Registration returns another, or the reason.
                log.warning("worker.bus_refused error=%s", error)
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
        # The first report with a connected bus makes the node healthy, and commands may follow. So it must not be sent
        # before every subject is subscribed.
        await listening.wait()
        log.info("worker.joined node=%s name=%s", node.id, node.name)
        self._is_listening = True
        self._connected_at = asyncio.get_running_loop().time()
        self._wake()

    async def _opened(self, node: RegisterReply) -> Bus | None:
        """Open the bus; None if the worker must stop or join again first, because an attempt may take long."""

        async def attempt() -> Bus | EnginehouseError | OSError:
            try:
                return await self._open_bus(node)
            except (EnginehouseError, OSError) as error:
                return error  # raised below: a task group would wrap it

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
        """Record the node's identity. If it differs from the previous one, reset the generations."""
        await in_thread(self._parts.node_files.write_node, node)
        if node.id != self._parts.journal.node_id:
            # The trees come first: the journal decides, so a kill between the two steps repeats both.
            await in_thread(self._parts.generations.forget_generations)
            await self._parts.journal.belong_to(node.id)

    async def _beat(self) -> None:
        """Send a heartbeat if one is due."""
        if self._node is None or not self._is_time():
            return
        is_away = not self._hears()
        self._is_due = False
        try:
            request = await self._measure()
        except OSError as error:
            # The heartbeat goes out without a report: no report is better than a wrong one.
            log.warning("worker.cannot_report error=%s", disk.storage_error(error, "read what is installed"))
            request = HeartbeatRequest()
        if is_away or not self._hears():
            request = msgspec.structs.replace(request, bus=BUS_AWAY)
            if not self._said_away:
                log.warning("worker.bus_away effect=%r", "heartbeats continue; commands wait for the bus")
        self._said_away = request.bus == BUS_AWAY
        if self._renewal.is_due(self._is_far_away()):
            request = msgspec.structs.replace(request, renew=True)
        request = self._without_known_report(request)
        # Whatever becomes of this heartbeat, only its answer tells what the store has then.
        self._confirmed_digest = ""
        try:
            reply = await self._link.heartbeat(self._node.id, self._node.node_token, request)
        except (NotFound, Unauthenticated) as error:
            log.warning("worker.unknown error=%s", error)
            self._turn.set()
        except Unavailable as error:
            if not self._has_failed:
                log.warning("worker.heartbeat_failed error=%s", error)
            self._is_due = self._has_failed = True
        else:
            self._mark, self._is_known = reply.mark, True
            self._confirmed_digest = reply.report_digest
            if request.unchanged is not None and reply.report_digest != request.report_digest:
                self._wake()  # that frontend needs the whole report
            await self._take_renewed(reply)
            self._parts.http_server.heard(reply.mark, is_bus_away=request.bus == BUS_AWAY)
            for intent in reply.cancelled:
                self._parts.executor.cancel(intent)
            self._has_failed = False
            interval = self._options.heartbeat_seconds or self._node.heartbeat_seconds or HEARTBEAT_SECONDS
            self._due_at = asyncio.get_running_loop().time() + interval
            await in_thread(self._parts.supervisor.tidy)

    def _without_known_report(self, request: HeartbeatRequest) -> HeartbeatRequest:
        """The heartbeat with the digest of its report, and without the report itself if the store has it."""
        report = request.report
        if report is None:
            return request
        digest = digest_of(report)
        if digest != self._confirmed_digest:
            return msgspec.structs.replace(request, report_digest=digest)
        stamp = ReportStamp(sequence=report.sequence, mark=report.mark)
        return msgspec.structs.replace(request, report=None, report_digest=digest, unchanged=stamp)

    async def _take_renewed(self, reply: HeartbeatReply) -> None:
        """Apply a new token or credential from a heartbeat reply. Running commands continue."""
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
        if reply.node_token:
            self._parts.http_server.joined(node)
        if given is not None and given.nats_jwt and self._bus is not None:
            await self._bus.renew(given.nats_jwt, given.nats_user_seed)

    def _is_far_away(self) -> bool:
        """Whether the bus is away for so long that it may have moved or the credential may have expired."""
        return not self._hears() and asyncio.get_running_loop().time() - self._connected_at > FAR_AWAY_SECONDS

    def _hears(self) -> bool:
        """Whether commands reach this worker, as far as it can know."""
        return self._is_listening and self._bus is not None and self._bus.is_connected

    def _is_time(self) -> bool:
        now = asyncio.get_running_loop().time()
        if self._hears():
            self._connected_at = now
            return self._is_due or self._said_away or now >= self._due_at
        away = now - self._connected_at
        # LocalAI's frontends issue credentials only at registration. Registering ends a drain, so it happens only for a
        # refused credential. Running commands finish first, because joining again ends them.
        is_refused = self._bus is not None and self._bus.is_refused and not self._renewal.is_possible
        if is_refused and away > FAR_AWAY_SECONDS and not self._parts.executor.running():
            log.warning("worker.joins_again bus_away_seconds=%.0f", away)
            self._turn.set()
        is_opening = not self._is_listening and away < OPENING_SECONDS
        return not is_opening and (self._is_due or now >= self._due_at)

    async def _measure(self) -> HeartbeatRequest:
        """Take a report of the current state.

        The state in memory is read without an await in between, so that every command is in `results` or `running`. A
        command that ran at any time while the disk was read counts as running: the disk may show it half done.
        """
        before = self._parts.executor.running()
        backends = await self._parts.inventory.list_installed()
        models = await in_thread(self._parts.models.held_models)
        await self._parts.supervisor.measure()
        replicas, failed, results, running = (
            self._parts.supervisor.running(),
            self._parts.supervisor.failed(),
            self._parts.journal.results(),
            self._parts.executor.running(),
        )
        # Last: what an engine takes that is shown as running, or as about to be, is no longer free.
        capacity = await in_thread(self._parts.machine.capacity, self._options.models)
        self._sequence += 1
        report = Report(
            boot_id=self._boot_id,
            sequence=self._sequence,
            mark=self._mark,
            boot_mark=self._boot_mark,
            version=enginehouse.__version__,
            confinement=self._options.installing.confinement.described,
            backends=backends,
            models=models,
            replicas=replicas,
            failed=failed,
            restarting=self._parts.supervisor.restarting(),
            results=results,
            running=tuple(dict.fromkeys((*before, *running))),
        )
        return HeartbeatRequest(
            # An unknown amount is left out, never told as 0.
            available_vram=capacity.available_vram if capacity.total_vram else None,
            total_vram=capacity.total_vram or None,
            available_ram=capacity.available_ram,
            available_disk=capacity.available_disk,
            total_disk=capacity.total_disk,
            gpu_vendor=capacity.gpu_vendor,
            gpu_cards=capacity.gpu_cards or None,
            used_cores=capacity.used_cores,
            report=report,
        )

    async def _leave(self) -> None:
        if self._node is None or not self._is_known:
            return
        try:
            async with asyncio.timeout(LEAVE_SECONDS):
                await self._link.deregister(self._node.id, self._node.node_token)
        except (EnginehouseError, TimeoutError) as error:
            log.warning("worker.deregistration_failed error=%s", error)
            return
        # Frontends send no more requests here; those under way are answered.
        await self._parts.supervisor.until_all_idle(ANSWER_SECONDS)
