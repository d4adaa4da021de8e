"""Counts what the embedded server refused: whoever publishes or listens where its credential does not allow it.

The server tells nobody but its log, so its log is read: what was added since the last look, and no more of it than a
bounded part. A worker that turned bad is seen here first.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from pathlib import Path

log = logging.getLogger(__name__)

LOOK_SECONDS = 5.0
READ_BYTES = 1024 * 1024  # of one look; a flood beyond it is a flood either way
NAMED = 5  # in the log, of one look
_VIOLATION = re.compile(rb"jwt:([A-Z0-9]{10,80}).{0,16} - (Publish|Subscription) Violation")


class ViolationLog:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self.counts: Counter[str] = Counter()

    def look(self) -> None:
        """Count what is new. Blocks for one read."""
        try:
            size = self._path.stat().st_size
            if size < self._offset:
                self._offset = 0  # the server has turned its log over
            with self._path.open("rb") as file:
                file.seek(max(self._offset, size - READ_BYTES))
                content = file.read(READ_BYTES)
                # A line that is being written is read the next time.
                whole = content[: content.rfind(b"\n") + 1]
                self._offset = file.tell() - (len(content) - len(whole))
        except OSError:
            return  # there is no server of ours here
        found = [(kind.decode().lower(), user.decode()) for user, kind in _VIOLATION.findall(whole)]
        self.counts.update(kind for kind, _ in found)
        for user in sorted({user for _, user in found})[:NAMED]:
            log.error("bus.violation user=%s count=%d", user, sum(one == user for _, one in found))
