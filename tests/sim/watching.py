"""What somebody sees who watches one frontend, and the guarantee that it never goes backwards (G9).

One watcher per life of a frontend. It knows only what it was told, as a page does.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from msgspec import Struct
from tests.sim.rows import TERMINAL
from tests.sim.trace import Violation

ENDED = TERMINAL | {"partial"}


class ToldRow(Struct, frozen=True):
    intent: str
    state: str
    attempt: int
    current_bytes: int = 0


class Told(Struct, frozen=True):
    jobID: str
    status: str
    nodes: tuple[ToldRow, ...] = ()


def row_does_not_fall(before: ToldRow, after: ToldRow) -> str:
    """G9: within an attempt numbers do not fall; nothing of an older attempt or after the end is shown."""
    if before.state in TERMINAL and before.state != after.state:
        return f"intent {after.intent} was shown as {before.state} and then as {after.state}"
    if after.attempt < before.attempt:
        return f"intent {after.intent} was shown at attempt {before.attempt} and then at {after.attempt}"
    same = after.attempt == before.attempt and before.state == after.state == "running"
    if same and after.current_bytes < before.current_bytes:
        return f"intent {after.intent} fell from {before.current_bytes} to {after.current_bytes} bytes"
    return ""


def end_is_the_end(before: Told, after: Told) -> str:
    """G9: after its end an operation is shown as ended in that way."""
    if before.status in ENDED and after.status != before.status:
        return f"operation {after.jobID} was shown as {before.status} and then as {after.status}"
    return ""


class Watched:
    def __init__(self, name: str, now: Callable[[], float], fail: Callable[[Violation], None]) -> None:
        self.name = name
        self._now = now
        self._fail = fail
        self._seen: dict[str, Told] = {}
        self.end_seen_at: dict[str, float] = {}
        self._decoder = msgspec.json.Decoder(Told)

    def told(self, body: bytes) -> None:
        after = self._decoder.decode(body)
        before = self._seen.get(after.jobID)
        if before is not None:
            self._judge(end_is_the_end(before, after))
            rows = {row.intent: row for row in before.nodes}
            for row in after.nodes:
                if row.intent in rows:
                    self._judge(row_does_not_fall(rows[row.intent], row))
        self._seen[after.jobID] = after
        if after.status in ENDED:
            self.end_seen_at.setdefault(after.jobID, self._now())

    def _judge(self, wrong: str) -> None:
        if wrong:
            self._fail(Violation("G9", f"{self.name}: {wrong}"))
