"""A database as a server of an earlier version left it: of any schema, with a row or two in every table that it had."""

from __future__ import annotations

from typing import Any

import sqlalchemy
from sqlalchemy import Connection, Engine, MetaData, select

from enginehouse.store import migrating
from enginehouse.store.clock import StoreClock
from enginehouse.store.engines import Holding, make_engines
from enginehouse.store.limits import StoreLimits

NODE, OTHER, OPERATION, INTENT = (f"{number}" * 8 + "-0000-4000-8000-000000000000" for number in (1, 2, 3, 4))
_ACTION = '{"type":"remove_backend","directory":"llama-cpp"}'
_NODE: dict[str, Any] = {
    **{"public_key": "ab" * 32, "node_type": "backend", "approved": True, "health": "healthy", "drained": False},
    **{
        "address": "10.0.0.9:50051",
        "http_address": "10.0.0.9:50050",
        "capability": "default",
        "platform": "linux/amd64",
    },
    **{"labels": '{"zone":"home"}', "max_replicas_per_model": 1, "capacity": "{}", "report": "{}"},
    **{"created_at": 1000.25, "updated_at": 1e9 + 1 / 3, "last_heartbeat": 1.7e9, "claim": "", "waits_for": ""},
}
# By table; a schema takes what it has columns for. `Ω` and the quotes are to arrive as they are.
ROWS: dict[str, list[dict[str, Any]]] = {
    "nodes": [
        {**_NODE, "id": NODE, "name": "attic", "token_hash": "a" * 64},
        {**_NODE, "id": OTHER, "name": "cellar", "token_hash": "b" * 64, "approved": False, "public_key": "cd" * 32},
    ],
    "node_liveness": [{"node_id": NODE, "heard_at": 1.7e9, "capacity": "{}"}],
    "operations": [
        {
            **{"id": OPERATION, "kind": "delete", "name": "llama-cpp", "author": "Ω 'quoted'", "created_at": 1.5},
            **{"targets": f'["{NODE}"]', "excluded": "[]", "is_steered": False, "error_code": "", "error_message": ""},
        }
    ],
    "intents": [
        {
            **{"id": INTENT, "node_id": NODE, "subject": "backend:llama-cpp", "generation": 7, "action": _ACTION},
            **{"state": "succeeded", "created_at": 1.5, "updated_at": 2.5, "due_at": 1.5, "attempt": 1, "failures": 0},
            **{"fence": 3, "owner": "up", "lease_until": 9.0, "dispatched_at": 2.0, "reason": "", "message": "done"},
            **{"progress": None, "outcome": None, "version": 4},
        }
    ],
    "operation_intents": [{"operation_id": OPERATION, "intent_id": INTENT, "position": 0}],
    "idempotency_keys": [
        {"author": "me", "key": "k", "body_hash": "c" * 64, "operation_id": OPERATION, "created_at": 1.0}
    ],
    "lingering_commands": [{"intent_id": "i", "node_id": NODE, "subject": "backend:x", "sent_at": 2.0}],
    "subjects": [{"node_id": NODE, "subject": "backend:llama-cpp", "generation": 7}],
    "models": [{"name": "tiny", "definition": '{"name":"tiny","backend":"llama-cpp","files":[]}', "created_at": 3.0}],
    "replicas": [
        {
            **{"node_id": NODE, "model": "tiny", "slot": 0, "revision": "r", "address": "10.0.0.9:50051"},
            **{"nonce": "n", "backend": "llama-cpp", "key": "k", "created_at": 4.0},
        }
    ],
    "schedules": [
        {
            **{"model_name": "tiny", "node_selector": "{}", "min_replicas": 1, "max_replicas": 2, "spread_all": False},
            **{"route_policy": "", "balance_abs_threshold": 0, "balance_rel_threshold": 0.5, "min_prefix_match": 0.1},
            **{"idle_seconds": float("inf"), "created_at": 1.0, "updated_at": 2.0},
        }
    ],
    "load_infos": [
        {
            **{"model": "tiny", "revision": "r", "memory_bytes": 2**40, "kept": "[]", "author": "me", "scaled_at": 1.0},
            **{"failures": 0, "retry_at": 0.0, "reason": ""},
        }
    ],
    "reservations": [
        {
            **{"operation_id": OPERATION, "node_id": NODE, "model": "tiny", "slot": 0, "memory_bytes": 2**33},
            **{"until": 5.0, "settled_at": 0.0},
        }
    ],
    "tokens": [
        {"id": "t-1", "role": "admin", "name": "admin", "hash": "d" * 64, "created_at": 1.0},
        {"id": "t-2", "role": "user", "name": "app", "hash": "e" * 64, "created_at": 2.0, "models": '["tiny-*"]'},
    ],
    "rate_counts": [{"token_id": "t-2", "step": 2**40, "requests": 1, "tokens": 2}],
    "usage_counts": [
        {
            **{"hour": 1_700_000_000, "token_id": "t-2", "model": "tiny", "node": "attic", "token_name": "app"},
            **{"requests": 3, "errors": 1, "prompt_tokens": 2**35, "completion_tokens": 5},
        }
    ],
    "audit": [
        {
            **{"id": "au", "at": 1.0, "who": "admin", "role": "admin", "token_id": "t-1", "session_id": ""},
            **{"address": "::1", "method": "POST", "path": "/x", "summary": "", "target": "attic", "status": 200},
            **{"error": "", "operation_id": ""},
        }
    ],
    "rejected_keys": [{"public_key": "ef" * 32, "name": "stranger", "rejected_at": 1.0}],
    "removed_nodes": [{"node_id": "gone", "name": "shed", "removed_at": 1.0}],
    "used_challenges": [{"hash": "f" * 64, "until": 9.0}],
    "bus_credentials": [{"user": "U", "node_id": NODE, "issued_at": 1.0, "expires_at": 2.0, "revoked": True}],
    "cluster_values": [{"name": "challenge-key", "value": "00" * 32}],
}
Rows = dict[str, list[dict[str, Any]]]


def engine_of(url: str) -> Engine:
    return make_engines(url, StoreLimits(answer_seconds=60.0), Holding(), StoreClock()).steering


def make_old(url: str, revision: str) -> Rows:
    """Bring an empty database to a schema, and fill it. Returns the rows that it has."""
    engine = engine_of(url)
    try:
        with engine.begin() as connection:
            migrating.upgrade(connection, revision)
            made: Rows = {}
            for table in tables_of(connection):
                columns = set(table.columns.keys())
                made[table.name] = [
                    {name: value for name, value in row.items() if name in columns} for row in ROWS[table.name]
                ]
                for row in made[table.name]:  # one by one: they need not have the same columns
                    connection.execute(table.insert(), row)
            return made
    finally:
        engine.dispose()


def rows_of(url: str) -> Rows:
    engine = engine_of(url)
    try:
        with engine.connect() as connection:
            return {
                table.name: [dict(row) for row in connection.execute(select(table)).mappings()]
                for table in tables_of(connection)
            }
    finally:
        engine.dispose()


def tables_of(connection: Connection) -> list[sqlalchemy.Table]:
    found = MetaData()
    found.reflect(connection, only=lambda name, _: name in ROWS)
    return found.sorted_tables


def lost(before: Rows, after: Rows) -> list[str]:
    """The rows of `before` that `after` does not have with the same values; columns may have come."""
    return [
        f"{name}: {row} among {after.get(name)}"
        for name, rows in before.items()
        for row in rows
        if not any(row.items() <= other.items() for other in after.get(name, ()))
    ]
