"""Readiness of a frontend: whether a load balancer should send requests to it.

A fault counts only if another frontend may be better off.
"""

from __future__ import annotations

from enginehouse.frontend.fleet.nodes import Nodes
from enginehouse.loop import Wakes
from enginehouse.ports import Bus
from enginehouse.store.db import Store


def unready_reasons(store: Store, bus: Bus, nodes: Nodes, wakes: Wakes) -> list[str]:
    """Return why this frontend is not ready; empty if it is."""
    reasons = ["this frontend is stopping"] if wakes.is_stopping else []
    # If no node has the bus either, other frontends are no better, and requests for loaded models do not need it.
    reasons += [] if bus.is_connected or nodes.is_bus_away else ["the bus is not connected"]
    reasons += ["the database does not answer"] if store.is_away else []
    return reasons + [f"the loop {loop.name} keeps failing" for loop in wakes.loops.values() if loop.is_stuck]
