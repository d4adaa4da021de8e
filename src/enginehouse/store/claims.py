"""Who sends what: claims, leases and take-overs of intents.

Every statement here runs many times a second on every frontend, so each is put together once, and looks only at what
can be done now: a thousand requests for machines that are away cost nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sqlalchemy import BindParameter, Select, bindparam, func, select, update

from enginehouse.core.action import UnknownAction
from enginehouse.core.intent import Change, Intent
from enginehouse.store import lingering
from enginehouse.store.db import Connection
from enginehouse.store.operations import apply_all
from enginehouse.store.rows import KNOWN_KINDS, intent_of
from enginehouse.store.schema import intents, nodes, operations

_Held = dict[tuple[str, str], set[str]]  # node and subject, and the intents that may still be carried out there
_STOPS = ("remove_model", "stop_replica")  # all that a drained node gets to do
_NOW: BindParameter[Any] = bindparam("now")
_LANE: BindParameter[Any] = bindparam("lane")
_PRESENT = select(nodes.c.id, nodes.c.drained).where(nodes.c.approved.is_(True), nodes.c.health == "healthy")
_DUE = (
    intents.c.node_id.in_(bindparam("node_ids", expanding=True)),
    intents.c.state.in_(("accepted", "waiting")),
    intents.c.due_at <= _NOW,
    intents.c.kind.in_(bindparam("kinds", expanding=True)),
)
# SQLite has no figures to choose by, and would look at everything that is due for whomever.
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


def claim_due(connection: Connection, owner: str, now: float, lease_until: float, limit: int) -> list[Intent]:
    """Take every due intent whose node is approved and healthy: a new attempt with a new fence each. Oldest first,
    skipping what another frontend holds, and of a lane no more than it is wide. Nothing is claimed while its worker may
    still carry out an older command about the same thing that it cannot be told to stop.
    """
    by_drained: dict[bool, list[str]] = {False: [], True: []}
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
        # Two frontends that count at once would let twice as many in.
        if connection.execute(_OWN_LANE, {"lane": lane}).scalar_one_or_none() is None:
            continue
        free = width - int(connection.execute(_RUNNING_IN_LANE, {"lane": lane}).scalar_one())
        if free > 0:
            claimed += _take_free(connection, change, {**due, "lane": lane}, free, held)
    return claimed


def _take_free(
    connection: Connection, change: Change, due: Mapping[str, object], most: int, held: _Held
) -> list[Intent]:
    """At most so many of those that are due, past those that wait for an older command on their worker."""
    found = _found(connection, _OLDEST, {**due, "most": most + len(held)})
    free = [intent for intent in found if not held.get((intent.node_id, intent.subject), set()) - {intent.id}]
    return apply_all(connection, [(intent, change) for intent in free[:most]])


def take_over(connection: Connection, owner: str, now: float, lease_until: float) -> list[Intent]:
    """Take the running intents whose owner's lease ended: same attempt, new fence, nothing is sent."""
    change = Change(kind="take_over", now=now, owner=owner, lease_until=lease_until)
    return _take(connection, _ORPHANED, change, {"now": now})


def renew(connection: Connection, owner: str, lease_until: float) -> None:
    """Extend the leases of this owner. Not a change that others must see, so no version is taken."""
    connection.execute(_RENEWED, {"by": owner, "until": lease_until})


def park_absent(connection: Connection, change: Change) -> list[Intent]:
    """Apply a change to every running intent whose node is offline, skipping what another frontend holds."""
    return park(connection, _found(connection, _PARKED, {}), change)


def park(connection: Connection, running: list[Intent], change: Change) -> list[Intent]:
    """Have running intents wait whose workers may go on with them unheard."""
    lingering.add(connection, running)
    return apply_all(connection, [(intent, change) for intent in running])


def _take(connection: Connection, query: Select[Any], change: Change, parameters: Mapping[str, object]) -> list[Intent]:
    """Apply a change to all that are found and not held by another transaction, in two statements however many."""
    return apply_all(connection, [(intent, change) for intent in _found(connection, query, parameters)])


def _found(connection: Connection, query: Select[Any], parameters: Mapping[str, object]) -> list[Intent]:
    found = (intent_of(row) for row in connection.execute(query, parameters).all())
    # One row that says no kind and holds what this version does not know must not stop all others.
    return [intent for intent in found if not isinstance(intent.action, UnknownAction)]
