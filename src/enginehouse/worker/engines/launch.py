"""Starts one engine process with its port, threads, description and environment, waits until it is ready or ends, and
loads its model where the engine takes it after its start.

The engine reads its key from a private file, which is removed as soon as the engine is ready; of the worker's
environment it gets only what it needs. All workers of this user on this machine share one thread budget, because
engines that compete for cores slow each other down by more than half. A start may be refused for lack of memory, never
for lack of threads. The supervisor owns the process afterwards.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
from collections.abc import Collection, Mapping
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path

from msgspec import Struct

from enginehouse.core.errors import EnginehouseError, Hopeless, Unavailable
from enginehouse.core.installation import RUN_FILE
from enginehouse.core.load_options import ModelPaths
from enginehouse.core.model import load_options, load_seconds
from enginehouse.core.name import model_directory
from enginehouse.core.placement import fits, free_memory
from enginehouse.core.progress import format_bytes
from enginehouse.core.replica import LOCALAI_GRPC, OPENAI_HTTP, EngineProtocol
from enginehouse.core.threads import CARD_THREADS, is_for_card, share
from enginehouse.host import disk, hardware, processes, threads
from enginehouse.host.blocking import in_thread
from enginehouse.host.confinement import UNCONFINED_EXIT
from enginehouse.ports import Engine
from enginehouse.worker.enclosures import Enclosures, EngineNeeds
from enginehouse.worker.engines.fitting import card_variables, fit
from enginehouse.worker.engines.ports import Ports
from enginehouse.worker.engines.process_table import Record, Records, Running, StartRequest
from enginehouse.worker.options import WorkerOptions

log = logging.getLogger(__name__)

CANNOT_BIND = 98  # the exit code of our launchers when their port is taken
IN_USE = "address already in use"  # the system's words for it, which engines of others pass on
POLL_SECONDS = (
    0.02  # between checks whether an engine is ready; later ones are rarer, because each costs the engine work
)
MAX_POLL_SECONDS, POLL_GROWTH = 0.25, 1.05
ACTIVITY_SECONDS = 0.2  # between looks at what an engine that is not ready has used
LINES_LOOKED_AT = 50  # of an engine's log, in search of a refused access
LAST_LINES = 5  # of an engine's log, in the error of a failed load
FREE_SECONDS = 5.0  # LocalAI's limit; shorter where a process has less time to end
ENDING_SECONDS = 1.0  # between a broken connection and the end of its process
VULKAN_DRIVERS = "vulkan/icd.d"  # in the tree of an image that brings its own
BUDGET_SECONDS = 5.0  # for the machine-wide lock, which is held for milliseconds; then the start goes on without it


class LaunchPlan(Struct, frozen=True, kw_only=True):
    """The decisions about a start, made before the process exists."""

    request: StartRequest
    tree: Path
    inode: int
    model_path: Path | None  # the first file; None for a process without a model
    model_directory: Path | None = None
    linked: tuple[Path, ...] = ()  # files of the model on shared storage
    host: str
    port: int = 0
    running_models: Collection[str] = ()  # for the error message: models that could be unloaded
    protocols: tuple[EngineProtocol, ...] = (LOCALAI_GRPC, OPENAI_HTTP)

    @property
    def address(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Starter:
    def __init__(
        self,
        options: WorkerOptions,
        engine: Engine,
        records: Records,
        environment: Mapping[str, str],
        enclosures: Enclosures,
    ) -> None:
        self._options = options
        self._engine = engine
        self._records = records
        self._environment = processes.engine_environment(environment)
        self._enclosures = enclosures

    async def spawn(self, chosen: LaunchPlan) -> Running:
        """Start the process and return it before it is ready. A failure leaves no files."""
        request = chosen.request
        nonce = secrets.token_hex(16)
        log = self._options.engine_logs / f"{model_directory(request.model.name)}-{request.slot}.log"
        record = Record(nonce=nonce, process_key=request.process_key, directory=request.directory)
        async with AsyncExitStack() as unless_spawned:
            unless_spawned.push_async_callback(in_thread, self._records.remove, nonce)
            unless_spawned.push_async_callback(in_thread, self._enclosures.remove, nonce)
            try:
                await in_thread(self._check_memory, chosen)
                process, given = await self._spawn_within_budget(chosen, record, log)
            except OSError as error:
                raise disk.storage_error(error, f"start {request.model.name}") from error
            unless_spawned.pop_all()
        return Running(
            request=request,
            inode=chosen.inode,
            address=chosen.address,
            port=chosen.port,
            nonce=nonce,
            process=process,
            log=log,
            protocols=chosen.protocols,
            threads=given,
        )

    async def _spawn_within_budget(
        self, chosen: LaunchPlan, record: Record, log: Path
    ) -> tuple[asyncio.subprocess.Process, int]:
        """Start the process; also returns its share of the machine's threads."""
        async with threads.budget(BUDGET_SECONDS) as assigned:
            given = share(
                self._options.thread_budget or hardware.cores(), chosen.request.model.options.threads, assigned
            )
            await in_thread(_keep_last, log)
            description = await in_thread(self._records.describe, record.nonce, _description(chosen, given))
            await in_thread(self._records.write, record)
            variables = {
                processes.NONCE: record.nonce,
                threads.THREADS: str(CARD_THREADS if await in_thread(_is_on_card, chosen) else given),
                "ENGINEHOUSE_MODEL_FILE": str(description),
                **_localai_environment(chosen),
                **await in_thread(card_variables, chosen.request.model, record.directory, self._environment),
            }
            needs = EngineNeeds(
                directory=record.directory,
                nonce=record.nonce,
                tree=chosen.tree,
                read=(chosen.model_directory or self._options.models, description),
                linked=chosen.linked,
                shared=(self._options.staging, self._options.data) if chosen.request.process_only else (),
                log=log,
            )
            enclosure = await in_thread(self._enclosures.enclose, needs)
            with ExitStack() as stack:
                confined = await in_thread(stack.enter_context, self._enclosures.confined(enclosure))
                process = await processes.spawn(
                    [str(enclosure.tree / RUN_FILE), "--addr", chosen.address],
                    directory=enclosure.tree,
                    environment=self._environment | enclosure.environment | variables,
                    log=log,
                    confined=confined,
                )
                return process, given

    async def until_ready(self, current: Running) -> bool:
        """True when the engine is ready, False if its port was taken; raises if the engine ended or stalled."""
        await in_thread(self._records.write, _record_of(current))
        loop = asyncio.get_running_loop()
        moved_at = looked_at = loop.time()
        end, seen = moved_at + self._options.ready_limit_seconds, processes.Activity()
        pause = POLL_SECONDS
        while current.process.returncode is None:
            if await self.is_answering(current):
                await in_thread(self._records.forget_description, current.nonce)
                # Checked only when it is ready: before that, many engines refuse every request.
                current.checks_key = bool(current.request.key) and await self._engine.checks_key(current.targets[0])
                if not current.checks_key:
                    log.warning("engine.ignores_key key=%s pid=%d", current.request.process_key, current.process.pid)
                return True
            if (now := loop.time()) - looked_at >= ACTIVITY_SECONDS:
                before, seen = seen, processes.activity(current.process.pid)
                moved_at = now if seen.is_working_since(before, now - looked_at) else moved_at
                looked_at = now
            if now - moved_at > self._options.installing.stall_seconds or now > end:
                limit = self._options.installing.stall_seconds if now <= end else self._options.ready_limit_seconds
                state = "has been idle for" if now <= end else "has worked for"
                raise Unavailable(
                    f"cannot start {current.request.model.name}: its engine {state} {limit:.0f} s and is not ready",
                    code="stalled",
                )
            await asyncio.sleep(pause)
            pause = min(MAX_POLL_SECONDS, pause * POLL_GROWTH)
        if await in_thread(_has_lost_port, current):
            return False
        raise await in_thread(_ended, current, self._enclosures)

    async def is_answering(self, current: Running) -> bool:
        """Whether the engine is ready, in any of the protocols that it may speak. The health check needs no key, so
        another process on the port could answer it; therefore this process must be the one that listens there.
        """
        for target in current.targets:
            if await self._engine.is_ready(target):
                if not await in_thread(processes.is_listening, current.process.pid, current.port):
                    return False
                current.protocols = (target.protocol,)
                return True
        return False

    async def load(self, current: Running, chosen: LaunchPlan) -> None:
        """Load the model into a ready process that takes it after its start."""
        request, target = current.request, current.targets[0]
        if request.process_only or chosen.model_directory is None or target.protocol != LOCALAI_GRPC:
            return
        fitting = await in_thread(fit, request.model, chosen.model_path, request.directory)
        paths = ModelPaths(
            directory=str(chosen.model_directory),
            threads=current.threads,
            context_size=fitting.context_size,
            gpu_layers=fitting.gpu_layers,
            parallel=fitting.parallel,
        )
        options = load_options(request.model, paths)
        try:
            await self._engine.load(target, options, limit_seconds=load_seconds(request.model.size_bytes))
        except EnginehouseError as error:
            raise await self._load_failure(current, error) from error

    async def _load_failure(self, current: Running, error: EnginehouseError) -> EnginehouseError:
        if error.code == "upstream_error":
            # The connection breaks a moment before the end of its process is known.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ENDING_SECONDS):
                    await current.process.wait()
        if current.process.returncode is None:
            return await in_thread(_with_last_words, error, current)
        return await in_thread(_ended, current, self._enclosures)

    async def free(self, current: Running) -> bool | None:
        """Let an engine release its model before it is stopped, as LocalAI does; a refusal changes nothing. Returns
        whether it did; None for an engine that has no such call.
        """
        if current.protocols[0] != LOCALAI_GRPC:
            return None
        limit_seconds = min(FREE_SECONDS, self._options.grace_seconds / 2)
        return await self._engine.free(current.targets[0], limit_seconds=limit_seconds)

    def forget(self, current: Running) -> None:
        """Close the connections of this worker to an engine."""
        self._engine.forget(current.address)

    def _check_memory(self, chosen: LaunchPlan) -> None:
        """Refuse a model whose files exceed the free memory. What an engine needs beyond that is not known before."""
        model, capacity = chosen.request.model, hardware.capacity(self._options.models)
        if not fits(model, capacity):
            running = ", ".join(sorted(chosen.running_models))
            raise Unavailable(
                f"cannot start {model.name}: its files are {format_bytes(model.size_bytes)} and "
                f"{format_bytes(free_memory(capacity))} of memory are free on this machine; "
                + (f"unload a model first ({running})" if running else "end other programs or use another machine"),
                code="insufficient_capacity",
            )


