"""Rows of the simulated store as the invariants see them: every change of every transaction that was committed.

SQLite itself tells, through triggers, so nothing that the product writes can go unseen and nothing it only reads costs
anything. Changes of a transaction that is rolled back are forgotten.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence

from msgspec import Struct

from enginehouse.core.ids import NodeId

TERMINAL = frozenset({"succeeded", "failed", "cancelled", "superseded"})


class IntentRow(Struct, frozen=True):
    id: str
    node_id: NodeId
    subject: str
    generation: int
    action: str
    state: str
    attempt: int
    failures: int
    fence: int
    owner: str
    lease_until: float
    version: int
    created_at: float
    due_at: float
    progress: str | None
    outcome: str | None
    reason: str
    lane: str
    lane_width: int

    @property
    def is_ended(self) -> bool:
        return self.state in TERMINAL


class OperationRow(Struct, frozen=True):
    id: str
    kind: str
    name: str
    author: str
    targets: str
    excluded: str
    asked: str
    created_at: float
    is_steered: bool
    replaces: str  # JSON; null for a load that replaces nothing


class Changed(Struct, frozen=True):
    """One row before and after; None where there is none."""

    before: IntentRow | OperationRow | None
    after: IntentRow | OperationRow | None


class Changes:
    """Collects what the triggers tell; `take` at the end of a transaction."""

    def __init__(self) -> None:
        self._found: list[Changed] = []
        self.news = 0  # grows with every change that somebody who watches might be told, rolled back or not

    def take(self) -> list[Changed]:
        taken, self._found = self._found, []
        return taken

    def watch(self, connection: sqlite3.Connection) -> None:
        connection.create_function("sim_intent", -1, self._noting(IntentRow))
        connection.create_function("sim_operation", -1, self._noting(OperationRow))
        connection.create_function("sim_node", 0, self._note_news)

    def _noting(self, kind: type[IntentRow] | type[OperationRow]) -> Callable[..., None]:
        width = len(kind.__struct_fields__)

        def note(event: str, *values: str | float | None) -> None:
            before = kind(*values[:width]) if event != "insert" else None  # type: ignore[arg-type]
            after = kind(*values[-width:]) if event != "delete" else None  # type: ignore[arg-type]
            self._found.append(Changed(before, after))
            is_renewal = (
                isinstance(before, IntentRow) and isinstance(after, IntentRow) and before.version == after.version
            )
            if not is_renewal:
                self._note_news()

        return note

    def _note_news(self) -> None:
        self.news += 1


def add_triggers(connection: sqlite3.Connection) -> None:
    """Into the template: every copy has them."""
    for table, function, kind in (("intents", "sim_intent", IntentRow), ("operations", "sim_operation", OperationRow)):
        columns = kind.__struct_fields__
        for event, sides in (("insert", ("new",)), ("update", ("old", "new")), ("delete", ("old",))):
            said = ", ".join([f"'{event}'", *(f"{side}.{column}" for side in sides for column in columns)])
            connection.execute(
                f"create trigger sim_{table}_{event} after {event} on {table} begin select {function}({said}); end"
            )
    connection.execute("create trigger sim_node_new after insert on nodes begin select sim_node(); end")
    connection.execute("create trigger sim_node_set after update of updated_at on nodes begin select sim_node(); end")


def select_rows(connection: sqlite3.Connection, query: str, values: Sequence[object] = ()) -> list[tuple[object, ...]]:
    """A look at the store from outside, without the product's code."""
    return connection.execute(query, values).fetchall()
