"""Fetches the missing parts of blobs: several connections, in the order in which they will be unpacked, resumed.

What breaks off is asked for again from the byte where it broke; an origin that keeps failing gives way to the next
one. Safe because blobs are named by their digest: whatever an origin sent, a wrong byte is found before anything of it
can be seen. No bytes for `stall_seconds` end a read (the client's rule); when no connection heard anything meanwhile,
they end the fetch.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence

from msgspec import Struct

from enginehouse.artifact.blobs.partial import Following, Partial
from enginehouse.core.artifact import Layer
from enginehouse.core.errors import EnginehouseError, Upstream, can_heal
from enginehouse.core.reference import shown_uri
from enginehouse.fetch.http.patience import RetryPolicy
from enginehouse.fetch.origins import Origin
from enginehouse.host.blocking import in_thread

CONNECTIONS = 4  # to one server: more gain nothing on a fast link and are unfair on a slow one
WRITE_BYTES = 1024 * 1024  # what is gathered before a thread writes it
WRITE_SECONDS = 0.25  # on a slow link nothing is held back for longer: what is not written is lost to a kill


class Download(Struct, kw_only=True):
    """One blob that is not here yet, and who waits for it."""

    layer: Layer
    partial: Partial
    followings: list[Following]
    lock: asyncio.Lock  # of the one stream from the beginning, where a server sends no ranges


class _Read(Struct):
    """One request; when the last byte of it came, or when it began."""

    heard_at: float


class Fetch:
    """One fetch of some blobs from one or more origins that have them all. `sources` are those that gave bytes."""

    def __init__(self, targets: Sequence[Download], origins: Sequence[Origin], patience: RetryPolicy) -> None:
        self._targets = targets
        self._origins = origins
        self._patience = patience
        self._waiting = deque((target, part) for target in targets for part in target.partial.missing())
        self._preferred = 0  # the origin that answered last
        self._heard_at = 0.0
        self.sources: dict[str, None] = {}

    async def run(self, heard: Callable[[], None]) -> None:
        """Returns when every byte is on disk; `heard` is called as they come."""
        for target in self._targets:
            _tell(target)
        count = min(CONNECTIONS, len(self._waiting))
        async with asyncio.TaskGroup() as group:
            for _ in range(count):
                group.create_task(self._take_parts(heard))

    async def _take_parts(self, heard: Callable[[], None]) -> None:
        while self._waiting:
            target, part = self._waiting.popleft()
            await self._persist(target, part, heard)

    async def _persist(self, target: Download, part: int, heard: Callable[[], None]) -> None:
        """One part, whatever it takes: the same origin again after a pause, then the next one."""
        told: EnginehouseError | None = None
        first = self._preferred
        for turn in range(len(self._origins)):
            index = (first + turn) % len(self._origins)
            is_last = turn == len(self._origins) - 1
            failures = 0
            while failures < self._patience.tries:
                origin, before = self._origins[index], _progress(self._origins[index], target, part)
                read = _Read(asyncio.get_running_loop().time())
                try:
                    await self._fetch(origin, target, part, read, heard)
                    self._preferred = index
                    return
                except EnginehouseError as error:
                    # Whatever may heal is worth more to whoever decides about the next attempt.
                    told = error if told is None or can_heal(error) or not can_heal(told) else told
                    # What moves is not given up, however often it breaks off, unless another place may be better.
                    has_moved = _progress(origin, target, part) > before
                    failures = 0 if has_moved and is_last else failures + 1
                    if not isinstance(error, Upstream) or self._gives_up(error, read, is_last):
                        break
                    await asyncio.sleep(self._patience.pause_seconds(failures, error))
        assert told is not None
        raise told

    def _gives_up(self, error: Upstream, read: _Read, is_last: bool) -> bool:
        """Silence of one connection may be its own; silence of all of them is the origin's, and was long enough."""
        return error.code == "stalled" and (self._heard_at <= read.heard_at or not is_last)

    async def _fetch(self, origin: Origin, target: Download, part: int, read: _Read, heard: Callable[[], None]) -> None:
        partial = target.partial
        if origin.supports_ranges:
            try:
                start = partial.start_of(part) + partial.written[part]
                await self._copy(origin.read(target.layer, start, partial.end_of(part)), target, start, read, heard)
            except Upstream as error:
                if error.code != "no_ranges":
                    raise
        if not origin.supports_ranges:
            async with target.lock:
                if partial.missing():
                    await self._copy(origin.read(target.layer, 0, None), target, 0, read, heard)
        if partial.is_missing(part):
            raise Upstream(f"cannot get all of {target.layer.digest[:19]} from {shown_uri(origin.uri)}: it ended early")
        self.sources[origin.uri] = None

    async def _copy(
        self, stream: AsyncIterator[bytes], target: Download, position: int, read: _Read, heard: Callable[[], None]
    ) -> None:
        clock = asyncio.get_running_loop().time
        gathered: list[bytes] = []
        size, written_at = 0, clock()
        try:
            async for piece in stream:
                read.heard_at = self._heard_at = clock()
                gathered.append(piece)
                size += len(piece)
                if size >= WRITE_BYTES or read.heard_at - written_at >= WRITE_SECONDS:
                    await self._write(target, position, gathered)
                    position, gathered, size, written_at = position + size, [], 0, clock()
                    heard()
        finally:
            # What came before a break is kept: it need not come again.
            if gathered:
                await self._write(target, position, gathered)
                heard()
            await stream.aclose()  # type: ignore[attr-defined]

    async def _write(self, target: Download, position: int, pieces: list[bytes]) -> None:
        await in_thread(target.partial.write, position, pieces)
        _tell(target)


def _progress(origin: Origin, target: Download, part: int) -> int:
    return target.partial.written[part] if origin.supports_ranges else target.partial.done_bytes


def _tell(target: Download) -> None:
    for following in target.followings:
        following.follow(target.partial)
