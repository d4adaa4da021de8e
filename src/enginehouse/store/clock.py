"""The clock of a store on SQLite. It follows the machine's boot clock, not the wall clock, and never goes backwards.

The time is an anchor plus the machine's boot clock, which also counts sleep. The anchor is written to the database once
per boot, so every process on the file and every later start agree to the microsecond. Only the first start after a boot
reads the wall clock, and the anchor is never earlier than any time in the database. PostgreSQL has its own clock.
"""

from __future__ import annotations

import time
from pathlib import Path

from sqlalchemy import Connection, func, select

from enginehouse.store.schema import clock, intents, node_liveness, nodes, operations

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
# Columns that hold past times when written; leases and due times lie in the future.
_WRITTEN = (
    *(nodes.c.updated_at, nodes.c.last_heartbeat, node_liveness.c.heard_at),
    *(operations.c.created_at, intents.c.updated_at),
)


class StoreClock:
    def __init__(self) -> None:
        self._began_at = 0.0

    def now(self) -> float:
        return self._began_at + machine_seconds()

    def anchor(self, connection: Connection) -> None:
        """Load the anchor of this boot, or write a new one. Requires an exclusive transaction."""
        boot = boot_id()
        row = connection.execute(select(clock)).one_or_none()
        if row is not None and boot and row.boot == boot:
            self._began_at = row.began_at
            return
        latest = [connection.execute(select(func.max(column))).scalar() or 0.0 for column in _WRITTEN]
        self._began_at = max(time.time(), row.written_at if row is not None else 0.0, *latest) - machine_seconds()
        connection.execute(clock.delete())
        connection.execute(clock.insert(), {"boot": boot, "began_at": self._began_at, "written_at": self.now()})


def machine_seconds() -> float:
    """Seconds since boot, including sleep. Independent of changes to the wall clock."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


def boot_id() -> str:
    """An id that changes with every boot; "" if unavailable, and then every start of this program counts as a boot."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""
