"""The HTTP client for all servers outside the cluster, under the rules of `http.addresses`.

Every URL is checked before its request, including redirects, which are followed here and not by the library. The
resolver returns checked addresses only. Credentials are dropped when a redirect changes scheme, host or port.
Errors of the library are translated into ours. The owner of a client chooses how long a response may stall.
"""

from __future__ import annotations

import asyncio
import platform
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from ipaddress import ip_address
from urllib.parse import urlencode, urljoin

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from msgspec import Struct
from yarl import URL

from enginehouse import __version__
from enginehouse.core.errors import Hopeless, Invalid, TooLarge, Upstream
from enginehouse.core.reference import shown_uri
from enginehouse.fetch.http.addresses import CheckedTarget, ParsedRules, Rules
from enginehouse.fetch.http.answers import Document, failure

MAX_REDIRECTS = 5
STALL_SECONDS = 60.0
CONNECT_SECONDS = 30.0
RESOLVE_SECONDS = 15.0
# Bodies are gigabytes. With 64 KiB the stream is paused too often; above 256 KiB the differences are below the noise of
# a shared machine. Chunks are passed on as received, because joining them would copy every byte once more.
READ_BYTES = 1024 * 1024
_REDIRECTS = {301, 302, 303, 307, 308}
_BOUND_TO_ORIGIN = {"authorization", "cookie", "proxy-authorization"}
USER_AGENT = f"enginehouse/{__version__} ({platform.system().lower()}; {platform.machine()})"


class OutboundRequest(Struct, frozen=True, kw_only=True):
    """One request. A `form` is sent by POST, and redirects of it are not followed."""

    url: str
    method: str = "GET"
    headers: Mapping[str, str] = {}
    form: Mapping[str, str] | None = None


class OutboundResponse:
    """The head of a response whose body is still arriving. `url` is the last one after redirects."""

    def __init__(self, answer: aiohttp.ClientResponse, url: str) -> None:
        self.status = answer.status
        self.headers: Mapping[str, str] = {name.lower(): value for name, value in answer.headers.items()}
        self.url = url
        self._answer = answer

    @property
    def is_encoded(self) -> bool:
        """Whether the body has a content encoding, although none was requested."""
        return self.headers.get("content-encoding", "identity").lower() not in ("", "identity")

    async def chunks(self) -> AsyncIterator[bytes]:
        """Yield the body in chunks as received. Raises `Upstream` when it is cut off or stalls."""
        content = self._answer.content
        while not content.at_eof():
            try:
                piece, _ = await content.readchunk()
            except (aiohttp.ClientError, TimeoutError, OSError, RuntimeError) as error:
                # The library raises RuntimeError once the client is closed.
                raise translated(error, self.url) from error
            if piece:
                yield piece

    async def read(self, limit_bytes: int) -> bytes:
        """Return the whole body. Raises `TooLarge` as soon as it exceeds `limit_bytes`."""
        announced = self.headers.get("content-length", "")
        if announced.isdecimal() and int(announced) > limit_bytes:
            raise _too_large(self.url, limit_bytes)
        body = bytearray()
        async for piece in self.chunks():
            body += piece
            if len(body) > limit_bytes:
                raise _too_large(self.url, limit_bytes)
        return bytes(body)


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
        self._session: aiohttp.ClientSession | None = None

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
            answer = await self._send(request, target, headers)
            try:
                location = answer.headers.get("location", "")
                if answer.status not in _REDIRECTS or not location or request.form is not None:
                    yield OutboundResponse(answer, target.url)
                    return
            finally:
                # Skipping an unread body could take gigabytes, so its connection is closed instead of reused.
                if answer.content.at_eof():
                    answer.release()
                else:
                    answer.close()
            following = self.follow(target, location)
            if following.origin != target.origin:
                headers = {name: value for name, value in headers.items() if name not in _BOUND_TO_ORIGIN}
            target = following
        raise Upstream(f"cannot read {shown_uri(request.url)}: it has more than {self._max_redirects} redirects")

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    def follow(self, target: CheckedTarget, location: str) -> CheckedTarget:
        following = self.rules.check_url(urljoin(target.url, location).partition("#")[0])
        if target.scheme == "https" and following.scheme != "https":
            raise Invalid(
                f"cannot follow {shown_uri(target.url)} to {shown_uri(following.url)}: it redirects to http",
                code="uri_not_allowed",
            )
        return following

    async def _send(
        self, request: OutboundRequest, target: CheckedTarget, headers: dict[str, str]
    ) -> aiohttp.ClientResponse:
        url = URL(target.url, encoded=True)
        if url.host != target.host or url.port != target.port:
            # If two parsers disagree about the host, the checked host is not the one that would be contacted.
            raise Invalid(f"cannot request {shown_uri(target.url)}: its host is ambiguous", code="uri_not_allowed")
        try:
            return await self._opened().request(
                "POST" if request.form is not None else request.method,
                url,
                headers=headers | ({"content-type": "application/x-www-form-urlencoded"} if request.form else {}),
                data=urlencode(request.form).encode() if request.form is not None else None,
                allow_redirects=False,
            )
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise translated(error, target.url) from error

    def _opened(self) -> aiohttp.ClientSession:
        """The session. Created at the first request, because it is bound to the running event loop."""
        if self._session is None:
            self._session = aiohttp.ClientSession(
                # No pool limit: callers limit their connections themselves, and a wait for the pool would have no
                # timeout.
                connector=aiohttp.TCPConnector(
                    limit=0, use_dns_cache=False, keepalive_timeout=30.0, resolver=_CheckedResolver(self.rules)
                ),
                cookie_jar=aiohttp.DummyCookieJar(),
                timeout=aiohttp.ClientTimeout(
                    total=None, sock_connect=self._connect_seconds, sock_read=self._stall_seconds
                ),
                auto_decompress=False,
                trust_env=False,
                read_bufsize=READ_BYTES,
            )
        return self._session


