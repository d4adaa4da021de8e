"""The connections of the HTTP client: the only part of it that knows its library. Imported with the first request.

The resolver returns checked addresses only. Errors of the library are translated into ours. Nothing is followed here.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Mapping
from ipaddress import ip_address
from urllib.parse import urlencode

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from enginehouse.core.errors import Invalid, TooLarge, Upstream
from enginehouse.core.reference import shown_uri
from enginehouse.fetch.http.addresses import CheckedTarget, ParsedRules

RESOLVE_SECONDS = 15.0
# Bodies are gigabytes. With 64 KiB the stream is paused too often; above 256 KiB the differences are below the noise of
# a shared machine. Chunks are passed on as received, because joining them would copy every byte once more.
READ_BYTES = 1024 * 1024


class OutboundResponse:
    """The head of a response whose body is still arriving. `url` is the last one after redirects."""

    def __init__(self, answer: aiohttp.ClientResponse, url: str) -> None:
        self.status = answer.status
        self.headers: Mapping[str, str] = {name.lower(): value for name, value in answer.headers.items()}
        self.url = url
        self._answer = answer

    def leave(self) -> None:
        """Skipping an unread body could take gigabytes, so its connection is closed instead of reused."""
        if self._answer.content.at_eof():
            self._answer.release()
        else:
            self._answer.close()

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


class Connections:
    """Owns the connections of one client."""

    def __init__(self, rules: ParsedRules, connect_seconds: float, stall_seconds: float) -> None:
        self._session = aiohttp.ClientSession(
            # No pool limit: callers limit their connections themselves, and a wait for the pool would have no timeout.
            connector=aiohttp.TCPConnector(
                limit=0, use_dns_cache=False, keepalive_timeout=30.0, resolver=_CheckedResolver(rules)
            ),
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=connect_seconds, sock_read=stall_seconds),
            auto_decompress=False,
            trust_env=False,
            read_bufsize=READ_BYTES,
        )

    async def send(
        self, target: CheckedTarget, method: str, headers: dict[str, str], form: Mapping[str, str] | None
    ) -> OutboundResponse:
        url = URL(target.url, encoded=True)
        if url.host != target.host or url.port != target.port:
            # If two parsers disagree about the host, the checked host is not the one that would be contacted.
            raise Invalid(f"cannot request {shown_uri(target.url)}: its host is ambiguous", code="uri_not_allowed")
        try:
            answer = await self._session.request(
                "POST" if form is not None else method,
                url,
                headers=headers | ({"content-type": "application/x-www-form-urlencoded"} if form else {}),
                data=urlencode(form).encode() if form is not None else None,
                allow_redirects=False,
            )
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise translated(error, target.url) from error
        return OutboundResponse(answer, target.url)

    async def close(self) -> None:
        await self._session.close()


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
