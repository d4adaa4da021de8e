"""Keeps replies to intents of another owner until the owner's lease ends.

Every frontend receives every reply; the owner of the intent stores it. An owner that died or lost the bus at that
moment misses the reply, and it is not sent again: for LocalAI's workers a reply is the only way to report a failure. So
the other frontends check the reply again once the lease has been renewed or has ended. This module decides nothing. A
reply lost here only costs time if the worker sends reports.
"""

from __future__ import annotations

from msgspec import Struct

from enginehouse.core import subjects
from enginehouse.core.intent import Outcome
from enginehouse.ports import Clock

MAX_KEPT = 10_000  # the same as the collector's queue
MARGIN_SECONDS = 0.5  # the store's clock and this one are read at different moments


class Reply(Struct, frozen=True):
    """The end of one attempt. No outcome means that the node has no subscriber. With a fence, it counts only for the
    owner who has it: this frontend carried out the command itself.
    """

    to: subjects.ReplySubject
    outcome: Outcome | None
    fence: int = 0


class LateReplies:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._kept: list[tuple[float, Reply]] = []

    def keep(self, reply: Reply, seconds: float) -> None:
        """Keep a reply for at least `seconds`. Beyond `MAX_KEPT` it is dropped."""
        if len(self._kept) < MAX_KEPT:
            self._kept.append((self._clock.monotonic() + seconds + MARGIN_SECONDS, reply))

    def take_due(self) -> list[Reply]:
        now = self._clock.monotonic()
        due = [reply for at, reply in self._kept if at <= now]
        if due:
            self._kept = [one for one in self._kept if one[0] > now]
        return due
