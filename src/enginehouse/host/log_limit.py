"""Rate limit of a program's log, so that it cannot grow faster than its file is truncated.

Most log lines are triggered from outside: by bus messages, requests, heartbeats, engines. Each line is charged in bytes
to two budgets: that of its place in the code, and a common one. Lines over budget are dropped and counted, and the
count is logged with a later line. An event stays one line of bounded length, whatever text it quotes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TextIO

LINE_CHARACTERS = 2000  # of a message; above our longest, below what remote peers may send
TRACE_CHARACTERS = 8000  # the last ones of a traceback, because its end names the error
HEAD_BYTES = 80  # time, level and name
# Per place: the lines of a thousand nodes at once, then about sixteen per second.
PLACE_BYTES, PLACE_PER_SECOND = 256 * 1024, 4 * 1024
# In total: the growth of a file between two size checks (`host.children`) is a small part of its limit.
ALL_BYTES, ALL_PER_SECOND = 2 * 1024 * 1024, 32 * 1024
LOG_COUNT_SECONDS = 10.0  # after this time, the count is logged with the next line of any place
LogSource = tuple[str, int]


class _Budget:
    def __init__(self, most: float, per_second: float, now: float) -> None:
        self._most = most
        self._per_second = per_second
        self._left = most
        self._at = now

    def has(self, amount: float, now: float) -> bool:
        self._left = min(self._most, self._left + (now - self._at) * self._per_second)
        self._at = now
        return self._left >= amount

    def take(self, amount: float) -> None:
        self._left -= amount


class _LeftOut:
    def __init__(self, event: str, now: float) -> None:
        self.event = event
        self.since = now
        self.lines = 0


class LimitedHandler(logging.StreamHandler[TextIO]):
    """A stream handler with both budgets. A program may have two: of its output, and of its own file."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(stream)
        self._clock = clock
        self._all = _Budget(ALL_BYTES, ALL_PER_SECOND, clock())
        # Bounded by the number of log calls in the code.
        self._places: dict[LogSource, _Budget] = {}
        self._left_out: dict[LogSource, _LeftOut] = {}

    def emit(self, record: logging.LogRecord) -> None:
        _bound(record)
        now, place = self._clock(), (record.name, record.lineno)
        budget = self._places.get(place)
        if budget is None:
            budget = self._places[place] = _Budget(PLACE_BYTES, PLACE_PER_SECOND, now)
        size = HEAD_BYTES + len(str(record.msg).encode(errors="replace")) + len(record.exc_text or "")
        if not (budget.has(size, now) and self._all.has(size, now)):
            self._left_out.setdefault(place, _LeftOut(_event_of(record), now)).lines += 1
            return
        for one in [
            each for each, left in self._left_out.items() if each == place or now - left.since > LOG_COUNT_SECONDS
        ]:
            self._report(self._left_out.pop(one))
        budget.take(size)
        self._all.take(size)
        super().emit(record)

    def close(self) -> None:
        for left in self._left_out.values():
            self._report(left)
        self._left_out.clear()
        super().close()

    def _report(self, left: _LeftOut) -> None:
        message = f"log.left_out event={left.event} lines={left.lines}"
        super().emit(logging.LogRecord(__name__, logging.WARNING, __file__, 0, message, None, None))


def _bound(record: logging.LogRecord) -> None:
    if record.args is None and getattr(record, "is_bounded", False):
        return  # another handler has seen it
    record.is_bounded = True
    message = record.getMessage()
    if len(message) > LINE_CHARACTERS:
        message = f"{message[:LINE_CHARACTERS]}… ({len(message)} characters)"
    # Quoted text must not be able to forge a log line.
    record.msg, record.args = message.replace("\r", "\\r").replace("\n", "\\n"), None
    if record.exc_info and not record.exc_text:
        record.exc_text = logging.Formatter().formatException(record.exc_info)
    if record.exc_text:
        record.exc_text = record.exc_text[-TRACE_CHARACTERS:]


def _event_of(record: logging.LogRecord) -> str:
    return str(record.msg).partition(" ")[0][:100]
