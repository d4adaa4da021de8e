"""Rows of nodes.

A registration, a report and an operator change separate columns through separate functions, so none overwrites the
facts of another. What every heartbeat changes is in `liveness`, and is read from there. `updated_at` marks changes that
other frontends must see.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from operator import attrgetter
from typing import Any, get_args

import msgspec
from msgspec import Struct
from sqlalchemy import BindParameter, Row, and_, bindparam, delete, func, or_, select, tuple_, update

from enginehouse.core.backend import InstalledBackend
from enginehouse.core.capacity import Capacity
from enginehouse.core.ids import NodeId
from enginehouse.core.node import Health, Node, NodeQuery, Status
from enginehouse.core.operation import absence_of
from enginehouse.core.replica import FailedReplica, RunningReplica
from enginehouse.core.report import Report
from enginehouse.store import liveness
from enginehouse.store.checksums import part_of
from enginehouse.store.db import Connection
from enginehouse.store.liveness import LivenessChange
from enginehouse.store.rows import select_among, slices, text_of
from enginehouse.store.schema import node_liveness, nodes

# Built once: inspecting a type costs more than decoding a value.
_LABELS = msgspec.json.Decoder(dict[str, str])
_CAPACITY = msgspec.json.Decoder(Capacity)
_REPORT = msgspec.json.Decoder(Report)
_NO_REPORT = Report()
_STRUCTURED = ("labels", "capacity", "report")
_HEARD = ("last_heartbeat", "report_digest")  # those of `liveness` count
_PLAIN = tuple(field for field in Node.__struct_fields__ if field not in (*_STRUCTURED, *_HEARD))
_plain_of = attrgetter(*_PLAIN)


class _ListedReport(Struct, frozen=True):
    """What lists show of a report. The rest of the text is skipped: results and files are most of it."""

    version: str = ""
    confinement: str = ""
    backends: tuple[InstalledBackend, ...] = ()
    replicas: tuple[RunningReplica, ...] = ()
    failed: tuple[FailedReplica, ...] = ()


_LISTED_REPORT = msgspec.json.Decoder(_ListedReport)


def _node(row: Row[Any]) -> Node:
    return _node_with(row, _REPORT.decode(row.report))


def _node_with(row: Row[Any], report: Report) -> Node:
    # Frontends of the previous version know the older columns only.
    is_here = row.heard_at is not None and row.heard_at >= row.last_heartbeat
    return Node(
        **dict(zip(_PLAIN, _plain_of(row), strict=True)),
        last_heartbeat=row.heard_at if is_here else row.last_heartbeat,
        labels=_LABELS.decode(row.labels),
        capacity=_CAPACITY.decode(row.heard_capacity if is_here else row.capacity),
        report=liveness.as_confirmed(report, row.boot_id, row.sequence, row.mark),
        report_digest=row.report_digest or "",
    )


def _columns(node: Node) -> dict[str, object]:
    plain = {field: getattr(node, field) for field in (*_PLAIN, "last_heartbeat")}
    return plain | {field: text_of(getattr(node, field)) for field in _STRUCTURED}


def insert(connection: Connection, node: Node, token_hash: str) -> None:
    connection.execute(_ADD, {**_columns(node), "token_hash": token_hash})
    liveness.add(connection, node.id, node.capacity, node.last_heartbeat)
    if node.report != _NO_REPORT:
        liveness.set_reports(connection, [(node.id, node.report, node.report_digest)])


def take_registration(connection: Connection, node_id: NodeId, at: float) -> bool:
    """Record a registration; False if a later one was recorded. The database serializes two at once."""
    return connection.execute(_TAKE_REGISTRATION, {"node_id": node_id, "at": at}).rowcount == 1


def save(connection: Connection, node: Node) -> None:
    """Write the facts of a registration. Health, approval and draining have their own functions."""
    columns = _columns(node)
    kept = {"id", "created_at", "approved", "drained", "health", "last_heartbeat", "report", "bus_away", "waits_for"}
    connection.execute(
        update(nodes).where(nodes.c.id == node.id).values(**{k: v for k, v in columns.items() if k not in kept})
    )
    liveness.set_capacity(connection, node.id, node.capacity)


def set_token(connection: Connection, node_id: NodeId, token_hash: str, previous: str = "") -> None:
    """`previous` stays valid until the new token has been used."""
    connection.execute(_SET_TOKEN, {"node_id": node_id, "now_is": token_hash, "before": previous})


def forget_previous_token(connection: Connection, node_id: NodeId) -> None:
    connection.execute(_FORGET_TOKEN, {"node_id": node_id})


class NodeToken(Struct, frozen=True):
    node_id: NodeId
    name: str
    hash: str
    previous: str  # "" if only one is valid


def _token(row: Row[Any] | Row[str, str, str, str]) -> NodeToken:
    return NodeToken(row.id, row.name, row.token_hash, row.previous_token_hash)


def tokens(connection: Connection) -> list[NodeToken]:
    """The token hashes of all nodes."""
    return [_token(row) for row in connection.execute(_TOKENS)]


def token_of(connection: Connection, node_id: NodeId) -> NodeToken | None:
    row = connection.execute(_TOKEN_OF, {"node_id": node_id}).one_or_none()
    return None if row is None else _token(row)


def tokens_among(connection: Connection, hashes: Iterable[str]) -> list[NodeToken]:
    """The nodes that have one of these token hashes."""
    return [_token(row) for row in select_among(connection, _TOKENS_AMONG, hashes)]


def set_sealed_token(connection: Connection, node_id: NodeId, sealed: str) -> None:
    connection.execute(_SET_SEALED, {"node_id": node_id, "now_is": sealed})


def sealed_tokens(connection: Connection, node_ids: Iterable[NodeId]) -> dict[NodeId, str]:
    """The sealed tokens of these nodes, as far as there are any."""
    return {row.id: row.sealed_token for row in select_among(connection, _SEALED, node_ids) if row.sealed_token}


def set_approved(connection: Connection, node_id: NodeId, now: float) -> None:
    connection.execute(update(nodes).where(nodes.c.id == node_id).values(approved=True, waits_for="", updated_at=now))


def set_pending(connection: Connection, node_id: NodeId, waits_for: str, now: float) -> None:
    """Withdraw the approval; `waits_for` says why the node waits for approval again."""
    changed = {"approved": False, "waits_for": waits_for, "updated_at": now}
    connection.execute(update(nodes).where(nodes.c.id == node_id).values(**changed))


def set_drained(connection: Connection, node_id: NodeId, drained: bool, now: float) -> None:
    connection.execute(update(nodes).where(nodes.c.id == node_id).values(drained=drained, updated_at=now))


def set_labels(connection: Connection, node_id: NodeId, labels: Mapping[str, str], now: float) -> None:
    connection.execute(update(nodes).where(nodes.c.id == node_id).values(labels=text_of(labels), updated_at=now))


def remove(connection: Connection, node_id: NodeId) -> None:
    connection.execute(delete(nodes).where(nodes.c.id == node_id))


def set_health(connection: Connection, node_id: NodeId, health: Health, now: float) -> bool:
    """Set the health; False if it was the same."""
    return connection.execute(_SET_HEALTH, {"node_id": node_id, "now_is": health, "at": now}).rowcount > 0


def set_health_of_all(connection: Connection, node_ids: Iterable[NodeId], health: Health, now: float) -> None:
    """`set_health`, for many nodes at once."""
    for some in slices(sorted(node_ids)):
        connection.execute(_SET_HEALTH_OF_ALL, {"ids": some, "now_is": health, "at": now})


def set_heartbeat(connection: Connection, node_id: NodeId, capacity: Capacity, now: float) -> None:
    liveness.write(connection, [LivenessChange(node_id=node_id, capacity=capacity)], now)


def set_bus_away(connection: Connection, node_id: NodeId, is_away: bool, now: float) -> bool:
    """Set whether the worker is off the bus; False if it was the same."""
    return connection.execute(_SET_BUS_AWAY, {"node_id": node_id, "now_is": is_away, "at": now}).rowcount > 0


class ReportChange(Struct, frozen=True):
    """A report to be stored. `changed_at` is set if it differs from the last one: other frontends look for changed
    nodes.
    """

    node_id: NodeId
    report: Report
    changed_at: float | None
    digest: str = ""


def set_report(connection: Connection, node_id: NodeId, report: Report, changed_at: float | None) -> None:
    set_reports(connection, [ReportChange(node_id, report, changed_at)])


def set_reports(connection: Connection, changes: Iterable[ReportChange]) -> None:
    """Store reports of different nodes. Rows are locked in a fixed order, so that two frontends do not wait for each
    other.
    """
    ordered = sorted(changes, key=lambda one: one.node_id)
    if ordered:
        connection.execute(
            _SET_REPORT,
            [{"node_id": one.node_id, "now_is": text_of(one.report), "at": one.changed_at} for one in ordered],
        )
        liveness.set_reports(connection, [(one.node_id, one.report, one.digest) for one in ordered])


_ADD = nodes.insert()
_UPDATES = select(nodes.c.id, nodes.c.updated_at)
_PARTS = select(nodes.c.id, nodes.c.updated_at, part_of(nodes.c.updated_at).label("part")).where(
    nodes.c.updated_at >= bindparam("since")
)
_JOINED = nodes.outerjoin(node_liveness, node_liveness.c.node_id == nodes.c.id)
_ALL = select(
    nodes,
    node_liveness.c.capacity.label("heard_capacity"),
    *(getattr(node_liveness.c, name) for name in ("heard_at", "report_digest", "boot_id", "sequence", "mark")),
).select_from(_JOINED)
_OF_NAME = _ALL.where(nodes.c.name == bindparam("named"))
_ONE = _ALL.where(nodes.c.id == bindparam("node_id"))
_ONE_LOCKED = _ONE.with_for_update(of=nodes)
_EVERY = _ALL.order_by(nodes.c.name, nodes.c.created_at)
_OF_ONE = update(nodes).where(nodes.c.id == bindparam("node_id"))
_SET_HEALTH = _OF_ONE.where(nodes.c.health != bindparam("now_is")).values(
    health=bindparam("now_is"), updated_at=bindparam("at")
)
_SET_HEALTH_OF_ALL = (
    update(nodes)
    .where(nodes.c.id.in_(bindparam("ids", expanding=True)), nodes.c.health != bindparam("now_is"))
    .values(health=bindparam("now_is"), updated_at=bindparam("at"))
)
_TAKE_REGISTRATION = _OF_ONE.where(nodes.c.registered_at < bindparam("at")).values(registered_at=bindparam("at"))
_SET_TOKEN = _OF_ONE.values(token_hash=bindparam("now_is"), previous_token_hash=bindparam("before"))
_SET_SEALED = _OF_ONE.values(sealed_token=bindparam("now_is"))
_SEALED = select(nodes.c.id, nodes.c.sealed_token).where(nodes.c.id.in_(bindparam("ids", expanding=True)))
_FORGET_TOKEN = _OF_ONE.values(previous_token_hash="")
_TOKENS = select(nodes.c.id, nodes.c.name, nodes.c.token_hash, nodes.c.previous_token_hash)
_TOKEN_OF = _TOKENS.where(nodes.c.id == bindparam("node_id"))
_HASHES: BindParameter[Any] = bindparam("ids", expanding=True)
_TOKENS_AMONG = _TOKENS.where(or_(nodes.c.token_hash.in_(_HASHES), nodes.c.previous_token_hash.in_(_HASHES)))
_SET_REPORT = _OF_ONE.values(report=bindparam("now_is"), updated_at=func.coalesce(bindparam("at"), nodes.c.updated_at))
_WITHOUT_KEY = (
    select(nodes.c.id, nodes.c.name, nodes.c.health)
    .where(nodes.c.public_key == "", nodes.c.approved.is_(True), nodes.c.node_type == "backend")
    .order_by(nodes.c.name)
)
_SERVING = select(nodes.c.id, nodes.c.name).where(nodes.c.health != "offline", nodes.c.approved.is_(True))
_SERVING_AMONG = _SERVING.where(nodes.c.id.in_(bindparam("ids", expanding=True)))
_SET_BUS_AWAY = _OF_ONE.where(nodes.c.bus_away != bindparam("now_is")).values(
    bus_away=bindparam("now_is"), updated_at=bindparam("at")
)
_NAMED = select(nodes.c.id, nodes.c.name, nodes.c.health, nodes.c.drained, nodes.c.bus_away).where(
    nodes.c.id.in_(bindparam("ids", expanding=True))
)


def get(connection: Connection, node_id: NodeId, *, lock: bool = False) -> Node | None:
    row = connection.execute(_ONE_LOCKED if lock else _ONE, {"node_id": node_id}).one_or_none()
    return None if row is None else _node(row)


def by_name(connection: Connection, name: str) -> list[Node]:
    return [_node(row) for row in connection.execute(_OF_NAME, {"named": name})]


def every(connection: Connection) -> list[Node]:
    return [_node(row) for row in connection.execute(_EVERY)]


def listed(connection: Connection, asked: NodeQuery) -> list[Node] | None:
    """The nodes that a list shows; None if the one that it begins after does not exist. Their reports have only what
    lists show, so nothing may be decided by them.
    """
    query = _LISTED if asked.status is None else _LISTED.where(*_WITH_STATUS[asked.status])
    if asked.name:
        query = query.where(nodes.c.name == asked.name)
    if asked.after:
        last = connection.execute(_PLACE_OF, {"node_id": asked.after}).one_or_none()
        if last is None:
            return None
        is_younger = tuple_(nodes.c.created_at, nodes.c.id) > tuple_(last.created_at, last.id)
        query = query.where(or_(nodes.c.name > last.name, and_(nodes.c.name == last.name, is_younger)))
    return [
        _node_with(row, Report(**msgspec.structs.asdict(_LISTED_REPORT.decode(row.report))))
        for row in connection.execute(query.limit(asked.limit))
    ]


_PLACE_OF = select(nodes.c.name, nodes.c.created_at, nodes.c.id).where(nodes.c.id == bindparam("node_id"))
_LISTED = _ALL.order_by(nodes.c.name, nodes.c.created_at, nodes.c.id)
_WITH_STATUS: dict[Status, tuple[Any, ...]] = {
    "pending": (nodes.c.approved.is_(False),),
    "draining": (nodes.c.approved.is_(True), nodes.c.drained.is_(True)),
    **{
        health: (nodes.c.approved.is_(True), nodes.c.drained.is_(False), nodes.c.health == health)
        for health in get_args(Health)
    },
}


def named(
    connection: Connection, node_ids: Iterable[NodeId]
) -> tuple[dict[NodeId, str], dict[NodeId, str], set[NodeId]]:
    """Return the names of these nodes, what the unavailable ones wait for, and which are drained."""
    rows = list(select_among(connection, _NAMED, node_ids))
    away = {row.id: absence_of(row.health, bus_away=row.bus_away) for row in rows if row.health != "healthy"}
    return {row.id: row.name for row in rows}, away, {row.id for row in rows if row.drained}


class WithoutKey(Struct, frozen=True):
    """A node whose worker is LocalAI's: it has no key."""

    id: NodeId
    name: str
    health: Health


