"""The last lines of every engine's log, with the time at which they were seen, and without secrets.

Engines write to files, so a worker that is slow or gone never blocks them. `look` reads what was added; the supervisor
calls it several times a second. Rings are bounded, and outlive their process, so that the last words of an engine can
be read. Both streams of an engine go into one file: all lines count as `stdout`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable
from datetime import UTC, datetime
from pathlib import Path

from enginehouse.core.log_line import MAX_LINE, LogLine, redacted

MAX_LINES = 1000  # per process
MAX_RINGS = 64
READ_BYTES = 256 * 1024  # of one log at one look; more is skipped, and the lines say so


class _Ring:
    def __init__(self) -> None:
        self.path = Path()
        self.secrets: tuple[str, ...] = ()
        self.inode = 0
        self.position = 0
        self.rest = b""
        self.count = 0  # lines so far, also those that were dropped
        self.lines: deque[tuple[int, LogLine]] = deque(maxlen=MAX_LINES)


class EngineLogs:
    """Rings by process key (`model#slot`)."""

    def __init__(self, secrets: Collection[str] = (), clock: Callable[[], datetime] | None = None) -> None:
        self._secrets = tuple(one for one in secrets if one)
        self._clock = clock or (lambda: datetime.now(UTC))
        self._rings: dict[str, _Ring] = {}

    def began(self, key: str, path: Path, secrets: Collection[str] = ()) -> None:
        """A process writes to `path` from now on; its own secrets are hidden like those of the worker."""
        ring = self._rings.pop(key, None) or _Ring()
        ring.path, ring.inode, ring.position, ring.rest = path, 0, 0, b""
        ring.secrets = (*self._secrets, *(one for one in secrets if one))
        self._rings[key] = ring
        while len(self._rings) > MAX_RINGS:
            del self._rings[next(iter(self._rings))]

    def look(self) -> None:
        """Read what was added to the logs. Blocks."""
        for ring in list(self._rings.values()):
            try:
                self._look(ring)
            except OSError:
                continue  # not made yet, or removed

    def keys(self) -> list[str]:
        return sorted(self._rings)

    def models(self) -> list[str]:
        """The models that have logs."""
        return sorted({key.rpartition("#")[0] for key in self._rings})

    def lines(self, name: str, after: dict[str, int] | None = None, limit: int = MAX_LINES) -> list[LogLine]:
        """The last lines of a process, or of all replicas of a model by time. With `after`, only lines that were not
        returned before; the positions in it are updated.
        """
        positions = after if after is not None else {}
        found: list[LogLine] = []
        for key in self._named(name):
            new = [one for one in list(self._rings[key].lines) if one[0] > positions.get(key, 0)]
            found += [line for _, line in new]
            if new:
                positions[key] = new[-1][0]
        found.sort(key=lambda line: line.timestamp)
        return found[-limit:] if limit > 0 else []

    def _named(self, name: str) -> Iterable[str]:
        if "#" in name and name in self._rings:
            return [name]
        return [key for key in list(self._rings) if key.rpartition("#")[0] == name]

    def _look(self, ring: _Ring) -> None:
        with ring.path.open("rb") as file:
            status = file.seek(0, 2)
            if status < ring.position:
                ring.position, ring.rest = 0, b""  # truncated, because it was too long
            if status - ring.position > READ_BYTES:
                self._add(ring, f"[{status - ring.position - READ_BYTES} bytes are not shown]")
                ring.position, ring.rest = status - READ_BYTES, b""
            file.seek(ring.position)
            content = file.read(READ_BYTES)
        ring.position += len(content)
        *whole, ring.rest = (ring.rest + content).split(b"\n")
        if len(ring.rest) > MAX_LINE:
            whole, ring.rest = [*whole, ring.rest], b""
        for line in whole:
            self._add(ring, line.decode("utf-8", "replace").rstrip("\r"))

    def _add(self, ring: _Ring, text: str) -> None:
        # With a fixed width, and never before the last one, so that texts sort as times do.
        at = self._clock().isoformat(timespec="microseconds").replace("+00:00", "Z")
        at = max(at, ring.lines[-1][1].timestamp if ring.lines else at)
        ring.count += 1
        ring.lines.append((ring.count, LogLine(at, "stdout", redacted(text, ring.secrets)[:MAX_LINE])))