class _CheckedResolver(AbstractResolver):
    """Resolves once per connection. One address that is not allowed makes the whole host refused."""

    def __init__(self, rules: ParsedRules) -> None:
        self._rules = rules

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(RESOLVE_SECONDS):
                found = await loop.getaddrinfo(host, port, family=family, type=socket.SOCK_STREAM)
        except (TimeoutError, OSError, UnicodeError) as error:
            raise Upstream(f"cannot resolve {host}; check the name and the network") from error
        results: list[ResolveResult] = []
        for kind, _, protocol, _, address in found:
            text = str(address[0])
            self._rules.check_address(host, port, ip_address(text))
            results.append(
                ResolveResult(
                    hostname=host,
                    host=text,
                    port=port,
                    family=kind,
                    proto=protocol,
                    flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV,
                )
            )
        return results

    async def close(self) -> None:
        """Does nothing; no resource is held."""


def translated(error: Exception, url: str) -> Upstream:
    """Translate an error of the library."""
    shown = shown_uri(url)
    match error:
        case aiohttp.ConnectionTimeoutError():
            return Upstream(f"cannot reach {shown}: connection timeout; check the network", code="upstream_timeout")
        case TimeoutError():
            return Upstream(f"cannot read {shown}: no data within the timeout; check the network", code="stalled")
        case aiohttp.ClientConnectorCertificateError() | aiohttp.ClientSSLError():
            return Upstream(f"cannot trust {shown}: its certificate is not valid; check the host name and the clock")
        case aiohttp.ClientConnectorError():
            return Upstream(
                f"cannot reach {shown}: {error.os_error.strerror or 'connection failed'}; check the network"
            )
        case aiohttp.ClientPayloadError() | aiohttp.ServerDisconnectedError() | aiohttp.ClientOSError():
            return Upstream(f"cannot read {shown}: the connection was cut off")
        case aiohttp.ClientResponseError():
            return Upstream(f"cannot read {shown}: the response is not valid HTTP")
    return Upstream(f"cannot read {shown}: {type(error).__name__}")


def _too_large(url: str, limit_bytes: int) -> TooLarge:
    return TooLarge(f"cannot read {shown_uri(url)}: it is larger than {limit_bytes} bytes", code="too_large")
