"""Rows of operations and intents; what is read of them for people stands in `history`.

An intent changes only through `apply`, a compare-and-set on its version: of two writers one gets `Conflict` and looks
again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from sqlalchemy import Select, bindparam, func, select, update

from enginehouse.core import intent as intents_core
from enginehouse.core.errors import Conflict
from enginehouse.core.intent import OPEN, Change, Intent
from enginehouse.core.operation import ENDED, Operation, status_of
from enginehouse.store.db import Connection
from enginehouse.store.rows import (
    KNOWN_KINDS,
    intent_columns,
    intent_of,
    operation_columns,
    operation_of,
    slices,
    text_of,
)
from enginehouse.store.schema import intents, nodes, operation_intents, operations

# Operations --------------------------------------------------------------------------------------


def insert(connection: Connection, operation: Operation) -> None:
    connection.execute(operations.insert().values(operation_columns(operation)))


def get(connection: Connection, operation_id: str) -> Operation | None:
    row = connection.execute(select(operations).where(operations.c.id == operation_id)).one_or_none()
    return None if row is None else operation_of(row)


def select_operations(connection: Connection, query: Select[Any]) -> list[Operation]:
    return [operation_of(row) for row in connection.execute(query)]


def many(connection: Connection, operation_ids: Iterable[str]) -> dict[str, Operation]:
    found: list[Operation] = []
    for some in slices(operation_ids):
        found += select_operations(connection, select(operations).where(operations.c.id.in_(some)))
    return {one.id: one for one in found}


def recent(connection: Connection, limit: int) -> list[Operation]:
    return select_operations(connection, select(operations).order_by(operations.c.created_at.desc()).limit(limit))


def steered(connection: Connection, name: str | None = None) -> list[Operation]:
    """Loads under way; with `name`, those of one model."""
    query = select(operations).where(operations.c.is_steered.is_(True)).order_by(operations.c.created_at)
    return select_operations(connection, query if name is None else query.where(operations.c.name == name))


def is_steered(connection: Connection, operation_id: str) -> bool:
    return bool(connection.execute(select(operations.c.is_steered).where(operations.c.id == operation_id)).scalar())


def last_of(connection: Connection, kind: str, name: str, targets: tuple[str, ...] | None = None) -> Operation | None:
    """The newest of its kind and name; with `targets`, of those that were asked for exactly these nodes."""
    query = select(operations).where(operations.c.kind == kind, operations.c.name == name)
    if targets is not None:
        query = query.where(operations.c.targets == text_of(targets))
    row = connection.execute(query.order_by(operations.c.created_at.desc()).limit(1)).one_or_none()
    return None if row is None else operation_of(row)


def end_steering(connection: Connection, operation_id: str, code: str = "", message: str = "") -> None:
    connection.execute(
        update(operations)
        .where(operations.c.id == operation_id)
        .values(is_steered=False, error_code=code, error_message=message)
    )
    end_of(connection, operation_id)


def of_intents(connection: Connection, intent_ids: Iterable[str]) -> list[Operation]:
    ids: dict[str, None] = {}
    for some in slices(intent_ids):
        query = select(operation_intents.c.operation_id).where(operation_intents.c.intent_id.in_(some)).distinct()
        ids |= dict.fromkeys(connection.execute(query).scalars())
    return list(many(connection, ids).values())


def first_of_intents(connection: Connection, intent_ids: Iterable[str]) -> dict[str, str]:
    """For each intent the id of the operation that asked for it first."""
    first: dict[str, str] = {}
    for some in slices(intent_ids):
        query = (
            select(operation_intents.c.intent_id, operations.c.id)
            .join(operations, operations.c.id == operation_intents.c.operation_id)
            .where(operation_intents.c.intent_id.in_(some))
            .order_by(operations.c.created_at)
        )
        for row in connection.execute(query):
            first.setdefault(row.intent_id, row.id)
    return first


# Intents -----------------------------------------------------------------------------------------


def intents_of(connection: Connection, operation_ids: Sequence[str]) -> dict[str, list[Intent]]:
    """The intents of each operation, in the order in which they were added."""
    found: dict[str, list[Intent]] = {operation_id: [] for operation_id in operation_ids}
    for some in slices(operation_ids):
        query = (
            select(operation_intents.c.operation_id, operation_intents.c.detached, *intents.c)
            .join(intents, intents.c.id == operation_intents.c.intent_id)
            .where(operation_intents.c.operation_id.in_(some))
            .order_by(operation_intents.c.position)
        )
        for row in connection.execute(query):
            intent = intent_of(row)
            found[row.operation_id].append(_as_cancelled(intent) if row.detached else intent)
    return found


def _as_cancelled(intent: Intent) -> Intent:
    """As an operation sees an intent that it gave up and that goes on for another."""
    message = "cancelled; it goes on for another request of the same thing"
    return msgspec.structs.replace(
        intent,
        state="cancelled",
        reason="cancelled",
        message=message,
        progress=None,
        version=intent.version + 1,  # it was a change of this operation
    )


def intent(connection: Connection, intent_id: str) -> Intent | None:
    row = connection.execute(select(intents).where(intents.c.id == intent_id)).one_or_none()
    return None if row is None else intent_of(row)


def lock_intents(connection: Connection, intent_ids: Iterable[str]) -> dict[str, Intent]:
    """These intents, which nobody else changes until the transaction ends."""
    found: dict[str, Intent] = {}
    for some in slices(sorted(intent_ids)):
        query = select(intents).where(intents.c.id.in_(some)).order_by(intents.c.id).with_for_update()
        found |= {row.id: intent_of(row) for row in connection.execute(query)}
    return found


def open_on(connection: Connection, node_id: str) -> list[Intent]:
    query = select(intents).where(intents.c.node_id == node_id, intents.c.state.in_(OPEN))
    return [intent_of(row) for row in connection.execute(query.order_by(intents.c.created_at))]


def apply(connection: Connection, before: Intent, change: Change) -> Intent:
    """Apply a change by the table and write it; `Conflict` when the row has moved on since `before` was read."""
    after = intents_core.apply(before, change)
    written = connection.execute(
        update(intents)
        .where(intents.c.id == before.id, intents.c.version == before.version)
        .values(intent_columns(after))
    )
    if written.rowcount != 1:
        raise Conflict(f"cannot change intent {before.id}: it changed at the same time", code="conflict")
    return after


def cancel_share(connection: Connection, operation_id: str, intent: Intent, change: Change) -> Intent | None:
    """Cancel an intent for one operation: the intent itself, unless another operation still wants it.

    The intent as it is now where it was cancelled; None where it goes on.
    """
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
    note_ended(connection, [intent.id])
    return None


def note_ended(connection: Connection, intent_ids: Iterable[str]) -> None:
    """Write down how the operations of these intents ended, those that have. For finding them: whoever forgets to call
    this makes a list slower, not wrong.
    """
    ids = sorted(one.id for one in of_intents(connection, intent_ids))
    if ids:
        # Locked, always in the same order: of two that end the last two intents the second sees the first.
        connection.execute(
            select(operations.c.id).where(operations.c.id.in_(ids)).order_by(operations.c.id).with_for_update()
        )
        found = many(connection, ids)
        for operation_id, ended in intents_of(connection, ids).items():
            _note_end(connection, found[operation_id], ended)


def end_of(connection: Connection, operation_id: str) -> None:
    operation = get(connection, operation_id)
    if operation is not None:
        _note_end(connection, operation, intents_of(connection, [operation_id])[operation_id])


def _note_end(connection: Connection, operation: Operation, ended: Sequence[Intent]) -> None:
    status = status_of(operation, ended)
    if status in ENDED:
        connection.execute(update(operations).where(operations.c.id == operation.id).values(ended_as=status))


def dismiss(connection: Connection, operation_id: str) -> None:
    connection.execute(update(operations).where(operations.c.id == operation_id).values(dismissed=True))


def apply_all(connection: Connection, changes: Iterable[tuple[Intent, Change]]) -> list[Intent]:
    """Apply changes to intents that this transaction has locked, each once, in one statement however many."""
    after = [intents_core.apply(intent, change) for intent, change in changes]
    if after:
        rows = [{**intent_columns(one), "row_id": one.id, "row_version": one.version - 1} for one in after]
        connection.execute(_WRITE, rows)
    return after


# Nobody else can change a row in between: it is locked, or this is the only transaction.
_WRITE = (
    update(intents)
    .where(intents.c.id == bindparam("row_id"), intents.c.version == bindparam("row_version"))
    .values({name: bindparam(name) for name in (*Intent.__struct_fields__, "kind") if name != "id"})
)


_BY_NODE = "INDEXED BY intents_node"


# Claims ------------------------------------------------------------------------------------------


def claim_due(connection: Connection, owner: str, now: float, lease_until: float, limit: int) -> list[Intent]:
    """Take every due intent whose node is approved and healthy: a new attempt with a new fence each. Oldest first,
    skipping what another frontend holds, and of a lane no more than it is wide.
    """
    # The nodes first: a thousand wishes for machines that are away must not be looked at every second.
    present = select(nodes.c.id, nodes.c.drained).where(nodes.c.approved.is_(True), nodes.c.health == "healthy")
    by_drained: dict[bool, list[str]] = {False: [], True: []}
    for node_id, is_drained in connection.execute(present):
        by_drained[bool(is_drained)].append(node_id)
    change = Change(kind="claim", now=now, owner=owner, lease_until=lease_until)
    claimed: list[Intent] = []
    # A drained node gets nothing to do but to stop what it has.
    for node_ids, kinds in ((by_drained[False], KNOWN_KINDS), (by_drained[True], ("stop_replica", "remove_model"))):
        if node_ids:
            due = (
                intents.c.node_id.in_(node_ids),
                intents.c.state.in_(("accepted", "waiting")),
                intents.c.due_at <= now,
                intents.c.kind.in_(kinds),
            )
            claimed += _claim(connection, due, change, limit)
    return claimed


def _claim(connection: Connection, due: Sequence[Any], change: Change, limit: int) -> list[Intent]:
    # SQLite has no figures to choose by, and would look at everything that is due for whomever.
    oldest = select(intents).where(*due).with_hint(intents, _BY_NODE, "sqlite").order_by(intents.c.created_at)
    claimed = _take(connection, oldest.where(intents.c.lane == "").limit(limit), change)
    lanes = select(intents.c.lane, func.max(intents.c.lane_width)).with_hint(intents, _BY_NODE, "sqlite")
    for lane, width in connection.execute(lanes.where(*due, intents.c.lane != "").group_by(intents.c.lane)).all():
        # Two frontends that count at once would let twice as many in.
        own = select(operations.c.id).where(operations.c.id == lane).with_for_update(skip_locked=True)
        if connection.execute(own).scalar_one_or_none() is None:
            continue
        running = select(func.count()).select_from(intents).where(intents.c.lane == lane, intents.c.state == "running")
        free = width - int(connection.execute(running).scalar_one())
        if free > 0:
            claimed += _take(connection, oldest.where(intents.c.lane == lane).limit(free), change)
    return claimed


def take_over(connection: Connection, owner: str, now: float, lease_until: float) -> list[Intent]:
    """Take the running intents whose owner's lease ended: same attempt, new fence, nothing is sent."""
    orphaned = select(intents).where(
        intents.c.state == "running", intents.c.lease_until < now, intents.c.kind.in_(KNOWN_KINDS)
    )
    return _take(connection, orphaned, Change(kind="take_over", now=now, owner=owner, lease_until=lease_until))


def _take(connection: Connection, query: Select[Any], change: Change) -> list[Intent]:
    """Apply a change to all that are found and not held by another transaction, in two statements however many."""
    locked = query.with_for_update(skip_locked=True, of=intents)
    found = [intent_of(row) for row in connection.execute(locked).all()]
    return apply_all(connection, [(intent, change) for intent in found])


def renew(connection: Connection, owner: str, lease_until: float) -> None:
    """Extend the leases of this owner. Not a change that others must see, so no version is taken."""
    connection.execute(
        update(intents).where(intents.c.state == "running", intents.c.owner == owner).values(lease_until=lease_until)
    )


def park_absent(connection: Connection, change: Change) -> list[Intent]:
    """Apply a change to every running intent whose node is offline, skipping what another frontend holds."""
    parked = (
        select(intents)
        .join(nodes, nodes.c.id == intents.c.node_id)
        .where(intents.c.state == "running", nodes.c.health == "offline", intents.c.kind.in_(KNOWN_KINDS))
    )
    return _take(connection, parked, change)
