"""The log of a program, which nobody outside can make grow faster than its file is kept short.

Most lines are caused by somebody else: a message on the bus, a request, a heartbeat, an engine. So every line has a
budget in bytes: that of the place in the code that wrote it, and one for all. What is beyond is left out and
counted, and the count is told with one of the next lines. One line is one line, of bounded length, whatever it quotes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TextIO

LINE_CHARACTERS = 2000  # of a message: more than any of ours has, less than what others send
TRACE_CHARACTERS = 8000  # of a traceback, from its end, which names the error
HEAD_BYTES = 80  # time, level and name
# One place: as many lines as a thousand nodes cause at once, then some sixteen a second.
PLACE_BYTES, PLACE_PER_SECOND = 256 * 1024, 4 * 1024
# All together: what a file may grow between two looks at it (`host.children`) is a small part of its limit.
ALL_BYTES, ALL_PER_SECOND = 2 * 1024 * 1024, 32 * 1024
TELL_SECONDS = 10.0  # after which a count is told with whatever line comes next
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
    """To be the only handler of a program."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(stream)
        self._clock = clock
        self._all = _Budget(ALL_BYTES, ALL_PER_SECOND, clock())
        # As many as there are places in the code that log.
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
        for one in [each for each, left in self._left_out.items() if each == place or now - left.since > TELL_SECONDS]:
            self._tell(self._left_out.pop(one))
        budget.take(size)
        self._all.take(size)
        super().emit(record)

    def close(self) -> None:
        for left in self._left_out.values():
            self._tell(left)
        self._left_out.clear()
        super().close()

    def _tell(self, left: _LeftOut) -> None:
        message = f"log.left_out event={left.event} lines={left.lines}"
        super().emit(logging.LogRecord(__name__, logging.WARNING, __file__, 0, message, None, None))


def _bound(record: logging.LogRecord) -> None:
    message = record.getMessage()
    if len(message) > LINE_CHARACTERS:
        message = f"{message[:LINE_CHARACTERS]}… ({len(message)} characters)"
    # What came from outside must not look like a line of ours.
    record.msg, record.args = message.replace("\r", "\\r").replace("\n", "\\n"), None
    if record.exc_info and not record.exc_text:
        record.exc_text = logging.Formatter().formatException(record.exc_info)
    if record.exc_text:
        record.exc_text = record.exc_text[-TRACE_CHARACTERS:]


def _event_of(record: logging.LogRecord) -> str:
    return str(record.msg).partition(" ")[0][:100]
