"""The clock of a store on SQLite: it runs with the machine, never with the wall clock, and never backwards.

An anchor says what time it was at a moment of this boot; the time is the anchor plus what the machine's own clock has
counted since, asleep or not. It is written once per boot, into the database, so that every program on the file and
every later start agree to the microsecond. Only the first start after a boot looks at the wall clock, and
even then no earlier than anything that is written in the database. PostgreSQL has a clock of its own.
"""

from __future__ import annotations

import time
from pathlib import Path

from sqlalchemy import Connection, func, select

from enginehouse.store.schema import clock, intents, nodes, operations

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
# Times that have passed when they are written; leases and waits lie ahead.
_WRITTEN = (nodes.c.updated_at, nodes.c.last_heartbeat, operations.c.created_at, intents.c.updated_at)


class StoreClock:
    def __init__(self) -> None:
        self._began_at = 0.0

    def now(self) -> float:
        return self._began_at + machine_seconds()

    def anchor(self, connection: Connection) -> None:
        """Take the anchor of this boot, or leave one. In a transaction that nobody else has at the same time."""
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
    """Since the machine was started, with the time it slept; no setting of the clock changes it."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


def boot_id() -> str:
    """Another after each start of the machine; "" where it cannot be told, and then each start of ours is one."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""
