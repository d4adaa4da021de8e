"""Fetches the missing parts of blobs: several connections, in the order in which they will be unpacked, resumed.

What breaks off is asked for again from the byte where it broke; an origin that keeps failing gives way to the next
one. Safe because blobs are named by their digest: whatever an origin sent, a wrong byte is found before anything of it
can be seen. No bytes for `stall_seconds` end a read (the client's rule), not the fetch.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

from msgspec import Struct

from enginehouse.core.artifact import Layer
from enginehouse.core.errors import EnginehouseError, NotFound, Upstream, can_heal
from enginehouse.fetch.origins import Origin
from enginehouse.fetch.patience import Patience
from enginehouse.worker.partial import PART_BYTES, Following, Partial
from enginehouse.worker.threads import in_thread

CONNECTIONS = 4  # to one server: more gain nothing on a fast link and are unfair on a slow one
WRITE_BYTES = 1024 * 1024  # what is gathered before a thread writes it


class Target(Struct, kw_only=True):
    """One blob that is not here yet, and who waits for it."""

    layer: Layer
    partial: Partial
    following: Following
    is_whole: bool = False  # its server sends no ranges: one stream from the beginning
    lock: asyncio.Lock


class Fetch:
    """One fetch of some blobs from one or more origins that have them all."""

    def __init__(self, targets: Sequence[Target], origins: Sequence[Origin], patience: Patience) -> None:
        self._targets = targets
        self._origins = origins
        self._patience = patience
        self._waiting = deque((target, part) for target in targets for part in target.partial.missing())
        self._preferred = 0  # the origin that answered last

    async def run(self, heard: Callable[[], None]) -> None:
        """Returns when every byte is on disk; `heard` is called as they come."""
        for target in self._targets:
            target.following.follow(target.partial, 0)
        count = min(CONNECTIONS, len(self._waiting))
        async with asyncio.TaskGroup() as group:
            for _ in range(count):
                group.create_task(self._take_parts(heard))

    async def _take_parts(self, heard: Callable[[], None]) -> None:
        while self._waiting:
            target, part = self._waiting.popleft()
            await self._persist(target, part, heard)

    async def _persist(self, target: Target, part: int, heard: Callable[[], None]) -> None:
        """One part, whatever it takes: the same origin again after a pause, then the next one."""
        failures = 0
        first = self._preferred
        for turn in range(len(self._origins)):
            index = (first + turn) % len(self._origins)
            for attempt in range(self._patience.tries):
                before = target.partial.done_bytes
                try:
                    await self._fetch(self._origins[index], target, part, heard)
                    self._preferred = index
                    return
                except (Upstream, NotFound) as error:
                    last: EnginehouseError = error
                    failures = 0 if target.partial.done_bytes > before else failures + 1
                    if not can_heal(error) or failures >= self._patience.tries:
                        break
                    if isinstance(error, Upstream) and error.code != "no_ranges":
                        await asyncio.sleep(self._patience.pause_seconds(min(failures, attempt), error))
        raise last

    async def _fetch(self, origin: Origin, target: Target, part: int, heard: Callable[[], None]) -> None:
        partial = target.partial
        if not target.is_whole:
            start = partial.start_of(part) + partial.written[part]
            if start >= partial.end_of(part):
                return
            try:
                await self._copy(origin, target, start, partial.end_of(part), heard)
                return
            except Upstream as error:
                if error.code != "no_ranges":
                    raise
                target.is_whole = True
        async with target.lock:
            if partial.missing():
                await self._copy(origin, target, 0, partial.size_bytes, heard)

    async def _copy(self, origin: Origin, target: Target, start: int, end: int, heard: Callable[[], None]) -> None:
        position, gathered, size = start, [], 0
        stream = origin.read(target.layer, start, end)
        try:
            async for piece in stream:
                gathered.append(piece)
                size += len(piece)
                if size >= WRITE_BYTES:
                    await self._write(target, position, gathered)
                    position, gathered, size = position + size, [], 0
                    heard()
        finally:
            # What came before a break is kept: it need not come again.
            if gathered:
                await self._write(target, position, gathered)
                heard()
            await stream.aclose()  # type: ignore[attr-defined]

    async def _write(self, target: Target, position: int, pieces: list[bytes]) -> None:
        """Into the parts they belong to, leaving out what is there already."""
        content = pieces if position // PART_BYTES == (position + sum(map(len, pieces)) - 1) // PART_BYTES else None
        partial = target.partial
        if content is not None and position == partial.start_of(part := position // PART_BYTES) + partial.written[part]:
            await in_thread(partial.write, part, pieces)
            target.following.follow(partial, part)
            return
        joined = b"".join(pieces)
        while joined:
            part = position // PART_BYTES
            here, joined = joined[: partial.end_of(part) - position], joined[partial.end_of(part) - position :]
            new = here[max(0, partial.start_of(part) + partial.written[part] - position) :]
            if new:
                await in_thread(partial.write, part, [new])
                target.following.follow(partial, part)
            position += len(here)
