"""Publishes operations and nodes to watchers: state from the store, live progress from memory.

An open operation is read once and then follows the intents that change, here (`intents_changed`) and on other frontends
(a query when they say so, see `hints`), so all frontends publish the same. An event is the summary of an operation with
the rows that changed, at most a few times a second per operation; all of it is sent when an operation is new, when a
stream begins, and after a gap. Progress reaches watchers without the store: it is kept here per intent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress

import msgspec
from msgspec import Struct

from enginehouse.core.errors import NotFound, Unavailable
from enginehouse.core.ids import IntentId, NodeId, OperationId
from enginehouse.core.intent import Intent
from enginehouse.core.node import Node
from enginehouse.core.operation import ALL_OPERATIONS, OperationFilter, unknown_operation
from enginehouse.core.progress import Progress, continued, is_newer
from enginehouse.core.views import NodeView, OperationView
from enginehouse.frontend.watching.events import Events
from enginehouse.frontend.watching.news import Known, News, concerns_replicas, read_news
from enginehouse.frontend.watching.snapshots import NEVER, Snapshot, Tracked, read_snapshots
from enginehouse.frontend.watching.views import Sign, SilenceLimits, render_node
from enginehouse.ports import Clock
from enginehouse.store import db, history, nodes, operations
from enginehouse.store.db import Connection, Store
from enginehouse.store.glance import Glance

PUBLISH_SECONDS = 0.2  # between two events of one operation; faster updates cannot be read
SLOWEST_SECONDS = 0.8  # the same with very many watchers, so that none is more than a second behind
PUBLISHED_PER_SECOND = 50_000  # updates of progress, operations times watchers
CATCH_UP_SECONDS = 1.0  # the longest delay of a change by another frontend, whatever became of messages
HINTED_SECONDS = 0.5  # between two looks because of hints: a look in a busy cluster reads what changed for seconds
SILENCE_SECONDS = 1.0  # between two looks for workers that have been silent for long
_OVERLAP_SECONDS = 5.0  # a change is dated at the start of its transaction and visible after its end
_MAX_TOLD = 4_000  # operations whose published revision is kept; far more than change within the overlap
_RENDERED_AT_ONCE = 25  # then other tasks run
MAX_MISSED = 500  # operations sent at the beginning of a stream; a page of the list


class Missed(Struct, frozen=True, kw_only=True):
    """The changes since a watcher disconnected. Without `is_all` there are more; the watcher must list operations."""

    operations: list[OperationView]
    nodes: list[NodeView]
    present: list[str]  # the ids of all nodes; every other one has been removed
    position: float
    is_all: bool


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
        self._dirty_nodes: set[NodeId] = set()
        self._nodes_told_at = NEVER
        self._told: dict[OperationId, int] = {}
        self._told_nodes: dict[NodeId, float] = {}
        self._caught_up_to = 0.0
        self._rests_until = 0.0
        self._on_nodes_changed: Callable[[], None] = lambda: None
        self._on_replicas_changed: Callable[[], None] = lambda: None
        self._on_own_changes: Callable[[], None] = lambda: None
        self._silence_noted_at = NEVER

    def on_changes_elsewhere(self, nodes: Callable[[], None], replicas: Callable[[], None]) -> None:
        """Set the callbacks for what another frontend changed: a node that was drained, a replica that is to stop."""
        self._on_nodes_changed, self._on_replicas_changed = nodes, replicas

    def on_own_changes(self, note: Callable[[], None]) -> None:
        """Set the callback for changes by this frontend, which others must look at."""
        self._on_own_changes = note

    # Views ----------------------------------------------------------------------------------------

    async def view(self, operation_id: OperationId) -> OperationView:
        views = await self._store.read(lambda connection: self._views(connection, [operation_id]))
        if not views:
            raise unknown_operation(operation_id)
        return views[0]

    async def unfinished(self, limit: int) -> list[OperationView]:
        """Return the operations that are open or have failed, newest first."""

        def work(connection: Connection) -> list[OperationView]:
            return self._views(connection, [one.id for one in history.unfinished(connection, limit)])

        return await self._store.read(work)

    async def page(
        self,
        limit: int,
        before: OperationId | None = None,
        wanted: OperationFilter = ALL_OPERATIONS,
        *,
        is_ended: bool = False,
    ) -> list[OperationView]:
        """Return the wanted operations, or only the ended ones, newest first, beginning after `before`."""

        def work(connection: Connection) -> list[OperationView]:
            after = None if before is None else operations.get(connection, before)
            if before is not None and after is None:
                raise NotFound(f"cannot list operations after {before}: this operation does not exist", param="before")
            found = operations.recent(connection, limit, after, is_ended=is_ended, wanted=wanted)
            return self._views(connection, [operation.id for operation in found])

        return await self._store.read(work)

    def known(self, operation_id: OperationId) -> OperationView | None:
        """Return all of an open operation as watchers see it: the events that follow are changes of this."""
        snapshot = self._open.get(operation_id)
        return None if snapshot is None else self._render(snapshot)

    def known_open(self) -> list[OperationView] | None:
        """Return all of every open operation, oldest first; None if there are too many to send them at once."""
        if len(self._open) > MAX_MISSED:
            return None
        found = sorted(self._open.values(), key=lambda snapshot: snapshot.operation.created_at)
        return [self._render(snapshot) for snapshot in found]

    def _read(self, connection: Connection, operation_ids: list[OperationId]) -> list[Snapshot]:
        return read_snapshots(connection, operation_ids, self._clock.monotonic())

    def _views(self, connection: Connection, operation_ids: list[OperationId]) -> list[OperationView]:
        """Rendered in the thread that reads: a thousand rows would keep everything else waiting."""
        return [self._render(snapshot) for snapshot in self._read(connection, operation_ids)]

    def _render(self, snapshot: Snapshot) -> OperationView:
        """Render all of a snapshot, without an effect on what is published next."""
        return snapshot.whole(self._signs, snapshot.moment(self._clock.monotonic(), self._patience))

    # Publishing -----------------------------------------------------------------------------------

    async def operations_changed(self, operation_ids: Iterable[OperationId]) -> None:
        """Read these operations whole and publish them: their rows changed, or intents were added."""
        ids = list(dict.fromkeys(operation_ids))
        if ids:
            self._on_own_changes()
            await self.show(ids)

    async def show(self, operation_ids: list[OperationId]) -> None:
        """Read these operations whole and publish them as they are."""
        # Without the store `catch_up_step` does it later: a change is stored.
        with suppress(Unavailable):
            self._keep(await self._store.look(lambda connection: self._read(connection, operation_ids)))

    async def intents_changed(self, intents: Iterable[Intent]) -> None:
        """Publish every operation that these intents serve. Those that are known here are not read again."""
        changed = {intent.id: intent for intent in intents}
        if changed:
            self._on_own_changes()
        unknown = [one for one in changed if not self._is_followed(one)]
        read: list[Snapshot] = []
        if unknown:
            # Also what was added to a known operation: until that is read, its status would be that of the others.
            def work(connection: Connection) -> list[Snapshot]:
                return self._read(connection, [one.id for one in operations.of_intents(connection, unknown)])

            try:
                read = await self._store.look(work)
            except Unavailable:
                return  # `catch_up_step` publishes all of it
        touched = self._note(one for one in changed.values() if self._is_followed(one.id))
        self._keep(read)
        await self._tell_changes(touched & self._open.keys())

    async def _tell_changes(self, operation_ids: Collection[OperationId]) -> None:
        """Publish operations whose intents changed. An end is read from the store first: another frontend may have
        cancelled a share of it, which the intents do not show.
        """
        ended = [one for one in operation_ids if self._is_read_first(self._open[one])]
        self._publish_soon(set(operation_ids).difference(ended))
        if ended:
            await self.show(ended)

    def _is_read_first(self, snapshot: Snapshot) -> bool:
        """Whether it has ended, or a row of it has that other operations share: only these go on after a cancel."""
        if not snapshot.is_open:
            return True
        ended = (one for one in snapshot.changed if not snapshot.intents[one].is_open)
        return any(len(self._tracked[one].operations) > 1 for one in ended if one in self._tracked)

    def _is_followed(self, intent_id: IntentId) -> bool:
        """Whether all operations that an intent is known to serve are known here, with this intent."""
        tracked = self._tracked.get(intent_id)
        return tracked is not None and all(
            one in self._open and intent_id in self._open[one].intents for one in tracked.operations
        )

    def _note(self, intents: Iterable[Intent]) -> set[OperationId]:
        """Take over newer states of intents that are followed here, and return the operations they serve."""
        touched: set[OperationId] = set()
        for intent in intents:
            tracked = self._tracked[intent.id]
            tracked.note(intent)
            for operation_id in tracked.operations:
                self._open[operation_id].note(intent)
            touched |= tracked.operations
        return touched

    def _keep(self, snapshots: Iterable[Snapshot]) -> None:
        """Take over what was read, and publish what is new in it."""
        for read in snapshots:
            operation_id, revision = read.operation.id, read.revision
            known = self._open.get(operation_id)
            before = None if known is None else known.operation
            if known is not None:
                known.merge(read)
            elif revision < self._told.get(operation_id, -1):
                continue  # older than the published one
            elif read.is_open:
                known = self._open[operation_id] = read
            if known is None:
                self._told[operation_id] = revision
                self._send(read, whole=True)
                for intent_id in read.intents:
                    self._forget_share(intent_id, operation_id)
                continue
            for intent in known.intents.values():
                tracked = self._tracked.setdefault(intent.id, Tracked(intent.node_id, set()))
                tracked.operations.add(operation_id)
                tracked.note(intent)
            if not known.is_open and read.is_open:
                self._dirty.add(operation_id)  # it ended after this was read; the next step reads its end
            elif known.changed or known.operation != before:
                self._publish(known)

    def _publish_soon(self, operation_ids: Iterable[OperationId]) -> None:
        """Publish at once what has rested, and the others with the next step."""
        now = self._clock.monotonic()
        for operation_id in operation_ids:
            snapshot = self._open[operation_id]
            if now - snapshot.published_at >= PUBLISH_SECONDS:
                self._publish(snapshot)
            else:
                self._dirty.add(operation_id)

    def _publish(self, snapshot: Snapshot) -> None:
        """Publish an open operation, and stop following it if it has ended."""
        operation_id = snapshot.operation.id
        self._dirty.discard(operation_id)
        self._told[operation_id] = snapshot.revision
        self._send(snapshot, whole=not snapshot.is_shown)
        snapshot.is_shown, snapshot.published_at = True, self._clock.monotonic()
        has_ended = not snapshot.is_open
        if has_ended:
            del self._open[operation_id]
        for intent in snapshot.intents.values() if has_ended else ():
            self._forget_share(intent.id, operation_id)

    def _send(self, snapshot: Snapshot, *, whole: bool) -> None:
        if not self._events.is_watched:
            # Whoever begins to watch gets all of it first.
            snapshot.rows.clear()
            snapshot.changed.clear()
            return
        moment = snapshot.moment(self._clock.monotonic(), self._patience)
        view = snapshot.whole(self._signs, moment) if whole else snapshot.changes(self._signs, moment)
        snapshot.changed.clear()
        self._events.publish("operation", snapshot.operation.id, msgspec.json.encode(view))

    def _forget_share(self, intent_id: IntentId, operation_id: OperationId) -> None:
        """Stop tracking an intent once no open operation wants it."""
        tracked = self._tracked.get(intent_id)
        if tracked is not None:
            tracked.operations.discard(operation_id)
            if not tracked.operations:
                del self._tracked[intent_id]
                self._signs.pop(intent_id, None)

    def progress(self, node_id: NodeId, intent_id: IntentId, progress: Progress) -> bool:
        """Store the progress of a node's own running intent. Returns False for progress that is ignored: older than the
        known one, or of an intent that does not run on that node.
        """
        tracked = self._tracked.get(intent_id)
        known = self._signs.get(intent_id)
        if tracked is None or tracked.node_id != node_id or not is_newer(progress, known.progress if known else None):
            return False
        self._signs[intent_id] = Sign(progress, self._clock.monotonic())
        for operation_id in tracked.operations:
            snapshot = self._open.get(operation_id)
            if snapshot is not None and intent_id in snapshot.intents:
                snapshot.changed.add(intent_id)
                self._dirty.add(operation_id)
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
        snapshot = self._open.get(operation_id)
        # An operation that is not known yet may be expected already.
        for intent_id in list(self._tracked) if snapshot is None else snapshot.at_nodes.get(node_id, ()):
            tracked = self._tracked.get(intent_id)
            if tracked is None or tracked.node_id != node_id or operation_id not in tracked.operations:
                continue
            if tracked.attempt:
                known = self._signs[intent_id].progress if intent_id in self._signs else Progress()
                if known.attempt != tracked.attempt:
                    known = Progress(attempt=tracked.attempt)
                after = continued(progress, known)
                return (intent_id, after) if self.progress(node_id, intent_id, after) else (None, after)
        return None, progress

    async def step(self) -> None:
        """Publish the nodes and operations that changed since the last step."""
        if self._dirty_nodes:
            await self._publish_nodes()
        now = self._clock.monotonic()
        if now - self._silence_noted_at >= SILENCE_SECONDS:
            self._silence_noted_at = now
            self._note_silence()
        if now < self._rests_until:
            return
        taken, self._dirty = self._dirty, set()
        # Less often with many operations and watchers, so that publishing never takes all of this frontend's time.
        rest = len(taken) * self._events.watchers / PUBLISHED_PER_SECOND
        self._rests_until = now + (min(SLOWEST_SECONDS, rest) if rest > PUBLISH_SECONDS else 0.0)
        for count, operation_id in enumerate(taken, start=1):
            snapshot = self._open.get(operation_id)
            if snapshot is not None and not self._is_read_first(snapshot):
                self._publish(snapshot)
            elif snapshot is not None:
                await self._tell_changes([operation_id])
            if count % _RENDERED_AT_ONCE == 0:
                await asyncio.sleep(0)

    async def node_changed(self, node_id: NodeId) -> None:
        await self.nodes_changed([node_id])

    async def nodes_changed(self, node_ids: Iterable[NodeId]) -> None:
        """Publish these nodes at once, or with the next step if others were published a moment ago: every event is a
        write to every watcher, and a thousand machines may come back at the same time.
        """
        changed = [*node_ids]
        if changed:
            self._on_own_changes()
        await self._nodes_changed(changed)

    async def _nodes_changed(self, node_ids: Iterable[NodeId]) -> None:
        self._dirty_nodes.update(node_ids)
        if self._dirty_nodes and self._clock.monotonic() - self._nodes_told_at >= PUBLISH_SECONDS:
            await self._publish_nodes()

    async def _publish_nodes(self) -> None:
        """In one read for any number of them."""
        node_ids, self._dirty_nodes = self._dirty_nodes, set()
        self._nodes_told_at = self._clock.monotonic()
        try:
            found, now = await self._store.look(lambda c: (nodes.many(c, node_ids), db.now(c)))
        except Unavailable:
            return  # `catch_up_step` publishes them
        # Some together, so that watchers are not woken for each. Then requests run: a thousand machines that come back
        # at once are half a megabyte for every watcher.
        for count, node in enumerate(found, start=1):
            if node.updated_at >= self._told_nodes.get(node.id, 0.0):
                self._note_node(node, now)
            if count % _RENDERED_AT_ONCE == 0:
                await asyncio.sleep(0)

    def _note_node(self, node: Node, now: float) -> None:
        self._told_nodes[node.id] = node.updated_at
        if self._events.is_watched:
            self._events.publish("node", node.id, msgspec.json.encode(render_node(node, now)))
        # The view of an operation shows whether its nodes are away or drained.
        for operation_id, snapshot in self._open.items():
            if snapshot.note_node(node.id, health=node.health, bus_away=node.bus_away, drained=node.drained):
                self._dirty.add(operation_id)

    def node_removed(self, node_id: NodeId) -> None:
        self._on_own_changes()
        self._forget_node(node_id)

    def _forget_node(self, node_id: NodeId) -> None:
        if self._told_nodes.pop(node_id, None) is None:
            return  # published already
        self._events.publish("node-removed", node_id, msgspec.json.encode({"id": node_id}))

    # Reconnecting watchers ------------------------------------------------------------------------

    async def changed_since(self, position: float) -> Missed:
        """Return the changes after `position`, up to which the watcher got everything, from any frontend.

        Open operations are always among them: their progress is in no row.
        """
        since, still_open = position - _OVERLAP_SECONDS, list(self._open)

        def work(connection: Connection) -> tuple[list[Snapshot], list[Node], list[NodeId], float, bool]:
            found = list(dict.fromkeys([*history.changed_since(connection, since), *still_open]))
            snapshots = self._read(connection, found[:MAX_MISSED])
            changed = nodes.many(connection, nodes.changed_since(connection, since))
            return snapshots, changed, nodes.ids(connection), db.now(connection), len(found) <= MAX_MISSED

        snapshots, changed, present, now, is_all = await self._store.read(work)
        snapshots.sort(key=lambda snapshot: snapshot.operation.created_at)
        return Missed(
            operations=[self._render(snapshot) for snapshot in snapshots],
            nodes=[render_node(node, now) for node in changed],
            present=[*present],
            position=now,
            is_all=is_all,
        )

    # Other frontends ------------------------------------------------------------------------------

    async def restore(self) -> None:
        """Read the open operations after a start, so that their progress is tracked."""

        def work(connection: Connection) -> tuple[list[Snapshot], dict[NodeId, float], float]:
            now = db.now(connection)
            return self._read(connection, history.open_ids(connection)), nodes.updates(connection), now

        snapshots, self._told_nodes, self._caught_up_to = await self._store.look(work)
        self._keep(snapshots)
        self._events.position = self._caught_up_to

    def has_told(self, glance: Glance) -> bool:
        """Whether watchers know of all changes that a glance shows: there is nothing to catch up with."""
        if glance.changed_at >= self._caught_up_to - _OVERLAP_SECONDS or glance.node_count != len(self._told_nodes):
            return False
        return all(one.is_open and not one.changes_alone for one in self._open.values())

    async def catch_up_step(self) -> None:
        """Publish changes by other frontends, and those that this one could not publish."""
        since = self._caught_up_to - _OVERLAP_SECONDS
        told_nodes = self._told_nodes
        known = Known(
            open=self._open,
            ended=self._told,
            nodes=told_nodes,
            rows={one: snapshot.operation for one, snapshot in self._open.items() if snapshot.changes_alone},
        )

        def work(connection: Connection) -> tuple[News, list[Snapshot]]:
            news = read_news(connection, since, known)
            return news, self._read(connection, news.operations) if news.operations else []

        news, snapshots = await self._store.look(work)
        self._keep(snapshots)
        touched = self._note(one for one in news.intents if self._is_followed(one.id))
        # Also the ends that could not be read when they came.
        await self._tell_changes(
            {*(touched & self._open.keys()), *(one for one, known in self._open.items() if not known.is_open)}
        )
        await self._nodes_changed(news.nodes)
        gone = [one for one in told_nodes if one not in news.present] if news.present is not None else []
        for node_id in gone:
            self._forget_node(node_id)
        if news.nodes or gone:
            self._on_nodes_changed()
        if concerns_replicas(news, snapshots):
            self._on_replicas_changed()
        self._events.position = self._caught_up_to = news.now
        self._forget_told()

    def _note_silence(self) -> None:
        """Publish that workers have been silent for long: no message says so."""
        monotonic = self._clock.monotonic()
        for operation_id, snapshot in self._open.items() if self._events.is_watched else ():
            if snapshot.note_silence(self._signs, snapshot.moment(monotonic, self._patience)):
                self._dirty.add(operation_id)

    def _forget_told(self) -> None:
        """Drop old revisions: an operation that does not change is not read again."""
        if len(self._told) > _MAX_TOLD:
            kept = {*list(self._told)[-_MAX_TOLD // 2 :], *self._open}
            self._told = {one: revision for one, revision in self._told.items() if one in kept}
