"""The flags for the clocks of a frontend, which `up` and `frontend` share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from enginehouse.cli.options.shared import setting

_TIMINGS = {
    "heartbeat_seconds": "How often workers say that they live (10s).",
    "stale_seconds": "Silence after which a node is unhealthy (30s); offline after twice that.",
    "lease_seconds": "How long a frontend owns what it dispatched (30s).",
    "reconcile_seconds": "How often requests and reports are compared (5s).",
    "stall_seconds": "Silence after which a running action is shown as silent (2m).",
    "backend_install_timeout_seconds": "The same for an install that never spoke (15m).",
    "backend_upgrade_timeout_seconds": "The same for an upgrade that never spoke (15m).",
    "model_load_wait_seconds": "How long a request waits for its model; 0 without end (60s).",
    "bus_credential_seconds": "How long a worker's credential for the bus is valid (1h).",
}


def timings(function: Callable[..., Any]) -> Callable[..., Any]:
    for field, help_text in reversed(_TIMINGS.items()):
        function = setting(field, help_text, "DURATION")(function)
    return function