def _is_on_card(chosen: LaunchPlan) -> bool:
    return is_for_card(chosen.request.directory, hardware.graphics_vendor())


def choose_port(ports: Ports, key: str, host: str, refused: Collection[int]) -> int:
    return ports.take(key, lambda port: hardware.is_port_free(host, port), refused)


def _has_lost_port(current: Running) -> bool:
    """Whether an engine ended because another program has its port, or has just had it. Blocks."""
    if current.process.returncode == CANNOT_BIND:
        return True
    lines = processes.last_lines(current.log, LINES_LOOKED_AT)
    host = current.address.rpartition(":")[0].strip("[]")
    return any(IN_USE in line.lower() for line in lines) or not hardware.is_port_free(host, current.port)


def _record_of(current: Running) -> Record:
    return Record(
        nonce=current.nonce,
        process_key=current.request.process_key,
        directory=current.request.directory,
        pid=current.process.pid,
        started=processes.start_time(current.process.pid) or 0.0,
    )


def _description(chosen: LaunchPlan, given: int) -> dict[str, object]:
    request = chosen.request
    fitting = fit(request.model, chosen.model_path, request.directory)
    return {
        "path": str(chosen.model_path or ""),
        "name": request.model.name,
        "context": fitting.context_size,
        "parallel": fitting.parallel,
        "gpu_layers": fitting.gpu_layers,
        "threads": given,
        "key": request.key,
    }


