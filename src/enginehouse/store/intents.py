"""Queries over intents, and updates of their progress.

`requests` creates intents, `operations` and `claims` change their state. Nothing here changes a state or a version.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import msgspec
from sqlalchemy import Select, and_, bindparam, func, not_, or_, select, update

from enginehouse.core.ids import IntentId, NodeId
from enginehouse.core.intent import OPEN, Intent
from enginehouse.core.node import Node
from enginehouse.core.progress import Progress, is_newer
from enginehouse.store.db import Connection
from enginehouse.store.rows import intent_of, select_among, slices, text_of
from enginehouse.store.schema import intents
from enginehouse.store.schema import nodes as node_rows

_OPEN = select(intents).where(intents.c.state.in_(sorted(OPEN)))
_THERE = select(node_rows.c.id).where(node_rows.c.id == intents.c.node_id)
_OPEN_WITHOUT_NODE: Select[Any] = select(*intents.c, _THERE.exists().label("is_there")).where(
    intents.c.state.in_(sorted(OPEN)), not_(_THERE.where(node_rows.c.node_type == "backend").exists())
)
_NAMELESS = _OPEN.where(intents.c.subject == "backend:")


def open_without_node(connection: Connection) -> list[tuple[Intent, bool]]:
    """Open intents for no node that takes backends, and whether there is such a node at all."""
    return [(intent_of(row), bool(row.is_there)) for row in connection.execute(_OPEN_WITHOUT_NODE)]


def nameless(connection: Connection) -> list[Intent]:
    """Open intents for a backend without a name."""
    return [intent_of(row) for row in connection.execute(_NAMELESS)]


_KNOWN = (
    select(intents.c.subject)
    .distinct()
    .where(intents.c.node_id == bindparam("at_node"), intents.c.subject.in_(bindparam("ids", expanding=True)))
)


def known_subjects(connection: Connection, node_id: NodeId, subjects: Iterable[str]) -> set[str]:
    """Those of these subjects about which there ever was an intent on this node, as far back as rows are kept."""
    return {row[0] for row in select_among(connection, _KNOWN, subjects, at_node=node_id)}


_CARRIED = (
    select(intents)
    .join(node_rows, node_rows.c.id == intents.c.node_id)
    .where(
        intents.c.state == "running",
        intents.c.owner == bindparam("by"),
        intents.c.kind.in_(bindparam("kinds", expanding=True)),
        node_rows.c.public_key == "",
    )
)


def carried_by(connection: Connection, owner: str, kinds: Iterable[str]) -> list[Intent]:
    """The running intents of this owner, of these kinds, on nodes without a key."""
    return [intent_of(row) for row in connection.execute(_CARRIED, {"by": owner, "kinds": list(kinds)})]


_ABOUT = select(intents).where(
    intents.c.node_id.in_(bindparam("node_ids", expanding=True)),
    intents.c.subject.in_(bindparam("subjects", expanding=True)),
    or_(
        intents.c.state.in_(sorted(OPEN)),
        and_(intents.c.state == "succeeded", intents.c.updated_at >= bindparam("since")),
    ),
)


def changing(connection: Connection, nodes: Iterable[Node], subjects: Iterable[str]) -> list[Intent]:
    """Intents on these nodes and subjects that are open, or succeeded since the node's report: see `core.changes`."""
    found: list[Intent] = []
    marks = {node.id: node.report.mark for node in nodes}
    about = sorted(set(subjects))
    for some in slices(marks if about else ()):
        since = min(marks[node_id] for node_id in some)
        rows = connection.execute(_ABOUT, {"node_ids": some, "subjects": about, "since": since})
        found += [intent_of(row) for row in rows]
    return found


_STARTS = select(intents).where(
    intents.c.node_id == bindparam("at_node"),
    intents.c.kind == "start_replica",
    intents.c.updated_at >= bindparam("since"),
)


def starts_since(connection: Connection, node_id: NodeId, since: float) -> list[Intent]:
    """The starts of replicas on a node that were requested or changed since then, oldest first."""
    rows = connection.execute(_STARTS.order_by(intents.c.created_at), {"at_node": node_id, "since": since})
    return [intent_of(row) for row in rows]


_OF_GENERATION = select(intents).where(
    intents.c.node_id == bindparam("at_node"),
    intents.c.subject == bindparam("about"),
    intents.c.generation == bindparam("number"),
)


