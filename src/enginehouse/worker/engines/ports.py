"""Assigns ports to engines, and quarantines released ports.

A released port rests before another process may get it, and its last holder is preferred for longer. So a frontend with
an outdated address reaches no engine or the same model. An engine that does not check its key would answer requests for
another model, so its port rests far longer. Taken and resting ports are saved before a process is made. After a restart
they rest from the start of the worker on, so no clock has to be right.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from pathlib import Path

import msgspec
from msgspec import Struct

from enginehouse.core.errors import Unavailable
from enginehouse.host import disk

PORTS = 1000  # counted from the first port; more engines do not fit on a machine


class PortPace(Struct, frozen=True, kw_only=True):
    """How long ports rest and are kept for their last holder."""

    rest_seconds: float = 15.0  # LocalAI's quarantine
    # For an engine that does not check its key: longer than any frontend uses a route without checking it again.
    unchecked_rest_seconds: float = 300.0
    affinity_seconds: float = 300.0  # LocalAI's affinity


USUAL = PortPace()


class Ports:
    """Assigns ports from `first` up."""

    def __init__(
        self,
        first: int,
        clock: Callable[[], float],
        file: Path | None = None,
        *,
        count: int = PORTS,
        pace: PortPace = USUAL,
    ) -> None:
        self._pace = pace
        self._first = first
        self._count = count
        self._clock = clock
        self._file = file
        self._writing = threading.Lock()
        self._taken: dict[int, float] = {}  # port → seconds to rest after its release
        self._resting: dict[int, float] = {}  # port → end of its rest
        self._last: dict[str, tuple[int, float]] = {}  # process key → its last port, and the end of the preference

    def load(self) -> None:
        """Let the taken and resting ports of an earlier run rest. Blocks."""
        if self._file is None:
            return
        try:
            known = msgspec.json.decode(self._file.read_bytes(), type=dict[int, float])
        except FileNotFoundError:
            return
        except (msgspec.DecodeError, UnicodeDecodeError):
            # The file is damaged, so the ports that are tried first rest for the longest time that may be needed.
            known = dict.fromkeys(range(self._first, self._first + PORTS // 10), self._pace.unchecked_rest_seconds)
        now = self._clock()
        for port, seconds in known.items():
            self._resting[port] = now + min(self._pace.unchecked_rest_seconds, max(self._pace.rest_seconds, seconds))

    def save(self) -> None:
        """Save the taken and resting ports. Blocks."""
        if self._file is None:
            return
        with self._writing:  # the last write must contain the newest state
            now = self._clock()
            resting = {port: until - now for port, until in self._resting.copy().items() if until > now}
            disk.write_atomic(self._file, msgspec.json.encode(resting | self._taken.copy()), mode=0o600)

    def take(self, key: str, is_free: Callable[[int], bool], refused: Collection[int] = ()) -> int:
        now = self._clock()
        self._resting = {port: until for port, until in self._resting.items() if until > now}
        self._last = {name: kept for name, kept in self._last.items() if kept[1] > now}
        claimed = {port for name, (port, _) in self._last.items() if name != key}
        own = [self._last[key][0]] if key in self._last else []
        plain = list(range(self._first, min(self._first + self._count, 65536)))
        # A port that another key prefers is used only if there is no other.
        for port in [*own, *[one for one in plain if one not in claimed], *plain]:
            if port not in self._taken and port not in self._resting and port not in refused and is_free(port):
                # Until `note` is called, the engine counts as one that does not check its key.
                self._taken[port] = self._pace.unchecked_rest_seconds
                return port
        taken, resting = (len([port for port in plain if port in some]) for some in (self._taken, self._resting))
        raise Unavailable(
            f"cannot find a free port from {self._first} up: of {len(plain)}, engines use {taken}, {resting} rest "
            "after their use, and other programs have the others; wait, or start the worker with another --base-port",
            code="resource_exhausted",
        )

    def note(self, port: int, *, checks_key: bool) -> None:
        """Record whether the engine on a port checks its key."""
        self._taken[port] = self._pace.rest_seconds if checks_key else self._pace.unchecked_rest_seconds

    def release(self, key: str, port: int, *, used: bool = True) -> None:
        """Release a port. It rests if it was `used`, that is, if its address may be known to a frontend."""
        rest_seconds = self._taken.pop(port, self._pace.rest_seconds)
        if used:
            now = self._clock()
            self._resting[port] = now + rest_seconds
            self._last[key] = (port, now + max(self._pace.affinity_seconds, rest_seconds))
