"""Events and lists of a frontend, as `top` receives them."""

from __future__ import annotations

from typing import Any

import msgspec
from tests.cli.recorded import JOB, operation, row

from enginehouse.cli.terminal.fleet_state import LISTS, FleetState


def node(name: str, **fields: Any) -> dict[str, Any]:
    return {
        "id": f"id-of-{name}",
        "name": name,
        "approved": True,
        "health": "healthy",
        "status": "healthy",
        "platform": "linux/amd64",
        "fingerprint": "9f2c0000aaaa1111",
        "cores": 8,
        "total_ram": 24 * 1024**3,
        "available_ram": 12 * 1024**3,
        "total_disk": 100 * 1024**3,
        "available_disk": 50 * 1024**3,
        "heartbeat_age_seconds": 1.0,
        "updated_at": "2026-01-01T00:00:00Z",
        **fields,
    }


def model(name: str, *nodes: str, state: str = "loaded") -> dict[str, Any]:
    replicas = [{"node_id": f"id-of-{one}", "node_name": one, "slot": 0} for one in nodes]
    return {"name": name, "state": state, "replicas": replicas}


def send(state: FleetState, kind: str, body: object, at: float) -> None:
    state.take_event(kind, msgspec.json.encode(body), at)


def of(*nodes: dict[str, Any], at: float = 100.0) -> FleetState:
    """A state with these nodes, connected at `at`; every list was asked for, and that of nodes has come."""
    state = FleetState()
    state.connected(at, is_resumed=False)
    assert set(state.wanted_lists(at)) == set(LISTS)
    state.take_list("nodes", list(nodes), at, at)
    return state


__all__ = ["JOB", "model", "node", "of", "operation", "row", "send"]
