"""Rows of abandoned commands that a LocalAI worker may still carry out, because it cannot cancel them.

Newer commands on the same subject are sent only after they are over. The table is small and mostly empty, so every
claim reads all of it.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct
from sqlalchemy import bindparam, delete, select, update

from enginehouse.core.action import InstallBackend, RemoveBackend
from enginehouse.core.ids import IntentId, NodeId
from enginehouse.core.intent import Intent
from enginehouse.store.db import Connection
from enginehouse.store.rows import ignoring_known, select_among, slices
from enginehouse.store.schema import lingering_commands as lingering
from enginehouse.store.schema import nodes

_ADD = ignoring_known(lingering)
_EVERY = select(lingering)
_AMONG = select(lingering.c.intent_id).where(lingering.c.intent_id.in_(bindparam("ids", expanding=True)))
_REMOVE = delete(lingering).where(lingering.c.intent_id.in_(bindparam("ids", expanding=True)))
_RECEIVED = (
    update(lingering)
    .where(lingering.c.intent_id.in_(bindparam("ids", expanding=True)), lingering.c.received_at == 0.0)
    .values(received_at=bindparam("at"))
)
_ON_NODE = select(lingering.c.intent_id).where(lingering.c.node_id == bindparam("node"))
_WITHOUT_KEY = select(nodes.c.id).where(nodes.c.id.in_(bindparam("ids", expanding=True)), nodes.c.public_key == "")


class Lingering(Struct, frozen=True):
    intent_id: IntentId
    node_id: NodeId
    subject: str
    sent_at: float  # by the store's clock
    received_at: float = 0.0  # when the worker is known to have it or never to get it; 0 if unknown


def add(connection: Connection, intents: Iterable[Intent]) -> set[IntentId]:
    """Record those of these running intents whose worker cannot cancel; return their ids."""
    sent = [one for one in intents if one.state == "running" and isinstance(one.action, InstallBackend | RemoveBackend)]
    if not sent:
        return set()
    without_key = {row.id for row in select_among(connection, _WITHOUT_KEY, {one.node_id for one in sent})}
    found = [one for one in sent if one.node_id in without_key]
    rows = [
        {"intent_id": one.id, "node_id": one.node_id, "subject": one.subject, "sent_at": one.dispatched_at}
        for one in found
    ]
    if rows:
        connection.execute(_ADD[connection.dialect.name], rows)
    return {one.id for one in found}


def every(connection: Connection) -> list[Lingering]:
    rows = connection.execute(_EVERY).all()
    return [Lingering(row.intent_id, row.node_id, row.subject, row.sent_at, row.received_at) for row in rows]


def note_received(connection: Connection, intent_ids: Iterable[IntentId], now: float) -> None:
    for some in slices(intent_ids):
        connection.execute(_RECEIVED, {"ids": some, "at": now})


def among(connection: Connection, intent_ids: Iterable[IntentId]) -> set[IntentId]:
    return {row.intent_id for row in select_among(connection, _AMONG, intent_ids)}


def on_node(connection: Connection, node_id: NodeId) -> set[IntentId]:
    return set(connection.execute(_ON_NODE, {"node": node_id}).scalars())


def remove(connection: Connection, intent_ids: Iterable[IntentId]) -> None:
    for some in slices(intent_ids):
        connection.execute(_REMOVE, {"ids": some})
