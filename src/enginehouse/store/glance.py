"""The glance: what the loops of a frontend must know every second, in one statement whatever there is.

It says when something changed last and when something is due next, so that a loop reads only where that is its concern.
Every part is the end of an index, or a count of few columns; no row is read for it.
"""

from __future__ import annotations

import math

from msgspec import Struct
from sqlalchemy import ColumnElement, ScalarSelect, exists, func, select

from enginehouse.store import keys
from enginehouse.store.db import Connection
from enginehouse.store.schema import intents, nodes, operations
from enginehouse.store.timed import one_with_now, timed


class Glance(Struct, frozen=True, kw_only=True):
    """Times are by the store's clock."""

    now: float
    intents_at: float  # the last change of any of them; 0 if there are none
    operations_at: float  # the newest one
    nodes_at: float
    node_count: int
    token_changes: str
    due_at: float  # when an intent may be sent; past, if one waits for its node
    has_running: bool
    has_parted: bool  # an intent runs on a node that is offline
    has_steered: bool  # a load or a drain is under way
    has_canaries: bool
    has_keyless: bool  # nodes, such as those of LocalAI

    @property
    def changed_at(self) -> float:
        return max(self.intents_at, self.operations_at, self.nodes_at)


def _newest(time: ColumnElement[float]) -> ColumnElement[float]:
    return select(func.coalesce(func.max(time), 0.0)).scalar_subquery()


def _first_due(state: str) -> ScalarSelect[float]:
    return select(func.min(intents.c.due_at)).where(intents.c.state == state).scalar_subquery()


_GLANCE = timed(
    _newest(intents.c.updated_at).label("intents_at"),
    _newest(operations.c.created_at).label("operations_at"),
    _newest(nodes.c.updated_at).label("nodes_at"),
    select(func.count()).select_from(nodes).scalar_subquery().label("node_count"),
    keys.CHANGES.scalar_subquery().label("token_changes"),
    _first_due("accepted").label("accepted_due"),
    _first_due("waiting").label("waiting_due"),
    exists().where(intents.c.state == "running").label("has_running"),
    exists()
    .where(intents.c.state == "running", intents.c.node_id == nodes.c.id, nodes.c.health == "offline")
    .label("has_parted"),
    exists().where(operations.c.is_steered.is_(True)).label("has_steered"),
    exists().where(operations.c.canary_phase == "watching").label("has_canaries"),
    exists().where(nodes.c.public_key == "").label("has_keyless"),
)


def glance(connection: Connection) -> Glance:
    row, now = one_with_now(connection, _GLANCE)
    return Glance(
        now=now,
        intents_at=row.intents_at,
        operations_at=row.operations_at,
        nodes_at=row.nodes_at,
        node_count=row.node_count,
        token_changes=row.token_changes or "",
        due_at=min(math.inf if due is None else due for due in (row.accepted_due, row.waiting_due)),
        has_running=bool(row.has_running),
        has_parted=bool(row.has_parted),
        has_steered=bool(row.has_steered),
        has_canaries=bool(row.has_canaries),
        has_keyless=bool(row.has_keyless),
    )
