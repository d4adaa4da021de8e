"""Starts and stops replicas on LocalAI's workers: a process by `backend.install`, its model by gRPC from this frontend.

A process always gets its model fresh: whatever has the slot is stopped first, so a load that another frontend began and
did not finish is never continued by two. Addresses are checked before anything is sent there, because the token goes
along. These workers compare addresses with their own loopback form and report nothing else.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Awaitable, Callable

from msgspec import Struct

from enginehouse.core import subjects, wire
from enginehouse.core.action import StartReplica
from enginehouse.core.errors import EnginehouseError, Hopeless, Unavailable, Upstream
from enginehouse.core.ids import NodeId
from enginehouse.core.intent import Outcome
from enginehouse.core.load_options import ModelPaths
from enginehouse.core.model import load_options, load_seconds
from enginehouse.core.name import model_directory
from enginehouse.core.node import Node
from enginehouse.core.replica import LOCALAI_GRPC, RunningReplica, port_of, process_key
from enginehouse.fetch.worker_files import WorkerPlace
from enginehouse.frontend.fleet.nodes import Nodes
from enginehouse.frontend.localai.pushing import Pusher, ReportPush
from enginehouse.frontend.localai.requests import NO_SUBSCRIBER, WorkerRequests
from enginehouse.ports import Engine, EngineTarget

log = logging.getLogger(__name__)

RUNNING_SECONDS = 10.0  # LocalAI's limits for these messages
STOP_SECONDS = 20.0  # `Free` takes up to 5 s, the end of a process as long
DELETE_SECONDS = 30.0
LAST_LINES = 5  # of an engine's log, in the error of a failed load


Confirm = Callable[[], Awaitable[None]]  # raises if the command is another frontend's by now


class StartSite(Struct, frozen=True, kw_only=True):
    """Where a replica is started, and for whom."""

    node: Node
    place: WorkerPlace
    galleries: str  # as LocalAI's workers read them
    report: ReportPush
    confirm: Confirm


class StopParts(Struct, frozen=True):
    """A process to stop, at the address that its worker compares."""

    node_id: NodeId
    model: str
    slot: int
    address: str

    @property
    def key(self) -> str:
        return process_key(self.model, self.slot)


class WorkerProcesses:
    def __init__(
        self, requests: WorkerRequests, pusher: Pusher, engine: Engine, nodes: Nodes, *, install_seconds: float
    ) -> None:
        self._requests = requests
        self._pusher = pusher
        self._engine = engine
        self._nodes = nodes
        self._install_seconds = install_seconds

    async def start(self, site: StartSite, action: StartReplica) -> Outcome:
        node, place, model, slot = site.node, site.place, action.model, action.slot
        try:
            pushed = await self._pusher.push(place, model, free_bytes(node), site.report)
        except EnginehouseError as error:
            if error.code != "not_found":
                raise
            # "Not found" of a start means that the engine must be installed, which is not so here.
            raise Hopeless(error.message, code="source_gone") from error
        await site.report("starting", "", 0, 0)
        # A frontend that was frozen must not end the process that another has started meanwhile.
        await site.confirm()
        await self._clear_slot(node, model.name, slot)
        request = wire.BackendInstallRequest(
            backend=action.directory, model_id=model.name, replica_index=slot, backend_galleries=site.galleries
        )
        reply = await self._requests.ask(
            node.id, subjects.INSTALL, request, wire.BackendInstallReply, self._install_seconds
        )
        if not reply.success:
            # Not worth a wait on this node: a client waits, and another node may have it.
            raise Hopeless(
                f"cannot start {model.name} on {node.name}: {reply.error or 'its worker gave no reason'}",
                code="upstream_error",
            )
        address = reply.address or node.address
        why = self._nodes.replica_refusal(node, address)
        if why:
            raise Hopeless(
                f"cannot use the address {address[:80]!r} that {node.name} gave for {model.name}: {why}",
                code="address_refused",
            )
        await site.report("loading", "", 0, 0)
        await site.confirm()
        target = EngineTarget(address=address, key=place.token, protocol=LOCALAI_GRPC)
        options = load_options(model, ModelPaths(directory=pushed.directory))
        try:
            await self._engine.load(target, options, limit_seconds=load_seconds(model.size_bytes))
        except EnginehouseError as error:
            raise await self._load_failure(site, action, error) from error
        # All engines of such a worker have the same key, so it does not tell them apart: the worker is asked instead.
        return Outcome(address=address, nonce=secrets.token_hex(16), checks_key=False, protocol=LOCALAI_GRPC)

    async def stop(self, node: Node, model: str, slot: int) -> Outcome:
        """Stop one replica. Success if there is none."""
        for one in await self._running(node):
            if (one.model_id, one.replica_index) == (model, slot):
                await self._stop(StopParts(node.id, model, slot, one.address))
                return Outcome(stopped=(process_key(model, slot),))
        return Outcome()

    async def remove_model(self, node: Node, model: str) -> Outcome:
        """Stop every replica of a model, and remove its files."""
        stopped: list[str] = []
        for one in await self._running(node):
            if one.model_id == model:
                parts = StopParts(node.id, model, one.replica_index, one.address)
                await self._stop(parts)
                stopped.append(parts.key)
        request = wire.ModelDeleteRequest(model_name=model_directory(model))
        reply = await self._requests.ask(node.id, subjects.DELETE_MODEL, request, wire.ModelPullReply, DELETE_SECONDS)
        if not reply.success:
            raise Upstream(f"cannot remove the files of {model} from {node.name}: {reply.error}")
        return Outcome(stopped=tuple(stopped))

    async def _running(self, node: Node) -> tuple[RunningReplica, ...]:
        try:
            reply = await self._requests.ask(
                node.id, subjects.RUNNING, Nothing(), wire.ModelsRunningReply, RUNNING_SECONDS
            )
        except Unavailable as error:
            if error.code != NO_SUBSCRIBER:
                raise
            raise Unavailable(
                f"cannot use {node.name} for models: its worker is offline, or is older than LocalAI 4.8 "
                "and does not say which models run; upgrade it",
                code="node_away",
            ) from error
        if reply.error:
            raise Upstream(f"cannot use {node.name}: its worker does not say which models run: {reply.error[:200]}")
        return reply.models or ()

    async def _clear_slot(self, node: Node, model: str, slot: int) -> None:
        """End the process that has this slot; a failure shows in the start that follows."""
        for one in await self._running(node):
            if (one.model_id, one.replica_index) == (model, slot):
                await self._stop(StopParts(node.id, model, slot, one.address))

    async def _stop(self, parts: StopParts) -> None:
        request = wire.ModelStopRequest(
            model_name=parts.model,
            process_key=parts.key,
            expected_address=f"127.0.0.1:{port_of(parts.address)}" if parts.address else "",
        )
        try:
            reply = await self._requests.ask(
                parts.node_id, subjects.STOP_MODEL, request, wire.ModelStopReply, STOP_SECONDS
            )
        except Unavailable as error:
            if error.code != NO_SUBSCRIBER:
                raise
            # An older worker. The exact key, because any other name would stop more.
            await self._requests.tell(parts.node_id, subjects.STOP, wire.BackendStopRequest(backend=parts.key))
            return
        if not reply.terminated:
            raise Upstream(f"cannot stop {parts.key}: {reply.error or 'its worker gave no reason'}")
        log.info("process.stopped node=%s process=%s", parts.node_id, parts.key)

    async def _load_failure(self, site: StartSite, action: StartReplica, error: EnginehouseError) -> EnginehouseError:
        """The error of a failed load with the engine's last words. The poll after it ends the process (`listings`)."""
        key = process_key(action.model.name, action.slot)
        lines = "; ".join(await self._pusher.servers.last_lines(site.place, key, LAST_LINES))
        logged = f". Its engine logged: {lines}" if lines else ""
        return Hopeless(
            f"cannot load {action.model.name} on {site.node.name}: {error.message}{logged}",
            code=error.code if error.code not in ("upstream_error", "replica_unreachable") else "load_failed",
        )


class Nothing(Struct, frozen=True):
    """An empty request."""


def free_bytes(node: Node) -> int | None:
    """Free space on the disk of a worker's models; None if it reports none."""
    return node.capacity.available_disk if node.capacity.total_disk else None
