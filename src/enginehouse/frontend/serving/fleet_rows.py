"""Reads the rows that a pass of the reconciler decides by. What was read before is given to `read`, which reads again
only what differs.

Called inside a transaction; it decides nothing and writes nothing. Everything that is kept has the checksum of exactly
the rows that were read, taken from these rows: while the store has the same checksum, it has the same rows, whichever
frontend wrote them. Replicas are not kept, because uses are in no checksum: only their checksums per model are, and
whoever plans a model reads its replicas. Neither are signs of life, free memory and reports.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Generic, NamedTuple, TypeVar

import msgspec
from msgspec import Struct

from enginehouse.core.ids import NodeId
from enginehouse.core.node import Node
from enginehouse.core.placement import labels_of
from enginehouse.core.report import Report
from enginehouse.core.schedule import LoadInfo, Schedule
from enginehouse.store import checksums, load_infos, models, nodes, replicas, schedules
from enginehouse.store.checksums import ReplicaChecksum, ServingChecksums
from enginehouse.store.db import Connection

T = TypeVar("T")
_NO_REPORT = Report()
# How much earlier than the newest change of a node another one may be that was committed later. It only saves work.
OVERLAP_SECONDS = 1.0


class ShownProcess(NamedTuple):
    model: str
    revision: str
    memory_bytes: int


class KnownNode(Struct, frozen=True):
    """A node without its report, and what matters of that."""

    part: nodes.NodePart
    node: Node
    shown: tuple[ShownProcess, ...]
    outdated: frozenset[str]  # processes, by their nonces, whose backend was replaced since their start
    restarting: tuple[str, ...]
    fingerprint: int  # of what decides whether something fits there

    @property
    def serves(self) -> bool:
        """`nodes.serving`."""
        return self.node.approved and self.node.health != "offline"


class CheckedRows(Struct, Generic[T], frozen=True):
    """Rows by name or id, and the checksum of exactly these."""

    rows: Mapping[str, T]
    checksum: object


class FleetRows(Struct, frozen=True, kw_only=True):
    """What the store has. Never changed: the next one shares what is the same."""

    read_at: float  # when all of it was last read
    nodes: CheckedRows[KnownNode]
    replicas: Mapping[str, ReplicaChecksum]  # by model
    schedules: CheckedRows[Schedule]
    infos: CheckedRows[LoadInfo]
    definitions: CheckedRows[str]  # of all models

    def names(self) -> set[str]:
        """The models to look at: those that are loaded or wanted."""
        kept = (name for name, info in self.infos.rows.items() if info.kept)
        return {*self.schedules.rows, *kept, *self.replicas}

    def restarting(self) -> dict[str, list[NodeId]]:
        """Per model, the nodes whose workers are about to start an engine of it again."""
        found: dict[str, list[NodeId]] = {}
        for node_id, known in self.nodes.rows.items():
            if known.restarting and known.serves:
                for key in known.restarting:
                    found.setdefault(key.rpartition("#")[0], []).append(NodeId(node_id))
        return found

    def serves(self, node_id: NodeId) -> bool:
        known = self.nodes.rows.get(node_id)
        return known is not None and known.serves

    def drained(self) -> list[NodeId]:
        return [NodeId(node_id) for node_id, known in self.nodes.rows.items() if known.node.drained]

    def as_seen(self, node: Node) -> Node:
        """A node that was read again, drained if it was so here."""
        known = self.nodes.rows.get(node.id)
        return msgspec.structs.replace(node, drained=known is not None and known.node.drained)

    def in_order(self) -> list[Node]:
        """The order of every other list of nodes."""
        return sorted((known.node for known in self.nodes.rows.values()), key=lambda node: (node.name, node.created_at))


class RowChanges(Struct, frozen=True, kw_only=True):
    """What differs between two readings."""

    nodes: set[str]
    moved: set[str]  # of these, the nodes that may be chosen for other models than before
    models: set[str]  # models whose plan depends on something that differs


def read(connection: Connection, before: FleetRows | None, now: float) -> tuple[FleetRows, ServingChecksums]:
    """The rows, and the checksums from before they were read: what is committed in between is noticed by the next
    reading. Without `before` everything is read.
    """
    seen, by_model = checksums.of_serving_by_model(connection)
    known_nodes, wanted, infos, definitions = (
        (before.nodes, before.schedules, before.infos, before.definitions) if before is not None else (None,) * 4
    )
    rows = FleetRows(
        read_at=before.read_at if before is not None else now,
        nodes=_same_or_read(known_nodes, seen.nodes, lambda: _nodes(connection, known_nodes, seen.nodes)),
        replicas=by_model,
        schedules=_same_or_read(wanted, seen.schedules, lambda: CheckedRows(*schedules.with_checksum(connection))),
        infos=_same_or_read(infos, seen.infos, lambda: CheckedRows(*load_infos.with_checksum(connection))),
        definitions=_same_or_read(definitions, seen.models, lambda: CheckedRows(*models.definitions(connection))),
    )
    return rows, seen


def with_infos_again(connection: Connection, rows: FleetRows) -> FleetRows:
    """After this transaction has changed them."""
    return msgspec.structs.replace(rows, infos=CheckedRows(*load_infos.with_checksum(connection)))


def changes(connection: Connection, before: FleetRows | None, after: FleetRows) -> RowChanges:
    """Without `before` everything is another."""
    if before is None:
        return RowChanges(nodes={*after.nodes.rows}, moved={*after.nodes.rows}, models=after.names())
    # If one is about to stop instead of another, the checksum is the same.
    changed = {name for name, one in after.replicas.items() if one.leaving or before.replicas.get(name) != one}
    changed |= before.replicas.keys() - after.replicas.keys()
    changed |= _other(before.schedules, after.schedules) | _other(before.infos, after.infos)
    changed |= _other(before.definitions, after.definitions)
    changed_nodes = _other(before.nodes, after.nodes)
    pairs = {one: (before.nodes.rows.get(one), after.nodes.rows.get(one)) for one in changed_nodes}
    moved = {one for one, (old, new) in pairs.items() if _standing(old) != _standing(new)}
    touched = {NodeId(one) for one, (old, new) in pairs.items() if _of_its_replicas(old) != _of_its_replicas(new)}
    changed |= replicas.models_on(connection, touched) if touched else set()
    if moved:
        changed |= {one.model_name for one in after.schedules.rows.values() if one.spread_all or one.node_selector}
        changed |= {one.model for one in after.infos.rows.values() if not moved.isdisjoint(one.kept)}
    return RowChanges(nodes=changed_nodes, moved=moved, models=changed)


def _same_or_read(known: CheckedRows[T] | None, seen: object, read_all: Callable[[], CheckedRows[T]]) -> CheckedRows[T]:
    return known if known is not None and known.checksum == seen else read_all()


def _other(before: CheckedRows[T], after: CheckedRows[T]) -> set[str]:
    """The names of rows that differ. Rows that are the same object are the same."""
    if before is after:
        return set()
    old, new = before.rows, after.rows
    found = {name for name, row in new.items() if (was := old.get(name)) is not row and was != row}
    return found | (old.keys() - new.keys())


def _nodes(
    connection: Connection, known: CheckedRows[KnownNode] | None, seen: tuple[int, int]
) -> CheckedRows[KnownNode]:
    """If those that changed last are not all that differ, some are gone, or were changed by a transaction that began
    earlier and was committed later.
    """
    if known is None:
        return _with_parts(connection, CheckedRows({}, (0, 0)), nodes.parts(connection), is_all=True)
    newest = max((one.part[0] for one in known.rows.values()), default=0.0)
    found = _with_parts(connection, known, nodes.parts(connection, newest - OVERLAP_SECONDS), is_all=False)
    if found.checksum == seen:
        return found
    return _with_parts(connection, found, nodes.parts(connection), is_all=True)


def _with_parts(
    connection: Connection, known: CheckedRows[KnownNode], parts: Mapping[NodeId, nodes.NodePart], *, is_all: bool
) -> CheckedRows[KnownNode]:
    """The nodes with these parts, read again where the part is another."""
    changed = {one for one, part in parts.items() if (old := known.rows.get(one)) is None or old.part != part}
    # After the parts: of a node that changes in between, the part is that of the row before, so it is read once more.
    every = nodes.many(connection, sorted(changed)) if known.rows else nodes.every(connection)
    rows: dict[str, KnownNode] = {**known.rows}
    rows.update((node.id, _known(parts[node.id], node)) for node in every if node.id in changed)
    if is_all and len(rows) != len(parts):
        rows = {one: rows[one] for one in parts if one in rows}
    return CheckedRows(rows, (len(rows), sum(one.part[1] for one in rows.values())))


def _known(part: nodes.NodePart, node: Node) -> KnownNode:
    report = node.report
    return KnownNode(
        part=part,
        node=msgspec.structs.replace(node, report=_NO_REPORT),
        shown=tuple(ShownProcess(one.model_id, one.revision, one.memory_bytes) for one in report.replicas),
        outdated=frozenset(one.nonce for one in report.replicas if one.outdated),
        restarting=report.restarting,
        fingerprint=_fingerprint(node),
    )


def _fingerprint(node: Node) -> int:
    facts = (
        node.id,
        node.approved,
        node.health == "healthy",
        node.drained,
        sorted(labels_of(node).items()),
        node.max_replicas_per_model,
        node.capability,
        node.capacity.total_ram,
        node.capacity.total_vram,
    )
    return int.from_bytes(hashlib.sha256(msgspec.json.encode(facts)).digest()[:8])


def _standing(known: KnownNode | None) -> tuple[object, ...]:
    """What decides which models may be loaded on a node."""
    if known is None:
        return ()
    node = known.node
    facts = (node.approved, node.node_type, node.is_localai, node.health, node.drained)
    return (*facts, node.capability, node.platform, labels_of(node))


def _of_its_replicas(known: KnownNode | None) -> tuple[object, ...]:
    """What the plans of the models that run on a node depend on."""
    return () if known is None else (known.serves, known.node.drained, known.outdated)
