"""Authentication with a registry: challenges, tokens, and the destinations of a credential.

A password is sent to the registry it belongs to. A token server receives it only if it is the same host, or shares
the registry's domain over https; any other token server is asked anonymously.
Tokens are cached per repository until shortly before they expire.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable
from ipaddress import ip_address
from urllib.parse import urlencode, urlsplit

import msgspec
from msgspec import Struct

from enginehouse.core.errors import Denied, Invalid, Upstream
from enginehouse.core.reference import ImageReference, shown_uri
from enginehouse.fetch.http.answers import Document
from enginehouse.fetch.http.client import OutboundRequest
from enginehouse.fetch.registry.credentials import Credentials, RegistryCredential

MAX_TOKEN_BYTES = 256 * 1024
DEFAULT_LIFETIME_SECONDS = 60.0  # the default of the token specification
MARGIN_SECONDS = 5.0  # a token must not expire while the request is in transit
_CHALLENGE = re.compile(r"\s*(basic|bearer)(?:\s+(.*))?", re.IGNORECASE | re.DOTALL)
_PARAMETER = re.compile(r'([A-Za-z_]+)\s*=\s*(?:"((?:[^"\\]|\\.)*)"|([^\s,"]+))')

AskServer = Callable[[OutboundRequest, int], Awaitable[Document]]


class Challenge(Struct, frozen=True):
    """The WWW-Authenticate header of a 401 response."""

    scheme: str
    realm: str = ""
    service: str = ""


class _Token(Struct):
    token: str = ""
    access_token: str = ""
    expires_in: float | None = None


class _Kept(Struct, frozen=True):
    header: str
    until: float


class RegistryAuthorization:
    """The Authorization headers of one registry, cached. `url` is the URL of the registry, with scheme and port."""

    def __init__(self, url: str, credentials: Credentials) -> None:
        self._url = url
        self._credentials = credentials
        self._kept: dict[str, _Kept] = {}
        self._lock = asyncio.Lock()

    def header(self, reference: ImageReference) -> str:
        """The cached Authorization header for `reference`, or ""."""
        kept = self._kept.get(reference.repository)
        return kept.header if kept is not None and kept.until > time.monotonic() else ""

    async def unlock(self, reference: ImageReference, challenge: str, used: str, ask: AskServer) -> None:
        """Answer the challenge to the header `used`, so that `header` returns a new one; `Denied` if refused."""
        async with self._lock:
            # Of many requests that were refused at the same time, only the first requests a new token.
            if self.header(reference) in ("", used):
                await self._renew(reference, challenge, ask)

    async def _renew(self, reference: ImageReference, challenge: str, ask: AskServer) -> None:
        self._kept.pop(reference.repository, None)
        asked = parse_challenge(challenge)
        credential = await self._credentials.find(reference)
        if asked is not None and asked.scheme == "bearer":
            self._kept[reference.repository] = await self._token(reference, asked, credential, ask)
        elif asked is not None and credential is not None and credential.user:
            self._kept[reference.repository] = _Kept(credential.basic, float("inf"))
        else:
            raise refused(reference)

    async def _token(
        self, reference: ImageReference, asked: Challenge, credential: RegistryCredential | None, ask: AskServer
    ) -> _Kept:
        realm = urlsplit(asked.realm)
        if realm.scheme != "https" and realm.scheme != urlsplit(self._url).scheme:
            raise Invalid(
                f"cannot request a token for {reference} from {shown_uri(asked.realm)}: it does not use https",
                code="uri_not_allowed",
            )
        if credential is not None and not may_know(self._url, asked.realm):
            credential = None
        # The scope is ours, not the challenge's, so that a server cannot widen the token.
        parameters = {"service": asked.service, "scope": f"repository:{reference.repository}:pull"}
        answer = await ask(_token_request(asked.realm, parameters, credential), MAX_TOKEN_BYTES)
        if answer.status in (400, 401, 403, 404):
            raise refused(reference)
        try:
            issued = msgspec.json.decode(answer.body, type=_Token)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise Upstream(f"cannot parse the token response of {shown_uri(asked.realm)}") from error
        text = issued.token or issued.access_token
        if not text or not text.isascii() or not text.isprintable():
            raise Upstream(f"cannot use the token response of {shown_uri(asked.realm)}: it contains no valid token")
        lifetime = issued.expires_in if issued.expires_in and issued.expires_in > 0 else DEFAULT_LIFETIME_SECONDS
        return _Kept(f"Bearer {text}", time.monotonic() + max(lifetime - MARGIN_SECONDS, lifetime / 2))


def parse_challenge(text: str) -> Challenge | None:
    """Parse a WWW-Authenticate header. None for a scheme that is not supported."""
    found = _CHALLENGE.fullmatch(text)
    if found is None:
        return None
    parameters = {
        name.lower(): quoted.replace('\\"', '"') or plain for name, quoted, plain in _PARAMETER.findall(found[2] or "")
    }
    return Challenge(found[1].lower(), parameters.get("realm", ""), parameters.get("service", ""))


def may_know(registry_url: str, realm: str) -> bool:
    """Whether the token server at `realm` may receive the password of the registry."""
    registry, server = urlsplit(registry_url), urlsplit(realm)
    if (registry.scheme, registry.netloc) == (server.scheme, server.netloc):
        return True
    if server.scheme != "https" or registry.scheme != "https" or not registry.hostname or not server.hostname:
        return False
    return registry.hostname == server.hostname or _domain(registry.hostname) == _domain(server.hostname)


def refused(reference: ImageReference) -> Denied:
    return Denied(
        f"cannot pull {reference}: access denied; check that it exists and that the credentials for it are right "
        f"(docker login {reference.host})",
        code="forbidden",
    )


def _domain(host: str) -> str:
    """The registrable domain, approximately: two labels, or three under suffixes such as co.uk."""
    try:
        return str(ip_address(host))
    except ValueError:
        pass
    labels = host.split(".")
    is_short = len(labels) > 2 and len(labels[-1]) == 2 and len(labels[-2]) <= 3
    return ".".join(labels[-3:] if is_short else labels[-2:])


def _token_request(realm: str, parameters: dict[str, str], credential: RegistryCredential | None) -> OutboundRequest:
    if credential is not None and credential.identity_token:
        form = parameters | {
            "grant_type": "refresh_token",
            "client_id": "enginehouse",
            "refresh_token": credential.identity_token,
        }
        return OutboundRequest(url=realm, form=form)
    separator = "&" if urlsplit(realm).query else "?"
    query = urlencode({name: value for name, value in parameters.items() if value})
    headers = {"authorization": credential.basic} if credential is not None and credential.user else {}
    return OutboundRequest(url=f"{realm}{separator}{query}", headers=headers)
