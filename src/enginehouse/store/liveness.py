"""Signs of life of nodes: when each was heard, its free resources, and as of when its report is confirmed.

Every heartbeat changes these, so they are in a narrow table and are written for many nodes in one statement. Nothing
here reads or writes a report. The first versions had columns for them in `nodes`; whichever is newer counts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import msgspec
from msgspec import Struct
from sqlalchemy import ColumnElement, ScalarSelect, Update, bindparam, case, exists, func, or_, select, text, update

from enginehouse.core.capacity import Capacity
from enginehouse.core.ids import NodeId
from enginehouse.core.intent import OPEN
from enginehouse.core.node import Health
from enginehouse.core.report import Report, ReportStamp
from enginehouse.store.db import Connection
from enginehouse.store.rows import insert_unless_there, select_among, text_of
from enginehouse.store.schema import intents, node_liveness, nodes, replicas
from enginehouse.store.timed import one_with_now, timed

# A replica's row is dated before its transaction is committed. One that became visible after the last look is newer
# than that look less this time, which is longer than a transaction may take.
LATE_SECONDS = 30.0
_MAX_SEQUENCE = 2**63 - 1
_BOOT_ID_LENGTH = 64
_CAPACITY = msgspec.json.Decoder(Capacity)
_OF_NODE = nodes.outerjoin(node_liveness, node_liveness.c.node_id == nodes.c.id)


def newest_heard() -> ColumnElement[float]:
    """When a node was last heard, by whichever version of the program."""
    return case(
        (node_liveness.c.heard_at > nodes.c.last_heartbeat, node_liveness.c.heard_at), else_=nodes.c.last_heartbeat
    )


class Liveness(Struct, frozen=True, kw_only=True):
    """What a heartbeat is compared with."""

    id: NodeId
    approved: bool
    health: Health
    bus_away: bool
    capacity: Capacity
    report_digest: str
    sequence: int
    # Whether an unchanged report may still settle, end or start something on this node.
    is_busy: bool
    is_new: bool  # there is no row here yet


class LivenessChange(Struct, frozen=True, kw_only=True):
    """What a heartbeat changes. The digest, sequence and mark are those of the report that it confirms, if it does."""

    node_id: NodeId
    capacity: Capacity
    report_digest: str = ""
    sequence: int = 0
    mark: float = 0.0


_PROCESSES = select(func.count()).select_from(replicas).where(replicas.c.node_id == nodes.c.id).scalar_subquery()
_IS_BUSY = or_(
    node_liveness.c.running > 0,
    exists().where(intents.c.node_id == nodes.c.id, intents.c.state.in_(sorted(OPEN))),
    # Rows and processes differ, or a row was added since the report was last compared with the rows.
    node_liveness.c.processes != _PROCESSES,
    exists().where(replicas.c.node_id == nodes.c.id, replicas.c.created_at > node_liveness.c.mark - LATE_SECONDS),
)
_SOME = (
    select(
        *(nodes.c.id, nodes.c.approved, nodes.c.health, nodes.c.bus_away, nodes.c.last_heartbeat),
        nodes.c.capacity.label("copied_capacity"),
        *(node_liveness.c.heard_at, node_liveness.c.capacity, node_liveness.c.report_digest, node_liveness.c.sequence),
        _IS_BUSY.label("is_busy"),
    )
    .select_from(_OF_NODE)
    .where(nodes.c.id.in_(bindparam("ids", expanding=True)))
)
_OF_ONE = update(node_liveness).where(node_liveness.c.node_id == bindparam("of_node"))
_HEAR = _OF_ONE.values(heard_at=bindparam("at"), capacity=bindparam("now_has"))
_CONFIRM = _OF_ONE.where(
    # Not in place of a newer one that was stored at the same time.
    node_liveness.c.report_digest == bindparam("of_digest"),
    node_liveness.c.sequence <= bindparam("number"),
).values(heard_at=bindparam("at"), capacity=bindparam("now_has"), sequence=bindparam("number"), mark=bindparam("as_of"))
# PostgreSQL takes all of them in one statement; to SQLite a statement per row costs next to nothing. Rows are locked in
# a fixed order, so that two frontends do not wait for each other.
_TOGETHER = """
    with given as (
        select * from unnest(
            cast(:ids as text[]), cast(:capacities as text[]), cast(:digests as text[]), cast(:sequences as bigint[]),
            cast(:marks as double precision[])
        ) as given(id, capacity, digest, sequence, mark)
    ), locked as (
        select node_id from node_liveness where node_id in (select id from given) order by node_id for update
    )
