"""What a pass of the reconciler does before it plans: replicas whose stop failed serve again, loads that failed may be
tried again where nodes changed, and what replicas really take is remembered.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import msgspec

from enginehouse.core.schedule import LoadInfo
from enginehouse.frontend.serving.fleet_rows import FleetRows, with_infos_again
from enginehouse.store import cluster_values, load_infos, operations, replicas
from enginehouse.store.db import Connection

_FINGERPRINT = "fleet-fingerprint-by-node"  # frontends of the previous version have one of their own


def take_back(connection: Connection) -> None:
    """Let replicas serve again whose stop ended without stopping them."""
    for replica in replicas.leaving(connection):
        subject = f"replica:{replica.model}#{replica.slot}"
        if subject not in {one.subject for one in operations.open_on(connection, replica.node_id)}:
            replicas.set_leaving(connection, replica.node_id, replica.model, replica.slot, False)


def forgive_after_changes(connection: Connection, rows: FleetRows) -> FleetRows:
    """When nodes joined, left or changed, or became free, whatever did not fit is tried again at once."""
    every = rows.nodes.rows.values()
    fingerprint = f"{sum(one.fingerprint for one in every) % 2**64:016x}"
    replicas_held = sum(len(one.shown) for one in every)
    before, _, held = cluster_values.get(connection, _FINGERPRINT).partition(" ")
    if (before, held) == (fingerprint, str(replicas_held)):
        return rows
    cluster_values.put(connection, _FINGERPRINT, f"{fingerprint} {replicas_held}")
    if before and (before != fingerprint or (held.isdecimal() and replicas_held < int(held))):
        return with_infos_again(connection, rows) if load_infos.forgive(connection) else rows
    return rows


def learn(connection: Connection, rows: FleetRows, node_ids: Iterable[str]) -> None:
    """Remember what the replicas on these nodes really took: the next placement uses it."""
    most: dict[str, int] = {}
    for node_id in node_ids:
        known = rows.nodes.rows.get(node_id)
        for one in known.shown if known is not None else ():
            info = rows.infos.rows.get(one.model)
            if info is not None and one.revision == info.revision and one.memory_bytes > info.memory_bytes:
                most[one.model] = max(most.get(one.model, 0), one.memory_bytes)
    for model, memory_bytes in sorted(most.items()):
        load_infos.change(connection, model, partial(_with_memory, memory_bytes=memory_bytes))


def _with_memory(known: LoadInfo, *, memory_bytes: int) -> LoadInfo:
    return msgspec.structs.replace(known, memory_bytes=memory_bytes)
