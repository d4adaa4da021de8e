"""Carries out commands that LocalAI's workers do not know: to place files, to start, stop and remove models.

Intents for such nodes are claimed like all others, and the frontend that owns one does the work itself. What it should
be doing is read from the rows again and again: an intent that was claimed, taken over or left by a killed process gets
a task, and a task whose intent was cancelled, superseded, parked or taken over ends. Every step may be repeated. The
outcome goes to the collector like a reply and counts only while the intent is still this owner's; progress goes over
the bus, as a worker's does.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Protocol, assert_never

from msgspec import Struct

from enginehouse.core import subjects, wire
from enginehouse.core.action import (
    InstallBackend,
    PullModel,
    RemoveBackend,
    RemoveModel,
    StartReplica,
    StopReplica,
    UnknownAction,
    phrase,
)
from enginehouse.core.address import parse_endpoint, taken_by
from enginehouse.core.errors import EnginehouseError, Hopeless, Invalid, Unavailable, can_heal
from enginehouse.core.ids import IntentId, NodeId
from enginehouse.core.intent import Intent, Outcome
from enginehouse.core.node import Node
from enginehouse.core.progress import Phase, Progress
from enginehouse.fetch.worker_files import WorkerPlace
from enginehouse.frontend.fleet.nodes import Nodes
from enginehouse.frontend.localai.processes import StartSite, WorkerProcesses, free_bytes
from enginehouse.frontend.localai.pushing import Pusher
from enginehouse.frontend.localai.requests import WorkerRequests
from enginehouse.frontend.localai.worker_tokens import WorkerTokens
from enginehouse.loop import Loop
from enginehouse.ports import Bus
from enginehouse.store import intents, nodes, operations
from enginehouse.store.db import Connection, Store

log = logging.getLogger(__name__)

LOOK_SECONDS = 1.0  # between two looks at the rows; cancelled work ends that late
QUIET_SECONDS = 5.0  # the same while nothing is carried out: whoever claims a command or takes one over wakes it
REPORT_SECONDS = 0.25
PUSHES = 8  # at the same time; more share the same link
AGAIN_SECONDS = 60.0  # an outcome that was dropped is found again by doing the work again
DRAIN_LOOK_SECONDS = 0.5
SEQUENCES = 1_000_000  # per fence, so that progress of the next owner is newer than that of the one before
KINDS = ("pull_model", "remove_model", "start_replica", "stop_replica")


class Outcomes(Protocol):
    """Takes the outcomes of carried commands: the collector."""

    def settle(self, intent: Intent, outcome: Outcome) -> None: ...


class CarrierParts(Struct, frozen=True, kw_only=True):
    store: Store
    bus: Bus
    nodes: Nodes
    tokens: WorkerTokens
    requests: WorkerRequests
    pusher: Pusher
    processes: WorkerProcesses
    outcomes: Outcomes
    galleries: Callable[[], str]  # as LocalAI's workers read them
    in_flight: Callable[[NodeId, str, int], int]  # requests of this frontend to a model's replica in a slot
    owner: str


class _Carried(Struct):
    """One command under way here."""

    intent: Intent
    task: asyncio.Task[None]


class Carrier:
    def __init__(self, parts: CarrierParts) -> None:
        self._parts = parts
        self._carried: dict[IntentId, _Carried] = {}
        self._due = asyncio.Event()
        self._pushes = asyncio.Semaphore(PUSHES)
        self._is_idle: Callable[[], bool] = lambda: False

    @property
    def sent_bytes(self) -> Mapping[str, int]:
        """Bytes of files that were sent to nodes since the start, by the names of the nodes; always the same object."""
        return self._parts.pusher.sent_bytes

    def rest_while(self, is_idle: Callable[[], bool]) -> None:
        """Leave out the looks that nobody asked for while this says that there is nothing to carry out."""
        self._is_idle = is_idle

    def wake(self) -> None:
        """Look at the rows now."""
        self._due.set()

    def among(self, connection: Connection, claimed: Sequence[Intent]) -> set[IntentId]:
        """Those of these intents that are carried out here and not sent."""
        kinds = (PullModel, RemoveModel, StartReplica, StopReplica)
        found = [one for one in claimed if isinstance(one.action, kinds)]
        without_key = {one.id for one in nodes.without_key(connection)} if found else set()
        return {one.id for one in found if one.node_id in without_key}

    async def listen(self) -> None:
        await self._parts.requests.listen()

    async def step(self) -> None:
        """Carry out what this frontend owns, without an end: the tasks live as long as this call."""
        async with asyncio.TaskGroup() as group:
            try:
                is_woken = True
                while True:
                    self._due.clear()
                    pause = LOOK_SECONDS
                    # An outage of the store ends no push: its lease decides who goes on.
                    with suppress(Unavailable):
                        if is_woken or self._carried or not self._is_idle():
                            await self.look(group)
                        pause = LOOK_SECONDS if self._carried or self._parts.store.is_away else QUIET_SECONDS
                    is_woken = False
                    with suppress(TimeoutError):
                        async with asyncio.timeout(pause):
                            is_woken = await self._due.wait()
            finally:
                self._carried.clear()

    async def look(self, group: asyncio.TaskGroup) -> None:
        """Begin and end tasks so that there is one per command of this owner."""
        if self._parts.store.is_away:
            return  # other loops look whether it is back
        owner = self._parts.owner
        wanted = await self._parts.store.look(lambda c: intents.carried_by(c, owner, KINDS))
        by_id = {intent.id: intent for intent in wanted}
        for intent_id, one in list(self._carried.items()):
            now = by_id.get(intent_id)
            if now is None or (now.attempt, now.fence) != (one.intent.attempt, one.intent.fence):
                one.task.cancel()
                if one.task.done():
                    del self._carried[intent_id]
        for intent in wanted:
            if intent.id not in self._carried:
                # The loop repeats a step that failed by a fault of ours, and logs it, without harm to the others.
                loop = Loop(f"carry {intent.id}", partial(self._carry, intent), AGAIN_SECONDS)
                self._carried[intent.id] = _Carried(intent, group.create_task(loop.run()))

    async def _carry(self, intent: Intent) -> None:
        log.info(
            "command.carried intent=%s node=%s attempt=%d fence=%d action=%r",
            *(intent.id, intent.node_id, intent.attempt, intent.fence, phrase(intent.action)),
        )
        try:
            outcome = await self._do(intent)
        except EnginehouseError as error:
            outcome = Outcome(code=error.code, message=error.message, can_heal=can_heal(error))
        self._parts.outcomes.settle(intent, outcome)

    async def _do(self, intent: Intent) -> Outcome:
        action, parts = intent.action, self._parts
        node, place = await parts.store.look(lambda connection: self._place_of(connection, intent))
        report = _Reporter(parts.bus, intent).report
        match action:
            case PullModel():
                async with self._pushes:
                    pushed = await parts.pusher.push(place, action.model, free_bytes(node), report)
                return Outcome(pinned=pushed.pins)
            case StartReplica():
                site = StartSite(
                    node=node,
                    place=place,
                    galleries=parts.galleries(),
                    report=report,
                    confirm=partial(self._confirm, intent),
                )
                return await parts.processes.start(site, action)
            case StopReplica():
                await self._drain(intent, action)
                await self._confirm(intent)
                return await parts.processes.stop(node, action.model, action.slot)
            case RemoveModel():
                return await parts.processes.remove_model(node, action.model)
            case InstallBackend() | RemoveBackend() | UnknownAction():
                raise Hopeless(f"cannot {phrase(action)} here: workers do that", code="unsupported")
            case _:
                assert_never(action)

    async def _confirm(self, intent: Intent) -> None:
        """Raise if the command was ended or taken over since it began here; then no outcome counts."""
        now = await self._parts.store.transaction(lambda connection: operations.intent(connection, intent.id))
        is_same = now is not None and (now.state, now.attempt, now.fence) == ("running", intent.attempt, intent.fence)
        if not is_same:
            raise Unavailable(f"cannot go on with {phrase(intent.action)}: it is no longer this frontend's")

    async def _drain(self, intent: Intent, action: StopReplica) -> None:
        """Let requests of this frontend end first. Those of other frontends are not known; they lost the route, too."""
        end = asyncio.get_running_loop().time() + action.drain_seconds
        place = intent.node_id, action.model, action.slot
        while self._parts.in_flight(*place):
            if asyncio.get_running_loop().time() >= end:
                log.warning("engine.still_busy node=%s model=%s slot=%d", *place)
                return
            await asyncio.sleep(DRAIN_LOOK_SECONDS)

    def _place_of(self, connection: Connection, intent: Intent) -> tuple[Node, WorkerPlace]:
        """The node and its file server. The token goes there, so the address must be on the approved host."""
        node = nodes.get(connection, intent.node_id)
        if node is None or not node.approved:
            raise Hopeless("cannot use the node: it was removed or waits for approval", code="node_removed")
        try:
            claimed, approved = parse_endpoint(node.http_address), parse_endpoint(node.address)
        except Invalid as error:
            raise Hopeless(f"cannot use {node.name}: {error.message}", code="address_refused") from error
        if claimed.host != approved.host or taken_by(claimed, self._parts.nodes.addresses.taken):
            raise Hopeless(
                f"cannot use {node.name}: its HTTP address {node.http_address} is not on {approved.host}, the approved "
                "address of the node, or belongs to the cluster itself",
                code="address_refused",
            )
        token = self._parts.tokens.of(connection, node.id)
        return node, WorkerPlace(name=node.name, address=node.http_address, token=token)


class _Reporter:
    """Publishes the progress of one command as a worker would, at a bounded rate."""

    def __init__(self, bus: Bus, intent: Intent) -> None:
        self._bus = bus
        self._intent = intent
        self._sequence = intent.fence * SEQUENCES
        self._reported_at = 0.0
        self._phase: Phase = ""

    async def report(self, phase: Phase, file: str, done_bytes: int, total_bytes: int) -> None:
        now = asyncio.get_running_loop().time()
        is_end = 0 < total_bytes <= done_bytes
        if phase == self._phase and now - self._reported_at < REPORT_SECONDS and not is_end:
            return
        self._phase, self._reported_at = phase, now
        self._sequence += 1
        intent = self._intent
        progress = Progress(phase, file, done_bytes, total_bytes, intent.attempt, self._sequence)
        event = wire.progress_event(intent.id, intent.node_id, phrase(intent.action), intent.id, progress)
        with suppress(EnginehouseError):  # best effort: the bus is away, and the next report shows more
            await self._bus.publish(subjects.progress_subject(intent.node_id, intent.id), wire.encode(event))
