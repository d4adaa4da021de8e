"""What watchers see: the operations under way, each rendered once per change, with the live progress that only memory
holds.

State changes are read from the store and published at once; those that another frontend made are found by looking for
them every second, so all frontends tell the same. Reads run side by side and may overtake each other, so what is told
of an operation is numbered by its changes and never goes back. Progress never touches the store on its way to a
watcher: it is kept here per intent and rendered from the last snapshot, at most a few times a second per operation,
however many nodes report.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

import msgspec
from msgspec import Struct

from enginehouse.core.errors import NotFound, Unavailable
from enginehouse.core.intent import Intent
from enginehouse.core.node import Node
from enginehouse.core.operation import Operation, absence_of, status_of, unknown_operation
from enginehouse.core.progress import Progress, continued, is_newer
from enginehouse.frontend.watching.events import Events
from enginehouse.frontend.watching.views import (
    Moment,
    NodeView,
    OperationView,
    Sign,
    SilenceLimits,
    render_node,
    render_operation,
)
from enginehouse.ports import Clock
from enginehouse.store import db, history, nodes, operations
from enginehouse.store.db import Connection, Store

__all__ = ["Board", "SilenceLimits"]

PUBLISH_SECONDS = 0.2  # how often progress of one operation is told; faster than this nobody reads
SLOWEST_SECONDS = 0.8  # the same with very many watchers: nobody is more than a second behind
TOLD_PER_SECOND = 50_000  # tellings of progress, operations times watchers
CATCH_UP_SECONDS = 1.0  # how late a watcher here learns what another frontend did
_OVERLAP_SECONDS = 5.0  # a change is dated when its transaction begins and seen when it ends
_MAX_TOLD = 20_000  # operations whose last telling is remembered; far more than change within the overlap
_RENDERED_AT_ONCE = 50  # then the event loop has its turn
MAX_MISSED = 500  # operations told again to a watcher that comes back; a page of the list


class Missed(Struct, frozen=True, kw_only=True):
    """What changed while a watcher was away. Not `is_all`: more than is told; whoever wants the rest lists it."""

    operations: list[OperationView]
    nodes: list[NodeView]
    present: list[str]  # every node there is: whatever else a watcher knows has been removed
    position: float
    is_all: bool


class Snapshot(Struct):
    operation: Operation
    intents: list[Intent]
    names: dict[str, str]
    absent: dict[str, str]  # what each node that gets no commands waits for, in words
    drained: set[str]
    read_at: float
    read_monotonic: float


class Tracked(Struct):
    """An open intent: whose word on it counts, and which operations it serves."""

    node_id: str
    operations: set[str]
    attempt: int = 0  # that is running
    version: int = 0  # of the row that says so

    def note(self, intent: Intent) -> None:
        """Unless it was read before what is known."""
        if intent.version >= self.version:
            self.version = intent.version
            self.attempt = intent.attempt if intent.state == "running" else 0


class Board:
    def __init__(self, store: Store, events: Events, clock: Clock, patience: SilenceLimits) -> None:
        self._store = store
        self._events = events
        self._clock = clock
        self._patience = patience
        self._signs: dict[str, Sign] = {}
        self._open: dict[str, Snapshot] = {}
        self._tracked: dict[str, Tracked] = {}
        self._dirty: set[str] = set()
        self._told: dict[str, int] = {}
        self._told_nodes: dict[str, float] = {}
        self._caught_up_to = 0.0
        self._rests_until = 0.0
        self._on_nodes_changed: Callable[[], None] = lambda: None

    def on_nodes_changed(self, wake: Callable[[], None]) -> None:
        """Whom to wake when another frontend changed a node: what is drained gets no more requests from here either."""
        self._on_nodes_changed = wake

    # Reading --------------------------------------------------------------------------------------

    async def view(self, operation_id: str) -> OperationView:
        snapshots = await self._store.transaction(lambda connection: self._read(connection, [operation_id]))
        if not snapshots:
            raise unknown_operation(operation_id)
        return self._render(snapshots[0])

    async def unfinished(self, limit: int) -> list[OperationView]:
        """What is open or has failed, newest first."""

        def work(connection: Connection) -> list[Snapshot]:
            return self._read(connection, [one.id for one in history.unfinished(connection, limit)])

        return [self._render(snapshot) for snapshot in await self._store.transaction(work)]

    async def page(self, limit: int, before: str = "", *, is_ended: bool = False) -> list[OperationView]:
        """Every operation, or what is over, newest first; from the one that comes after `before`."""

        def work(connection: Connection) -> list[Snapshot]:
            after = operations.many(connection, [before]).get(before)
            if before and after is None:
                raise NotFound(f"cannot go on after operation {before}: there is none", param="before")
            found = operations.recent(connection, limit, after, is_ended=is_ended)
            return self._read(connection, [operation.id for operation in found])

        return [self._render(snapshot) for snapshot in await self._store.transaction(work)]

    def _read(self, connection: Connection, operation_ids: Sequence[str]) -> list[Snapshot]:
        now = db.now(connection)
        by_operation = operations.intents_of(connection, operation_ids)
        node_ids = {intent.node_id for intents in by_operation.values() for intent in intents}
        names, absent, drained = nodes.named(connection, node_ids)
        found = operations.many(connection, operation_ids)
        monotonic = self._clock.monotonic()
        return [
            Snapshot(found[one], by_operation[one], names, absent, drained, now, monotonic)
            for one in operation_ids
            if one in found
        ]

    def _render(self, snapshot: Snapshot) -> OperationView:
        monotonic = self._clock.monotonic()
        moment = Moment(
            now=snapshot.read_at + (monotonic - snapshot.read_monotonic),
            monotonic=monotonic,
            patience=self._patience,
            absent=snapshot.absent,
            drained=snapshot.drained,
        )
        return render_operation(snapshot.operation, snapshot.intents, snapshot.names, self._signs, moment)

    # Telling --------------------------------------------------------------------------------------

    async def operations_changed(self, operation_ids: Iterable[str]) -> None:
        ids = list(dict.fromkeys(operation_ids))
        if ids:
            await self._tell(lambda connection: self._read(connection, ids))

    async def _tell(self, read: Callable[[Connection], list[Snapshot]]) -> None:
        """Whoever changed something has done so, and must not fail because it cannot be told now: catching up will."""
        with suppress(Unavailable):
            self._keep(await self._store.transaction(read))

    async def intents_changed(self, intents: Iterable[Intent]) -> None:
        """Read and tell every operation that these intents serve."""
        ids = [intent.id for intent in intents]
        if not ids:
            return

        def work(connection: Connection) -> list[Snapshot]:
            return self._read(connection, [one.id for one in operations.of_intents(connection, ids)])

        await self._tell(work)

    def _keep(self, snapshots: Iterable[Snapshot]) -> None:
        for snapshot in snapshots:
            operation_id = snapshot.operation.id
            revision = _revision(snapshot)
            if revision < self._told.get(operation_id, -1):
                continue  # read before what has been told already
            self._told[operation_id] = revision
            if status_of(snapshot.operation, snapshot.intents) in ("queued", "running"):
                self._open[operation_id] = snapshot
                for intent in snapshot.intents:
                    tracked = self._tracked.setdefault(intent.id, Tracked(intent.node_id, set()))
                    tracked.operations.add(operation_id)
                    tracked.note(intent)
            else:
                self._open.pop(operation_id, None)
            self._publish(snapshot)
            for intent in snapshot.intents:
                if not intent.is_open:
                    self._forget_share(intent.id, operation_id)

    def _forget_share(self, intent_id: str, operation_id: str) -> None:
        """An intent is followed as long as one operation wants it."""
        tracked = self._tracked.get(intent_id)
        if tracked is not None:
            tracked.operations.discard(operation_id)
            if not tracked.operations:
                del self._tracked[intent_id]
                self._signs.pop(intent_id, None)

    def _publish(self, snapshot: Snapshot) -> None:
        self._dirty.discard(snapshot.operation.id)
        if self._events.is_watched:
            body = msgspec.json.encode(self._render(snapshot))
            self._events.publish("operation", snapshot.operation.id, body)

    def progress(self, node_id: str, intent_id: str, progress: Progress) -> bool:
        """Note what a node says of a running intent of its own; whether it was news. Older than what is known, or of an
        intent not under way there: ignored.
        """
        tracked = self._tracked.get(intent_id)
        known = self._signs.get(intent_id)
        if tracked is None or tracked.node_id != node_id or not is_newer(progress, known.progress if known else None):
            return False
        self._signs[intent_id] = Sign(progress, self._clock.monotonic())
        self._dirty.update(tracked.operations)
        return True

    def expect(self, intent: Intent, operation_id: str) -> None:
        """Just before it is sent: the worker's first word may come before anybody has looked at the row again."""
        tracked = self._tracked.setdefault(intent.id, Tracked(intent.node_id, set()))
        tracked.operations.add(operation_id)
        tracked.note(intent)

    def silence_of(self, intent: Intent) -> float | None:
        """For how long nothing was heard of this attempt; None where nothing ever was, here."""
        sign = self._signs.get(intent.id)
        if sign is None or sign.progress.attempt != intent.attempt:
            return None
        return self._clock.monotonic() - sign.monotonic

    def plain_progress(self, node_id: str, operation_id: str, progress: Progress) -> tuple[str, Progress]:
        """The same for a worker that knows only the operation, and no numbers: the intent meant ("" for none), and the
        progress with an attempt and a sequence of its own, no smaller than what is known.
        """
        for intent_id, tracked in self._tracked.items():
            if tracked.node_id == node_id and operation_id in tracked.operations and tracked.attempt:
                known = self._signs[intent_id].progress if intent_id in self._signs else Progress()
                if known.attempt != tracked.attempt:
                    known = Progress(attempt=tracked.attempt)
                after = continued(progress, known)
                return (intent_id, after) if self.progress(node_id, intent_id, after) else ("", after)
        return "", progress

    async def step(self) -> None:
        """Tell the operations whose progress moved since the last step."""
        now = self._clock.monotonic()
        if now < self._rests_until:
            return
        taken, self._dirty = self._dirty, set()
        # With many operations and many watchers less often, so that telling never takes all of this frontend's time.
        rest = len(taken) * self._events.watchers / TOLD_PER_SECOND
        self._rests_until = now + (min(SLOWEST_SECONDS, rest) if rest > PUBLISH_SECONDS else 0.0)
        for count, operation_id in enumerate(taken, start=1):
            snapshot = self._open.get(operation_id)
            if snapshot is not None:
                self._publish(snapshot)
            if count % _RENDERED_AT_ONCE == 0:
                await asyncio.sleep(0)

    async def node_changed(self, node_id: str) -> None:
        def work(connection: Connection) -> tuple[Node | None, float]:
            return nodes.get(connection, node_id), db.now(connection)

        try:
            node, now = await self._store.transaction(work)
        except Unavailable:
            return  # told by catching up
        if node is None or node.updated_at < self._told_nodes.get(node_id, 0.0):
            return
        self._told_nodes[node_id] = node.updated_at
        if self._events.is_watched:
            self._events.publish("node", node_id, msgspec.json.encode(render_node(node, now)))
        # Whether its node is there is part of what an operation shows.
        for operation_id, snapshot in self._open.items():
            if any(intent.node_id == node_id and intent.is_open for intent in snapshot.intents):
                # Another dictionary: snapshots of one reading share theirs.
                others = {one: why for one, why in snapshot.absent.items() if one != node_id}
                away = absence_of(node.health, bus_away=node.bus_away)
                snapshot.absent = others | ({node_id: away} if away else {})
                snapshot.drained = (snapshot.drained - {node_id}) | ({node_id} if node.drained else set())
                self._dirty.add(operation_id)

    def node_removed(self, node_id: str) -> None:
        if self._told_nodes.pop(node_id, None) is None:
            return  # told already
        self._events.publish("node-removed", node_id, msgspec.json.encode({"id": node_id}))

    # Coming back ----------------------------------------------------------------------------------

    async def changed_since(self, position: float) -> Missed:
        """What a watcher has missed that was told everything up to `position`, by whichever frontend."""
        since = position - _OVERLAP_SECONDS

        def work(connection: Connection) -> tuple[list[Snapshot], list[Node], set[str], float, bool]:
            found = list(history.revisions(connection, since, ()))
            snapshots = self._read(connection, found[:MAX_MISSED])
            changed = set(nodes.changed_since(connection, since))
            return snapshots, nodes.every(connection), changed, db.now(connection), len(found) <= MAX_MISSED

        snapshots, every, changed, now, is_all = await self._store.transaction(work)
        snapshots.sort(key=lambda snapshot: snapshot.operation.created_at)
        return Missed(
            operations=[self._render(snapshot) for snapshot in snapshots],
            nodes=[render_node(node, now) for node in every if node.id in changed],
            present=[node.id for node in every],
            position=now,
            is_all=is_all,
        )

    # Other frontends ------------------------------------------------------------------------------

    async def restore(self) -> None:
        """After a start: know what is under way, so that progress of it is news."""

        def work(connection: Connection) -> tuple[list[Snapshot], dict[str, float], float]:
            now = db.now(connection)
            return self._read(connection, history.open_ids(connection)), nodes.updates(connection), now

        snapshots, self._told_nodes, self._caught_up_to = await self._store.transaction(work)
        self._keep(snapshots)
        self._events.position = self._caught_up_to

    async def catch_up_step(self) -> None:
        """Tell what other frontends changed, and whatever this one failed to tell."""
        since = self._caught_up_to - _OVERLAP_SECONDS
        # The end of steering leaves no date.
        steered = [one for one, snapshot in self._open.items() if snapshot.operation.is_steered]
        told = self._told

        def work(connection: Connection) -> tuple[list[Snapshot], dict[str, float], float]:
            now = db.now(connection)
            revisions = history.revisions(connection, since, steered)
            news = [one for one, revision in revisions.items() if revision > told.get(one, -1)]
            present = nodes.updates(connection)
            return self._read(connection, news), present, now

        snapshots, present, self._caught_up_to = await self._store.transaction(work)
        self._keep(snapshots)
        changed = [one for one, at in present.items() if at > self._told_nodes.get(one, 0.0)]
        gone = [one for one in self._told_nodes if one not in present]
        for node_id in changed:
            await self.node_changed(node_id)
        for node_id in gone:
            self.node_removed(node_id)
        if changed or gone:
            self._on_nodes_changed()
        self._events.position = self._caught_up_to
        self._forget_told()

    def _forget_told(self) -> None:
        """What was told long ago needs no number: it is not looked at again unless it changes."""
        if len(self._told) > _MAX_TOLD:
            kept = {*list(self._told)[-_MAX_TOLD // 2 :], *self._open}
            self._told = {one: revision for one, revision in self._told.items() if one in kept}


def _revision(snapshot: Snapshot) -> int:
    """The same number as `history.revisions`."""
    steps = sum(1 + intent.version for intent in snapshot.intents)
    return steps + (0 if snapshot.operation.is_steered else 1) + (1 if snapshot.operation.dismissed else 0)
