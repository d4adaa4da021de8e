"""Authorization: which credential may call which route. Every route has a role (see `routes.make_routes`).

A token that is sent must be valid, even on public routes. On a loopback server the inference routes ignore a key that
this program never made, because OpenAI's clients insist on sending one. Without a token the cookie of a session counts,
on all routes but public ones. Without either only these answer, the ones on which machines register (one may be a node
that proves itself by its key) and, if the frontend listens on loopback only, the inference routes: every user of
this machine may chat. A web page in a browser cannot use that, because its request has another host or another origin.
A browser sends a cookie by itself, so a request that changes something by cookie must also come from a page of this
server (`check_site`).
"""

from __future__ import annotations

from typing import Literal
from urllib.parse import urlsplit

from starlette.types import Scope

from enginehouse.api.cookies import header, session_secret
from enginehouse.core.errors import Denied, Unauthenticated
from enginehouse.frontend.fleet.tokens import TOKEN_START, Caller, Keys

RouteRole = Literal["public", "user", "reader", "node", "machine", "viewer", "admin"]

# The token roles that each route role accepts. Node routes accept join tokens for LocalAI's workers, which have no key.
# A `viewer` route changes nothing and shows no secret; a `reader` route is also for applications.
_OPENS: dict[RouteRole, frozenset[str]] = {
    "public": frozenset({"admin", "viewer", "user", "join", "node"}),
    "user": frozenset({"admin", "user"}),
    "reader": frozenset({"admin", "viewer", "user"}),
    "node": frozenset({"node", "join"}),
    # A machine that registers: with a join token, or without any credential but the key that it proves to have.
    "machine": frozenset({"join", "admin", "stranger"}),
    "viewer": frozenset({"admin", "viewer"}),
    "admin": frozenset({"admin"}),
}
_LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
# What proxies add. Behind one on this machine a caller from anywhere comes from loopback, with a Host of its choice.
_OF_PROXIES = frozenset(
    {b"forwarded", b"via", b"x-forwarded-for", b"x-forwarded-host", b"x-forwarded-proto", b"x-real-ip"}
)
_DEFAULT_PORTS = {"http": 80, "https": 443}
ANONYMOUS = Caller("user", "anonymous")
LOCAL = Caller("user", "local")
STRANGER = Caller("stranger", "stranger")


def bearer(scope: Scope) -> str:
    """The token of a request, from `Authorization: Bearer …` or from `x-api-key`, which some clients send instead."""
    scheme, _, token = header(scope, b"authorization").partition(" ")
    if token and scheme.lower() == "bearer":
        return token.strip()
    return header(scope, b"x-api-key")


def is_local_page(scope: Scope) -> bool:
    """Whether host and origin of a request are loopback names, and no proxy passed it on. A foreign page has another
    host or origin.
    """
    if any(name in _OF_PROXIES for name, _ in scope["headers"]):
        return False
    host = host_of("//" + header(scope, b"host"))
    origin = header(scope, b"origin")
    return host in _LOOPBACK_NAMES and (not origin or host_of(origin) in _LOOPBACK_NAMES)


def host_of(url: str) -> str | None:
    """The host name of a URL that a client sent; None if it is not a valid URL."""
    try:
        return urlsplit(url).hostname
    except ValueError:
        return None


def identify(keys: Keys, scope: Scope, role: RouteRole, *, is_loopback: bool) -> Caller:
    """Who asks, for a route of this role; raises `Unauthenticated` for a credential that is not valid."""
    token = bearer(scope)
    if token:
        caller = keys.identify(token)
        if caller is None and not token.startswith(TOKEN_START) and _is_open(scope, role, is_loopback=is_loopback):
            return LOCAL
        if caller is None:
            raise Unauthenticated(
                "cannot accept this token: it is unknown here, or revoked, or it has expired; check it, or create one "
                "with `enginehouse tokens create`"
            )
        return caller
    if role == "public":
        return ANONYMOUS  # with an old cookie too: a person must be able to sign in again
    secret = session_secret(scope)
    if secret:
        caller = keys.identify_session(secret)
        if caller is None:
            raise Unauthenticated(
                "cannot accept this session: it has ended; sign in again (`enginehouse login-link` makes a link)"
            )
        return caller
    if role == "machine":
        return STRANGER
    if _is_open(scope, role, is_loopback=is_loopback):
        return LOCAL
    raise Unauthenticated(
        "cannot answer without a token: send `Authorization: Bearer TOKEN` (`enginehouse tokens create` makes one; "
        "the machine that runs `enginehouse up` has a join token)"
    )


def _is_open(scope: Scope, role: RouteRole, *, is_loopback: bool) -> bool:
    """Whether the route answers without a credential: every user of this machine may chat."""
    return role in ("user", "reader") and is_loopback and is_local_page(scope)


def check_role(caller: Caller, role: RouteRole) -> None:
    if caller.role not in _OPENS[role]:
        what = "session" if caller.session_id else "token"
        raise Denied(f"cannot do this with a {caller.role} {what}: it needs the role {role}")


def check_site(scope: Scope) -> None:
    """Refuse a request that a page of another site made, and that is authorized by what the browser adds to it."""
    site, origin = header(scope, b"sec-fetch-site"), header(scope, b"origin")
    if scope["method"] in ("GET", "HEAD"):
        is_ours = site != "cross-site"
    elif origin:
        is_ours = _is_own(origin, scope)
    else:
        is_ours = site == "same-origin"
    if not is_ours:
        own = f"{scope.get('scheme', 'http')}://{header(scope, b'host')}"
        seen = f" (it is at {shown_origin(origin)}, and this server was asked as {shown_origin(own)})" if origin else ""
        raise Denied(
            f"cannot do this for a page of another site{seen}: open this server's own page; a proxy in front of it "
            "must pass on `Host` with its port, and `X-Forwarded-Proto`; a program must send a token",
            code="cross_site",
        )


def shown_origin(origin: str) -> str:
    """An origin for a message: it came from outside."""
    return "".join(one if one.isascii() and one.isprintable() else "?" for one in origin[:80])


def check_sign_in_site(scope: Scope) -> None:
    """Refuse a sign-in from a page of another site. Programs send neither of the headers, and are no such page."""
    if header(scope, b"origin") or header(scope, b"sec-fetch-site") not in ("", "none", "same-origin"):
        check_site(scope)


def _is_own(origin: str, scope: Scope) -> bool:
    theirs = _place(origin)
    return theirs is not None and theirs == _place(f"{scope.get('scheme', 'http')}://{header(scope, b'host')}")


def _place(url: str) -> tuple[str, str, int] | None:
    """Scheme, host and port of an origin; None if it is not one."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        return None
    if parts.scheme not in _DEFAULT_PORTS or not parts.hostname:
        return None
    return parts.scheme, parts.hostname, _DEFAULT_PORTS[parts.scheme] if port is None else port
