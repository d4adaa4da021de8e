"""Claims, leases and take-overs of intents: which frontend sends what.

Every statement here runs many times a second on every frontend. Each is therefore built once and reads only rows that
can be acted on now: a thousand requests for absent nodes cost nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sqlalchemy import BindParameter, Select, bindparam, exists, func, or_, select, update

from enginehouse.core.action import UnknownAction
from enginehouse.core.ids import IntentId, NodeId
from enginehouse.core.intent import Change, Intent
from enginehouse.store import lingering
from enginehouse.store.db import Connection
from enginehouse.store.operations import apply_all
from enginehouse.store.rows import KNOWN_KINDS, intent_of
from enginehouse.store.schema import intents, nodes, operations

_Held = dict[tuple[NodeId, str], set[IntentId]]  # (node, subject) to the intents that its worker may still carry out
_STOPS = ("remove_model", "stop_replica")  # the only kinds that a drained node gets
_NOW: BindParameter[Any] = bindparam("now")
_LANE: BindParameter[Any] = bindparam("lane")
_PRESENT = select(nodes.c.id, nodes.c.drained).where(nodes.c.approved.is_(True), nodes.c.health == "healthy")
_DUE = (
    intents.c.node_id.in_(bindparam("node_ids", expanding=True)),
    intents.c.state.in_(("accepted", "waiting")),
    intents.c.due_at <= _NOW,
    intents.c.kind.in_(bindparam("kinds", expanding=True)),
)
# SQLite keeps no statistics, so it would scan all due rows.
_BY_NODE = "INDEXED BY intents_node"


def _locked(query: Select[Any]) -> Select[Any]:
    return query.with_for_update(skip_locked=True, of=intents)


_OLDEST = _locked(
    select(intents)
    .where(*_DUE, intents.c.lane == _LANE)
    .with_hint(intents, _BY_NODE, "sqlite")
    .order_by(intents.c.created_at)
    .limit(bindparam("most"))
)
_LANES = (
    select(intents.c.lane, func.max(intents.c.lane_width))
    .with_hint(intents, _BY_NODE, "sqlite")
    .where(*_DUE, intents.c.lane != "")
    .group_by(intents.c.lane)
)
_OWN_LANE = select(operations.c.id).where(operations.c.id == _LANE).with_for_update(skip_locked=True)
_RUNNING_IN_LANE = (
    select(func.count()).select_from(intents).where(intents.c.lane == _LANE, intents.c.state == "running")
)
_ORPHANED = _locked(
    select(intents).where(intents.c.state == "running", intents.c.lease_until < _NOW, intents.c.kind.in_(KNOWN_KINDS))
)
_RENEWED = (
    update(intents)
    .where(intents.c.state == "running", intents.c.owner == bindparam("by"))
    .values(lease_until=bindparam("until"))
)
_PARKED = _locked(
    select(intents)
    .join(nodes, nodes.c.id == intents.c.node_id)
    .where(intents.c.state == "running", nodes.c.health == "offline", intents.c.kind.in_(KNOWN_KINDS))
)

_ANY_TO_MOVE = select(
    or_(
        exists().where(intents.c.state.in_(("accepted", "waiting")), intents.c.due_at <= _NOW),
        exists().where(intents.c.state == "running", intents.c.node_id == nodes.c.id, nodes.c.health == "offline"),
    )
)


def is_any_to_move(connection: Connection, now: float) -> bool:
    """Whether there may be an intent to claim or to park. In a cluster where nothing waits there is none, and to find
    that out costs the same for any number of nodes.
    """
    return bool(connection.execute(_ANY_TO_MOVE, {"now": now}).scalar_one())


def claim_due(connection: Connection, owner: str, now: float, lease_until: float, limit: int) -> list[Intent]:
    """Claim every due intent whose node is approved and healthy; each gets a new attempt and a new fence.

    Oldest first. Intents locked by another frontend are skipped, and no lane exceeds its width. An intent is not
    claimed while its worker may still carry out an older command on the same subject that cannot be cancelled.
    """
    by_drained: dict[bool, list[NodeId]] = {False: [], True: []}
    for node_id, is_drained in connection.execute(_PRESENT):
        by_drained[bool(is_drained)].append(node_id)
    change = Change(kind="claim", now=now, owner=owner, lease_until=lease_until)
    held: _Held = {}
    for row in lingering.every(connection):
        held.setdefault((row.node_id, row.subject), set()).add(row.intent_id)
    claimed: list[Intent] = []
    for node_ids, kinds in ((by_drained[False], KNOWN_KINDS), (by_drained[True], _STOPS)):
        if node_ids:
            claimed += _claim(connection, {"now": now, "node_ids": node_ids, "kinds": kinds}, change, limit, held)
    return claimed


def _claim(connection: Connection, due: Mapping[str, object], change: Change, limit: int, held: _Held) -> list[Intent]:
    claimed = _take_free(connection, change, {**due, "lane": ""}, limit, held)
    for lane, width in connection.execute(_LANES, due).all():
        # Locked, because two frontends that count at the same time would admit twice the width.
        if connection.execute(_OWN_LANE, {"lane": lane}).scalar_one_or_none() is None:
            continue
        free = width - int(connection.execute(_RUNNING_IN_LANE, {"lane": lane}).scalar_one())
        if free > 0:
            claimed += _take_free(connection, change, {**due, "lane": lane}, free, held)
    return claimed


def _take_free(
    connection: Connection, change: Change, due: Mapping[str, object], most: int, held: _Held
) -> list[Intent]:
    """Claim at most `most` due intents, skipping those that wait for an older command on their worker."""
    found = _found(connection, _OLDEST, {**due, "most": most + len(held)})
    free = [intent for intent in found if not held.get((intent.node_id, intent.subject), set()) - {intent.id}]
    return apply_all(connection, [(intent, change) for intent in free[:most]])


def take_over(connection: Connection, owner: str, now: float, lease_until: float) -> list[Intent]:
    """Take over the running intents whose owner's lease has expired: same attempt, new fence, nothing is sent."""
    change = Change(kind="take_over", now=now, owner=owner, lease_until=lease_until)
    return _take(connection, _ORPHANED, change, {"now": now})


def renew(connection: Connection, owner: str, lease_until: float) -> None:
    """Extend the leases of this owner. The version stays, because other frontends need not see it."""
    connection.execute(_RENEWED, {"by": owner, "until": lease_until})


def park_absent(connection: Connection, change: Change) -> list[Intent]:
    """Apply a change to every running intent whose node is offline, except those locked by another frontend."""
    return park(connection, _found(connection, _PARKED, {}), change)


def park(connection: Connection, running: list[Intent], change: Change) -> list[Intent]:
    """Move running intents to waiting while their unreachable workers may continue with them."""
    lingering.add(connection, running)
    return apply_all(connection, [(intent, change) for intent in running])


def _take(connection: Connection, query: Select[Any], change: Change, parameters: Mapping[str, object]) -> list[Intent]:
    """Apply a change to all unlocked rows of the query, in two statements for any number of rows."""
    return apply_all(connection, [(intent, change) for intent in _found(connection, query, parameters)])


def _found(connection: Connection, query: Select[Any], parameters: Mapping[str, object]) -> list[Intent]:
    found = (intent_of(row) for row in connection.execute(query, parameters).all())
    # A row without a kind may hold an action that this version does not know; it must not block the others.
    return [intent for intent in found if not isinstance(intent.action, UnknownAction)]