def _localai_environment(chosen: LaunchPlan) -> dict[str, str]:
    """The variables of LocalAI's launch contract."""
    key = chosen.request.key
    variables = {"LOCALAI_GRPC_AUTH_TOKEN": key} if key and chosen.protocols[0] != OPENAI_HTTP else {}
    drivers = ":".join(str(path) for path in sorted((chosen.tree / VULKAN_DRIVERS).glob("*.json")))
    return variables | (dict.fromkeys(("VK_DRIVER_FILES", "VK_ICD_FILENAMES"), drivers) if drivers else {})


def _keep_last(log: Path) -> None:
    """Keep the log of the previous start: two logs are enough to see why an engine ended."""
    if log.exists():
        os.replace(log, log.with_name(log.name + ".1"))


def how_it_ended(current: Running) -> str:
    """How a process that was ready ended, with the last lines of its log. Blocks."""
    code = current.process.returncode or 0
    how = f"by signal {-code}" if code < 0 else f"with code {code}"
    lines = _last_words(current, LAST_LINES)
    return f"{how}: {lines}" if lines else how


def _last_words(current: Running, count: int) -> str:
    """The last lines of an engine's log, without its key. Blocks."""
    lines = "; ".join(processes.last_lines(current.log, count))
    return lines.replace(current.request.key, "…") if current.request.key else lines


def _ended(current: Running, enclosures: Enclosures) -> EnginehouseError:
    code = current.process.returncode or 0
    name = current.request.model.name
    if code < 0:
        # Killed from outside, most likely for lack of memory; a retry may find more.
        return Unavailable(
            f"cannot start {name}: its engine was ended by signal {-code} before it was ready", code="backend_exited"
        )
    reason = _last_words(current, 1) or _silent_reason(code)
    reason = enclosures.explain(reason, processes.last_lines(current.log, LINES_LOOKED_AT))
    return Hopeless(f"cannot start {name}: its engine ended with code {code}: {reason}", code="backend_exited")


def _with_last_words(error: EnginehouseError, current: Running) -> EnginehouseError:
    """The error of a failed load with the last lines of the engine's log; the same on every retry, so it is final."""
    lines = _last_words(current, LAST_LINES)
    logged = f". Its engine logged: {lines}" if lines else ""
    return Hopeless(
        f"cannot load {current.request.model.name}: {error.message}{logged}",
        code=error.code if error.code != "upstream_error" else "load_failed",
    )


def _silent_reason(code: int) -> str:
    return "it could not be confined, which is required" if code == UNCONFINED_EXIT else "it logged no reason"
