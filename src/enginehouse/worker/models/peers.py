"""Files of models from other nodes: peers that the command names, as origins of a download.

Only addresses of the command are contacted, without redirects, each with its ticket. A peer is asked first whether it
has the file. While it fetches the file itself, this node waits, as long as that moves. A peer that fails, stalls or is
slower than any usable network is left at once for the next origin. Nothing here checks digests: the download does.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from types import TracebackType

from msgspec import Struct

from enginehouse.core.address import parse_endpoint
from enginehouse.core.artifact import Artifact, Layer
from enginehouse.core.errors import EnginehouseError, Hopeless, Invalid, Unavailable, Upstream
from enginehouse.core.peer import FilePeer
from enginehouse.fetch.files import Described
from enginehouse.fetch.http.addresses import Rules
from enginehouse.fetch.http.bodies import body, range_header
from enginehouse.fetch.http.client import Client, OutboundRequest
from enginehouse.fetch.http.connections import OutboundResponse
from enginehouse.fetch.oci.local import LocalBlob

log = logging.getLogger(__name__)

PATH = "/v1/model-files/"  # of a worker's HTTP server
MOVED = "x-moved"  # of a file that is coming: a number that grows while it does


class PeerPatience(Struct, frozen=True, kw_only=True):
    """How long peers are waited for. The source is always there, so a peer that is no good is left soon."""

    connect_seconds: float = 3.0
    stall_seconds: float = 5.0  # without a byte
    ask_seconds: float = 5.0  # for the answer whether it has the file
    look_seconds: float = 0.5  # between two such questions
    quiet_seconds: float = 15.0  # a file that is coming and does not move
    busy_seconds: float = 300.0  # a peer that has the file and serves others first
    wait_seconds: float = 2 * 3600.0  # in all
    pace_seconds: float = 10.0  # over which the pace is measured
    pace_bytes: int = 256 * 1024  # per second, over all connections to one peer


PATIENCE = PeerPatience()


class _PeerState(Struct, frozen=True):
    has_file: bool = False
    is_busy: bool = False
    moved: int | None = None  # of a file that is coming


class PeerFile:
    """One file at one peer."""

    def __init__(self, peer: FilePeer, client: Client, patience: PeerPatience) -> None:
        self.uri = f"http://{peer.address}{PATH}{peer.sha256}"
        self.supports_ranges = True
        self.peer = peer
        self._client = client
        self._patience = patience
        self.given_bytes = 0
        self._reading = 0
        self._measured_at = 0.0
        self._measured_bytes = 0

    async def resolve(self, platform: str) -> Artifact:
        raise Hopeless(f"cannot install from {self.uri}: it is a single file", code="unsupported")

    def local(self, layer: Layer) -> LocalBlob | None:
        return None

    async def describe(self) -> Described:
        raise Hopeless(f"cannot ask {self.peer.address} for a size: the request names it", code="unsupported")

    async def read(self, layer: Layer, start: int, end: int | None) -> AsyncIterator[bytes]:
        end = layer.size_bytes if end is None else min(end, layer.size_bytes)
        if start >= end:
            return
        request = self._request("GET", range_header(start, end, layer.size_bytes))
        self._begin()
        try:
            async with self._client.open(request) as response:
                if response.status == 503:
                    raise _busy(self.peer)
                async for piece in body(response, layer, start, end, self.uri):
                    self.given_bytes += len(piece)
                    self._measure(len(piece))
                    yield piece
        except Upstream as error:
            if error.code == _BUSY:
                raise
            # Not `Upstream`: the download would ask the same peer again, and there are others.
            raise Unavailable(error.message, code="peer_failed") from error
        finally:
            self._reading -= 1

    async def state(self) -> _PeerState:
        try:
            async with (
                asyncio.timeout(self._patience.ask_seconds),
                self._client.open(self._request("HEAD", {})) as response,
            ):
                return _state(response)
        except (EnginehouseError, TimeoutError) as error:
            log.info("peer.not_reached address=%s error=%s", self.peer.address, error)
            return _PeerState()

    def _request(self, method: str, headers: dict[str, str]) -> OutboundRequest:
        presented = {"authorization": f"Bearer {self.peer.ticket}", **headers}
        return OutboundRequest(url=self.uri, method=method, headers=presented)

    def _begin(self) -> None:
        if not self._reading:
            self._measured_at, self._measured_bytes = asyncio.get_running_loop().time(), 0
        self._reading += 1

    def _measure(self, count: int) -> None:
        self._measured_bytes += count
        now = asyncio.get_running_loop().time()
        taken = now - self._measured_at
        if taken < self._patience.pace_seconds:
            return
        if self._measured_bytes < taken * self._patience.pace_bytes:
            raise Upstream(f"cannot read from {self.peer.address}: it is too slow", code="stalled")
        self._measured_at, self._measured_bytes = now, 0


class PeerFiles:
    """The peers of one file, for one download. Use with `async with`."""

    def __init__(self, peers: Sequence[FilePeer], patience: PeerPatience) -> None:
        usable = [peer for peer in peers if _is_address(peer.address)]
        self._patience = patience
        # Its rules allow these addresses and no other; the operator's rules are for addresses that people write.
        self._client = Client(
            Rules(tuple(dict.fromkeys(peer.address for peer in usable))),
            stall_seconds=patience.stall_seconds,
            connect_seconds=patience.connect_seconds,
            max_redirects=0,
        )
        self._files = [PeerFile(peer, self._client, patience) for peer in usable]

    async def __aenter__(self) -> PeerFiles:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._client.close()

    async def having(self) -> list[PeerFile]:
        """The peers that have the file; waits for one that is fetching it. Empty if none has it or will have it."""
        clock = asyncio.get_running_loop().time
        began = moved_at = clock()
        last: list[_PeerState] = []
        while self._files:
            states = await self._states()
            found = [file for file, state in zip(self._files, states, strict=True) if state.has_file]
            if found:
                return found
            now = clock()
            is_coming = any(state.moved is not None for state in states)
            is_busy = any(state.is_busy for state in states) and now - began < self._patience.busy_seconds
            moved_at = now if is_coming and states != last else moved_at
            is_coming = is_coming and now - moved_at < self._patience.quiet_seconds
            if not (is_coming or is_busy) or now - began > self._patience.wait_seconds:
                break
            last = states
            await asyncio.sleep(self._patience.look_seconds)
        return []

    async def _states(self) -> list[_PeerState]:
        async with asyncio.TaskGroup() as group:
            asked = [group.create_task(file.state()) for file in self._files]
        return [task.result() for task in asked]


_BUSY = "peer_busy"


def _busy(peer: FilePeer) -> Upstream:
    error = Upstream(f"cannot read from {peer.address}: it serves others first", code=_BUSY)
    error.retry_after_seconds = 1.0
    return error


def _state(response: OutboundResponse) -> _PeerState:
    match response.status:
        case 200:
            return _PeerState(has_file=True)
        case 202:
            moved = response.headers.get(MOVED, "")
            return _PeerState(moved=int(moved) if moved.isdecimal() and len(moved) < 19 else 0)
        case 503:
            return _PeerState(is_busy=True)
    return _PeerState()


def _is_address(address: str) -> bool:
    try:
        parse_endpoint(address)
        Client(Rules((address,)))
    except Invalid as error:
        log.warning("peer.refused error=%s", error)
        return False
    return True
