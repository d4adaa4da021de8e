"""What other frontends changed: a read whose cost follows the changes, not the number of rows.

Changes are found by their times. A change is dated before it becomes visible, so the range overlaps with that of the
read before, and versions decide what is new.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct

from enginehouse.core.action import StartReplica, StopReplica
from enginehouse.core.ids import IntentId, NodeId, OperationId
from enginehouse.core.intent import Intent
from enginehouse.core.operation import Operation
from enginehouse.frontend.watching.snapshots import Snapshot
from enginehouse.store import db, history, nodes, operations
from enginehouse.store.db import Connection


class Known(Struct, frozen=True, kw_only=True):
    """What this frontend has published. The mappings may change while they are read from."""

    open: Mapping[OperationId, Snapshot]
    ended: Mapping[OperationId, int]  # revisions
    nodes: Mapping[NodeId, float]  # times of their last change
    rows: Mapping[OperationId, Operation]  # of open operations that change without their intents


class News(Struct, frozen=True, kw_only=True):
    now: float
    operations: list[OperationId]  # to be read whole
    intents: list[Intent]  # newer states, of operations that are known
    nodes: list[NodeId]
    present: set[NodeId] | None  # all nodes, if some were removed


def read_news(connection: Connection, since: float, known: Known) -> News:
    now = db.now(connection)
    is_any, node_count = history.anything_since(connection, since)
    if not is_any and not known.rows and node_count == len(known.nodes):
        return News(now=now, operations=[], intents=[], nodes=[], present=None)
    whole: dict[OperationId, None] = {}
    newer: set[IntentId] = set()
    others = set(history.created_since(connection, since))
    for row in history.touched(connection, since):
        snapshot = known.open.get(row.operation_id)
        if snapshot is None:
            others.add(row.operation_id)
            continue
        intent = snapshot.intents.get(row.intent_id)
        if intent is None or row.detached:
            # Added to the operation, or left by it: its row alone does not say so.
            if intent is None or intent.version <= row.version:
                whole[row.operation_id] = None
        elif row.version > intent.version:
            newer.add(row.intent_id)
    revisions = history.revisions(connection, others.difference(known.open))
    whole |= {one: None for one, revision in revisions.items() if revision > known.ended.get(one, -1)}
    # The end of steering and the stages of a canary have no time.
    rows = operations.many(connection, known.rows)
    whole |= {one: None for one, row in rows.items() if row != known.rows[one]}
    changed, present = _nodes_news(connection, since, known.nodes)
    return News(
        now=now,
        operations=list(whole),
        intents=operations.intents_by_id(connection, newer),
        nodes=changed,
        present=present,
    )


def concerns_replicas(news: News, whole: Sequence[Snapshot]) -> bool:
    """Whether replicas are started or stopped: a worker ends one when no frontend uses it, so routes must be fresh."""
    changed = [*news.intents, *(intent for one in whole for intent in one.intents.values())]
    return any(isinstance(intent.action, StartReplica | StopReplica) for intent in changed)


def _nodes_news(
    connection: Connection, since: float, told: Mapping[NodeId, float]
) -> tuple[list[NodeId], set[NodeId] | None]:
    recent = nodes.changed_since(connection, since)
    changed = [one for one, at in recent.items() if at > told.get(one, 0.0)]
    if nodes.count(connection) == len(told) + sum(one not in told for one in changed):
        return changed, None
    present = set(nodes.ids(connection))
    return [*changed, *(present - set(told) - set(changed))], present
