"""Publishes operations and nodes to watchers: state from the store, live progress from memory.

State changes are read from the store and published at once; changes by other frontends are found by a query every
second, so all frontends publish the same. Reads are concurrent and may overtake each other, so every snapshot has a
revision, and an older one is never published after a newer one. Progress reaches watchers without the store: it is kept
here per intent and rendered with the last snapshot, at most a few times a second per operation, however many nodes
report.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

import msgspec
from msgspec import Struct

from enginehouse.core.errors import NotFound, Unavailable
from enginehouse.core.ids import IntentId, NodeId, OperationId
from enginehouse.core.intent import Intent
from enginehouse.core.node import Node
from enginehouse.core.operation import Operation, absence_of, status_of, unknown_operation
from enginehouse.core.progress import Progress, continued, is_newer
from enginehouse.core.views import NodeView, OperationView
from enginehouse.frontend.watching.events import Events
from enginehouse.frontend.watching.views import Moment, Sign, SilenceLimits, render_node, render_operation
from enginehouse.ports import Clock
from enginehouse.store import db, history, nodes, operations
from enginehouse.store.db import Connection, Store

PUBLISH_SECONDS = 0.2  # between two updates of progress per operation; faster updates cannot be read
SLOWEST_SECONDS = 0.8  # the same with very many watchers, so that none is more than a second behind
PUBLISHED_PER_SECOND = 50_000  # updates of progress, operations times watchers
CATCH_UP_SECONDS = 1.0  # the longest delay of a change by another frontend
_OVERLAP_SECONDS = 5.0  # a change is dated at the start of its transaction and visible after its end
_MAX_TOLD = 20_000  # operations whose published revision is kept; far more than change within the overlap
_RENDERED_AT_ONCE = 50  # then other tasks run
MAX_MISSED = 500  # operations sent to a watcher that reconnects; a page of the list


class Missed(Struct, frozen=True, kw_only=True):
    """The changes since a watcher disconnected. Without `is_all` there are more; the watcher must list operations."""

    operations: list[OperationView]
    nodes: list[NodeView]
    present: list[str]  # the ids of all nodes; every other one has been removed
    position: float
    is_all: bool


class Snapshot(Struct):
    operation: Operation
    intents: list[Intent]
    names: dict[NodeId, str]
    absent: dict[NodeId, str]  # nodes that get no commands, and why
    drained: set[NodeId]
    read_at: float
    read_monotonic: float


class Tracked(Struct):
    """An open intent: its node, whose progress alone counts, and the operations it serves."""

    node_id: NodeId
    operations: set[OperationId]
    attempt: int = 0  # the running one; 0 for none
    version: int = 0  # of the row it was read from

    def note(self, intent: Intent) -> None:
        """Store the state of the intent, unless the row is older than the known one."""
        if intent.version >= self.version:
            self.version = intent.version
            self.attempt = intent.attempt if intent.state == "running" else 0


class Board:
    def __init__(self, store: Store, events: Events, clock: Clock, patience: SilenceLimits) -> None:
        self._store = store
        self._events = events
        self._clock = clock
        self._patience = patience
        self._signs: dict[IntentId, Sign] = {}
        self._open: dict[OperationId, Snapshot] = {}
        self._tracked: dict[IntentId, Tracked] = {}
        self._dirty: set[OperationId] = set()
        self._told: dict[OperationId, int] = {}
        self._told_nodes: dict[NodeId, float] = {}
        self._caught_up_to = 0.0
        self._rests_until = 0.0
        self._on_nodes_changed: Callable[[], None] = lambda: None

    def on_nodes_changed(self, wake: Callable[[], None]) -> None:
        """Set the callback for nodes that another frontend changed, such as one that was drained."""
        self._on_nodes_changed = wake

    # Views ----------------------------------------------------------------------------------------

    async def view(self, operation_id: OperationId) -> OperationView:
        snapshots = await self._store.transaction(lambda connection: self._read(connection, [operation_id]))
        if not snapshots:
            raise unknown_operation(operation_id)
        return self._render(snapshots[0])

    async def unfinished(self, limit: int) -> list[OperationView]:
        """Return the operations that are open or have failed, newest first."""

        def work(connection: Connection) -> list[Snapshot]:
            return self._read(connection, [one.id for one in history.unfinished(connection, limit)])

        return [self._render(snapshot) for snapshot in await self._store.transaction(work)]

    async def page(
        self, limit: int, before: OperationId | None = None, *, is_ended: bool = False
    ) -> list[OperationView]:
        """Return all operations, or only the ended ones, newest first, beginning after `before`."""

        def work(connection: Connection) -> list[Snapshot]:
            after = None if before is None else operations.get(connection, before)
            if before is not None and after is None:
                raise NotFound(f"cannot list operations after {before}: this operation does not exist", param="before")
            found = operations.recent(connection, limit, after, is_ended=is_ended)
            return self._read(connection, [operation.id for operation in found])

        return [self._render(snapshot) for snapshot in await self._store.transaction(work)]

    def _read(self, connection: Connection, operation_ids: Sequence[OperationId]) -> list[Snapshot]:
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

    # Publishing -----------------------------------------------------------------------------------

    async def operations_changed(self, operation_ids: Iterable[OperationId]) -> None:
        ids = list(dict.fromkeys(operation_ids))
        if ids:
            await self._tell(lambda connection: self._read(connection, ids))

    async def _tell(self, read: Callable[[Connection], list[Snapshot]]) -> None:
        """Read and publish. Without the store `catch_up_step` does it later: the change is stored."""
        with suppress(Unavailable):
            self._keep(await self._store.transaction(read))

    async def intents_changed(self, intents: Iterable[Intent]) -> None:
        """Publish every operation that these intents serve."""
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
                continue  # older than the published one
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

    def _forget_share(self, intent_id: IntentId, operation_id: OperationId) -> None:
        """Stop tracking an intent once no open operation wants it."""
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

    def progress(self, node_id: NodeId, intent_id: IntentId, progress: Progress) -> bool:
        """Store the progress of a node's own running intent. Returns False for progress that is ignored: older than the
        known one, or of an intent that does not run on that node.
        """
        tracked = self._tracked.get(intent_id)
        known = self._signs.get(intent_id)
        if tracked is None or tracked.node_id != node_id or not is_newer(progress, known.progress if known else None):
            return False
        self._signs[intent_id] = Sign(progress, self._clock.monotonic())
        self._dirty.update(tracked.operations)
        return True

    def expect(self, intent: Intent, operation_id: OperationId) -> None:
        """Track an intent just before it is sent: its first progress may arrive before its row is read again."""
        tracked = self._tracked.setdefault(intent.id, Tracked(intent.node_id, set()))
        tracked.operations.add(operation_id)
        tracked.note(intent)

    def silence_of(self, intent: Intent) -> float | None:
        """Return the seconds since the last progress of this attempt; None if this frontend received none."""
        sign = self._signs.get(intent.id)
        if sign is None or sign.progress.attempt != intent.attempt:
            return None
        return self._clock.monotonic() - sign.monotonic

    def plain_progress(
        self, node_id: NodeId, operation_id: OperationId, progress: Progress
    ) -> tuple[IntentId | None, Progress]:
        """Store progress from a worker that names only the operation, without attempt and sequence.

        Returns the intent (None if ignored) and the progress with an attempt and a sequence. It never decreases.
        """
        for intent_id, tracked in self._tracked.items():
            if tracked.node_id == node_id and operation_id in tracked.operations and tracked.attempt:
                known = self._signs[intent_id].progress if intent_id in self._signs else Progress()
                if known.attempt != tracked.attempt:
                    known = Progress(attempt=tracked.attempt)
                after = continued(progress, known)
                return (intent_id, after) if self.progress(node_id, intent_id, after) else (None, after)
        return None, progress

    async def step(self) -> None:
        """Publish the operations whose progress changed since the last step."""
        now = self._clock.monotonic()
        if now < self._rests_until:
            return
        taken, self._dirty = self._dirty, set()
        # Less often with many operations and watchers, so that publishing never takes all of this frontend's time.
        rest = len(taken) * self._events.watchers / PUBLISHED_PER_SECOND
        self._rests_until = now + (min(SLOWEST_SECONDS, rest) if rest > PUBLISH_SECONDS else 0.0)
        for count, operation_id in enumerate(taken, start=1):
            snapshot = self._open.get(operation_id)
            if snapshot is not None:
                self._publish(snapshot)
            if count % _RENDERED_AT_ONCE == 0:
                await asyncio.sleep(0)

    async def node_changed(self, node_id: NodeId) -> None:
        def work(connection: Connection) -> tuple[Node | None, float]:
            return nodes.get(connection, node_id), db.now(connection)

        try:
            node, now = await self._store.transaction(work)
        except Unavailable:
            return  # `catch_up_step` publishes it
        if node is None or node.updated_at < self._told_nodes.get(node_id, 0.0):
            return
        self._told_nodes[node_id] = node.updated_at
        if self._events.is_watched:
            self._events.publish("node", node_id, msgspec.json.encode(render_node(node, now)))
        # The view of an operation shows whether its nodes are away or drained.
        for operation_id, snapshot in self._open.items():
            if any(intent.node_id == node_id and intent.is_open for intent in snapshot.intents):
                # A new dictionary, because the snapshots of one read share theirs.
                others = {one: why for one, why in snapshot.absent.items() if one != node_id}
                away = absence_of(node.health, bus_away=node.bus_away)
                snapshot.absent = others | ({node_id: away} if away else {})
                snapshot.drained = (snapshot.drained - {node_id}) | ({node_id} if node.drained else set())
                self._dirty.add(operation_id)

    def node_removed(self, node_id: NodeId) -> None:
        if self._told_nodes.pop(node_id, None) is None:
            return  # published already
        self._events.publish("node-removed", node_id, msgspec.json.encode({"id": node_id}))

    # Reconnecting watchers ------------------------------------------------------------------------

    async def changed_since(self, position: float) -> Missed:
        """Return the changes after `position`, up to which the watcher got everything, from any frontend."""
        since = position - _OVERLAP_SECONDS

        def work(connection: Connection) -> tuple[list[Snapshot], list[Node], set[NodeId], float, bool]:
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
        """Read the open operations after a start, so that their progress is tracked."""

        def work(connection: Connection) -> tuple[list[Snapshot], dict[NodeId, float], float]:
            now = db.now(connection)
            return self._read(connection, history.open_ids(connection)), nodes.updates(connection), now

        snapshots, self._told_nodes, self._caught_up_to = await self._store.transaction(work)
        self._keep(snapshots)
        self._events.position = self._caught_up_to

    async def catch_up_step(self) -> None:
        """Publish changes by other frontends, and those that this one could not publish."""
        since = self._caught_up_to - _OVERLAP_SECONDS
        # The end of steering has no timestamp, so steered operations are always included.
        steered = [one for one, snapshot in self._open.items() if snapshot.operation.is_steered]
        told = self._told

        def work(connection: Connection) -> tuple[list[Snapshot], dict[NodeId, float], float]:
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
        """Drop old revisions: an operation that does not change is not read again."""
        if len(self._told) > _MAX_TOLD:
            kept = {*list(self._told)[-_MAX_TOLD // 2 :], *self._open}
            self._told = {one: revision for one, revision in self._told.items() if one in kept}


def _revision(snapshot: Snapshot) -> int:
    """Return the same number as `history.revisions`."""
    steps = sum(1 + intent.version for intent in snapshot.intents)
    return steps + (0 if snapshot.operation.is_steered else 1) + (1 if snapshot.operation.dismissed else 0)
