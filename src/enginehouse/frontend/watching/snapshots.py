"""What a frontend knows of one operation: its row, its intents, and the rows that watchers were shown.

A snapshot is read whole once and then follows the intents that change, so that the end of one node of a thousand costs
the same as of one. States arrive by several ways and may overtake each other: per intent the highest version counts,
and an operation is never taken back to an earlier stage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
from msgspec import Struct, field

from enginehouse.core.ids import IntentId, NodeId, OperationId
from enginehouse.core.intent import Intent
from enginehouse.core.operation import Operation, OperationStatus, RequestOptions, absence_of, status_of
from enginehouse.core.views import NodeRow, OperationView
from enginehouse.frontend.watching.views import Moment, Sign, SilenceLimits, render_operation, render_row, word_of
from enginehouse.store import db, gone_nodes, nodes, operations
from enginehouse.store.db import Connection

NEVER = float("-inf")


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


class Snapshot(Struct, kw_only=True):
    operation: Operation
    intents: dict[IntentId, Intent]  # in the order in which they were added
    names: dict[NodeId, str]
    absent: dict[NodeId, str]  # nodes that get no commands, and why
    drained: set[NodeId]
    read_at: float
    read_monotonic: float
    rows: dict[IntentId, NodeRow] = field(default_factory=dict)  # as rendered last
    changed: set[IntentId] = field(default_factory=set)  # those that are to be rendered again
    at_nodes: dict[NodeId, list[IntentId]] = field(default_factory=dict)
    is_shown: bool = False  # watchers were sent all of it, so the changed rows are enough
    published_at: float = NEVER

    def __post_init__(self) -> None:
        for intent in self.intents.values():
            self.at_nodes.setdefault(intent.node_id, []).append(intent.id)

    @property
    def status(self) -> OperationStatus:
        return status_of(self.operation, self.intents.values())

    @property
    def is_open(self) -> bool:
        return self.status in ("queued", "running")

    @property
    def changes_alone(self) -> bool:
        """Whether the operation's row changes without its intents."""
        return self.operation.is_steered or self.operation.is_watching

    @property
    def revision(self) -> int:
        """The same number as `history.revisions`."""
        steps = sum(1 + intent.version for intent in self.intents.values())
        return steps + (0 if self.operation.is_steered else 1) + (1 if self.operation.dismissed else 0)

    def note(self, intent: Intent) -> None:
        """Take a newer state of an intent that is known here."""
        if intent.version > self.intents[intent.id].version:
            self.intents[intent.id] = intent
            self.changed.add(intent.id)

    def merge(self, read: Snapshot) -> None:
        """Take over what is newer in another snapshot of the same operation."""
        for intent in read.intents.values():
            if intent.id in self.intents:
                self.note(intent)
            else:
                self.intents[intent.id] = intent
                self.at_nodes.setdefault(intent.node_id, []).append(intent.id)
                self.changed.add(intent.id)
        if _stage(read.operation) >= _stage(self.operation):
            self.operation = read.operation
        self.names.update(read.names)
        if (read.absent, read.drained) != (self.absent, self.drained):
            self.absent, self.drained = read.absent, read.drained
            self.changed.update(self.intents)
        self.read_at, self.read_monotonic = read.read_at, read.read_monotonic

    def note_node(self, node_id: NodeId, *, health: str, bus_away: bool, drained: bool) -> bool:
        """Note whether a node gets commands; False if that changes no row."""
        touched = [one for one in self.at_nodes.get(node_id, ()) if self.intents[one].is_open]
        away = absence_of(health, bus_away=bus_away)
        if not touched or (away, drained) == (self.absent.get(node_id, ""), node_id in self.drained):
            return False
        # New containers, because the snapshots of one read share theirs.
        others = {one: why for one, why in self.absent.items() if one != node_id}
        self.absent = others | ({node_id: away} if away else {})
        self.drained = (self.drained - {node_id}) | ({node_id} if drained else set())
        self.changed.update(touched)
        return True

    def note_silence(self, signs: Mapping[IntentId, Sign], moment: Moment) -> bool:
        """Mark the rows that look different because time passed; returns whether there are any."""
        for intent in self.intents.values():
            row = self.rows.get(intent.id) if intent.state == "running" else None
            if row is not None and row.status != word_of(intent, signs.get(intent.id), moment):
                self.changed.add(intent.id)
        return bool(self.changed)

    def whole(self, signs: Mapping[IntentId, Sign], moment: Moment) -> OperationView:
        """All of it. What changed since the last event stays marked: others have not seen it."""
        self.rows = {one.id: self._row(one, signs, moment) for one in self.intents.values()}
        return self._summary(moment)

    def changes(self, signs: Mapping[IntentId, Sign], moment: Moment) -> OperationView:
        """The summary, with the changed rows only."""
        changed = [one for one in self.intents if one in self.changed]  # in their order
        for intent_id in self.changed | (self.intents.keys() - self.rows.keys()):
            self.rows[intent_id] = self._row(self.intents[intent_id], signs, moment)
        return msgspec.structs.replace(
            self._summary(moment),
            nodes=[self.rows[one] for one in changed],
            targets=(),
            excluded=(),
            asked=RequestOptions(),
            partial=True,
        )

    def _row(self, intent: Intent, signs: Mapping[IntentId, Sign], moment: Moment) -> NodeRow:
        return render_row(intent, self.names.get(intent.node_id, intent.node_id), signs.get(intent.id), moment)

    def _summary(self, moment: Moment) -> OperationView:
        return render_operation(
            self.operation, list(self.intents.values()), list(self.rows.values()), moment, revision=self.revision
        )

    def moment(self, monotonic: float, patience: SilenceLimits) -> Moment:
        return Moment(
            now=self.read_at + (monotonic - self.read_monotonic),
            monotonic=monotonic,
            patience=patience,
            absent=self.absent,
            drained=self.drained,
        )


def read_snapshots(connection: Connection, ids: Sequence[OperationId], monotonic: float) -> list[Snapshot]:
    """Read these operations whole, in this order, as far as they exist."""
    now = db.now(connection)
    by_operation = operations.intents_of(connection, ids)
    node_ids = {intent.node_id for intents in by_operation.values() for intent in intents}
    present, absent, drained = nodes.named(connection, node_ids)
    names = present | gone_nodes.names(connection, node_ids - present.keys())
    found = operations.many(connection, ids)
    return [
        Snapshot(
            operation=found[one],
            intents={intent.id: intent for intent in by_operation[one]},
            names=names,
            absent=absent,
            drained=drained,
            read_at=now,
            read_monotonic=monotonic,
        )
        for one in ids
        if one in found
    ]


def _stage(operation: Operation) -> int:
    """How many of the steps that are never taken back the row of an operation has made."""
    steps = (
        not operation.is_steered,
        operation.dismissed,
        bool(operation.error_code),
        operation.canary is not None and not operation.is_watching,
    )
    return sum(steps)
