"""Queries over operations for users and watchers, and retention.

They list what is open or failed and what changed since a time. Reads never write. Only `prune` deletes, and only
operations that ended long ago; an open operation is kept for ever.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from msgspec import Struct
from sqlalchemy import Select, bindparam, case, delete, exists, func, not_, or_, select

from enginehouse.core.ids import IntentId, OperationId
from enginehouse.core.intent import OPEN, State
from enginehouse.core.operation import Operation
from enginehouse.store.db import Connection
from enginehouse.store.operations import end_of, select_operations
from enginehouse.store.rows import select_among
from enginehouse.store.schema import intents, nodes, operation_intents, operations


def _with_intents(*conditions: object, is_wanted: bool = True) -> Select[tuple[str]]:
    """Select the ids of operations with such an intent; with `is_wanted`, only if they have not detached from it."""
    query = select(operation_intents.c.operation_id).join(intents, intents.c.id == operation_intents.c.intent_id)
    if is_wanted:
        query = query.where(operation_intents.c.detached.is_(False))
    return query.where(*conditions)  # type: ignore[arg-type]  # column expressions, whose type is not exported


_SERVED = _with_intents(intents.c.state.in_(sorted(OPEN))).distinct()
_STEERED = select(operations.c.id).where(operations.c.is_steered)


def open_ids(connection: Connection) -> list[OperationId]:
    served = connection.execute(_SERVED).scalars()
    steered = connection.execute(_STEERED).scalars()
    return list(dict.fromkeys([*served, *steered]))


def unfinished(connection: Connection, limit: int) -> list[Operation]:
    """Open operations, and failed ones that are not dismissed, newest first; open ones are never left out."""
    newest = select(operations).order_by(operations.c.created_at.desc())
    found = select_operations(connection, newest.where(operations.c.ended_as == "").limit(limit))
    if len(found) < limit:
        failed = newest.where(operations.c.ended_as.in_(("failed", "partial")), operations.c.dismissed.is_(False))
        found += select_operations(connection, failed.limit(limit - len(found)))
    return sorted(found, key=lambda operation: operation.created_at, reverse=True)


def note_every_end(connection: Connection) -> None:
    """Record the end of operations that ended without being recorded."""
    over = select(operations.c.id).where(
        operations.c.ended_as == "",
        not_(operations.c.is_steered),
        operations.c.id.not_in(_with_intents(intents.c.state.in_(OPEN))),
    )
    for operation_id in list(connection.execute(over).scalars()):
        end_of(connection, operation_id)


_DETACHED = func.coalesce(func.sum(case((operation_intents.c.detached, 1), else_=0)), 0)
_STEPS = (
    func.count(intents.c.id)
    + func.coalesce(func.sum(intents.c.version), 0)
    + _DETACHED
    + case((operations.c.dismissed, 1), else_=0)
    + case((operations.c.is_steered, 0), else_=1)
)
# Built once, because every frontend runs them every second.
_REVISIONS = (
    select(operations.c.id, _STEPS.label("steps"))
    .outerjoin(operation_intents, operation_intents.c.operation_id == operations.c.id)
    .outerjoin(intents, intents.c.id == operation_intents.c.intent_id)
    .where(operations.c.id.in_(bindparam("ids", expanding=True)))
    .group_by(operations.c.id, operations.c.is_steered, operations.c.dismissed)
)
_TOUCHED = (
    select(
        *(operation_intents.c.operation_id, operation_intents.c.intent_id, operation_intents.c.detached),
        intents.c.version,
    )
    .join(intents, intents.c.id == operation_intents.c.intent_id)
    .where(intents.c.updated_at >= bindparam("since"))
)
_CREATED = select(operations.c.id).where(operations.c.created_at >= bindparam("since"))


_ANYTHING = select(
    or_(
        exists().where(intents.c.updated_at >= bindparam("since")),
        exists().where(operations.c.created_at >= bindparam("since")),
        exists().where(nodes.c.updated_at >= bindparam("since")),
    ),
    select(func.count()).select_from(nodes).scalar_subquery(),
)


def anything_since(connection: Connection, since: float) -> tuple[bool, int]:
    """Whether an intent, an operation or a node changed since then, and how many nodes there are, in one statement."""
    is_any, node_count = connection.execute(_ANYTHING, {"since": since}).one()
    return bool(is_any), int(node_count)


def revisions(connection: Connection, ids: Iterable[OperationId]) -> dict[OperationId, int]:
    """The revisions of these operations; every change of an intent counts."""
    return {row.id: int(row.steps) for row in select_among(connection, _REVISIONS, ids)}


class TouchedIntent(Struct, frozen=True):
    """An intent that changed, as one of its operations sees it."""

    operation_id: OperationId
    intent_id: IntentId
    detached: bool
    version: int


def touched(connection: Connection, since: float) -> list[TouchedIntent]:
    """The intents that changed since then, once per operation."""
    return [TouchedIntent(*row) for row in connection.execute(_TOUCHED, {"since": since})]


def created_since(connection: Connection, since: float) -> list[OperationId]:
    return list(connection.execute(_CREATED, {"since": since}).scalars())


def changed_since(connection: Connection, since: float) -> list[OperationId]:
    """The operations that were created or changed since then."""
    changed = (one.operation_id for one in touched(connection, since))
    return list(dict.fromkeys([*created_since(connection, since), *changed]))


def count_by_state(connection: Connection) -> dict[str, int]:
    rows = connection.execute(select(intents.c.state, func.count()).group_by(intents.c.state))
    return {state: count for state, count in rows}


def count_operations(connection: Connection) -> dict[tuple[str, str], int]:
    """The operations that are kept, by kind and outcome; the outcome of an open one is ""."""
    query = select(operations.c.kind, operations.c.ended_as, func.count()).group_by(
        operations.c.kind, operations.c.ended_as
    )
    return {(kind, ended_as): count for kind, ended_as, count in connection.execute(query)}


class StateCounts(Struct):
    """How many intents of an operation are in each state. One that the operation has detached from is cancelled."""

    states: dict[State, int] = {}
    changed_at: float = 0.0  # the last change of any of them
    error: str = ""  # of one that failed


_SHOWN_STATE = case((operation_intents.c.detached, "cancelled"), else_=intents.c.state)
_COUNTS_OF = (
    select(
        operation_intents.c.operation_id,
        _SHOWN_STATE.label("shown_state"),
        func.count().label("number"),
        func.max(intents.c.updated_at).label("changed_at"),
        func.max(case((_SHOWN_STATE == "failed", intents.c.message), else_="")).label("error"),
    )
    .join(intents, intents.c.id == operation_intents.c.intent_id)
    .where(operation_intents.c.operation_id.in_(bindparam("ids", expanding=True)))
    .group_by(operation_intents.c.operation_id, _SHOWN_STATE)
)


def counts_of(connection: Connection, operation_ids: Collection[OperationId]) -> dict[OperationId, StateCounts]:
    """Counted by the database: an operation may have a thousand intents, and a list many such operations."""
    found = {operation_id: StateCounts() for operation_id in operation_ids}
    for row in select_among(connection, _COUNTS_OF, operation_ids):
        counts = found[row.operation_id]
        counts.states[row.shown_state] = row.number
        counts.changed_at = max(counts.changed_at, row.changed_at)
        counts.error = counts.error or row.error
    return found


def prune(connection: Connection, before: float, keep: int, limit: int) -> int:
    """Delete operations that ended before then, except the newest `keep`, at most `limit`; return how many."""
    newest = select(operations.c.created_at).order_by(operations.c.created_at.desc()).offset(keep - 1).limit(1)
    oldest_kept = connection.execute(newest).scalar_one_or_none()
    if oldest_kept is None:
        return 0
    alive = _with_intents(or_(intents.c.state.in_(OPEN), intents.c.updated_at >= before))
    past = (
        select(operations.c.id)
        .where(
            operations.c.created_at < min(before, oldest_kept),
            not_(operations.c.is_steered),
            operations.c.id.not_in(alive),
        )
        .order_by(operations.c.created_at)
        .limit(limit)
    )
    ids = list(connection.execute(past).scalars())
    served = select(operation_intents.c.intent_id).where(operation_intents.c.operation_id.in_(ids))
    intent_ids = list(connection.execute(served).scalars())
    connection.execute(delete(operations).where(operations.c.id.in_(ids)))
    # An intent may also serve an operation that is kept.
    serving = select(operation_intents.c.intent_id).where(operation_intents.c.intent_id == intents.c.id).exists()
    connection.execute(delete(intents).where(intents.c.id.in_(intent_ids), not_(serving)))
    return len(ids)
