"""Protocols for everything outside: the bus, an engine, the frontend's HTTP API, and the clock.

A port exists only if its caller must not know the implementation. `build_frontend` and `build_worker` choose it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Protocol

from msgspec import Struct

from enginehouse.core.ids import NodeId
from enginehouse.core.model import ServedModel
from enginehouse.core.node_api import HeartbeatReply, HeartbeatRequest, RegisterReply, RegisterRequest
from enginehouse.core.replica import OPENAI_HTTP, EngineProtocol

Headers = Sequence[tuple[bytes, bytes]]


class Message(Struct, frozen=True):
    """One message from the bus. `no_responders` is the server's own reply: the subject has no subscriber."""

    subject: str
    payload: bytes
    reply: str = ""
    no_responders: bool = False


class Bus(Protocol):
    """NATS. Best effort: it notifies, and is never the record."""

    @property
    def is_connected(self) -> bool: ...

    @property
    def is_refused(self) -> bool:
        """Whether the server refuses our credential because it expired or was revoked."""

    async def answers(self, limit_seconds: float) -> bool:
        """Whether the server answers now. A connection to one that hangs is noticed only after a while."""

    async def publish(self, subject: str, payload: bytes, reply: str = "") -> None:
        """Send a message; raises `Unavailable` (`bus_unavailable`) if there is no connection."""

    async def subscribe(self, subject: str, receive: Callable[[Message], None]) -> None:
        """Call `receive` for every message, in order. It must return at once; longer work belongs into a task."""

    async def renew(self, jwt: str, seed: str) -> None:
        """Switch to a new credential without missing a message; one may arrive twice."""

    async def close(self) -> None: ...


class EngineTarget(Struct, frozen=True, kw_only=True):
    """The process of an engine: its address, its key, which is sent as a Bearer token, and what it speaks."""

    address: str
    key: str = ""
    protocol: EngineProtocol = OPENAI_HTTP


class EngineCall(Struct, frozen=True, kw_only=True):
    """One request to an engine, in terms of OpenAI's HTTP API, whatever the engine speaks."""

    address: str
    key: str
    method: str
    path: str
    content_type: str = "application/json"
    body: bytes = b""
    protocol: EngineProtocol = OPENAI_HTTP
    served: ServedModel | None = None  # for engines whose requests are translated


class EngineResponse(Protocol):
    """The head of a response whose body is still arriving. It must be closed, even after it was read to the end."""

    @property
    def status(self) -> int: ...

    @property
    def headers(self) -> Headers: ...

    def chunks(self) -> AsyncIterator[bytes]:
        """The body as it arrives; raises `Upstream` if it ends before its announced end."""

    async def close(self) -> None:
        """Release the connection; one that was not read to the end is aborted, which tells the engine to stop."""


class Engine(Protocol):
    """Calls to a backend process."""

    async def send(self, call: EngineCall, *, connect_seconds: float, head_seconds: float) -> EngineResponse:
        """Send and wait for the head. `Unavailable` (`replica_unreachable`) means that nothing was sent, so another
        replica may be tried; `Upstream` means that it was sent.
        """

    async def is_ready(self, target: EngineTarget) -> bool:
        """Whether the health check of the process succeeds within a second."""

    async def checks_key(self, target: EngineTarget) -> bool:
        """Whether the process refuses requests without its key or with another key."""

    async def load(self, target: EngineTarget, options: Mapping[str, object], *, limit_seconds: float) -> None:
        """Load a model into a process that takes it after its start. `options` are the fields of the load request.

        Raises `Hopeless` (`load_failed`) if the engine refuses the model, `Upstream` if the engine gave no answer.
        Does nothing for engines that take their model at start.
        """

    async def free(self, target: EngineTarget, *, limit_seconds: float) -> bool:
        """Ask the process to release its model before it is stopped; False if it did not, which is no error."""

    def forget(self, address: str) -> None:
        """Close the connections to a process that gets no more requests, those in use after their last answer."""

    async def close(self) -> None: ...


class Link(Protocol):
    """A worker's HTTP connection to a frontend."""

    async def challenge(self, *, by_key: bool = False) -> str:
        """The challenge that the next registration must sign; "" if the frontend requires none. `by_key`: without the
        join token.
        """

    async def register(self, request: RegisterRequest, *, by_key: bool = False) -> RegisterReply: ...

    async def heartbeat(self, node_id: NodeId, node_token: str, request: HeartbeatRequest) -> HeartbeatReply: ...

    async def deregister(self, node_id: NodeId, node_token: str) -> None: ...

    def local_address(self) -> str:
        """The address of this machine as the frontend sees it: the local end of the last connection."""


class Clock(Protocol):
    """Time and randomness outside the store, for waiting only: shared deadlines use the store's clock."""

    def monotonic(self) -> float: ...

    def random(self) -> float:
        """In [0, 1)."""
