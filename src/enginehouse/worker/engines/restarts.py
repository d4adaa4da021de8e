"""How often and when an engine that ended by itself is started again.

An engine that was ready and ended is started again after a pause that doubles, a bounded number of times within a
window. After that it is given up: until the window has passed, a start is refused with how it ended, whoever asks for
it, because its next end is likely. Another revision, another version of the engine or a stop clears the record. Nothing
here starts a process; the clock is an argument.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from msgspec import Struct

from enginehouse.core.errors import Hopeless
from enginehouse.core.replica import FailedReplica
from enginehouse.worker.engines.process_table import StartRequest

Identity = tuple[str, str, int | None]  # revision of the model, directory and inode of the engine


class RestartRules(Struct, frozen=True, kw_only=True):
    limit: int = 5
    window_seconds: float = 600.0
    # A request that misses the engine starts it by itself within this time; it then has the key of its own.
    first_seconds: float = 1.0
    longest_seconds: float = 60.0


class PendingRestart:
    """A start that is due after a pause, unless it is dropped."""

    def __init__(self, request: StartRequest, pause_seconds: float) -> None:
        self.request = request
        self.pause_seconds = pause_seconds
        self._dropped = asyncio.Event()

    @property
    def is_dropped(self) -> bool:
        return self._dropped.is_set()

    def drop(self) -> None:
        self._dropped.set()

    async def is_due(self) -> bool:
        """Wait for the pause; False if it was dropped meanwhile."""
        try:
            async with asyncio.timeout(self.pause_seconds):
                await self._dropped.wait()
        except TimeoutError:
            return True
        return False


class _Record(Struct, kw_only=True):
    identity: Identity
    ends: list[float]
    request: StartRequest
    how: str  # it ended the last time


class Restarts:
    def __init__(self, rules: RestartRules, clock: Callable[[], float]) -> None:
        self._rules = rules
        self._clock = clock
        self._records: dict[str, _Record] = {}
        self._pending: dict[str, PendingRestart] = {}
        self._ending: dict[str, StartRequest] = {}  # processes that have ended and are being cleaned up after

    def note_exit(self, request: StartRequest) -> None:
        """Record at once that a process has ended by itself: a stop or a start that comes before `note_end` wins."""
        self._ending[request.process_key] = request

    def takes_end(self, request: StartRequest) -> bool:
        """Whether nothing was asked for the process since it ended."""
        return self._ending.pop(request.process_key, None) is request

    def note_end(self, request: StartRequest, identity: Identity, how: str) -> PendingRestart | None:
        """Record an end that nobody asked for; returns the restart to wait for, None if it is given up."""
        key, now = request.process_key, self._clock()
        record = self._records.get(key)
        if record is None or record.identity != identity:
            record = self._records[key] = _Record(identity=identity, ends=[], request=request, how=how)
        record.ends = [*self._recent(record), now]
        record.how, record.request = how, request
        self.drop(key)
        if len(record.ends) > self._rules.limit:
            return None
        pause = min(self._rules.longest_seconds, self._rules.first_seconds * 2.0 ** (len(record.ends) - 1))
        made = self._pending[key] = PendingRestart(request, pause)
        return made

    def check(self, request: StartRequest, identity: Identity) -> None:
        """Raise if the engine was given up a short time ago."""
        record = self._records.get(request.process_key)
        if record is None or record.identity != identity:
            return
        recent = self._recent(record)
        if len(recent) <= self._rules.limit:
            return
        left = recent[-self._rules.limit - 1] + self._rules.window_seconds - self._clock()
        raise Hopeless(f"{_text(record, recent)}. It can be started again in {left:.0f} s", code="backend_exited")

    def drop(self, process_key: str) -> None:
        """Forget the restart that is due; the record of ends stays."""
        self._ending.pop(process_key, None)
        pending = self._pending.pop(process_key, None)
        if pending is not None:
            pending.drop()

    def drop_where(self, matches: Callable[[StartRequest], bool]) -> None:
        """Drop restarts and records of what is being stopped."""
        for key in [key for key, pending in self._pending.items() if matches(pending.request)]:
            self.drop(key)
        self._records = {key: one for key, one in self._records.items() if not matches(one.request)}
        self._ending = {key: request for key, request in self._ending.items() if not matches(request)}

    def failed(self) -> tuple[FailedReplica, ...]:
        """The replicas that were given up."""
        found = []
        for record in self._records.values():
            recent = self._recent(record)
            if len(recent) > self._rules.limit:
                request = record.request
                found.append(FailedReplica(request.model.name, request.slot, _text(record, recent)))
        return tuple(found)

    def pending(self) -> tuple[str, ...]:
        """The replicas, by process key, that are about to be started again."""
        return tuple(self._pending)

    def _recent(self, record: _Record) -> list[float]:
        since = self._clock() - self._rules.window_seconds
        return [end for end in record.ends if end > since]


def _text(record: _Record, recent: list[float]) -> str:
    return (
        f"cannot keep {record.request.model.name} running: its engine ended {len(recent)} times in "
        f"{recent[-1] - recent[0]:.0f} s, the last time {record.how}"
    )
