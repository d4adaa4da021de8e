"""Parallel download of the missing parts of blobs, in the order of unpacking.

A read that is cut off resumes at the byte it has reached; an origin that keeps failing is replaced by the next one.
Mixing origins is safe because blobs are named by their digest, which is checked before any content becomes visible.
A read ends after `stall_seconds` without a byte (the client's timeout). If no other connection has received a byte
meanwhile, the origin is given up.
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
from enginehouse.fetch.http.retries import RetryPolicy
from enginehouse.fetch.origins import Origin
from enginehouse.host.blocking import in_thread

CONNECTIONS = 4  # per server; more gain nothing on a fast link and are unfair on a slow one
WRITE_BYTES = 1024 * 1024  # buffered before one write in a thread
WRITE_SECONDS = 0.25  # the longest buffering on a slow link; unwritten bytes are lost when the process is killed


class Download(Struct, kw_only=True):
    """One missing blob, and the readers that wait for it."""

    layer: Layer
    partial: Partial
    followings: list[Following]
    lock: asyncio.Lock  # one stream from byte 0 at a time, for servers without ranges


class _Read(Struct):
    """One request. `heard_at` is the time of its last byte, at first of its start."""

    heard_at: float


class Fetch:
    """Downloads blobs from origins that each have all of them. `sources` lists the origins that delivered bytes."""

    def __init__(self, targets: Sequence[Download], origins: Sequence[Origin], patience: RetryPolicy) -> None:
        self._targets = targets
        self._origins = origins
        self._patience = patience
        self._waiting = deque((target, part) for target in targets for part in target.partial.missing())
        self._preferred = 0  # the origin that answered last
        self._heard_at = 0.0
        self.sources: dict[str, None] = {}

    async def run(self, heard: Callable[[], None]) -> None:
        """Return once every byte is on disk. `heard` is called after each write."""
        for target in self._targets:
            _notify(target)
        count = min(CONNECTIONS, len(self._waiting))
        async with asyncio.TaskGroup() as group:
            for _ in range(count):
                group.create_task(self._take_parts(heard))

    async def _take_parts(self, heard: Callable[[], None]) -> None:
        while self._waiting:
            target, part = self._waiting.popleft()
            await self._persist(target, part, heard)

    async def _persist(self, target: Download, part: int, heard: Callable[[], None]) -> None:
        """Download one part: retry the same origin with pauses, then try the next one."""
        kept: EnginehouseError | None = None
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
                    # A temporary error is kept in preference, because the caller retries on it.
                    kept = error if kept is None or can_heal(error) or not can_heal(kept) else kept
                    # The last origin is not given up while bytes arrive, however often it is cut off.
                    has_moved = _progress(origin, target, part) > before
                    failures = 0 if has_moved and is_last else failures + 1
                    if not isinstance(error, Upstream) or self._gives_up(error, read, is_last):
                        break
                    await asyncio.sleep(self._patience.pause_seconds(failures, error))
        assert kept is not None
        raise kept

    def _gives_up(self, error: Upstream, read: _Read, is_last: bool) -> bool:
        """Whether to leave the origin after a stall: if there is another one, or if all connections have stalled."""
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
            raise Upstream(
                f"cannot get all of {target.layer.digest[:19]} from {shown_uri(origin.uri)}: the response was too short"
            )
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
            # Bytes received before an error are kept and not requested again.
            if gathered:
                await self._write(target, position, gathered)
                heard()
            await stream.aclose()  # type: ignore[attr-defined]

    async def _write(self, target: Download, position: int, pieces: list[bytes]) -> None:
        await in_thread(target.partial.write, position, pieces)
        _notify(target)


def _progress(origin: Origin, target: Download, part: int) -> int:
    return target.partial.written[part] if origin.supports_ranges else target.partial.done_bytes


def _notify(target: Download) -> None:
    for following in target.followings:
        following.follow(target.partial)
