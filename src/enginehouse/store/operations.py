"""Rows of operations and intents.

An intent changes only through `apply`, a compare-and-set on its version: of two writers one gets `Conflict` and looks
again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from sqlalchemy import Row, Select, func, select, update
from sqlalchemy.dialects import postgresql, sqlite

from enginehouse.core import intent as intents_core
from enginehouse.core.action import Action, is_same_wish, subject_of
from enginehouse.core.errors import Conflict
from enginehouse.core.intent import OPEN, Change, Intent, Outcome
from enginehouse.core.operation import Excluded, Operation
from enginehouse.core.progress import Progress
from enginehouse.store.db import Connection
from enginehouse.store.schema import intents, nodes, operation_intents, operations, subjects


def _text(value: object) -> str:
    return msgspec.json.encode(value).decode()


def _operation(row: Row[Any]) -> Operation:
    return Operation(
        id=row.id,
        kind=row.kind,
        name=row.name,
        author=row.author,
        created_at=row.created_at,
        targets=msgspec.json.decode(row.targets, type=tuple[str, ...]),
        excluded=msgspec.json.decode(row.excluded, type=tuple[Excluded, ...]),
        is_steered=row.is_steered,
        error_code=row.error_code,
        error_message=row.error_message,
    )


def _intent(row: Row[Any]) -> Intent:
    plain = {
        field: getattr(row, field)
        for field in Intent.__struct_fields__
        if field not in ("action", "progress", "outcome")
    }
    return Intent(
        **plain,
        action=msgspec.json.decode(row.action, type=Action),
        progress=None if row.progress is None else msgspec.json.decode(row.progress, type=Progress),
        outcome=None if row.outcome is None else msgspec.json.decode(row.outcome, type=Outcome),
    )


def _intent_columns(intent: Intent) -> dict[str, object]:
    plain = {field: getattr(intent, field) for field in Intent.__struct_fields__}
    return plain | {
        "action": _text(intent.action),
        "progress": None if intent.progress is None else _text(intent.progress),
        "outcome": None if intent.outcome is None else _text(intent.outcome),
    }


# Operations --------------------------------------------------------------------------------------


def insert(connection: Connection, operation: Operation) -> None:
    columns = {field: getattr(operation, field) for field in Operation.__struct_fields__}
    connection.execute(
        operations.insert().values(
            columns | {"targets": _text(operation.targets), "excluded": _text(operation.excluded)}
        )
    )


def get(connection: Connection, operation_id: str) -> Operation | None:
    row = connection.execute(select(operations).where(operations.c.id == operation_id)).one_or_none()
    return None if row is None else _operation(row)


def recent(connection: Connection, limit: int) -> list[Operation]:
    query = select(operations).order_by(operations.c.created_at.desc()).limit(limit)
    return [_operation(row) for row in connection.execute(query)]


def steered(connection: Connection) -> list[Operation]:
    query = select(operations).where(operations.c.is_steered.is_(True)).order_by(operations.c.created_at)
    return [_operation(row) for row in connection.execute(query)]


def is_steered(connection: Connection, operation_id: str) -> bool:
    return bool(connection.execute(select(operations.c.is_steered).where(operations.c.id == operation_id)).scalar())


def last_of(connection: Connection, kind: str, name: str) -> Operation | None:
    query = (
        select(operations)
        .where(operations.c.kind == kind, operations.c.name == name)
        .order_by(operations.c.created_at.desc())
        .limit(1)
    )
    row = connection.execute(query).one_or_none()
    return None if row is None else _operation(row)


def end_steering(connection: Connection, operation_id: str, code: str = "", message: str = "") -> None:
    connection.execute(
        update(operations)
        .where(operations.c.id == operation_id)
        .values(is_steered=False, error_code=code, error_message=message)
    )


def of_intents(connection: Connection, intent_ids: Iterable[str]) -> list[Operation]:
    query = (
        select(operations)
        .join(operation_intents, operation_intents.c.operation_id == operations.c.id)
        .where(operation_intents.c.intent_id.in_(list(intent_ids)))
        .distinct()
    )
    return [_operation(row) for row in connection.execute(query)]


# Intents -----------------------------------------------------------------------------------------


def intents_of(connection: Connection, operation_ids: Sequence[str]) -> dict[str, list[Intent]]:
    """The intents of each operation, in the order in which they were added."""
    query = (
        select(operation_intents.c.operation_id, *intents.c)
        .join(intents, intents.c.id == operation_intents.c.intent_id)
        .where(operation_intents.c.operation_id.in_(list(operation_ids)))
        .order_by(operation_intents.c.position)
    )
    found: dict[str, list[Intent]] = {operation_id: [] for operation_id in operation_ids}
    for row in connection.execute(query):
        found[row.operation_id].append(_intent(row))
    return found


def intent(connection: Connection, intent_id: str) -> Intent | None:
    row = connection.execute(select(intents).where(intents.c.id == intent_id)).one_or_none()
    return None if row is None else _intent(row)


def open_on(connection: Connection, node_id: str) -> list[Intent]:
    query = select(intents).where(intents.c.node_id == node_id, intents.c.state.in_(OPEN))
    return [_intent(row) for row in connection.execute(query.order_by(intents.c.created_at))]


def open_intent_ids(connection: Connection) -> list[str]:
    return list(connection.execute(select(intents.c.id).where(intents.c.state.in_(OPEN))).scalars())


def count_by_state(connection: Connection) -> dict[str, int]:
    rows = connection.execute(select(intents.c.state, func.count()).group_by(intents.c.state))
    return {state: count for state, count in rows}


def add_intent(
    connection: Connection, operation_id: str, node_id: str, action: Action, intent_id: str, now: float
) -> Intent:
    """Give the operation an intent for `action` on the node: a new one that supersedes what was open there, or the
    equal one that is open.
    """
    subject = subject_of(action)
    generation = _lock_subject(connection, node_id, subject)
    query = (
        select(intents)
        .where(intents.c.node_id == node_id, intents.c.subject == subject, intents.c.state.in_(OPEN))
        .order_by(intents.c.generation.desc())
    )
    open_ones = [_intent(row) for row in connection.execute(query)]
    if open_ones and is_same_wish(action, open_ones[0].action):
        chosen = open_ones[0]
    else:
        for older in open_ones:
            message = "a newer request for the same thing on this node replaced it"
            apply(connection, older, Change(kind="supersede", now=now, reason="superseded", message=message))
        chosen = Intent(
            id=intent_id,
            node_id=node_id,
            subject=subject,
            generation=generation + 1,
            action=action,
            state="accepted",
            created_at=now,
            updated_at=now,
            due_at=now,
        )
        connection.execute(intents.insert().values(_intent_columns(chosen)))
        connection.execute(
            update(subjects)
            .where(subjects.c.node_id == node_id, subjects.c.subject == subject)
            .values(generation=generation + 1)
        )
    _link(connection, operation_id, chosen.id)
    return chosen


def _lock_subject(connection: Connection, node_id: str, subject: str) -> int:
    """The last generation, with its row locked until the transaction ends."""
    insert_into = postgresql.insert if connection.dialect.name == "postgresql" else sqlite.insert
    statement = (
        insert_into(subjects)
        .values(node_id=node_id, subject=subject, generation=0)
        .on_conflict_do_update(
            index_elements=[subjects.c.node_id, subjects.c.subject],
            # Writing the value it has is what takes the lock.
            set_={"generation": subjects.c.generation},
        )
        .returning(subjects.c.generation)
    )
    return int(connection.execute(statement).scalar_one())


def _link(connection: Connection, operation_id: str, intent_id: str) -> None:
    links = select(operation_intents.c.intent_id).where(operation_intents.c.operation_id == operation_id)
    linked = list(connection.execute(links).scalars())
    if intent_id not in linked:
        connection.execute(
            operation_intents.insert().values(operation_id=operation_id, intent_id=intent_id, position=len(linked))
        )


def apply(connection: Connection, before: Intent, change: Change) -> Intent:
    """Apply a change by the table and write it; `Conflict` when the row has moved on since `before` was read."""
    after = intents_core.apply(before, change)
    written = connection.execute(
        update(intents)
        .where(intents.c.id == before.id, intents.c.version == before.version)
        .values(_intent_columns(after))
    )
    if written.rowcount != 1:
        raise Conflict(f"cannot change intent {before.id}: it changed at the same time", code="conflict")
    return after


def set_progress(connection: Connection, intent_id: str, progress: Progress) -> None:
    """Progress is not a change of state: it takes no version, and only a running intent has any."""
    connection.execute(
        update(intents).where(intents.c.id == intent_id, intents.c.state == "running").values(progress=_text(progress))
    )


# Claims ------------------------------------------------------------------------------------------


def claim_due(connection: Connection, owner: str, now: float, lease_until: float, limit: int) -> list[Intent]:
    """Take every due intent whose node is approved and healthy: a new attempt with a new fence each. Oldest first,
    skipping what another frontend holds.
    """
    due = (
        select(intents)
        .join(nodes, nodes.c.id == intents.c.node_id)
        .where(
            intents.c.state.in_(("accepted", "waiting")),
            intents.c.due_at <= now,
            nodes.c.approved.is_(True),
            nodes.c.health == "healthy",
        )
        .order_by(intents.c.created_at)
        .limit(limit)
    )
    change = Change(kind="claim", now=now, owner=owner, lease_until=lease_until)
    return _take(connection, due, change)


def take_over(connection: Connection, owner: str, now: float, lease_until: float) -> list[Intent]:
    """Take the running intents whose owner's lease ended: same attempt, new fence, nothing is sent."""
    orphaned = select(intents).where(intents.c.state == "running", intents.c.lease_until < now)
    return _take(connection, orphaned, Change(kind="take_over", now=now, owner=owner, lease_until=lease_until))


def _take(connection: Connection, query: Select[Any], change: Change) -> list[Intent]:
    locked = query.with_for_update(skip_locked=True, of=intents)
    return [apply(connection, _intent(row), change) for row in connection.execute(locked).all()]


def renew(connection: Connection, owner: str, lease_until: float) -> None:
    """Extend the leases of this owner. Not a change that others must see, so no version is taken."""
    connection.execute(
        update(intents).where(intents.c.state == "running", intents.c.owner == owner).values(lease_until=lease_until)
    )


def running_on_absent_nodes(connection: Connection) -> list[Intent]:
    query = (
        select(intents)
        .join(nodes, nodes.c.id == intents.c.node_id)
        .where(intents.c.state == "running", nodes.c.health == "offline")
    )
    return [_intent(row) for row in connection.execute(query)]


def next_due(connection: Connection, now: float) -> float | None:
    """Seconds until the next waiting intent is due by the clock; None when there is none."""
    query = select(func.min(intents.c.due_at)).where(intents.c.state == "waiting", intents.c.due_at > now)
    due = connection.execute(query).scalar_one()
    return None if due is None else max(0.0, float(due) - now)