def without_key(connection: Connection) -> list[WithoutKey]:
    """Approved backend nodes with LocalAI workers."""
    return [WithoutKey(row.id, row.name, row.health) for row in connection.execute(_WITHOUT_KEY)]


def serving(connection: Connection) -> dict[NodeId, str]:
    """The names, by id, of nodes whose replicas may be used. On a drained node, those that are not about to stop: they
    go on until others have taken their place.
    """
    return {row.id: row.name for row in connection.execute(_SERVING)}


def serving_among(connection: Connection, node_ids: Iterable[NodeId]) -> dict[NodeId, str]:
    """`serving`, of these nodes only."""
    return {row.id: row.name for row in select_among(connection, _SERVING_AMONG, dict.fromkeys(node_ids))}


NodePart = tuple[float, int]  # when a node changed, and what that adds to the checksum of all nodes


def parts(connection: Connection, since: float = 0.0) -> dict[NodeId, NodePart]:
    """Of all that changed then or later, without the rest of their rows."""
    rows = connection.execute(_PARTS, {"since": since}).all()
    return {node_id: (updated_at, int(part)) for node_id, updated_at, part in rows}


def updates(connection: Connection) -> dict[NodeId, float]:
    """When each node last changed."""
    return {row.id: row.updated_at for row in connection.execute(_UPDATES)}


