"""Polls LocalAI's workers, which send no reports, and makes reports of their answers.

A report combines two answers, the installed backends and the running processes; its mark is the time of the poll. A
missing answer removes nothing. The idle process that an install leaves on such a worker serves no model: it is left out
of the report and stopped. So is one that was started from here and is no replica; others are left alone.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable
from typing import Protocol

from msgspec import Struct

from enginehouse.core import subjects, wire
from enginehouse.core.action import InstallBackend
from enginehouse.core.backend import InstalledBackend
from enginehouse.core.errors import EnginehouseError, Malformed
from enginehouse.core.ids import IntentId, NodeId
from enginehouse.core.replica import RunningReplica, process_key
from enginehouse.core.report import Report
from enginehouse.ports import Bus, Message
from enginehouse.store import db, intents, nodes, operations, replicas
from enginehouse.store.db import Connection, Store

log = logging.getLogger(__name__)

FRESH_SECONDS = 2.0  # for answers before targets are chosen: a client waits for it. A listing takes milliseconds


class Question(Struct):
    """A poll of one node and its answers so far."""

    node_id: NodeId
    number: int
    asked_at: float  # by the store's clock
    ended: asyncio.Event  # both answers arrived, or the node has no subscriber
    replicas: tuple[RunningReplica, ...] | None = None
    backends: tuple[InstalledBackend, ...] | None = None
    is_unreachable: bool = False  # the node has no subscriber
    # Nobody hears the question what runs: a worker too old for it, or one that is just starting to listen.
    is_mute: bool = False

    @property
    def is_answered(self) -> bool:
        return self.backends is not None and self.replicas is not None


class _ProcessUses(Struct, frozen=True):
    """What the processes of a node are for, by their keys."""

    served: frozenset[str]  # a replica, or about to be one
    abandoned: frozenset[str]  # started from here for a replica that failed, was cancelled or is lost
    busy: frozenset[str]  # backends that are being installed: without its idle process an install would fail


class Reports(Protocol):
    """Stores the reports made of listings."""

    async def report(self, node_id: NodeId, report: Report) -> tuple[IntentId, ...]: ...


class Listings:
    def __init__(self, store: Store, reports: Reports, owner: str, is_backend: Callable[[str], bool]) -> None:
        self._store = store
        self._reports = reports
        self._owner = owner
        # Whether a gallery has a backend of that name. Needed because listings contain no pointer named like an alias.
        self._is_backend = is_backend
        self._bus: Bus | None = None
        self._number = 0
        self._open: dict[tuple[NodeId, int], Question] = {}
        self._on_end: Callable[[], None] = lambda: None

    def on_end(self, wake: Callable[[], None]) -> None:
        """Set the callback for a poll that has ended."""
        self._on_end = wake

    @property
    def is_connected(self) -> bool:
        return self._bus is not None and self._bus.is_connected

    async def listen(self, bus: Bus) -> None:
        self._bus = bus
        await bus.subscribe(subjects.all_polls(self._owner), self._take)

    async def ask(self, node_ids: Iterable[NodeId], asked_at: float) -> list[Question]:
        """Poll all these nodes at once. The caller must `drop` the questions in the end."""
        asked: list[Question] = []
        for node_id in node_ids:
            self._number += 1
            question = Question(node_id, self._number, asked_at, asyncio.Event())
            self._open[node_id, question.number] = question
            asked.append(question)
            for verb in (subjects.LIST, subjects.RUNNING):
                reply = subjects.poll_subject(node_id, self._owner, verb, question.number)
                await self._publish(node_id, verb, b"{}", reply)
        return asked

    def drop(self, questions: Iterable[Question]) -> None:
        for question in questions:
            self._open.pop((question.node_id, question.number), None)

    async def freshen(self, named: Collection[str] | None = None) -> frozenset[NodeId]:
        """Refresh the listings of all LocalAI workers, or of those named.

        Returns the nodes that did not answer in time: their state is unknown. Only healthy nodes are polled; for the
        others the last listing counts.
        """
        present, now = await self._store.look(lambda connection: _present(connection, named))
        if not present or not self.is_connected:
            return frozenset(present)
        questions = await self.ask(present, now)
        try:
            async with asyncio.timeout(FRESH_SECONDS):
                for question in questions:
                    await question.ended.wait()
        except TimeoutError:
            pass
        finally:
            self.drop(questions)
        for question in questions:
            if question.is_answered:
                await self.keep(question)
        return frozenset(one.node_id for one in questions if not one.is_answered)

    async def keep(self, question: Question) -> None:
        """Store the answers as a report, and stop processes that serve nobody."""
        listed, running = question.backends or (), question.replicas or ()
        if question.is_mute:
            # Silence is no proof that a process ended: what is stored stays.
            stored = await self._store.look(lambda connection: _stored_on(connection, question.node_id))
            await self._reports.report(
                question.node_id, Report(mark=question.asked_at, backends=listed, replicas=stored)
            )
            return
        names = {backend.name for backend in listed}
        uses = await self._store.look(lambda connection: _uses_of(connection, question.node_id, running))
        idle = [
            one
            for one in running
            if one.replica_index == 0
            and process_key(one.model_id, 0) not in uses.served
            and (one.model_id in names or self._is_backend(one.model_id))
        ]
        served = tuple(one for one in running if one not in idle)
        await self._reports.report(question.node_id, Report(mark=question.asked_at, backends=listed, replicas=served))
        left = [one for one in served if process_key(one.model_id, one.replica_index) in uses.abandoned]
        await self._stop(question.node_id, [one for one in idle if one.model_id not in uses.busy] + left)

    async def _stop(self, node_id: NodeId, unused: Iterable[RunningReplica]) -> None:
        """Stop processes by their exact keys, because any other name would stop more."""
        for one in unused:
            stop = wire.BackendStopRequest(backend=process_key(one.model_id, one.replica_index))
            await self._publish(node_id, subjects.STOP, wire.encode(stop))
            log.info("process.stopped node=%s process=%s#%d", node_id, one.model_id, one.replica_index)

    async def _publish(self, node_id: NodeId, verb: str, payload: bytes, reply: str = "") -> None:
        assert self._bus is not None
        try:
            await self._bus.publish(subjects.node_subject(node_id, verb), payload, reply)
        except EnginehouseError as error:
            log.warning("poll.not_sent node=%s error=%s", node_id, error)

    def _take(self, message: Message) -> None:
        try:
            answer = subjects.parse_poll_subject(message.subject)
            question = self._open.get((answer.node_id, answer.number))
            if question is None:
                return  # an answer to an older question
            if answer.verb == subjects.token(subjects.LIST):
                if message.no_responders:
                    question.is_unreachable = True
                else:
                    listed = wire.decode(message.payload, wire.BackendListReply, "a listing")
                    if not listed.error:
                        question.backends = listed.backends or ()
            elif message.no_responders:
                question.replicas, question.is_mute = (), True
            else:
                running = wire.decode(message.payload, wire.ModelsRunningReply, "a list of processes")
                if not running.error:
                    question.replicas = running.models or ()
        except Malformed as error:
            log.warning("poll.dropped subject=%s error=%s", message.subject, error)
            return
        if question.is_answered or question.is_unreachable:
            question.ended.set()
            self._on_end()


def _present(connection: Connection, named: Collection[str] | None) -> tuple[list[NodeId], float]:
    """Return the ids of the healthy nodes without a key, all or those named, and the time."""
    found = [one for one in nodes.without_key(connection) if one.health == "healthy"]
    return [one.id for one in found if named is None or one.id in named or one.name in named], db.now(connection)


def _stored_on(connection: Connection, node_id: NodeId) -> tuple[RunningReplica, ...]:
    """The replicas of a node as a listing would show them."""
    return tuple(
        RunningReplica(model_id=one.model, replica_index=one.slot, address=one.address)
        for one, _ in replicas.on_node(connection, node_id)
    )


def _uses_of(connection: Connection, node_id: NodeId, running: Iterable[RunningReplica]) -> _ProcessUses:
    open_ones = operations.open_on(connection, node_id)
    served = {process_key(one.model, one.slot) for one, _ in replicas.on_node(connection, node_id)}
    served |= {one.subject.removeprefix("replica:") for one in open_ones if one.subject.startswith("replica:")}
    others = {process_key(one.model_id, one.replica_index) for one in running} - served
    started = intents.known_subjects(connection, node_id, [f"replica:{key}" for key in others]) if others else set()
    installs = [one.action for one in open_ones if one.state == "running" and isinstance(one.action, InstallBackend)]
    return _ProcessUses(
        served=frozenset(served),
        abandoned=frozenset(subject.removeprefix("replica:") for subject in started),
        busy=frozenset(name for action in installs for name in (action.backend, action.resolved.directory)),
    )
