"""Rows of operations and intents. Queries for users are in `history`.

The state of an intent changes only through `apply`, a compare-and-set on its version (of two writers one gets
`Conflict` and must read again), or through `apply_all`, for rows that the transaction has locked. Leases, progress and
remarks on ended intents are not changes of state.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from sqlalchemy import BindParameter, Select, and_, bindparam, or_, select, update

from enginehouse.core import intent as intents_core
from enginehouse.core.action import UnknownAction
from enginehouse.core.errors import Conflict
from enginehouse.core.ids import IntentId, NodeId, OperationId
from enginehouse.core.intent import OPEN, Change, Intent
from enginehouse.core.operation import (
    ALL_OPERATIONS,
    ENDED,
    Operation,
    OperationFilter,
    OperationKind,
    status_by_states,
)
from enginehouse.store.db import Connection
from enginehouse.store.rows import (
    STRUCTURED,
    intent_columns,
    intent_of,
    operation_columns,
    operation_of,
    select_among,
    slices,
    text_of,
)
from enginehouse.store.schema import intents, nodes, operation_intents, operations

# Statements that run many times a second are built once.
_IDS: BindParameter[Any] = bindparam("ids", expanding=True)
_ADD = operations.insert()
_STEERED = (
    select(operations)
    .where(operations.c.is_steered.is_(True), operations.c.kind == bindparam("of_kind"))
    .order_by(operations.c.created_at)
)
_STEERED_OF = _STEERED.where(operations.c.name == bindparam("of"))
_WATCHING = select(operations).where(operations.c.canary_phase == "watching").order_by(operations.c.created_at)
_LOCKED = select(operations).where(operations.c.id == bindparam("row_id")).with_for_update()
_SET_CANARY = (
    update(operations)
    .where(operations.c.id == bindparam("row_id"))
    .values({name: bindparam(name) for name in ("canary", "canary_phase", "error_code", "error_message")})
)
_IS_STEERED = select(operations.c.is_steered).where(operations.c.id == bindparam("row_id"))
_END_STEERING = (
    update(operations)
    .where(operations.c.id == bindparam("row_id"))
    .values(is_steered=False, error_code=bindparam("code"), error_message=bindparam("text"))
)
_MANY = select(operations).where(operations.c.id.in_(_IDS))
_OF_INTENTS = select(operation_intents.c.operation_id).where(operation_intents.c.intent_id.in_(_IDS)).distinct()
_INTENTS_OF = (
    select(operation_intents.c.operation_id, operation_intents.c.detached, *intents.c)
    .join(intents, intents.c.id == operation_intents.c.intent_id)
    .where(operation_intents.c.operation_id.in_(_IDS))
    .order_by(operation_intents.c.position)
)
_INTENT = select(intents).where(intents.c.id == bindparam("id"))
_FIRST_OF_INTENTS = (
    select(operation_intents.c.intent_id, operations.c.id)
    .join(operations, operations.c.id == operation_intents.c.operation_id)
    .where(operation_intents.c.intent_id.in_(_IDS))
    .order_by(operations.c.created_at)
)
_INTENTS = select(intents).where(intents.c.id.in_(_IDS))
_LOCKED_INTENTS = _INTENTS.order_by(intents.c.id).with_for_update()
_LOCKED_ROWS = select(operations.c.id).where(operations.c.id.in_(_IDS)).order_by(operations.c.id).with_for_update()
_SET_END = update(operations).where(operations.c.id == bindparam("row_id")).values(ended_as=bindparam("status"))
_SHARES = operation_intents.join(intents, intents.c.id == operation_intents.c.intent_id)
_ANY_OPEN = (
    select(intents.c.id)
    .select_from(_SHARES)
    .where(
        operation_intents.c.operation_id == bindparam("of"),
        operation_intents.c.detached.is_(False),
        intents.c.state.in_(sorted(OPEN)),
    )
    .limit(1)
)
_STATES = (
    select(operation_intents.c.detached, intents.c.state)
    .select_from(_SHARES)
    .where(operation_intents.c.operation_id == bindparam("of"))
    .distinct()
)
_OPEN_ON = (
    select(intents)
    .where(intents.c.node_id == bindparam("node_id"), intents.c.state.in_(sorted(OPEN)))
    .order_by(intents.c.created_at)
)

_OPEN_AMONG = (
    select(intents).where(intents.c.node_id.in_(_IDS), intents.c.state.in_(sorted(OPEN))).order_by(intents.c.created_at)
)

# Operations --------------------------------------------------------------------------------------


def insert(connection: Connection, operation: Operation) -> None:
    connection.execute(_ADD, operation_columns(operation))


def get(connection: Connection, operation_id: OperationId) -> Operation | None:
    return many(connection, [operation_id]).get(operation_id)


def select_operations(connection: Connection, query: Select[Any]) -> list[Operation]:
    return [operation_of(row) for row in connection.execute(query)]


def many(connection: Connection, operation_ids: Iterable[OperationId]) -> dict[OperationId, Operation]:
    return {row.id: operation_of(row) for row in select_among(connection, _MANY, operation_ids)}


def recent(
    connection: Connection,
    limit: int,
    before: Operation | None = None,
    *,
    is_ended: bool = False,
    wanted: OperationFilter = ALL_OPERATIONS,
) -> list[Operation]:
    """Newest first: all operations, or only ended ones; `before` is the last operation of the previous page."""
    query = select(operations).order_by(operations.c.created_at.desc(), operations.c.id.desc()).limit(limit)
    if is_ended:
        query = query.where(operations.c.ended_as != "")
    if wanted.kind:
        query = query.where(operations.c.kind == wanted.kind)
    if wanted.status:
        query = query.where(operations.c.ended_as == ("" if wanted.status == "open" else wanted.status))
    if wanted.node:
        query = query.where(operations.c.id.in_(_of_node(wanted.node)))
    if before is not None:
        same_moment = and_(operations.c.created_at == before.created_at, operations.c.id < before.id)
        query = query.where(
            operations.c.created_at <= before.created_at,
            or_(operations.c.created_at < before.created_at, same_moment),
        )
    return select_operations(connection, query)


def _of_node(id_or_name: str) -> Select[tuple[str]]:
    chosen = select(nodes.c.id).where(or_(nodes.c.id == id_or_name, nodes.c.name == id_or_name))
    joined = operation_intents.join(intents, intents.c.id == operation_intents.c.intent_id)
    return select(operation_intents.c.operation_id).select_from(joined).where(intents.c.node_id.in_(chosen))


def steered(connection: Connection, name: str | None = None, *, kind: OperationKind = "load") -> list[Operation]:
    """Loads under way, or other operations whose steps are still added; with `name`, those of one model."""
    query, values = (_STEERED, {}) if name is None else (_STEERED_OF, {"of": name})
    return [operation_of(row) for row in connection.execute(query, {"of_kind": kind, **values})]


def watching(connection: Connection) -> list[Operation]:
    """Upgrades in their canary phase."""
    return [operation_of(row) for row in connection.execute(_WATCHING)]


def lock(connection: Connection, operation_id: OperationId) -> Operation | None:
    """Read an operation, and lock its row until the transaction ends."""
    row = connection.execute(_LOCKED, {"row_id": operation_id}).one_or_none()
    return None if row is None else operation_of(row)


def set_canary(connection: Connection, operation: Operation) -> None:
    """Write the canary phase of an operation, and its error."""
    columns = operation_columns(operation)
    names = ("canary", "canary_phase", "error_code", "error_message")
    connection.execute(_SET_CANARY, {"row_id": operation.id, **{name: columns[name] for name in names}})


def is_steered(connection: Connection, operation_id: OperationId) -> bool:
    return bool(connection.execute(_IS_STEERED, {"row_id": operation_id}).scalar_one_or_none())


def error_code_of(connection: Connection, operation_id: OperationId) -> str:
    query = select(operations.c.error_code).where(operations.c.id == operation_id)
    return str(connection.execute(query).scalar_one_or_none() or "")


def last_of(
    connection: Connection, kind: str, name: str, targets: tuple[NodeId, ...] | None = None
) -> Operation | None:
    """The newest operation of this kind and name; with `targets`, of those requested for exactly these nodes."""
    query = select(operations).where(operations.c.kind == kind, operations.c.name == name)
    if targets is not None:
        query = query.where(operations.c.targets == text_of(targets))
    row = connection.execute(query.order_by(operations.c.created_at.desc()).limit(1)).one_or_none()
    return None if row is None else operation_of(row)


def end_steering(connection: Connection, operation_id: OperationId, code: str = "", message: str = "") -> None:
    connection.execute(_END_STEERING, {"row_id": operation_id, "code": code, "text": message})
    end_of(connection, operation_id)


def of_intents(connection: Connection, intent_ids: Iterable[IntentId]) -> list[Operation]:
    ids = dict.fromkeys(row.operation_id for row in select_among(connection, _OF_INTENTS, intent_ids))
    return list(many(connection, ids).values())


def first_of_intents(connection: Connection, intent_ids: Iterable[IntentId]) -> dict[IntentId, OperationId]:
    """The id of the oldest operation of each intent."""
    first: dict[IntentId, OperationId] = {}
    for row in select_among(connection, _FIRST_OF_INTENTS, intent_ids):
        first.setdefault(row.intent_id, row.id)
    return first


# Intents -----------------------------------------------------------------------------------------


def intents_of(connection: Connection, operation_ids: Sequence[OperationId]) -> dict[OperationId, list[Intent]]:
    """The intents of each operation, in the order in which they were added."""
    found: dict[OperationId, list[Intent]] = {operation_id: [] for operation_id in operation_ids}
    for row in select_among(connection, _INTENTS_OF, operation_ids):
        intent = intent_of(row)
        found[row.operation_id].append(_as_cancelled(intent) if row.detached else intent)
    return found


def _as_cancelled(intent: Intent) -> Intent:
    """The view of an operation that detached from an intent which continues for another one."""
    message = "cancelled here; it continues for another operation"
    return msgspec.structs.replace(
        intent,
        state="cancelled",
        reason="cancelled",
        message=message,
        progress=None,
        version=intent.version + 1,  # detaching changed this operation
    )


def intent(connection: Connection, intent_id: IntentId) -> Intent | None:
    row = connection.execute(_INTENT, {"id": intent_id}).one_or_none()
    return None if row is None else intent_of(row)


def intents_by_id(connection: Connection, intent_ids: Iterable[IntentId]) -> list[Intent]:
    return [intent_of(row) for row in select_among(connection, _INTENTS, intent_ids)]


def lock_intents(connection: Connection, intent_ids: Iterable[IntentId]) -> dict[IntentId, Intent]:
    """Read these intents and lock them until the transaction ends."""
    return {row.id: intent_of(row) for row in select_among(connection, _LOCKED_INTENTS, sorted(intent_ids))}


def open_on(connection: Connection, node_id: NodeId) -> list[Intent]:
    return [intent_of(row) for row in connection.execute(_OPEN_ON, {"node_id": node_id})]


def open_among(connection: Connection, node_ids: Iterable[NodeId]) -> dict[NodeId, list[Intent]]:
    """`open_on`, for several nodes at once; nodes without open intents are left out."""
    found: dict[NodeId, list[Intent]] = {}
    for row in select_among(connection, _OPEN_AMONG, node_ids):
        found.setdefault(row.node_id, []).append(intent_of(row))
    return found


def apply(connection: Connection, before: Intent, change: Change) -> Intent:
    """Apply a change by the table and write it; raise `Conflict` if the row changed since `before` was read."""
    after = intents_core.apply(before, change)
    # Some columns of a row that a newer version wrote are unknown; they keep their values.
    write = _WRITE_KNOWN if isinstance(after.action, UnknownAction) else _WRITE
    written = connection.execute(write, _written(after))
    if written.rowcount != 1:
        raise Conflict(f"cannot change intent {before.id}: it changed at the same time. Read it again", code="conflict")
    return after


def cancel_share(connection: Connection, operation_id: OperationId, intent: Intent, change: Change) -> Intent | None:
    """Cancel an intent for one operation and return it; None if another needs it, so that it continues."""
    wanted = (
        select(operation_intents.c.operation_id)
        .where(
            operation_intents.c.intent_id == intent.id,
            operation_intents.c.operation_id != operation_id,
            operation_intents.c.detached.is_(False),
        )
        .limit(1)
    )
    if connection.execute(wanted).scalar_one_or_none() is None:
        after = apply(connection, intent, change)
        note_ended(connection, [intent.id])
        return after
    share = (operation_intents.c.operation_id == operation_id, operation_intents.c.intent_id == intent.id)
    connection.execute(update(operation_intents).where(*share).values(detached=True))
    _touch(connection, operation_id, change.now)
    note_ended(connection, [intent.id])
    return None


def remark(connection: Connection, before: Intent, message: str, now: float) -> Intent:
    """Replace the message of an intent that nobody works on: it has ended, or is held. Its state stays."""
    after = msgspec.structs.replace(before, message=message, updated_at=now, version=before.version + 1)
    connection.execute(_WRITE, {**intent_columns(after), "row_id": before.id, "row_version": before.version})
    return after


def note_ended(connection: Connection, intent_ids: Iterable[IntentId]) -> None:
    """Record how the operations of these intents ended, if they did. It only speeds up lists.

    The states are read without the intents, and only once no intent is open: the end of one node of a thousand must not
    cost a thousand.
    """
    ids = sorted({row.operation_id for row in select_among(connection, _OF_INTENTS, intent_ids)})
    for some in slices(ids):
        # Locked in a fixed order: if two transactions end the last two intents of an operation, the second sees the
        # first.
        connection.execute(_LOCKED_ROWS, {"ids": some})
    for operation_id in ids:
        if connection.execute(_ANY_OPEN, {"of": operation_id}).scalar_one_or_none() is None:
            end_of(connection, operation_id)


def end_of(connection: Connection, operation_id: OperationId) -> None:
    operation = get(connection, operation_id)
    if operation is not None:
        rows = connection.execute(_STATES, {"of": operation_id})
        status = status_by_states(operation, {"cancelled" if row.detached else row.state for row in rows})
        if status in ENDED:
            connection.execute(_SET_END, {"row_id": operation.id, "status": status})


def dismiss(connection: Connection, operation_id: OperationId, now: float) -> None:
    connection.execute(update(operations).where(operations.c.id == operation_id).values(dismissed=True))
    _touch(connection, operation_id, now)


def _touch(connection: Connection, operation_id: OperationId, now: float) -> None:
    """Make other frontends notice an operation that changed without a change of its intents."""
    served = select(operation_intents.c.intent_id).where(operation_intents.c.operation_id == operation_id)
    connection.execute(update(intents).where(intents.c.id.in_(served)).values(updated_at=now))


def apply_all(connection: Connection, changes: Iterable[tuple[Intent, Change]]) -> list[Intent]:
    """Apply changes to intents that this transaction has locked, each once, in one statement for any number of rows."""
    after = [intents_core.apply(intent, change) for intent, change in changes]
    for write, is_unknown in ((_WRITE, False), (_WRITE_KNOWN, True)):
        rows = [_written(one) for one in after if isinstance(one.action, UnknownAction) == is_unknown]
        if rows:
            connection.execute(write, rows)
    return after


def _written(after: Intent) -> dict[str, object]:
    return {**intent_columns(after), "row_id": after.id, "row_version": after.version - 1}


# The version makes this a compare-and-set; a locked row always has the version that was read.
_OF_VERSION = update(intents).where(intents.c.id == bindparam("row_id"), intents.c.version == bindparam("row_version"))
_WRITE = _OF_VERSION.values({name: bindparam(name) for name in (*Intent.__struct_fields__, "kind") if name != "id"})
_WRITE_KNOWN = _OF_VERSION.values(
    {name: bindparam(name) for name in Intent.__struct_fields__ if name not in ("id", *STRUCTURED)}
)