def changed_since(connection: Connection, since: float) -> dict[NodeId, float]:
    """When each of the nodes that changed since then last changed."""
    query = select(nodes.c.id, nodes.c.updated_at).where(nodes.c.updated_at >= since)
    return {row.id: row.updated_at for row in connection.execute(query)}


def many(connection: Connection, node_ids: Iterable[NodeId]) -> list[Node]:
    return [_node(row) for row in select_among(connection, _MANY, node_ids)]


def ids(connection: Connection) -> list[NodeId]:
    return list(connection.execute(_IDS).scalars())


def count(connection: Connection) -> int:
    return int(connection.execute(_COUNT).scalar_one())


def make_room(connection: Connection, limit: int) -> None:
    """Delete pending nodes so that one more fits into `limit`.

    Nodes that registered only once go first, then those silent for longest. A live machine registers again at once.
    """
    excess = int(connection.execute(_COUNT_PENDING).scalar_one()) - limit + 1
    if excess > 0:
        ids = connection.execute(_PENDING_TO_FORGET.limit(excess)).scalars().all()
        for some in slices(ids):
            connection.execute(delete(nodes).where(nodes.c.id.in_(some)))


_MANY = _ALL.where(nodes.c.id.in_(bindparam("ids", expanding=True)))
_IDS = select(nodes.c.id)
_COUNT = select(func.count()).select_from(nodes)
_COUNT_PENDING = select(func.count()).select_from(nodes).where(nodes.c.approved.is_(False))
# A node that lost its approval was approved once and is kept.
_PENDING_TO_FORGET = (
    select(nodes.c.id)
    .select_from(_JOINED)
    .where(nodes.c.approved.is_(False), nodes.c.waits_for == "")
    .order_by(liveness.newest_heard() > nodes.c.created_at, liveness.newest_heard())
)


