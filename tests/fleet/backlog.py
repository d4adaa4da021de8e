"""A past and a backlog, written by SQL: what a cluster looks like after years, in seconds.

Every operation has one intent. Of what waits, half is for nodes that are away and half for a later moment, so that
nothing of it can be done. `age` makes some of what has ended older than anything is kept for; only `Claims` makes
something due, one intent at a time.
"""

from __future__ import annotations

import time

import psycopg

from enginehouse.core.action import RemoveBackend, kind_of
from enginehouse.core.ids import IntentId, NodeId
from enginehouse.core.intent import Intent
from enginehouse.frontend.delivery.dispatcher import CLAIM_LIMIT
from enginehouse.frontend.operations.cancel import KEPT_SECONDS
from enginehouse.store import claims, db, schema
from enginehouse.store.db import Store
from enginehouse.store.rows import intent_columns, text_of

ENDED, WAITING = 100_000, 10_000
OLD = 3000  # of the ended; six batches of forgetting
NODES = 100
OWNER = "the test"
FAR_SECONDS = 365 * 24 * 3600.0
_ACTION = RemoveBackend(backend="seeded", directory="seeded")
# Odd nodes are away. The others were heard tomorrow, so that no frontend thinks them silent.
_NODES = """insert into nodes (id, name, public_key, node_type, approved, health, drained, address, http_address,
        capability, platform, labels, max_replicas_per_model, capacity, report, token_hash, created_at, updated_at,
        last_heartbeat)
    select 'seeded-' || n, 'seeded-' || n, '', 'backend', true, case when n %% 2 = 0 then 'healthy' else 'offline' end,
        false, '127.0.0.1:1', '', 'default', 'linux/amd64', '{}', 1, '{}', '{}', 'seeded-' || n, %(now)s, %(now)s,
        %(now)s + 86400
    from generate_series(0, %(nodes)s - 1) n"""
_OPERATIONS = """insert into operations (id, kind, name, author, created_at, targets, excluded, is_steered, error_code,
        error_message, ended_as)
    select %(group)s || n, 'delete', 'seeded', 'seed', %(at)s - n / 1000.0, '[]', '[]', false, '', '', %(ended)s
    from generate_series(1, %(count)s) n"""
_INTENTS = """insert into intents (id, node_id, subject, generation, action, kind, state, created_at, updated_at,
        due_at, attempt, failures, fence, owner, lease_until, dispatched_at, reason, message, version)
    select %(group)s || n, 'seeded-' || n %% %(nodes)s, 'backend:' || %(group)s || n, 1, %(action)s, %(kind)s,
        %(state)s, %(at)s, %(at)s, case when n %% 2 = 0 then %(far)s else %(at)s end, 0, 0, 0, '', 0, 0, '', '', 1
    from generate_series(1, %(count)s) n"""
_LINKS = """insert into operation_intents (operation_id, intent_id, position)
    select %(group)s || n, %(group)s || n, 0 from generate_series(1, %(count)s) n"""


def seed_nodes(url: str) -> None:
    """Into a PostgreSQL whose tables are there."""
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(_NODES.encode(), {"nodes": NODES, "now": time.time()})


def seed(url: str) -> None:
    """The same, with all that was ever asked of them."""
    seed_nodes(url)
    now = time.time()
    plain = {"nodes": NODES, "far": now + FAR_SECONDS, "action": text_of(_ACTION), "kind": kind_of(_ACTION)}
    groups = (
        {"group": "old-", "count": OLD, "at": now - 7200, "state": "succeeded", "ended": "succeeded"},
        {"group": "ended-", "count": ENDED - OLD, "at": now - 7200, "state": "succeeded", "ended": "succeeded"},
        {"group": "waiting-", "count": WAITING, "at": now - 3600, "state": "waiting", "ended": ""},
    )
    with psycopg.connect(url, autocommit=True) as connection:
        # The rows are made to fit: to look up each reference would take longer than to write them.
        connection.execute("set session_replication_role = replica")
        for group in groups:
            for statement in (_OPERATIONS, _INTENTS, _LINKS):
                connection.execute(statement.encode(), {**plain, **group})
        connection.execute("analyze")


def age(url: str) -> None:
    """Have the oldest be older than anything is kept for."""
    with psycopg.connect(url, autocommit=True) as connection:
        for table, column in (("operations", "created_at"), ("intents", "updated_at")):
            query = f"update {table} set {column} = {column} - %s where id like 'old-%%'"
            connection.execute(query.encode(), (2 * KEPT_SECONDS,))


class Claims:
    """Claims one due intent after another, as a frontend does. No frontend may run on that database meanwhile."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def seconds(self, count: int) -> list[float]:
        """What each claim took, with its transaction. Each of the intents is due a second after the one before."""
        now = await self._store.transaction(db.now)
        made = [_due(number, now + number) for number in range(count)]
        columns = [intent_columns(intent) for intent in made]
        await self._store.transaction(lambda connection: connection.execute(schema.intents.insert(), columns))
        taken = [await self._claim(intent) for intent in made]
        mine = schema.intents.c.owner == OWNER
        await self._store.transaction(lambda connection: connection.execute(schema.intents.delete().where(mine)))
        return taken

    async def _claim(self, due: Intent) -> float:
        now = due.due_at
        began = time.perf_counter()
        claimed = await self._store.transaction(lambda c: claims.claim_due(c, OWNER, now, now + 30.0, CLAIM_LIMIT))
        taken = time.perf_counter() - began
        assert [intent.id for intent in claimed] == [due.id]
        return taken


def _due(number: int, due_at: float) -> Intent:
    return Intent(
        id=IntentId(f"due-{number}"),
        node_id=NodeId(f"seeded-{number * 2 % NODES}"),
        subject=f"backend:due-{number}",
        generation=1,
        action=_ACTION,
        state="accepted",
        created_at=due_at,
        updated_at=due_at,
        due_at=due_at,
    )
