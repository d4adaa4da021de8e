"""The outside as narrow protocols: what the frontend and the worker may ask of the bus, of an engine, of the
frontend's HTTP and of the clock.

A port exists only where the caller must not know which implementation it has. `run.py` chooses.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from typing import Protocol

from msgspec import Struct

from enginehouse.core.node_api import HeartbeatReply, HeartbeatRequest, RegisterReply, RegisterRequest

Headers = Sequence[tuple[bytes, bytes]]


class Message(Struct, frozen=True):
    """One message from the bus. `no_responders` is the server's own answer on a reply subject: nobody listens there."""

    subject: str
    payload: bytes
    reply: str = ""
    no_responders: bool = False


class Bus(Protocol):
    """NATS. Best effort: it wakes and tells, it is never the record."""

    @property
    def is_connected(self) -> bool: ...

    @property
    def is_refused(self) -> bool:
        """Whether the server does not accept our credential: it ended, or was revoked."""

    async def publish(self, subject: str, payload: bytes, reply: str = "") -> None:
        """Hand over a message; raises `Unavailable` (`bus_unavailable`) when there is no connection to hand it to."""

    async def subscribe(self, subject: str, receive: Callable[[Message], None]) -> None:
        """`receive` is called for every message, in order, and must return at once: whatever takes time is its own
        task.
        """

    async def renew(self, jwt: str, seed: str) -> None:
        """Go over to a new credential, without missing a message; one may come twice."""

    async def close(self) -> None: ...


class EngineCall(Struct, frozen=True, kw_only=True):
    """One request to an engine, as it goes on the wire. The key is presented as Bearer."""

    address: str
    key: str
    method: str
    path: str
    content_type: str = "application/json"
    body: bytes = b""


class EngineResponse(Protocol):
    """The head of an answer whose body is still arriving. It must be closed, also when it was read to its end."""

    @property
    def status(self) -> int: ...

    @property
    def headers(self) -> Headers: ...

    def chunks(self) -> AsyncIterator[bytes]:
        """The body as it arrives; raises `Upstream` when it ends before its announced end."""

    async def close(self) -> None:
        """Let go of the connection; one that was not read to its end is cut, which is how an engine learns to stop."""


class Engine(Protocol):
    """Calls to a backend process."""

    async def send(self, call: EngineCall, *, connect_seconds: float, head_seconds: float) -> EngineResponse:
        """Send and wait for the head. `Unavailable` (`replica_unreachable`) means that nothing was sent, so another
        replica may be tried; `Upstream` means that it was."""

    async def is_ready(self, address: str, key: str) -> bool:
        """Whether the process answers its health question with yes, within a second."""

    async def checks_key(self, address: str) -> bool:
        """Whether the process refuses a request without its key, and one with another."""

    async def close(self) -> None: ...


class Link(Protocol):
    """A worker's HTTP to a frontend."""

    async def challenge(self) -> str:
        """What the next registration has to sign; empty where the frontend asks for nothing."""

    async def register(self, request: RegisterRequest) -> RegisterReply: ...

    async def heartbeat(self, node_id: str, node_token: str, request: HeartbeatRequest) -> HeartbeatReply: ...

    async def deregister(self, node_id: str, node_token: str) -> None: ...

    def local_address(self) -> str:
        """The address of this machine as the frontend sees it: the near end of the last connection."""


class Clock(Protocol):
    """Time and chance for everything that is not the store. Waiting only: deadlines that others must agree on are the
    store's.
    """

    def monotonic(self) -> float: ...

    def random(self) -> float:
        """In [0, 1)."""
