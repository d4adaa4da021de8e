"""Creation of intents: a request for a (node, subject) joins an equal open intent, or supersedes the open ones.

Generations are assigned under the lock of the subject's row, which orders concurrent frontends. A request costs a
handful of statements for any number of nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from msgspec import Struct
from sqlalchemy import bindparam, func, select, update

from enginehouse.core.action import Action, InstallBackend, is_same_request, pointer_of, pointing, subject_of
from enginehouse.core.ids import IntentId, NodeId, OperationId
from enginehouse.core.intent import CANARY, HELD_UNTIL, OPEN, Change, Intent
from enginehouse.core.operation import OLDER_AT_WORK, OLDER_MESSAGE, STILL_RUNNING
from enginehouse.store import cluster_values, lingering
from enginehouse.store.db import Connection
from enginehouse.store.operations import apply, note_ended
from enginehouse.store.per_database import PerDatabase
from enginehouse.store.rows import ignoring_known, intent_columns, intent_of, select_among
from enginehouse.store.schema import intents, operation_intents, subjects

_AT_ONCE = 250  # requests in one statement; both databases limit the number of bound values
_SUPERSEDED = "replaced by a newer request for the same subject on this node"
_Place = tuple[NodeId, str]  # a node and a subject
_AT = (subjects.c.node_id == bindparam("at_node"), subjects.c.subject == bindparam("about"))
_GENERATION = select(subjects.c.generation).where(*_AT)
_SET_GENERATION = update(subjects).where(*_AT).values(generation=bindparam("newest"))
_ADD = intents.insert()
_COUNT = select(func.count()).where(operation_intents.c.operation_id == bindparam("of"))
_OPEN_AT = (
    select(intents)
    .where(
        intents.c.node_id.in_(bindparam("node_ids", expanding=True)),
        intents.c.subject.in_(bindparam("subjects", expanding=True)),
        intents.c.state.in_(sorted(OPEN)),
    )
    # By id: every transaction locks in this order.
    .order_by(intents.c.id)
    # Another frontend may be claiming or settling one of them; the later one waits and sees the result.
    .with_for_update()
)


def _locking(insert: Any) -> Any:
    return (
        insert(subjects)
        .on_conflict_do_update(
            index_elements=[subjects.c.node_id, subjects.c.subject],
            # Writing the current value takes the row lock.
            set_={"generation": subjects.c.generation},
        )
        .returning(subjects.c.node_id, subjects.c.subject, subjects.c.generation)
    )


_LOCK = PerDatabase(_locking)
_LINK = ignoring_known(operation_intents)


class Wanted(Struct, frozen=True):
    """One action on one node, and the id of its intent if a new one is created."""

    node_id: NodeId
    action: Action
    intent_id: IntentId
    hold: str = ""  # what it waits for before it may be sent; "" if it may be sent at once


def add_intent(
    connection: Connection,
    operation_id: OperationId,
    node_id: NodeId,
    action: Action,
    intent_id: IntentId,
    now: float,
) -> Intent:
    """Like `add_intents`, for one node."""
    return add_intents(connection, operation_id, [Wanted(node_id, action, intent_id)], now)[0]


def add_intents(
    connection: Connection, operation_id: OperationId, wanted: Sequence[Wanted], now: float, lane_width: int = 0
) -> list[Intent]:
    """Give the operation an intent per request: the equal open intent, or a new one that supersedes the open ones.

    With a `lane_width`, at most that many intents of the operation run at once.
    """
    by_place: dict[_Place, Wanted] = {(one.node_id, subject_of(one.action)): one for one in wanted}
    if len(by_place) != len(wanted):
        raise ValueError("cannot add two requests of one operation for the same subject on one node")
    chosen: list[Intent] = []
    # In a fixed order, so that two requests for the same nodes cannot deadlock.
    places = sorted(by_place)
    for start in range(0, len(places), _AT_ONCE):
        some = {place: by_place[place] for place in places[start : start + _AT_ONCE]}
        chosen += _add_some(connection, operation_id, some, now, lane_width)
    metas = [pointer_of(by_place[intent.node_id, intent.subject].action) for intent in chosen]
    _link(connection, operation_id, chosen, metas)
    return chosen


def _add_some(
    connection: Connection, operation_id: OperationId, wanted: dict[_Place, Wanted], now: float, lane_width: int
) -> list[Intent]:
    generations = _lock_subjects(connection, list(wanted))
    open_ones = _open_at(connection, list(wanted))
    chosen: list[Intent] = []
    made: list[Intent] = []
    superseded: list[IntentId] = []
    held = {(row.node_id, row.subject) for row in lingering.every(connection)}
    for place, one in wanted.items():
        there = open_ones.get(place, [])
        if there and is_same_request(one.action, there[0].action):
            chosen.append(there[0] if one.hold or not there[0].is_held else release(connection, there[0], now))
            continue
        goes_on = lingering.add(connection, there)
        if goes_on:
            held.add(place)
        for older in there:
            message = f"{_SUPERSEDED}; {STILL_RUNNING}" if older.id in goes_on else _SUPERSEDED
            apply(connection, older, Change(kind="supersede", now=now, reason="superseded", message=message))
            superseded.append(older.id)
        intent = Intent(
            id=one.intent_id,
            node_id=one.node_id,
            subject=place[1],
            generation=generations[place] + 1,
            action=one.action,
            state="waiting" if one.hold else "accepted",
            created_at=now,
            updated_at=now,
            due_at=HELD_UNTIL if one.hold else now,
            reason=CANARY if one.hold else OLDER_AT_WORK if place in held else "",
            message=one.hold or (OLDER_MESSAGE if place in held else ""),
            lane=operation_id if lane_width else "",
            lane_width=lane_width,
        )
        chosen.append(intent)
        made.append(intent)
    if made:
        connection.execute(_ADD, [intent_columns(intent) for intent in made])
        connection.execute(
            _SET_GENERATION,
            [{"at_node": one.node_id, "about": one.subject, "newest": one.generation} for one in made],
        )
    note_ended(connection, superseded)
    return chosen


def release(connection: Connection, held: Intent, now: float) -> Intent:
    """Let a held intent be sent."""
    return apply(connection, held, Change(kind="release", now=now))


_NAMED = (
    select(operation_intents.c.operation_id, operation_intents.c.intent_id, operation_intents.c.meta)
    .where(
        operation_intents.c.intent_id.in_(bindparam("ids", expanding=True)),
        operation_intents.c.meta != "",
        operation_intents.c.detached.is_(False),
    )
    .order_by(operation_intents.c.operation_id)
)


def add_pointers(
    connection: Connection, done: Iterable[Intent], new_id: Callable[[], IntentId], now: float
) -> list[Intent]:
    """Add the missing pointers of succeeded installs: operations that joined under another meta name get an intent each
    for their pointer.

    Must run in the transaction that settles the installs, so that no operation appears done too early.
    """
    installs = {one.id: one for one in done if one.state == "succeeded" and isinstance(one.action, InstallBackend)}
    added: list[Intent] = []
    for row in select_among(connection, _NAMED, installs):
        intent = installs[row.intent_id]
        if row.meta != pointer_of(intent.action) and isinstance(intent.action, InstallBackend):
            digest = intent.outcome.digest if intent.outcome is not None else ""
            action = pointing(intent.action, row.meta, digest)
            added.append(add_intent(connection, row.operation_id, intent.node_id, action, new_id(), now))
    return added


def generation_at(connection: Connection, node_id: NodeId, subject: str) -> int:
    """The newest generation assigned for this node and subject; 0 if none."""
    return int(connection.execute(_GENERATION, {"at_node": node_id, "about": subject}).scalar_one_or_none() or 0)


def _lock_subjects(connection: Connection, places: list[_Place]) -> dict[_Place, int]:
    """Return the last generation of each place and lock its row until the transaction ends."""
    base = int(cluster_values.get(connection, cluster_values.GENERATION_BASE) or 0)
    rows = [{"node_id": node_id, "subject": subject, "generation": base} for node_id, subject in places]
    locked = connection.execute(_LOCK[connection.dialect.name], rows)
    return {(row.node_id, row.subject): int(row.generation) for row in locked}


def _open_at(connection: Connection, places: list[_Place]) -> dict[_Place, list[Intent]]:
    """The open intents of each place, newest first."""
    node_ids, subject_names = (sorted(set(some)) for some in zip(*places, strict=True))
    found: dict[_Place, list[Intent]] = {}
    for row in connection.execute(_OPEN_AT, {"node_ids": node_ids, "subjects": subject_names}):
        found.setdefault((row.node_id, row.subject), []).append(intent_of(row))
    for there in found.values():
        there.sort(key=lambda intent: intent.generation, reverse=True)
    return found


def _link(connection: Connection, operation_id: OperationId, chosen: Sequence[Intent], metas: Sequence[str]) -> None:
    before = int(connection.execute(_COUNT, {"of": operation_id}).scalar_one())
    rows = [
        {"operation_id": operation_id, "intent_id": intent.id, "position": before + number, "meta": meta}
        for number, (intent, meta) in enumerate(zip(chosen, metas, strict=True))
    ]
    if rows:
        connection.execute(_LINK[connection.dialect.name], rows)
