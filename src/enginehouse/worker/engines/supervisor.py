"""Owns the engine processes of this worker: starts, checks, watches and stops them. The only writer of process state.

A process counts as running only after its engine was ready. Its end is noticed at once and signalled by `changed`. No
process outlives the worker: the kernel ends the children of a killed worker, and the next start finds any leftovers by
record and nonce. Starts and stops of one process key are serialized.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack, ExitStack
from types import TracebackType

import msgspec

from enginehouse.core.errors import Invalid, Unavailable
from enginehouse.core.installation import RUN_FILE
from enginehouse.core.progress import ReportProgress, no_progress
from enginehouse.core.replica import LOCALAI_GRPC, OPENAI_HTTP, EngineProtocol, RunningReplica
from enginehouse.host import disk, processes
from enginehouse.host.blocking import in_thread
from enginehouse.ports import Engine
from enginehouse.worker.backends.trees import Trees
from enginehouse.worker.enclosures import Enclosures
from enginehouse.worker.engines.launch import POLL_SECONDS, LaunchPlan, Starter, choose_port
from enginehouse.worker.engines.logs import EngineLogs
from enginehouse.worker.engines.ports import Ports
from enginehouse.worker.engines.process_table import Records, Running, Started, StartRequest, Stopped
from enginehouse.worker.locks import Locks
from enginehouse.worker.models.files import ModelFiles
from enginehouse.worker.options import WorkerOptions

log = logging.getLogger(__name__)

PORT_TRIES = 20  # other programs may take a port between its check and the engine's bind
IDLE_LOOK_SECONDS = 0.2  # between checks whether an engine still has connections
PROOF_SECONDS = 2.0  # for the health check of a running process, which is cheap for the engine
LOG_BYTES = 8 * 1024 * 1024  # of one engine; a larger log is truncated to nothing
LOOKS_PER_TRIM = 4  # at what was added to the logs: their lines carry the time of the look
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
    ) -> None:
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

    async def start(self, request: StartRequest, report: ReportProgress = no_progress) -> Started:
        """Return a live process for `request`: the running one if it fits, otherwise a new one that replaces it."""
        if request.process_only:
            # LocalAI's frontends present the token with which workers join.
            request = msgspec.structs.replace(request, key=self._options.join_token)
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
        """Wait until the engine has no connections; frontends close connections that they do not use."""
        current = self._running.get(process_key)
        deadline = asyncio.get_running_loop().time() + limit_seconds
        while current is not None and current.process.returncode is None:
            if not await in_thread(processes.connections_to, current.process.pid, current.port):
                return True
            if asyncio.get_running_loop().time() > deadline:
                log.warning("engine.still_busy key=%s seconds=%.0f", process_key, limit_seconds)
                return False
            await asyncio.sleep(IDLE_LOOK_SECONDS)
        return True

    async def stop(self, process_key: str) -> bool:
        """Stop a process, and return whether there was one. Raises `Unavailable` if it does not end."""
        async with self._locks.hold(process_key):
            current = self._running.get(process_key)
            # Not `is_alive`: this call must finish an interrupted stop.
            if current is None or current.process.returncode is not None:
                return False
            await self._stop(current)
            return True

    async def stop_from(self, directory: str, *, but_inode: int | None = None) -> Stopped:
        """Stop the processes of a backend's directory, except those of the tree with `but_inode`."""
        matching = [
            key
            for key, one in self._running.items()
            if one.request.directory == directory and (but_inode is None or one.inode != but_inode)
        ]
        return await self._stop_each(matching)

    async def stop_model(self, model: str) -> Stopped:
        """Stop every replica of a model. One that is starting is stopped after its start has succeeded or failed."""
        requests = self._coming | {key: one.request for key, one in self._running.items()}
        return await self._stop_each([key for key, request in requests.items() if request.model.name == model])

    async def stop_all(self) -> Stopped:
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
        self._changed()

    async def _stop(self, current: Running) -> None:
        current.is_stopping = True
        if current.is_ready and current.process.returncode is None:
            await self._starter.free(current)
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
