"""The sessions of a database as its server sees them: who waits for a lock, who holds a transaction and does nothing,
and what the server ended because it took too long.

Looked at twenty times a second from a thread; what lies between two looks is not seen, so what matters is how long
something lasted, not how often it was.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path

import psycopg

LOOK_SECONDS = 0.05
_SESSIONS = """select pid, coalesce(wait_event_type, '') = 'Lock', state like 'idle in transaction%',
        extract(epoch from clock_timestamp() - state_change)::float8, query
    from pg_stat_activity where datname = current_database() and pid <> pg_backend_pid() and state <> 'idle'"""
# In the words of the server: limits of a role that were reached.
_ENDED = (
    "canceling statement due to statement timeout",
    "canceling statement due to lock timeout",
    "terminating connection due to idle-in-transaction timeout",
)


class Sessions:
    """`with Sessions(url) as sessions:` looks until the end. The URL is that of a role that may see everybody."""

    def __init__(self, url: str) -> None:
        self.looks = 0
        self.longest_lock = (0.0, "")  # seconds, and the statement that waited
        self.longest_idle = (0.0, "")  # inside a transaction, after that statement
        self._waiting: dict[int, float] = {}  # since when it has been seen waiting, at every look
        self._over = threading.Event()
        self._connection = psycopg.connect(url, autocommit=True)
        self._thread = threading.Thread(target=self._go_on)
        ((directory,),) = self._connection.execute("show data_directory").fetchall()
        self._log = Path(directory) / "log"
        self._before = self._log.stat().st_size

    def __enter__(self) -> Sessions:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(10)
        self._connection.close()

    @property
    def ended(self) -> list[str]:
        """What the server cut off since this was made."""
        with self._log.open("rb") as log:
            log.seek(self._before)
            lines = log.read().decode(errors="replace").splitlines()
        return [line for line in lines if any(words in line for words in _ENDED)]

    def _go_on(self) -> None:
        while not self._over.wait(LOOK_SECONDS):
            self._look()

    def _look(self) -> None:
        rows = self._connection.execute(_SESSIONS).fetchall()
        now = time.monotonic()
        self.looks += 1
        self._waiting = {pid: self._waiting.get(pid, now) for pid, is_waiting, *_ in rows if is_waiting}
        for pid, _, is_idle, seconds, query in rows:
            if pid in self._waiting:
                self.longest_lock = max(self.longest_lock, (now - self._waiting[pid], query))
            if is_idle:
                self.longest_idle = max(self.longest_idle, (seconds, query))
