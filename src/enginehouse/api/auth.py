"""Authorization: which token may call which route. Every route has a role (see `routes.make_routes`).

A token that is sent must be valid, even on public routes. Without a token only public routes answer, and, if the
frontend listens on loopback only, the inference routes: every user of this machine may chat. A web page in a browser
cannot use that, because its request has another host or another origin.
"""

from __future__ import annotations

from typing import Literal
from urllib.parse import urlsplit

from starlette.types import Scope

from enginehouse.core.errors import Denied, Unauthenticated
from enginehouse.frontend.fleet.tokens import Caller, Keys

RouteRole = Literal["public", "user", "node", "join", "admin"]

# The token roles that each route role accepts. Node routes accept join tokens for LocalAI's workers, which have no key.
_OPENS: dict[RouteRole, frozenset[str]] = {
    "public": frozenset({"admin", "user", "join", "node"}),
    "user": frozenset({"admin", "user"}),
    "node": frozenset({"node", "join"}),
    "join": frozenset({"join", "admin"}),
    "admin": frozenset({"admin"}),
}
_LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
ANONYMOUS = Caller("user", "anonymous")
LOCAL = Caller("user", "local")


def header(scope: Scope, name: bytes) -> str:
    for key, value in scope["headers"]:
        if key == name:
            return str(value.decode("latin-1"))
    return ""


def bearer(scope: Scope) -> str:
    """The token of a request, from `Authorization: Bearer …` or from `x-api-key`, which some clients send instead."""
    scheme, _, token = header(scope, b"authorization").partition(" ")
    if token and scheme.lower() == "bearer":
        return token.strip()
    return header(scope, b"x-api-key")


def is_local_page(scope: Scope) -> bool:
    """Whether host and origin of a request are loopback names; a foreign page has another host or origin."""
    host = host_of("//" + header(scope, b"host"))
    origin = header(scope, b"origin")
    return host in _LOOPBACK_NAMES and (not origin or host_of(origin) in _LOOPBACK_NAMES)


def host_of(url: str) -> str | None:
    """The host name of a URL that a client sent; None if it is not a valid URL."""
    try:
        return urlsplit(url).hostname
    except ValueError:
        return None


def authorize(keys: Keys, scope: Scope, role: RouteRole, *, is_loopback: bool) -> Caller:
    """The caller, if its token opens the role; otherwise raises `Unauthenticated` or `Denied`."""
    token = bearer(scope)
    if not token:
        if role == "public":
            return ANONYMOUS
        if role == "user" and is_loopback and is_local_page(scope):
            return LOCAL
        raise Unauthenticated(
            "cannot answer without a token: send `Authorization: Bearer TOKEN` (`enginehouse tokens create` makes one; "
            "the machine that runs `enginehouse up` has a join token)"
        )
    caller = keys.identify(token)
    if caller is None:
        raise Unauthenticated(
            "cannot accept this token: it is unknown here, or revoked, or it has expired; check it, or create one with "
            "`enginehouse tokens create`"
        )
    if caller.role not in _OPENS[role]:
        raise Denied(f"cannot do this with a {caller.role} token: it needs the role {role}")
    return caller
