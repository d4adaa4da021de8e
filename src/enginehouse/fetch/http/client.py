"""The HTTP client for all servers outside the cluster, under the rules of `http.addresses`.

Every URL is checked before its request, including redirects, which are followed here and not by the library. The
resolver returns checked addresses only. Credentials are dropped when a redirect changes scheme, host or port.
Errors of the library are translated into ours. The owner of a client chooses how long a response may stall.
"""

from __future__ import annotations

import asyncio
import platform
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING
from urllib.parse import urljoin

from msgspec import Struct

from enginehouse import __version__
from enginehouse.core.errors import Hopeless, Invalid, Upstream
from enginehouse.core.reference import shown_uri
from enginehouse.fetch.http.addresses import CheckedTarget, ParsedRules, Rules
from enginehouse.fetch.http.answers import Document, failure

if TYPE_CHECKING:
    from enginehouse.fetch.http.connections import Connections, OutboundResponse

MAX_REDIRECTS = 5
STALL_SECONDS = 60.0
CONNECT_SECONDS = 30.0
_REDIRECTS = {301, 302, 303, 307, 308}
_BOUND_TO_ORIGIN = {"authorization", "cookie", "proxy-authorization"}
USER_AGENT = f"enginehouse/{__version__} ({platform.system().lower()}; {platform.machine()})"


class OutboundRequest(Struct, frozen=True, kw_only=True):
    """One request. A `form` is sent by POST, and redirects of it are not followed."""

    url: str
    method: str = "GET"
    headers: Mapping[str, str] = {}
    form: Mapping[str, str] | None = None


class Client:
    """Owns the connections and must be closed. `stall_seconds` limits the time without a received byte."""

    def __init__(
        self,
        rules: Rules,
        *,
        user_agent: str = USER_AGENT,
        stall_seconds: float = STALL_SECONDS,
        connect_seconds: float = CONNECT_SECONDS,
        max_redirects: int = MAX_REDIRECTS,
    ) -> None:
        self.rules = ParsedRules(rules)
        self._user_agent = user_agent
        self._stall_seconds = stall_seconds
        self._connect_seconds = connect_seconds
        self._max_redirects = max_redirects
        self._connections: Connections | None = None

    async def document(
        self,
        url: str,
        *,
        limit_bytes: int,
        headers: Mapping[str, str] = {},
        total_seconds: float = 120.0,
    ) -> Document:
        """GET a small document. A status of 400 or above is raised as an error; 304 is returned."""
        document = await self.exchange(OutboundRequest(url=url, headers=headers), limit_bytes, total_seconds)
        if document.status >= 400:
            raise failure(document.status, shown_uri(url), document.headers)
        return document

    async def exchange(self, request: OutboundRequest, limit_bytes: int, total_seconds: float = 120.0) -> Document:
        """Send a request and return the response, whatever its status."""
        try:
            async with asyncio.timeout(total_seconds):
                async with self.open(request) as response:
                    if response.is_encoded:
                        raise Hopeless(
                            f"cannot read {shown_uri(request.url)}: the response has an unrequested content encoding",
                            code="unsupported",
                        )
                    body = await response.read(limit_bytes)
                    return Document(response.status, response.headers, body, response.url)
        except TimeoutError as error:
            raise Upstream(
                f"cannot read {shown_uri(request.url)}: timeout after {total_seconds:g} s; check the network",
                code="upstream_timeout",
            ) from error

    @asynccontextmanager
    async def open(self, request: OutboundRequest) -> AsyncIterator[OutboundResponse]:
        """Follow redirects and return the response, body unread. Leaving the context early closes the connection."""
        target = self.rules.check_url(request.url)
        headers = {"user-agent": self._user_agent, "accept-encoding": "identity"}
        headers |= {name.lower(): value for name, value in request.headers.items()}
        for _ in range(self._max_redirects + 1):
            response = await (await self._opened()).send(target, request.method, headers, request.form)
            try:
                location = response.headers.get("location", "")
                if response.status not in _REDIRECTS or not location or request.form is not None:
                    yield response
                    return
            finally:
                response.leave()
            following = self.follow(target, location)
            if following.origin != target.origin:
                headers = {name: value for name, value in headers.items() if name not in _BOUND_TO_ORIGIN}
            target = following
        raise Upstream(f"cannot read {shown_uri(request.url)}: it has more than {self._max_redirects} redirects")

    async def close(self) -> None:
        if self._connections is not None:
            await self._connections.close()

    def follow(self, target: CheckedTarget, location: str) -> CheckedTarget:
        following = self.rules.check_url(urljoin(target.url, location).partition("#")[0])
        if target.scheme == "https" and following.scheme != "https":
            raise Invalid(
                f"cannot follow {shown_uri(target.url)} to {shown_uri(following.url)}: it redirects to http",
                code="uri_not_allowed",
            )
        return following

    async def _opened(self) -> Connections:
        """The connections. Made at the first request, because they are bound to the running event loop."""
        if self._connections is None:
            # Importing the library takes a sixth of a frontend's start, which needs nothing from outside; and a tenth
            # of a second, so it is done in a thread.
            make = await asyncio.to_thread(_library)
            if self._connections is None:
                self._connections = make(self.rules, self._connect_seconds, self._stall_seconds)
        return self._connections


def _library() -> type[Connections]:
    from enginehouse.fetch.http.connections import Connections

    return Connections
