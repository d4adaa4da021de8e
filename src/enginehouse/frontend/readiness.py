"""Readiness of a frontend: whether a load balancer should send requests to it.

A fault counts only if another frontend may be better off.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from enginehouse.core.progress import format_bytes
from enginehouse.frontend.fleet.nodes import Nodes
from enginehouse.loop import Wakes
from enginehouse.ports import Bus
from enginehouse.store.db import Store

FULL_BYTES = 16 * 1024**2  # free; a transaction of SQLite needs some of it beside the database


def unready_reasons(store: Store, bus: Bus, nodes: Nodes, wakes: Wakes, data: Path) -> list[str]:
    """Return why this frontend is not ready; empty if it is."""
    reasons = ["this frontend is stopping"] if wakes.is_stopping else []
    # If no node has the bus either, other frontends are no better, and requests for loaded models do not need it.
    reasons += [] if bus.is_connected or nodes.is_bus_away else ["the bus is not connected"]
    reasons += ["the database does not answer"] if store.is_away else []
    reasons += ["the disk of the database is full; free some space there"] if store.is_full else []
    reasons += full_disk(data)
    return reasons + [f"the loop {loop.name} keeps failing" for loop in wakes.loops.values() if loop.is_stuck]


def full_disk(data: Path) -> list[str]:
    """That the disk of the data directory is full; empty if it is not."""
    try:
        free = shutil.disk_usage(data).free
    except OSError as error:
        return [f"the data directory {data} cannot be used: {error.strerror or error}"]
    if free >= FULL_BYTES:
        return []
    return [f"the disk of {data} is full ({format_bytes(free)} free); free some space there"]
