"""Owns the engine processes of this worker: starts, proves, watches and stops them. The only writer of process state.

A process is "already running" only after it has answered; its end is noticed when it happens and told to whoever
listens. Nothing survives the worker: the kernel ends the children of a killed one, and what is left all the same is
found by its record and nonce at the next start. Starts and stops of one key take turns.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack, ExitStack
from types import TracebackType

import msgspec

from enginehouse.core.errors import Unavailable
from enginehouse.core.installation import RUN_FILE
from enginehouse.core.replica import RunningReplica
from enginehouse.host import disk, processes
from enginehouse.host.blocking import in_thread
from enginehouse.ports import Engine
from enginehouse.worker.backends.trees import Trees
from enginehouse.worker.enclosures import Enclosures
from enginehouse.worker.engines.launch import POLL_SECONDS, LaunchPlan, Starter, choose_port
from enginehouse.worker.engines.ports import Ports
from enginehouse.worker.engines.process_table import Records, Running, Started, StartRequest, Stopped
from enginehouse.worker.locks import Locks
from enginehouse.worker.models.files import ModelFiles
from enginehouse.worker.options import WorkerOptions

log = logging.getLogger(__name__)

PORT_TRIES = 20
IDLE_LOOK_SECONDS = 0.2  # between two looks whether an engine still answers somebody
PROOF_SECONDS = 2.0  # how long a running process may take to prove that it lives: its health answer costs it nothing
LOG_BYTES = 8 * 1024 * 1024  # of one engine; cut to nothing beyond
TRIM_SECONDS = 1.0  # between two looks: a fast disk takes half a gigabyte meanwhile


class Supervisor:
    """Use as `async with`: its watchers live inside, and on leaving every process has been stopped."""

    def __init__(
        self,
        place: WorkerOptions,
        trees: Trees,
        models: ModelFiles,
        engine: Engine,
        *,
        environment: Mapping[str, str],
        enclosures: Enclosures,
        changed: Callable[[], None],
    ) -> None:
        self._place = place
        self._trees = trees
        self._models = models
        self._engine = engine
        self._changed = changed
        self._host = place.advertise_host or "127.0.0.1"
        self._records = Records(place.processes)
        self._enclosures = enclosures
        self._starter = Starter(place, engine, self._records, environment, enclosures)
        self._running: dict[str, Running] = {}
        self._coming: dict[str, StartRequest] = {}  # being started, from before there is a process
        self._locks = Locks()
        self._watchers = asyncio.TaskGroup()
        self._watching: set[asyncio.Task[None]] = set()
        self._trimming: asyncio.Task[None] | None = None
        self._ports: Ports | None = None

    async def __aenter__(self) -> Supervisor:
        self._ports = Ports(self._place.base_port, asyncio.get_running_loop().time, self._place.ports_file)
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
                task.cancel()  # the kernel does not let go of them; the next worker looks again, by their records
        if self._trimming is not None:
            self._trimming.cancel()
        # Never with the error: the watchers have their last steps to do, whatever the reason for leaving.
        await self._watchers.__aexit__(None, None, None)

    def listen_on(self, host: str) -> None:
        """Where engines listen from now on: the address under which the frontend reaches this machine."""
        self._host = host

    def running(self) -> tuple[RunningReplica, ...]:
        return tuple(one.report() for one in self._running.values() if one.is_alive and one.is_ready)

    async def start(self, request: StartRequest) -> Started:
        """The address of a live process for `request`: the one that runs, or a new one in its place."""
        async with self._locks.hold(request.process_key):
            self._coming[request.process_key] = request
            try:
                return await self._start_or_find(request)
            finally:
                del self._coming[request.process_key]

    async def _start_or_find(self, request: StartRequest) -> Started:
        inode = await in_thread(self._trees.inode_of, request.directory)
        current = self._running.get(request.process_key)
        if current is not None and current.serves(request, inode) and await self._proves(current):
            current.request = request
            return current.started
        if current is not None:
            await self._stop(current)
        if inode is None or not (self._trees.path_of(request.directory) / RUN_FILE).is_file():
            raise Unavailable(
                f"cannot start {request.model.name}: the backend {request.directory} is not installed on this node",
                code="not_found",
            )
        chosen = LaunchPlan(
            request=request,
            tree=self._trees.path_of(request.directory),
            inode=inode,
            model_path=await in_thread(self._models.check_files, request.model),
            host=self._host,
            running_models={one.request.model.name for one in self._running.values() if one.is_alive},
        )
        return await self._start(chosen)

    async def until_idle(self, process_key: str, limit_seconds: float) -> bool:
        """Wait until nobody is connected to the engine; frontends let go of connections that they do not use."""
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
        """Whether there was one; `Unavailable` where it does not end."""
        async with self._locks.hold(process_key):
            current = self._running.get(process_key)
            # Not `is_alive`: a stop that was interrupted is finished by the next one.
            if current is None or current.process.returncode is not None:
                return False
            await self._stop(current)
            return True

    async def stop_from(self, directory: str, *, but_inode: int | None = None) -> Stopped:
        """Stop what runs from a backend's directory, except from the tree `but_inode`."""
        matching = [
            key
            for key, one in self._running.items()
            if one.request.directory == directory and (but_inode is None or one.inode != but_inode)
        ]
        return await self._stop_each(matching)

    async def stop_model(self, model: str) -> Stopped:
        """Stop every replica of a model. One that is being started is stopped when it has come up, or has failed to."""
        requests = self._coming | {key: one.request for key, one in self._running.items()}
        return await self._stop_each([key for key, request in requests.items() if request.model.name == model])

    async def stop_all(self) -> Stopped:
        return await self._stop_each(list(self._coming | {key: one.request for key, one in self._running.items()}))

    def find(self, process_key: str) -> RunningReplica | None:
        """What has this key and has not ended, one that is being stopped or did not stop included."""
        current = self._running.get(process_key)
        return current.report() if current is not None and current.process.returncode is None else None

    def tidy(self) -> None:
        """Keep no home of a backend that is gone. A disk that cannot be read now shows nothing. Blocks."""
        requests = [*self._coming.values(), *(one.request for one in list(self._running.values()))]
        try:
            self._trees.backends.stat()
            installed = {path.name for path in self._trees.every_tree()}
            self._enclosures.tidy(installed | {request.directory for request in requests})
        except OSError as error:
            log.warning("engines.not_tidied error=%s", error)

    async def _trim(self) -> None:
        """Whether anybody hears this worker or not: an engine may print without an end."""
        while True:
            await asyncio.sleep(TRIM_SECONDS)
            await asyncio.to_thread(self._trim_logs)

    def _trim_logs(self) -> None:
        """Keep the logs of long-lived engines bounded; they are written in append mode, so cutting is safe. Blocks."""
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

    async def _proves(self, current: Running) -> bool:
        try:
            async with asyncio.timeout(PROOF_SECONDS):
                while current.is_alive:
                    # Anybody may give the health answer, so who listens there is looked at as well.
                    if await self._engine.is_ready(current.address, current.request.key) and await in_thread(
                        processes.is_listening, current.process.pid, current.port
                    ):
                        return True
                    await asyncio.sleep(POLL_SECONDS)
        except TimeoutError:
            log.warning("engine.silent key=%s address=%s", current.request.process_key, current.address)
        return False

    async def _start(self, chosen: LaunchPlan) -> Started:
        """Spawn until a port is had; `chosen` has the first one."""
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
            watching = self._watchers.create_task(self._watch(current))
            self._watching.add(watching)
            watching.add_done_callback(self._watching.discard)
            async with AsyncExitStack() as unless_answered:
                unless_answered.push_async_callback(self._stop, current)
                current.is_ready = await self._starter.until_ready(current)
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
            f"cannot start {request.model.name}: {PORT_TRIES} ports from {min(refused)} up were taken by others",
            code="resource_exhausted",
        )

    async def _watch(self, current: Running) -> None:
        """Notice the end, wanted or not, and clean up after it."""
        code = await current.process.wait()
        if not current.is_stopping and current.is_ready:
            log.warning("engine.exited key=%s code=%d", current.request.process_key, code)
        # What it started itself must not outlive it.
        await in_thread(processes.kill_leftovers, current.nonce, self._place.grace_seconds)
        if self._running.get(current.request.process_key) is current:
            del self._running[current.request.process_key]
        self._chosen_ports().release(current.request.process_key, current.port, used=current.is_ready)
        await self._note_ports()
        await in_thread(self._records.remove, current.nonce)
        await in_thread(self._enclosures.remove, current.nonce)
        self._changed()

    async def _stop(self, current: Running) -> None:
        current.is_stopping = True
        await processes.stop_group(current.process, self._place.grace_seconds)
        if current.process.returncode is None:
            # It stays known, so that the next stop tries again and its port and files stay its own.
            raise Unavailable(
                f"cannot stop {current.request.process_key}: process {current.process.pid} does not end though it was "
                "killed; look what it waits for on that machine",
                code="process_survived",
            )
        # The watcher does the rest; nobody may meet the old entry meanwhile.
        if self._running.get(current.request.process_key) is current:
            del self._running[current.request.process_key]

    async def _note_ports(self) -> None:
        """Where this cannot be written, what is on disk lets a port rest for longer than it must."""
        try:
            await in_thread(self._chosen_ports().save)
        except OSError as error:
            log.warning("ports.not_saved error=%s", error)

    def _chosen_ports(self) -> Ports:
        assert self._ports is not None, "used outside `async with`"
        return self._ports

    def _kill_leftovers(self) -> None:
        for nonce in self._records.nonces():
            if count := processes.kill_leftovers(nonce, self._place.grace_seconds):
                log.warning("engine.leftover_killed nonce=%s processes=%d", nonce, count)
            self._records.remove(nonce)
