"""The one outbound door: HTTP to anything that is not ours, under the rules of `fetch.addresses`.

Every URL is checked before it is asked for, redirects included, which are followed by hand; the resolver gives the
connection checked addresses only. Credentials stay with the scheme, host and port that they were given for.
Whatever the library raises leaves as one of our errors; whoever reads a body chooses how long silence may last.
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
from enginehouse.fetch.http.addresses import Border, CheckedTarget, Rules
from enginehouse.fetch.http.answers import Document, failure

__all__ = ["Client", "Document", "OutboundRequest", "OutboundResponse", "Rules"]

MAX_REDIRECTS = 5
STALL_SECONDS = 60.0
CONNECT_SECONDS = 30.0
RESOLVE_SECONDS = 15.0
# Bodies are gigabytes. With 64 KiB a stream is paused too often; from 256 KiB on the differences are smaller than the
# noise of a shared machine. Pieces are handed on as they came, because joining them would copy every byte once more.
READ_BYTES = 1024 * 1024
_REDIRECTS = {301, 302, 303, 307, 308}
_BOUND_TO_ORIGIN = {"authorization", "cookie", "proxy-authorization"}
USER_AGENT = f"enginehouse/{__version__} ({platform.system().lower()}; {platform.machine()})"


class OutboundRequest(Struct, frozen=True, kw_only=True):
    """One question. A `form` is posted and never follows a redirect."""

    url: str
    method: str = "GET"
    headers: Mapping[str, str] = {}
    form: Mapping[str, str] | None = None


class OutboundResponse:
    """The head of an answer whose body is still arriving. `url` is where it came from in the end."""

    def __init__(self, answer: aiohttp.ClientResponse, url: str) -> None:
        self.status = answer.status
        self.headers: Mapping[str, str] = {name.lower(): value for name, value in answer.headers.items()}
        self.url = url
        self._answer = answer

    async def chunks(self) -> AsyncIterator[bytes]:
        """The body as it arrives, in whatever pieces; raises `Upstream` when it breaks off or nothing comes."""
        content = self._answer.content
        while not content.at_eof():
            try:
                piece, _ = await content.readchunk()
            except (aiohttp.ClientError, TimeoutError, OSError, RuntimeError) as error:
                # The last is what the library raises once the client has been closed.
                raise translated(error, self.url) from error
            if piece:
                yield piece

    async def read(self, limit_bytes: int) -> bytes:
        """The whole body, refused as soon as it is longer than `limit_bytes`."""
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
    """Holds the connections; to be closed. `stall_seconds` is how long a body or an answer may be silent."""

    def __init__(self, rules: Rules, *, user_agent: str = USER_AGENT, stall_seconds: float = STALL_SECONDS) -> None:
        self.border = Border(rules)
        self._user_agent = user_agent
        self._stall_seconds = stall_seconds
        self._session: aiohttp.ClientSession | None = None

    async def document(
        self,
        url: str,
        *,
        limit_bytes: int,
        headers: Mapping[str, str] = {},
        total_seconds: float = 120.0,
    ) -> Document:
        """A small body as a whole. An answer of 400 and above is raised as an error, 304 is an answer."""
        document = await self.exchange(OutboundRequest(url=url, headers=headers), limit_bytes, total_seconds)
        if document.status >= 400:
            raise failure(document.status, shown_uri(url), document.headers)
        return document

    async def exchange(self, request: OutboundRequest, limit_bytes: int, total_seconds: float = 120.0) -> Document:
        """As `document`, with whatever status there is."""
        try:
            async with asyncio.timeout(total_seconds):
                async with self.open(request) as response:
                    if response.headers.get("content-encoding", "identity").lower() not in ("", "identity"):
                        raise Hopeless(
                            f"cannot read {shown_uri(request.url)}: it was sent compressed although that was not asked "
                            "for",
                            code="unsupported",
                        )
                    body = await response.read(limit_bytes)
                    return Document(response.status, response.headers, body, response.url)
        except TimeoutError as error:
            raise Upstream(
                f"cannot read {shown_uri(request.url)}: not complete after {total_seconds:g} s; check the network",
                code="upstream_timeout",
            ) from error

    @asynccontextmanager
    async def open(self, request: OutboundRequest) -> AsyncIterator[OutboundResponse]:
        """The answer with its body still to come, after redirects. Leaving early cuts the connection."""
        target = self.border.check_url(request.url)
        headers = {"user-agent": self._user_agent, "accept-encoding": "identity"}
        headers |= {name.lower(): value for name, value in request.headers.items()}
        for _ in range(MAX_REDIRECTS + 1):
            answer = await self._send(request, target, headers)
            try:
                location = answer.headers.get("location", "")
                if answer.status not in _REDIRECTS or not location or request.form is not None:
                    yield OutboundResponse(answer, target.url)
                    return
            finally:
                # A body that was not read to its end cannot be skipped cheaply: the connection goes with it.
                if answer.content.at_eof():
                    answer.release()
                else:
                    answer.close()
            following = self.follow(target, location)
            if following.origin != target.origin:
                headers = {name: value for name, value in headers.items() if name not in _BOUND_TO_ORIGIN}
            target = following
        raise Upstream(f"cannot read {shown_uri(request.url)}: more than {MAX_REDIRECTS} redirects")

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    def follow(self, target: CheckedTarget, location: str) -> CheckedTarget:
        following = self.border.check_url(urljoin(target.url, location).partition("#")[0])
        if target.scheme == "https" and following.scheme != "https":
            raise Invalid(
                f"cannot follow {shown_uri(target.url)} to {shown_uri(following.url)}: from https to plain http",
                code="uri_not_allowed",
            )
        return following

    async def _send(
        self, request: OutboundRequest, target: CheckedTarget, headers: dict[str, str]
    ) -> aiohttp.ClientResponse:
        url = URL(target.url, encoded=True)
        if url.host != target.host or url.port != target.port:
            # Two parsers that disagree about the host are how a checked URL becomes an unchecked one.
            raise Invalid(f"cannot ask for {shown_uri(target.url)}: its host is ambiguous", code="uri_not_allowed")
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
        """Made at the first request, because it belongs to the event loop that runs then."""
        if self._session is None:
            self._session = aiohttp.ClientSession(
                # How many connections there are at a time is the callers' choice; waiting for one in a pool would be a
                # wait without a limit.
                connector=aiohttp.TCPConnector(
                    limit=0, use_dns_cache=False, keepalive_timeout=30.0, resolver=_CheckedResolver(self.border)
                ),
                cookie_jar=aiohttp.DummyCookieJar(),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS, sock_read=self._stall_seconds),
                auto_decompress=False,
                trust_env=False,
                read_bufsize=READ_BYTES,
            )
        return self._session


class _CheckedResolver(AbstractResolver):
    """Resolves once per connection; one address that is not allowed refuses the host with all of them."""

    def __init__(self, border: Border) -> None:
        self._border = border

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(RESOLVE_SECONDS):
                found = await loop.getaddrinfo(host, port, family=family, type=socket.SOCK_STREAM)
        except (TimeoutError, OSError, UnicodeError) as error:
            raise Upstream(f"cannot find the address of {host}: check the name and the network") from error
        results: list[ResolveResult] = []
        for kind, _, protocol, _, address in found:
            text = str(address[0])
            self._border.check_address(host, port, ip_address(text))
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
        """Nothing is kept open."""


def translated(error: Exception, url: str) -> Upstream:
    """What the library says, in our words."""
    shown = shown_uri(url)
    match error:
        case aiohttp.ConnectionTimeoutError():
            return Upstream(f"cannot reach {shown}: no connection in time; check the network", code="upstream_timeout")
        case TimeoutError():
            return Upstream(f"cannot read {shown}: nothing came for too long; check the network", code="stalled")
        case aiohttp.ClientConnectorCertificateError() | aiohttp.ClientSSLError():
            return Upstream(f"cannot trust {shown}: its certificate is not valid for it, or the clock here is wrong")
        case aiohttp.ClientConnectorError():
            return Upstream(f"cannot reach {shown}: {error.os_error.strerror or 'no connection'}; check the network")
        case aiohttp.ClientPayloadError() | aiohttp.ServerDisconnectedError() | aiohttp.ClientOSError():
            return Upstream(f"cannot read {shown}: the connection was cut off")
        case aiohttp.ClientResponseError():
            return Upstream(f"cannot read {shown}: its answer is not HTTP that can be understood")
    return Upstream(f"cannot read {shown}: {type(error).__name__}")


def _too_large(url: str, limit_bytes: int) -> TooLarge:
    return TooLarge(f"cannot read {shown_uri(url)}: more than {limit_bytes} bytes", code="too_large")
