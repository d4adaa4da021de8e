"""Counts permission violations on the embedded server: a client published or subscribed where its credential does not
allow it.

The server reports them only in its log. Each look reads what was added since the last one, up to a limit. A compromised
worker shows up here first.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from pathlib import Path

log = logging.getLogger(__name__)

LOOK_SECONDS = 5.0
READ_BYTES = 1024 * 1024  # per look; more than that is a flood in any case
NAMED = 5  # users named in the log per look
_VIOLATION = re.compile(rb"jwt:([A-Z0-9]{10,80}).{0,16} - (Publish|Subscription) Violation")


class ViolationLog:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self.counts: Counter[str] = Counter()

    def count_new(self) -> None:
        """Count the new violations. Blocks for one read."""
        try:
            size = self._path.stat().st_size
            if size < self._offset:
                self._offset = 0  # the server has rotated its log
            with self._path.open("rb") as file:
                file.seek(max(self._offset, size - READ_BYTES))
                content = file.read(READ_BYTES)
                # An incomplete last line is read the next time.
                whole = content[: content.rfind(b"\n") + 1]
                self._offset = file.tell() - (len(content) - len(whole))
        except OSError:
            return  # there is no embedded server here
        found = [(kind.decode().lower(), user.decode()) for user, kind in _VIOLATION.findall(whole)]
        self.counts.update(kind for kind, _ in found)
        for user in sorted({user for _, user in found})[:NAMED]:
            log.error("bus.violation user=%s count=%d", user, sum(one == user for _, one in found))
