"""Which port an engine gets, and how long nobody gets it afterwards.

A port that was let go rests before another process gets it, and its last holder is preferred after that: a frontend
that missed the change and asks an old address then meets nobody, or the same model. An engine that answers whoever asks
would answer for another model, so its port rests far longer. What is taken or rests is on disk before a process is
made. The next worker lets it rest from its own start on: no clock has to be right for that.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from pathlib import Path

import msgspec

from enginehouse.core.errors import Unavailable
from enginehouse.host import disk

REST_SECONDS = 15.0  # LocalAI's quarantine
# Of an engine that does not check its key: longer than any frontend uses a route that it has not looked at again.
UNCHECKED_REST_SECONDS = 300.0
AFFINITY_SECONDS = 300.0  # LocalAI's affinity
PORTS = 1000  # from the first one up; more engines than this do not fit on a machine


class Ports:
    """Chooses ports from `first` up."""

    def __init__(self, first: int, clock: Callable[[], float], file: Path | None = None) -> None:
        self._first = first
        self._clock = clock
        self._file = file
        self._writing = threading.Lock()
        self._taken: dict[int, float] = {}  # port → how long it rests afterwards
        self._resting: dict[int, float] = {}  # port → until when
        self._last: dict[str, tuple[int, float]] = {}  # process key → its last port, and until when it is preferred

    def load(self) -> None:
        """What an earlier run had, or left to rest, rests. Blocks."""
        if self._file is None:
            return
        try:
            known = msgspec.json.decode(self._file.read_bytes(), type=dict[int, float])
        except FileNotFoundError:
            return
        except (msgspec.DecodeError, UnicodeDecodeError):
            # What they were is lost, so all that could be chosen first are left alone for as long as may be needed.
            known = dict.fromkeys(range(self._first, self._first + PORTS // 10), UNCHECKED_REST_SECONDS)
        now = self._clock()
        for port, seconds in known.items():
            self._resting[port] = now + min(UNCHECKED_REST_SECONDS, max(REST_SECONDS, seconds))

    def save(self) -> None:
        """Blocks."""
        if self._file is None:
            return
        with self._writing:  # so that what is written last is what is so now
            now = self._clock()
            resting = {port: until - now for port, until in self._resting.copy().items() if until > now}
            disk.write_atomic(self._file, msgspec.json.encode(resting | self._taken.copy()), mode=0o600)

    def take(self, key: str, is_free: Callable[[int], bool], refused: Collection[int] = ()) -> int:
        now = self._clock()
        self._resting = {port: until for port, until in self._resting.items() if until > now}
        self._last = {name: kept for name, kept in self._last.items() if kept[1] > now}
        claimed = {port for name, (port, _) in self._last.items() if name != key}
        own = [self._last[key][0]] if key in self._last else []
        plain = list(range(self._first, min(self._first + PORTS, 65536)))
        # Claims of others are respected as long as there is anything else.
        for port in [*own, *[one for one in plain if one not in claimed], *plain]:
            if port not in self._taken and port not in self._resting and port not in refused and is_free(port):
                # As long as nobody knows whether its engine checks its key, it may not.
                self._taken[port] = UNCHECKED_REST_SECONDS
                return port
        raise Unavailable(
            f"cannot find a free port from {self._first} up: give the worker another base port",
            code="resource_exhausted",
        )

    def note(self, port: int, *, checks_key: bool) -> None:
        """What was found out about the engine on a port."""
        self._taken[port] = REST_SECONDS if checks_key else UNCHECKED_REST_SECONDS

    def release(self, key: str, port: int, *, used: bool = True) -> None:
        """`used` says whether anybody may have learned the address."""
        rest_seconds = self._taken.pop(port, REST_SECONDS)
        if used:
            now = self._clock()
            self._resting[port] = now + rest_seconds
            self._last[key] = (port, now + max(AFFINITY_SECONDS, rest_seconds))
