"""Owns the engine processes of this worker: starts, checks, watches and stops them. The only writer of process state.

A process counts as running only after its engine was ready. Its end is noticed at once and signalled by `changed`. No
process outlives the worker: the kernel ends the children of a killed worker, and the next start finds any leftovers by
record and nonce. Starts and stops of one process key are serialized. An engine that ends by itself is started again
with the same request, within the bounds of `restarts`; a start or stop that is asked for takes precedence.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Collection, Mapping
from contextlib import AsyncExitStack, ExitStack
from types import TracebackType

import msgspec

from enginehouse.core.errors import EnginehouseError, Invalid, Unavailable
from enginehouse.core.installation import RUN_FILE
from enginehouse.core.progress import ReportProgress, no_progress
from enginehouse.core.replica import LOCALAI_GRPC, OPENAI_HTTP, EngineProtocol, FailedReplica, RunningReplica
from enginehouse.host import disk, processes
from enginehouse.host.blocking import in_thread
from enginehouse.ports import Engine
from enginehouse.worker.backends.trees import Trees
from enginehouse.worker.enclosures import Enclosures
from enginehouse.worker.engines.launch import POLL_SECONDS, LaunchPlan, Starter, choose_port, how_it_ended
from enginehouse.worker.engines.logs import EngineLogs
from enginehouse.worker.engines.ports import Ports
from enginehouse.worker.engines.process_table import EndedProcess, Records, Running, Started, StartRequest, Stopped
from enginehouse.worker.engines.restarts import PendingRestart, RestartRules, Restarts
from enginehouse.worker.locks import Locks
from enginehouse.worker.models.files import ModelFiles
from enginehouse.worker.options import WorkerOptions

log = logging.getLogger(__name__)

PORT_TRIES = 20  # other programs may take a port between its check and the engine's bind
MEMORY_STEP_BYTES = 16 * 1024**2  # less does not matter to a placement
IDLE_LOOK_SECONDS = 0.2  # between checks whether an engine still has connections
# An engine without connections for this long is idle: frontends hear of a stop in a second (board.CATCH_UP_SECONDS).
QUIET_SECONDS = 1.5
UNUSED_SECONDS = 0.4  # the same if it had none from the start: frontends keep theirs for 3 s after a request
PROOF_SECONDS = 2.0  # for the health check of a running process, which is cheap for the engine
LOG_BYTES = 8 * 1024 * 1024  # of one engine; a larger log is truncated to nothing
LOOKS_PER_TRIM = 4  # at what was added to the logs: their lines carry the time of the look
RULES = RestartRules()
TRIM_SECONDS = 1.0  # between checks of the logs; a fast disk can take half a gigabyte in that time


class Supervisor:
    """Use with `async with`: the exit stops all processes and ends their watchers."""

    def __init__(
        self,
        options: WorkerOptions,
        trees: Trees,
        models: ModelFiles,
        engine: Engine,
        *,
        environment: Mapping[str, str],
        enclosures: Enclosures,
        changed: Callable[[], None],
        locks: Locks | None = None,
        rules: RestartRules = RULES,
    ) -> None:
        """`locks` are those of commands, by subject: a restart holds what a start by a command would."""
        self._options = options
        self._trees = trees
        self._models = models
        self._changed = changed
        self._host = options.advertise_host or "127.0.0.1"
        self._records = Records(options.processes)
        self._enclosures = enclosures
        self._starter = Starter(options, engine, self._records, environment, enclosures)
        self.logs = EngineLogs((options.join_token,))
        self._running: dict[str, Running] = {}
        self._coming: dict[str, StartRequest] = {}  # starting, also before the process exists
        self._locks = Locks()
        self._command_locks = locks or Locks()
        self._is_closing = False
        self._restarts = Restarts(rules, lambda: asyncio.get_running_loop().time())
        self._watchers = asyncio.TaskGroup()
        self._watching: set[asyncio.Task[None]] = set()
        self._trimming: asyncio.Task[None] | None = None
        self._ports: Ports | None = None

    async def __aenter__(self) -> Supervisor:
        self._ports = Ports(self._options.base_port, asyncio.get_running_loop().time, self._options.ports_file)
        await asyncio.to_thread(self._ports.load)
        await self._watchers.__aenter__()
        await asyncio.to_thread(self._kill_leftovers)
        await asyncio.to_thread(self._enclosures.prepare)
        self._trimming = self._watchers.create_task(self._trim())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._is_closing = True
        if (await self.stop_all()).survivors:
            for task in self._watching:
                task.cancel()  # the processes do not end; the next worker finds them by their records
        if self._trimming is not None:
            self._trimming.cancel()
        # Without the error, which would cancel the watchers: they have to clean up whatever the reason for the exit.
        await self._watchers.__aexit__(None, None, None)

    def listen_on(self, host: str) -> None:
        """Set the address for new engines: the one at which the frontend reaches this machine."""
        self._host = host

    def running(self) -> tuple[RunningReplica, ...]:
        return tuple(one.report() for one in self._running.values() if one.is_alive and one.is_ready)

    async def measure(self) -> None:
        """Look which version each engine runs, and how much memory it holds. Only growth by a step counts, so that
        reports rarely change.
        """
        for one in list(self._running.values()):
            if one.is_alive and one.is_ready:
                one.is_outdated = await in_thread(self._trees.inode_of, one.request.directory) not in (None, one.inode)
                held = await in_thread(processes.memory_of, one.process.pid)
                one.memory_bytes = max(one.memory_bytes, -(-held // MEMORY_STEP_BYTES) * MEMORY_STEP_BYTES)

    def failed(self) -> tuple[FailedReplica, ...]:
        return self._restarts.failed()

    def restarting(self) -> tuple[str, ...]:
        return self._restarts.pending()

    async def start(self, request: StartRequest, report: ReportProgress = no_progress) -> Started:
        """Return a live process for `request`: the running one if it fits, otherwise a new one that replaces it.

        Raises `Hopeless` if its engine ended too often a short time ago.
        """
        self._restarts.drop(request.process_key)
        if request.process_only:
            # LocalAI's frontends present the token with which workers join.
            request = msgspec.structs.replace(request, key=self._options.join_token)
        return await self._start_in_turn(request, report)

    async def _start_in_turn(self, request: StartRequest, report: ReportProgress) -> Started:
        async with self._locks.hold(request.process_key):
            self._coming[request.process_key] = request
            try:
                return await self._start_or_find(request, report)
            finally:
                del self._coming[request.process_key]

    async def _start_or_find(self, request: StartRequest, report: ReportProgress) -> Started:
        inode = await in_thread(self._trees.inode_of, request.directory)
        current = self._running.get(request.process_key)
        if current is not None and current.serves(request, inode) and await self._is_healthy(current):
            current.request = request
            return current.started
        if current is not None:
            await self._stop(current)
        self._restarts.check(request, (request.model.revision, request.directory, inode))
        if inode is None or not (self._trees.path_of(request.directory) / RUN_FILE).is_file():
            raise Unavailable(
                f"cannot start {request.model.name}: the backend {request.directory} is not installed on this node; "
                "install it first",
                code="not_found",
            )
        chosen = LaunchPlan(
            request=request,
            tree=self._trees.path_of(request.directory),
            inode=inode,
            model_path=None if request.process_only else await in_thread(self._models.check_files, request.model),
            model_directory=None if request.process_only else self._models.path_of(request.model),
            linked=() if request.process_only else await in_thread(self._models.shared_storage, request.model),
            host=self._host,
            running_models={one.request.model.name for one in self._running.values() if one.is_alive},
            protocols=await in_thread(self._protocols_of, request),
        )
        return await self._start(chosen, report)

    def _protocols_of(self, request: StartRequest) -> tuple[EngineProtocol, ...]:
        metadata = self._trees.metadata_of(request.directory)
        declared = metadata.protocol if metadata is not None else ""
        if request.process_only and declared == OPENAI_HTTP:
            raise Invalid(
                f"cannot start {request.directory} for a LocalAI frontend: it speaks OpenAI's HTTP API, which only "
                "Enginehouse frontends use; choose a backend that speaks LocalAI's protocol",
                code="unsupported",
            )
        if request.process_only:
            return (LOCALAI_GRPC,)
        return (declared,) if declared else (LOCALAI_GRPC, OPENAI_HTTP)

    async def until_idle(self, process_key: str, limit_seconds: float) -> bool:
        """Wait until frontends use the engine no more: they close the connections of a replica that they give up. One
        that has not heard of the stop may have no connection for a moment, so none may come for a while.
        """
        current = self._running.get(process_key)
        if current is not None:
            self._starter.forget(current)  # the connections of this worker do not count
        clock = asyncio.get_running_loop().time
        deadline = clock() + limit_seconds
        quiet_since, quiet_seconds = clock(), UNUSED_SECONDS
        while current is not None and current.process.returncode is None:
            connections = await in_thread(processes.connections_to, current.process.pid, current.port)
            if connections:
                quiet_since, quiet_seconds = clock(), QUIET_SECONDS
            elif clock() - quiet_since >= quiet_seconds:
                return True
            if clock() > deadline:
                if connections:
                    log.warning("engine.still_busy key=%s seconds=%.0f", process_key, limit_seconds)
                return not connections
            await asyncio.sleep(IDLE_LOOK_SECONDS)
        return True

    async def until_all_idle(self, limit_seconds: float) -> None:
        """The same for all engines of our own frontends; LocalAI's never close their connections."""
        async with asyncio.TaskGroup() as group:
            for key, one in self._running.items():
                if not one.request.process_only:
                    group.create_task(self.until_idle(key, limit_seconds))

    async def stop(self, process_key: str) -> EndedProcess | None:
        """Stop a process; None if there is none. Raises `Unavailable` if it does not end."""
        self._restarts.drop_where(lambda request: request.process_key == process_key)
        async with self._locks.hold(process_key):
            current = self._running.get(process_key)
            # Not `is_alive`: this call must finish an interrupted stop.
            if current is None or current.process.returncode is not None:
                self._restarts.drop(process_key)  # it ended by itself while this call waited for its turn
                return None
            await self._stop(current)
            return EndedProcess(current.freed)

    async def stop_from(self, directory: str, *, kept: Collection[int] = (), newest: int | None = None) -> Stopped:
        """Stop the processes of a backend's directory, except those of the trees with these inodes. What is to be
        started again starts from the `newest` tree; older trees are kept only for replicas of our own frontends, which
        replace them.
        """
        if newest is None:
            self._restarts.drop_where(lambda request: request.directory == directory)
        matching = [
            key
            for key, one in self._running.items()
            if one.request.directory == directory
            and (newest is None or one.inode != newest)
            and (one.inode not in kept or one.request.process_only)
        ]
        return await self._stop_each(matching)

    async def stop_model(self, model: str) -> Stopped:
        """Stop every replica of a model. One that is starting is stopped after its start has succeeded or failed."""
        self._restarts.drop_where(lambda request: request.model.name == model)
        requests = self._coming | {key: one.request for key, one in self._running.items()}
        return await self._stop_each([key for key, request in requests.items() if request.model.name == model])

    async def stop_all(self) -> Stopped:
        self._restarts.drop_where(lambda request: True)
        return await self._stop_each(list(self._coming | {key: one.request for key, one in self._running.items()}))

    def find(self, process_key: str) -> RunningReplica | None:
        """The process with this key that has not ended, including one that is stopping or failed to stop."""
        current = self._running.get(process_key)
        return current.report() if current is not None and current.process.returncode is None else None

    def tidy(self) -> None:
        """Remove the homes of removed backends. An unreadable backends directory removes nothing. Blocks."""
        requests = [*self._coming.values(), *(one.request for one in list(self._running.values()))]
        try:
            self._trees.backends.stat()
            installed = {path.name for path in self._trees.every_tree()}
            self._enclosures.tidy(installed | {request.directory for request in requests})
        except OSError as error:
            log.warning("engines.not_tidied error=%s", error)

    async def _trim(self) -> None:
        """Runs independently of bus and frontend: an engine may log without limit during an outage."""
        while True:
            for _ in range(LOOKS_PER_TRIM):
                await asyncio.sleep(TRIM_SECONDS / LOOKS_PER_TRIM)
                await asyncio.to_thread(self.logs.look)
            await asyncio.to_thread(self._trim_logs)

    def _trim_logs(self) -> None:
        """Bound the logs of long-lived engines. Logs are opened in append mode, so truncation is safe. Blocks."""
        for one in list(self._running.values()):
            try:
                if one.log.stat().st_size > LOG_BYTES:
                    os.truncate(one.log, 0)
            except OSError:
                continue

    async def _stop_each(self, keys: list[str]) -> Stopped:
        stopped: list[str] = []
        survivors: list[str] = []

        async def stop_one(key: str) -> None:
            try:
                if await self.stop(key):
                    stopped.append(key)
            except Unavailable as error:
                log.error("engine.survives key=%s error=%s", key, error)
                survivors.append(key)

        async with asyncio.TaskGroup() as group:
            for key in keys:
                group.create_task(stop_one(key))
        return Stopped(tuple(sorted(stopped)), tuple(sorted(survivors)))

    async def _is_healthy(self, current: Running) -> bool:
        try:
            async with asyncio.timeout(PROOF_SECONDS):
                while current.is_alive:
                    if await self._starter.is_answering(current):
                        return True
                    await asyncio.sleep(POLL_SECONDS)
        except TimeoutError:
            # Many engines of LocalAI answer one call at a time, so that a health check waits behind a long answer.
            if current.is_alive and current.protocols[0] == LOCALAI_GRPC:
                return await in_thread(processes.is_serving, current.process.pid, current.port)
            log.warning("engine.silent key=%s address=%s", current.request.process_key, current.address)
        return False

    async def _start(self, chosen: LaunchPlan, report: ReportProgress) -> Started:
        """Start the process; if another program takes its port, retry with another port."""
        ports = self._chosen_ports()
        request = chosen.request
        refused: set[int] = set()
        for _ in range(PORT_TRIES):
            port = choose_port(ports, request.process_key, chosen.host, refused)
            with ExitStack() as unless_spawned:
                unless_spawned.callback(ports.release, request.process_key, port, used=False)
                try:
                    await in_thread(ports.save)
                except OSError as error:
                    raise disk.storage_error(error, f"start {request.model.name}") from error
                current = await self._starter.spawn(msgspec.structs.replace(chosen, port=port))
                unless_spawned.pop_all()
            self._running[request.process_key] = current
            self.logs.began(request.process_key, current.log, (request.key, current.nonce))
            watching = self._watchers.create_task(self._watch(current))
            self._watching.add(watching)
            watching.add_done_callback(self._watching.discard)
            async with AsyncExitStack() as unless_answered:
                unless_answered.push_async_callback(self._stop, current)
                is_listening = await self._starter.until_ready(current)
                if is_listening:
                    report("loading", "", 0, 0)
                    await self._starter.load(current, chosen)
                current.is_ready = is_listening
                unless_answered.pop_all()
            if current.is_ready:
                ports.note(port, checks_key=current.checks_key)
                await self._note_ports()
                log.info(
                    "engine.ready key=%s address=%s pid=%d", request.process_key, current.address, current.process.pid
                )
                self._changed()
                return current.started
            refused.add(port)
        raise Unavailable(
            f"cannot start {request.model.name}: other programs took {PORT_TRIES} ports from {min(refused)} up; "
            "start the worker with another base port",
            code="resource_exhausted",
        )

    async def _watch(self, current: Running) -> None:
        """Wait for the end of a process, expected or not, and clean up after it."""
        code = await current.process.wait()
        is_restarted = not current.is_stopping and current.is_ready and not current.request.process_only
        if is_restarted:
            self._restarts.note_exit(current.request)
        if not current.is_stopping and current.is_ready:
            log.warning("engine.exited key=%s code=%d", current.request.process_key, code)
        # Its own children must not outlive it.
        await in_thread(processes.kill_leftovers, current.nonce, self._options.grace_seconds)
        if self._running.get(current.request.process_key) is current:
            del self._running[current.request.process_key]
        self._chosen_ports().release(current.request.process_key, current.port, used=current.is_ready)
        await self._note_ports()
        await in_thread(self._records.remove, current.nonce)
        await in_thread(self._enclosures.remove, current.nonce)
        if is_restarted:
            how = await in_thread(how_it_ended, current)
            if self._restarts.takes_end(current.request) and not self._is_taken(current.request.process_key):
                self._restart_later(current.request, current.inode, how)
        self._changed()

    def _is_taken(self, process_key: str) -> bool:
        """Whether a newer process has this key, or is about to: it must not be replaced by an older request."""
        return process_key in self._running or process_key in self._coming

    def _restart_later(self, request: StartRequest, inode: int | None, how: str) -> None:
        if self._is_closing:
            return
        pending = self._restarts.note_end(request, (request.model.revision, request.directory, inode), how)
        if pending is None:
            log.error("engine.given_up key=%s ended=%r", request.process_key, how)
            return
        log.warning("engine.restarts key=%s pause_seconds=%.0f", request.process_key, pending.pause_seconds)
        restarting = self._watchers.create_task(self._restart(pending, inode))
        self._watching.add(restarting)
        restarting.add_done_callback(self._watching.discard)

    async def _restart(self, pending: PendingRestart, inode: int | None) -> None:
        """Start an engine again with the request of the process that ended. The key and the generation are the same, so
        frontends recognize the new process in the next report.
        """
        request = pending.request
        if not await pending.is_due():
            return
        async with (
            self._command_locks.hold(f"replica:{request.process_key}"),
            self._command_locks.hold(f"backend:{request.directory}", exclusive=False),
        ):
            if pending.is_dropped:
                return
            if self._is_taken(request.process_key):
                self._restarts.drop(request.process_key)
                return
            try:
                await self._start_in_turn(request, no_progress)
                self._restarts.drop(request.process_key)
            except EnginehouseError as error:
                if not pending.is_dropped:
                    self._restart_later(request, inode, f"before it was ready: {error.message}")
                    self._changed()

    async def _stop(self, current: Running) -> None:
        current.is_stopping = True
        if current.is_ready and current.process.returncode is None:
            current.freed = await self._starter.free(current)
        await processes.stop_group(current.process, self._options.grace_seconds)
        if current.process.returncode is None:
            # The entry stays: the next stop tries again, and the port and files remain reserved.
            raise Unavailable(
                f"cannot stop {current.request.process_key}: process {current.process.pid} did not end after SIGKILL; "
                "check on that machine what it waits for",
                code="process_survived",
            )
        # The watcher cleans up; the old entry must not be visible until then.
        if self._running.get(current.request.process_key) is current:
            del self._running[current.request.process_key]

    async def _note_ports(self) -> None:
        """Save the ports. A failure is harmless: the older file lets a port rest longer than necessary."""
        try:
            await in_thread(self._chosen_ports().save)
        except OSError as error:
            log.warning("ports.not_saved error=%s", error)

    def _chosen_ports(self) -> Ports:
        assert self._ports is not None, "used outside `async with`"
        return self._ports

    def _kill_leftovers(self) -> None:
        for nonce in self._records.nonces():
            if count := processes.kill_leftovers(nonce, self._options.grace_seconds):
                log.warning("engine.leftover_killed nonce=%s processes=%d", nonce, count)
            self._records.remove(nonce)
