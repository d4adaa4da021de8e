"""Keeps the log of SQLite (its WAL) short.

SQLite begins the log anew only at a moment at which nobody reads from it, so reads that always overlap would let it
grow without end. When it is long, a read waits until no other is under way, and a moment more, in which transactions
find nobody reading and cut it. Transactions never wait here.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path

LONG_LOG_BYTES = 32 * 1024 * 1024  # eight times what SQLite itself aims at
KEPT_LOG_BYTES = LONG_LOG_BYTES // 2  # the size to which a log is cut that was longer
_PATIENCE_SECONDS = 1.0  # for the reads under way
# At most: within two transactions it is over, because one moves the log into the file and the next one begins it anew.
_PAUSE_SECONDS = 0.3
_LOOK_SECONDS = 0.005
_REST_SECONDS = 1.0  # after a pause in which nobody wrote


class ReadGate:
    def __init__(self, log: Path) -> None:
        self._log = log
        self._changed = threading.Condition()
        self._under_way = 0
        self._rests_until = 0.0

    def __enter__(self) -> None:
        with self._changed:
            if self._is_long() and time.monotonic() > self._rests_until:
                self._changed.wait_for(lambda: self._under_way == 0, _PATIENCE_SECONDS)
                end = time.monotonic() + _PAUSE_SECONDS
                while self._is_long() and time.monotonic() < end:
                    time.sleep(_LOOK_SECONDS)  # in a thread of the store; others wait for the lock meanwhile
                if self._is_long():
                    self._rests_until = time.monotonic() + _REST_SECONDS
            self._under_way += 1

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._under_way -= 1
            self._changed.notify_all()

    def _is_long(self) -> bool:
        try:
            return self._log.stat().st_size > LONG_LOG_BYTES
        except OSError:
            return False  # there is none yet
