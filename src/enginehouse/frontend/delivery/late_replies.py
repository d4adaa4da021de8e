"""Replies to what another frontend has sent, kept until its lease would have ended.

Every frontend hears every reply and its owner writes it. An owner that died or lost the bus in that moment has not
heard it, and nobody says it again: one of LocalAI's workers has no other word for a failure. So the others look once
more when the lease must have been renewed or have ended. Nothing is decided here, and what is lost here costs time only
where the worker sends reports.
"""

from __future__ import annotations

from msgspec import Struct

from enginehouse.core import subjects
from enginehouse.core.intent import Outcome
from enginehouse.ports import Clock

MAX_KEPT = 10_000  # as many as wait to be worked through at most
MARGIN_SECONDS = 0.5  # the database's clock and this one are read at different moments


class Reply(Struct, frozen=True):
    """A worker's last word on one attempt; no outcome means that nobody listens on that node."""

    to: subjects.ReplySubject
    outcome: Outcome | None


class Overheard:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._kept: list[tuple[float, Reply]] = []

    def keep(self, reply: Reply, seconds: float) -> None:
        """For so long at least."""
        if len(self._kept) < MAX_KEPT:
            self._kept.append((self._clock.monotonic() + seconds + MARGIN_SECONDS, reply))

    def take_due(self) -> list[Reply]:
        now = self._clock.monotonic()
        due = [reply for at, reply in self._kept if at <= now]
        if due:
            self._kept = [one for one in self._kept if one[0] > now]
        return due