"""
_HEAR_TOGETHER = text(
    _TOGETHER
    + """
    update node_liveness as row set heard_at = :at, capacity = given.capacity from given, locked
    where row.node_id = given.id and locked.node_id = given.id
    """
)
_CONFIRM_TOGETHER = text(
    _TOGETHER
    + """
    update node_liveness as row
    set heard_at = :at, capacity = given.capacity, sequence = given.sequence, mark = given.mark from given, locked
    where row.node_id = given.id and locked.node_id = given.id
        and row.report_digest = given.digest and row.sequence <= given.sequence
    """
)
_SET_CAPACITY = _OF_ONE.values(capacity=bindparam("now_has"))
_SET_REPORT = _OF_ONE.values(
    {
        name: bindparam(f"new_{name}")
        for name in ("report_digest", "boot_id", "sequence", "mark", "running", "processes")
    }
)


def some(connection: Connection, node_ids: Iterable[NodeId]) -> dict[NodeId, Liveness]:
    """The rows of these nodes; an unknown node has none."""
    found: dict[NodeId, Liveness] = {}
    for row in select_among(connection, _SOME, sorted(set(node_ids))):
        is_new = row.heard_at is None
        is_copy_newer = is_new or row.last_heartbeat > row.heard_at
        found[row.id] = Liveness(
            id=row.id,
            approved=bool(row.approved),
            health=row.health,
            bus_away=bool(row.bus_away),
            capacity=_CAPACITY.decode(row.copied_capacity if is_copy_newer else row.capacity),
            report_digest=row.report_digest or "",
            sequence=row.sequence or 0,
            is_busy=bool(row.is_busy),
            is_new=is_new,
        )
    return found


def add(connection: Connection, node_id: NodeId, capacity: Capacity, heard_at: float) -> None:
    """Make the row of a node, unless there is one."""
    row: dict[str, object] = {"node_id": node_id, "heard_at": heard_at, "capacity": text_of(capacity)}
    insert_unless_there(connection, node_liveness, row)


def write(connection: Connection, signs: Sequence[LivenessChange], now: float) -> None:
    """Store heartbeats of different nodes."""
    ordered = sorted(signs, key=lambda sign: sign.node_id)
    plain = [sign for sign in ordered if not sign.report_digest]
    confirming = [sign for sign in ordered if sign.report_digest]
    if connection.dialect.name == "postgresql":
        for statement, some in ((_HEAR_TOGETHER, plain), (_CONFIRM_TOGETHER, confirming)):
            if some:
                connection.execute(statement, _lists(some, now))
        return
    if plain:
        connection.execute(_HEAR, [_values(sign, now) for sign in plain])
    if confirming:
        connection.execute(_CONFIRM, [_values(sign, now) | _stamp_values(sign) for sign in confirming])


def _lists(signs: Sequence[LivenessChange], now: float) -> dict[str, object]:
    """The same columns for all of them."""
    return {
        "at": now,
        "ids": [sign.node_id for sign in signs],
        "capacities": [text_of(sign.capacity) for sign in signs],
        "digests": [sign.report_digest for sign in signs],
        "sequences": [sign.sequence for sign in signs],
        "marks": [sign.mark for sign in signs],
    }


def _stamp_values(sign: LivenessChange) -> dict[str, object]:
    return {"of_digest": sign.report_digest, "number": sign.sequence, "as_of": sign.mark}


def _values(sign: LivenessChange, now: float) -> dict[str, object]:
    return {"of_node": sign.node_id, "at": now, "now_has": text_of(sign.capacity)}


def _set(connection: Connection, statement: Update, rows: Sequence[dict[str, object]]) -> None:
    """Change the rows of nodes. One that a frontend of the previous version added has none yet."""
    if connection.execute(statement, rows).rowcount == len(rows):
        return
    for row in rows:
        add(connection, NodeId(str(row["of_node"])), Capacity(), 0.0)
    connection.execute(statement, rows)


def set_capacity(connection: Connection, node_id: NodeId, capacity: Capacity) -> None:
    _set(connection, _SET_CAPACITY, [{"of_node": node_id, "now_has": text_of(capacity)}])


def set_reports(connection: Connection, stored: Sequence[tuple[NodeId, Report, str]]) -> None:
    """Note which reports, with which digests, nodes have now; `nodes` stores them."""
    rows: list[dict[str, object]] = [
        {
            "of_node": node_id,
            "new_report_digest": digest,
            "new_boot_id": _boot_id(report),
            "new_sequence": _bounded(report.sequence),
            "new_mark": report.mark,
            "new_running": len(report.running),
            "new_processes": len(report.replicas),
        }
        for node_id, report, digest in stored
    ]
    _set(connection, _SET_REPORT, rows)


def _boot_id(report: Report) -> str:
    """As it fits into its column: a worker may send anything."""
    return report.boot_id.replace("\0", "")[:_BOOT_ID_LENGTH]


def confirming(change: LivenessChange, digest: str, stamp: ReportStamp | Report) -> LivenessChange:
    """The same, and that the stored report was taken again."""
    return msgspec.structs.replace(
        change, report_digest=digest, sequence=_bounded(stamp.sequence), mark=max(0.0, stamp.mark)
    )


def _bounded(sequence: int) -> int:
    return min(max(0, sequence), _MAX_SEQUENCE)


def as_confirmed(report: Report, boot_id: str | None, sequence: int | None, mark: float | None) -> Report:
    """The stored report as of its last confirmation. A frontend of the previous version stores reports without noting
    them here, so they are compared.
    """
    if sequence is None or mark is None or boot_id != _boot_id(report) or sequence <= report.sequence:
        return report
    return msgspec.structs.replace(report, sequence=sequence, mark=mark)


class HeardNode(Struct, frozen=True):
    """The last sign of life of an approved node; never heard is 0."""

    id: NodeId
    health: Health
    heard_at: float
    capacity: Capacity


_HEARD = (
    # Nothing of a node that comes after its report: SQLite would read every report to get to it.
    select(nodes.c.id, nodes.c.health, node_liveness.c.heard_at, node_liveness.c.capacity)
    .select_from(_OF_NODE)
    .where(nodes.c.approved.is_(True))
)
_UNHEARD = Capacity()


def heard(connection: Connection) -> list[HeardNode]:
    """All approved nodes. Of one that only a frontend of the previous version has heard nothing is known."""
    return [
        HeardNode(row.id, row.health, row.heard_at or 0.0, _CAPACITY.decode(row.capacity) if row.capacity else _UNHEARD)
        for row in connection.execute(_HEARD)
    ]


# Silence -----------------------------------------------------------------------------------------


class SilentNode(Struct, frozen=True):
    id: NodeId
    health: Health
    heard_at: float


# Without the older column: SQLite would read every report to get to it. It is compared for what was found.
_heard_at = func.coalesce(node_liveness.c.heard_at, 0.0)
_SILENT = (
    select(nodes.c.id, nodes.c.health, newest_heard().label("heard_at"))
    .select_from(_OF_NODE)
    .where(
        nodes.c.approved.is_(True),
        or_(
            (nodes.c.health == "healthy") & (_heard_at <= bindparam("unhealthy_if")),
            (nodes.c.health == "unhealthy") & (_heard_at <= bindparam("offline_if")),
        ),
    )
)
_HEARD_SINCE = (
    select(nodes.c.id)
    .select_from(_OF_NODE)
    .where(
        nodes.c.approved.is_(True),
        nodes.c.public_key != "",
        nodes.c.bus_away == bindparam("is_away"),
        or_(_heard_at >= bindparam("since"), nodes.c.last_heartbeat >= bindparam("since")),
    )
    .limit(1)
)
_COUNT_APPROVED = select(func.count()).select_from(nodes).where(nodes.c.approved.is_(True))


class Hearing(Struct, frozen=True, kw_only=True):
    """How well the approved nodes are heard, at the store's time `now`."""

    now: float
    oldest_healthy: float  # when the healthy node was heard that is silent for longest
    oldest_unhealthy: float
    is_any_bus_away: bool


