"""The flags for the intervals and timeouts of a frontend, which `up` and `frontend` share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from enginehouse.cli.options.shared import setting

_TIMINGS = {
    "heartbeat_seconds": "Interval of the workers' heartbeats (10s).",
    "stale_seconds": "A node is unhealthy after this long without a heartbeat, offline after twice that (30s).",
    "lease_seconds": "Lease of a frontend on what it dispatched (30s).",
    "reconcile_seconds": "Interval of comparing requests and reports (5s).",
    "stall_seconds": "A running action is shown as silent after this long without progress (2m).",
    "backend_install_timeout_seconds": "The same for an install that never reported progress (15m).",
    "backend_upgrade_timeout_seconds": "The same for an upgrade that never reported progress (15m).",
    "model_load_wait_seconds": "How long a request waits for its model to load; 0 means no limit (60s).",
    "bus_credential_seconds": "Lifetime of a worker's bus credential (1h).",
}


def timings(function: Callable[..., Any]) -> Callable[..., Any]:
    for field, help_text in reversed(_TIMINGS.items()):
        function = setting(field, help_text, "DURATION")(function)
    return function