def of_generation(connection: Connection, node_id: NodeId, subject: str, generation: int) -> Intent | None:
    """The intent with this generation of a node and subject."""
    values = {"at_node": node_id, "about": subject, "number": generation}
    row = connection.execute(_OF_GENERATION, values).one_or_none()
    return None if row is None else intent_of(row)


def unanswered_generations(
    connection: Connection, node_ids: Collection[NodeId], subjects: Collection[str]
) -> dict[tuple[NodeId, str], int]:
    """Per node and subject, the newest generation that was sent and given up without an answer from the worker.

    Its message may still arrive, and the worker refuses it only if it has seen a newer generation.
    """
    rows = select_among(connection, _SHADOWED, node_ids, subjects=list(subjects)) if subjects else ()
    return {(row.node_id, row.subject): row.newest for row in rows}


def ended_since(connection: Connection, node_id: NodeId, subjects: Iterable[str], since: float) -> set[str]:
    """The subjects of which a given-up command was seen to end at `since` or later: older proofs count for nothing."""
    found: set[str] = set()
    for some in slices(subjects):
        rows = connection.execute(_ENDED_SINCE, {"at_node": node_id, "subjects": some, "since": since})
        found |= set(rows.scalars())
    return found


_ENDED_SINCE = select(intents.c.subject).where(
    intents.c.node_id == bindparam("at_node"),
    intents.c.subject.in_(bindparam("subjects", expanding=True)),
    intents.c.state.in_(("superseded", "cancelled")),
    intents.c.attempt > 0,
    intents.c.updated_at >= bindparam("since"),
)
_SHADOWED = (
    select(intents.c.node_id, intents.c.subject, func.max(intents.c.generation).label("newest"))
    .where(
        intents.c.node_id.in_(bindparam("ids", expanding=True)),
        intents.c.subject.in_(bindparam("subjects", expanding=True)),
        or_(
            intents.c.state.in_(("superseded", "cancelled")),
            # Given up after too many presumed losses, but its message may still arrive.
            and_(intents.c.state == "failed", intents.c.reason == "worker_restarted"),
        ),
        intents.c.attempt > 0,
    )
    .group_by(intents.c.node_id, intents.c.subject)
)


_ENDED_AMONG = select(intents.c.id, intents.c.node_id).where(
    intents.c.id.in_(bindparam("ids", expanding=True)),
    intents.c.state.in_(("cancelled", "superseded")),
)


def ended_among(
    connection: Connection, by_node: Mapping[NodeId, Sequence[IntentId]]
) -> dict[NodeId, tuple[IntentId, ...]]:
    """Return those of these intents that are cancelled or superseded, each only at its own node."""
    asked = {intent_id for some in by_node.values() for intent_id in some}
    ended = {row.id: row.node_id for row in select_among(connection, _ENDED_AMONG, sorted(asked))}
    return {node_id: tuple(one for one in some if ended.get(one) == node_id) for node_id, some in by_node.items()}


_AT_WORK = (
    select(intents.c.id, intents.c.attempt, intents.c.progress)
    .where(
        intents.c.id.in_(bindparam("ids", expanding=True)),
        intents.c.state == "running",
        or_(intents.c.owner == bindparam("by"), intents.c.lease_until < bindparam("at")),
    )
    .with_for_update(skip_locked=True)
)
_PROGRESS = msgspec.json.Decoder(Progress)
_SET_PROGRESS = update(intents).where(intents.c.id == bindparam("row_id")).values(progress=bindparam("new_progress"))


def set_progress(connection: Connection, heard: Mapping[IntentId, Progress], owner: str, now: float) -> None:
    """Store progress of running intents. It is not a change of state, so the version stays.

    Only progress of the current attempt that is newer than the stored one is written. Every frontend receives all
    progress messages, so `owner` writes only for intents that it owns or whose lease has expired.
    """
    newer: list[dict[str, object]] = []
    for row in select_among(connection, _AT_WORK, heard, by=owner, at=now):
        known = None if row.progress is None else _PROGRESS.decode(row.progress)
        progress = heard[row.id]
        if progress.attempt == row.attempt and is_newer(progress, known):
            newer.append({"row_id": row.id, "new_progress": text_of(progress)})
    if newer:
        connection.execute(_SET_PROGRESS, newer)