def _oldest(health: Health) -> ScalarSelect[float]:
    query = select(func.min(_heard_at)).select_from(_OF_NODE)
    return query.where(nodes.c.approved.is_(True), nodes.c.health == health).scalar_subquery()


_HEARING = timed(
    _oldest("healthy").label("healthy"),
    _oldest("unhealthy").label("unhealthy"),
    exists().where(nodes.c.approved.is_(True), nodes.c.bus_away.is_(True)).label("is_away"),
)


def hearing(connection: Connection) -> Hearing:
    """Whether it may be worth a look who is silent, in one statement."""
    row, now = one_with_now(connection, _HEARING)
    return Hearing(
        now=now,
        oldest_healthy=math.inf if row.healthy is None else row.healthy,
        oldest_unhealthy=math.inf if row.unhealthy is None else row.unhealthy,
        is_any_bus_away=bool(row.is_away),
    )


def silent(connection: Connection, unhealthy_if: float, offline_if: float) -> list[SilentNode]:
    """Approved nodes whose health may be worse than stored: heard at these times, or before."""
    rows = connection.execute(_SILENT, {"unhealthy_if": unhealthy_if, "offline_if": offline_if})
    return [SilentNode(row.id, row.health, row.heard_at) for row in rows]


def every_bus_is_away(connection: Connection, since: float) -> bool:
    """Whether every node heard from since then reports that its bus is away. LocalAI workers never report it."""
    if connection.execute(_HEARD_SINCE, {"is_away": True, "since": since}).scalar_one_or_none() is None:
        return False
    return connection.execute(_HEARD_SINCE, {"is_away": False, "since": since}).scalar_one_or_none() is None


def count_approved(connection: Connection) -> int:
    return int(connection.execute(_COUNT_APPROVED).scalar_one())