class ApprovedNode(Struct, frozen=True):
    """An approved node without its report, for monitoring."""

    name: str
    health: Health
    drained: bool
    bus_away: bool
    heard_at: float
    capacity: Capacity


_APPROVED = (
    select(*(nodes.c.name, nodes.c.health, nodes.c.drained, nodes.c.bus_away, nodes.c.last_heartbeat, nodes.c.capacity))
    .add_columns(node_liveness.c.heard_at, node_liveness.c.capacity.label("heard_capacity"))
    .select_from(_JOINED)
    .where(nodes.c.approved.is_(True))
    .order_by(nodes.c.name)
)


def approved(connection: Connection) -> list[ApprovedNode]:
    found: list[ApprovedNode] = []
    for row in connection.execute(_APPROVED):
        is_here = row.heard_at is not None and row.heard_at >= row.last_heartbeat
        heard_at, capacity = (row.heard_at, row.heard_capacity) if is_here else (row.last_heartbeat, row.capacity)
        facts = (row.name, row.health, row.drained, row.bus_away)
        found.append(ApprovedNode(*facts, heard_at, _CAPACITY.decode(capacity)))
    return found


def count_by_health(connection: Connection) -> dict[str, int]:
    rows = connection.execute(
        select(nodes.c.health, func.count()).where(nodes.c.approved.is_(True)).group_by(nodes.c.health)
    )
    return {health: count for health, count in rows}
