"""gRPC calls to engines: long-lived connections per address, opened when needed and replaced when they end.

A call is sent once. `replica_unreachable` means that no engine has begun it, so another replica may be tried; any other
error of the transport comes after that point and is never followed by a second attempt here. One connection carries all
calls to an address; another one is opened only when the peer allows no more streams or is going away.
"""

from __future__ import annotations

import asyncio

import msgspec

from enginehouse.core.errors import Invalid, Unavailable, Upstream
from enginehouse.engine.dialing import dial, unreachable
from enginehouse.engine.localai import hpack, status
from enginehouse.engine.localai.http2 import Http2Connection
from enginehouse.engine.localai.stream import GrpcStream, framed

SERVICE_PATH = "/backend.Backend/"
MAX_CONNECTIONS = 32  # per address: for a peer that allows few streams on each
_REMEMBERED_HEADS = 1024
_SECRET = frozenset({b"authorization"})


class GrpcCall(msgspec.Struct, frozen=True, kw_only=True):
    """`method` is a name of the protocol, such as `PredictStream`; `deadline_seconds` is told to the engine too."""

    address: str
    method: str
    key: str = ""
    message: bytes = b""
    connect_seconds: float
    deadline_seconds: float
    ends: bool = True  # False for a call that sends more messages


class _Lines:
    """The connections to one address. There is an entry as long as it has one, or somebody opens one."""

    def __init__(self) -> None:
        self.connections: list[Http2Connection] = []
        self.opening = asyncio.Lock()
        self.callers = 0  # that hold or wait for the lock


class GrpcClient:
    """Belongs to one event loop; owns the connections."""

    def __init__(self) -> None:
        self._lines: dict[str, _Lines] = {}
        self._heads: dict[tuple[str, str, str], bytes] = {}
        self._is_closed = False

    async def start(self, call: GrpcCall) -> GrpcStream:
        """Send the request, as far as the engine takes it; what the engine says is read from the stream."""
        payload = framed(call.message)
        block = self._head(call) + hpack.encode([(b"grpc-timeout", status.timeout_value(call.deadline_seconds))])
        connection = self._with_room(call.address) or await self._open(call.address, call.connect_seconds)
        return await connection.start(block, payload, deadline_seconds=call.deadline_seconds, ends=call.ends)

    async def unary(self, call: GrpcCall) -> bytes:
        """The one message that answers the call."""
        stream = await self.start(call)
        try:
            messages: list[bytes] = []
            while batch := await stream.next_messages():
                messages += batch
                if len(messages) > 1:
                    break
        finally:
            stream.cancel()
        if len(messages) != 1:
            count = "no message" if not messages else "several messages"
            raise Upstream(f"cannot read the answer of the engine at {call.address}: {count} instead of one")
        return messages[0]

    def forget(self, address: str) -> None:
        """Close the connections to an address when their last call has ended."""
        for connection in self.connections_to(address):
            connection.retire()

    async def close(self) -> None:
        """End all calls and connections."""
        self._is_closed = True
        closing = [connection for lines in self._lines.values() for connection in lines.connections]
        for connection in closing:
            connection.close()
        for connection in closing:
            await connection.wait_until_closed()

    def connections_to(self, address: str) -> list[Http2Connection]:
        """Those that take new calls, or will when they are open."""
        lines = self._lines.get(address)
        return list(lines.connections) if lines is not None else []

    def _with_room(self, address: str) -> Http2Connection | None:
        lines = self._lines.get(address)
        if lines is not None:
            for connection in lines.connections:
                if connection.has_room:
                    return connection
        return None

    async def _open(self, address: str, connect_seconds: float) -> Http2Connection:
        """A connection with room; of several callers at once one opens it and the others wait for that."""
        lines = self._lines.setdefault(address, _Lines())
        lines.callers += 1
        try:
            async with asyncio.timeout(connect_seconds):
                async with lines.opening:
                    return self._with_room(address) or await self._connect(address, lines, connect_seconds)
        except TimeoutError as error:
            raise unreachable(address, f"no connection within {connect_seconds:g} s") from error
        finally:
            lines.callers -= 1
            self._tidy(address)

    async def _connect(self, address: str, lines: _Lines, connect_seconds: float) -> Http2Connection:
        if self._is_closed:
            raise Unavailable(f"cannot call the engine at {address}: this program is stopping")
        if len(lines.connections) >= MAX_CONNECTIONS:
            raise Unavailable(
                f"cannot call the engine at {address}: it allows no more calls on {MAX_CONNECTIONS} connections",
                code="resource_exhausted",
            )
        connection = await dial(address, connect_seconds, lambda: Http2Connection(address, self._drop))
        lines.connections.append(connection)
        try:
            await connection.wait_for_greeting()
        except asyncio.CancelledError:
            connection.close()
            raise
        if not connection.has_room:
            connection.close()
            raise unreachable(address, "it allows no calls")
        return connection

    def _drop(self, connection: Http2Connection) -> None:
        lines = self._lines.get(connection.address)
        if lines is not None and connection in lines.connections:
            lines.connections.remove(connection)
            self._tidy(connection.address)

    def _tidy(self, address: str) -> None:
        lines = self._lines.get(address)
        if lines is not None and not lines.connections and not lines.callers:
            del self._lines[address]

    def _head(self, call: GrpcCall) -> bytes:
        """The header block of a call up to its deadline, remembered, because few differ."""
        known = self._heads.get((call.address, call.method, call.key))
        if known is not None:
            return known
        headers = [
            (":method", "POST"),
            (":scheme", "http"),
            (":path", SERVICE_PATH + call.method),
            (":authority", call.address),
            ("te", "trailers"),
            ("content-type", "application/grpc"),
            ("user-agent", "enginehouse"),
        ]
        if call.key:
            headers.append(("authorization", f"Bearer {call.key}"))
        for name, value in headers:
            if not value.isascii() or not value.isprintable():
                raise Invalid(
                    f"cannot call the engine at {call.address}: {name} contains a character that is not allowed"
                )
        block = hpack.encode([(name.encode(), value.encode()) for name, value in headers], _SECRET)
        if len(self._heads) >= _REMEMBERED_HEADS:
            self._heads.clear()
        self._heads[call.address, call.method, call.key] = block
        return block
