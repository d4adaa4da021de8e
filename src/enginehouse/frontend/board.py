"""What watchers see: the operations under way, each rendered once per change, with the live progress that only memory
holds.

State changes are read from the store and published at once. Progress never touches the store on its way to a watcher:
it is kept here per intent and rendered from the last snapshot, at most a few times a second per operation, however
many nodes report.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
from msgspec import Struct

from enginehouse.core.errors import NotFound
from enginehouse.core.intent import Intent
from enginehouse.core.operation import Operation, status_of
from enginehouse.core.progress import Progress, is_newer
from enginehouse.frontend.events import Events
from enginehouse.frontend.views import Moment, OperationView, Sign, render_node, render_operation
from enginehouse.ports import Clock
from enginehouse.store import db, nodes, operations
from enginehouse.store.db import Connection, Store

PUBLISH_SECONDS = 0.2  # how often progress of one operation is told; faster than this nobody reads


class Patience(Struct, frozen=True):
    """After how much silence a running intent is shown as `running_on_worker`."""

    stall_seconds: float = 120.0
    reply_budget_seconds: float = 900.0


class Snapshot(Struct):
    operation: Operation
    intents: list[Intent]
    names: dict[str, str]
    absent: set[str]
    read_at: float
    read_monotonic: float


class Board:
    def __init__(self, store: Store, events: Events, clock: Clock, patience: Patience) -> None:
        self._store = store
        self._events = events
        self._clock = clock
        self._patience = patience
        self._signs: dict[str, Sign] = {}
        self._open: dict[str, Snapshot] = {}
        self._operations_of: dict[str, set[str]] = {}
        self._dirty: set[str] = set()

    # Reading --------------------------------------------------------------------------------------

    async def view(self, operation_id: str) -> OperationView:
        snapshots = await self._store.transaction(lambda connection: self._read(connection, [operation_id]))
        if not snapshots:
            raise NotFound(f"cannot find an operation with the id {operation_id!r}", code="not_found")
        return self._render(snapshots[0])

    async def recent(self, limit: int) -> list[OperationView]:
        def work(connection: Connection) -> list[Snapshot]:
            found = operations.recent(connection, limit)
            return self._read(connection, [operation.id for operation in found])

        return [self._render(snapshot) for snapshot in await self._store.transaction(work)]

    def _read(self, connection: Connection, operation_ids: Sequence[str]) -> list[Snapshot]:
        now = db.now(connection)
        by_operation = operations.intents_of(connection, operation_ids)
        node_ids = {intent.node_id for intents in by_operation.values() for intent in intents}
        names, absent = nodes.named(connection, node_ids)
        found = (operations.get(connection, operation_id) for operation_id in operation_ids)
        return [
            Snapshot(one, by_operation[one.id], names, absent, now, self._clock.monotonic())
            for one in found
            if one is not None
        ]

    def _render(self, snapshot: Snapshot) -> OperationView:
        monotonic = self._clock.monotonic()
        moment = Moment(
            now=snapshot.read_at + (monotonic - snapshot.read_monotonic),
            monotonic=monotonic,
            stall_seconds=self._patience.stall_seconds,
            reply_budget_seconds=self._patience.reply_budget_seconds,
            absent=snapshot.absent,
        )
        return render_operation(snapshot.operation, snapshot.intents, snapshot.names, self._signs, moment)

    # Telling --------------------------------------------------------------------------------------

    async def operations_changed(self, operation_ids: Iterable[str]) -> None:
        ids = list(dict.fromkeys(operation_ids))
        if ids:
            self._keep(await self._store.transaction(lambda connection: self._read(connection, ids)))

    async def intents_changed(self, intents: Iterable[Intent]) -> None:
        """Read and tell every operation that these intents serve."""
        ids = [intent.id for intent in intents]
        if not ids:
            return

        def work(connection: Connection) -> list[Snapshot]:
            return self._read(connection, [one.id for one in operations.of_intents(connection, ids)])

        self._keep(await self._store.transaction(work))

    def _keep(self, snapshots: Iterable[Snapshot]) -> None:
        for snapshot in snapshots:
            operation_id = snapshot.operation.id
            if status_of(snapshot.operation, snapshot.intents) in ("queued", "running"):
                self._open[operation_id] = snapshot
                for intent in snapshot.intents:
                    self._operations_of.setdefault(intent.id, set()).add(operation_id)
            else:
                self._open.pop(operation_id, None)
            self._publish(snapshot)
            for intent in snapshot.intents:
                if not intent.is_open:
                    self._signs.pop(intent.id, None)
                    self._operations_of.pop(intent.id, None)

    def _publish(self, snapshot: Snapshot) -> None:
        self._dirty.discard(snapshot.operation.id)
        if self._events.is_watched:
            body = msgspec.json.encode(self._render(snapshot))
            self._events.publish("operation", snapshot.operation.id, body)

    def progress(self, intent_id: str, progress: Progress) -> bool:
        """Note progress of a running intent; whether it was news. Older than what is known, or of an intent not under
        way: ignored.
        """
        known = self._signs.get(intent_id)
        if intent_id not in self._operations_of or not is_newer(progress, known.progress if known else None):
            return False
        self._signs[intent_id] = Sign(progress, self._clock.monotonic())
        self._dirty.update(self._operations_of[intent_id])
        return True

    async def step(self) -> None:
        """Tell the operations whose progress moved since the last step."""
        for operation_id in list(self._dirty):
            snapshot = self._open.get(operation_id)
            if snapshot is not None:
                self._publish(snapshot)
        self._dirty.clear()

    async def node_changed(self, node_id: str) -> None:
        def work(connection: Connection) -> bytes | None:
            node = nodes.get(connection, node_id)
            return None if node is None else msgspec.json.encode(render_node(node, db.now(connection)))

        if self._events.is_watched:
            body = await self._store.transaction(work)
            if body is not None:
                self._events.publish("node", node_id, body)
        # Whether its node is there is part of what an operation shows.
        await self.operations_changed(
            [
                operation_id
                for operation_id, snapshot in self._open.items()
                if any(intent.node_id == node_id and intent.is_open for intent in snapshot.intents)
            ]
        )

    async def restore(self) -> None:
        """After a start: know what is under way, so that progress of it is news."""

        def work(connection: Connection) -> list[Snapshot]:
            ids = operations.open_intent_ids(connection)
            return self._read(connection, [one.id for one in operations.of_intents(connection, ids)])

        self._keep(await self._store.transaction(work))
