"""The cookie of a session: its name, how it is read and how it is set.

Cookies do not tell ports apart, so the port is part of the name: two servers on one machine do not overwrite each
other's. Scripts cannot read the cookie (`HttpOnly`), and browsers do not send it for pages of other sites (`SameSite`).
"""

from __future__ import annotations

import re
from urllib.parse import urlsplit

from starlette.types import Scope

COOKIE = "enginehouse_session"
_SECRET = re.compile(r"[A-Za-z0-9_-]{16,128}")


def header(scope: Scope, name: bytes) -> str:
    for key, value in scope["headers"]:
        if key == name:
            return str(value.decode("latin-1"))
    return ""


def cookie_name(host: str) -> str:
    """The name for the value of a Host header."""
    try:
        port = urlsplit(f"//{host}").port
    except ValueError:
        port = None
    return COOKIE if port is None else f"{COOKIE}_{port}"


def session_secret(scope: Scope) -> str:
    """The secret in the session cookie of a request; "" without one. The first counts if there are several."""
    name = ""
    for key, value in scope["headers"]:
        if key == b"cookie":
            name = name or cookie_name(header(scope, b"host"))
            found = read_cookie(value.decode("latin-1"), name)
            if found:
                return found
    return ""


def read_cookie(text: str, name: str) -> str:
    """The secret under this name in a Cookie header; "" if there is none that could be one of ours."""
    for part in text.split(";"):
        key, sign, value = part.partition("=")
        if sign and key.strip(" \t") == name and _SECRET.fullmatch(value.strip(" \t")):
            return value.strip(" \t")
    return ""


def set_cookie(scope: Scope, secret: str, seconds: float) -> str:
    """The Set-Cookie header for a session; with an empty secret, the one that removes it."""
    is_safe = scope.get("scheme") == "https"
    parts = [
        f"{cookie_name(header(scope, b'host'))}={secret}",
        "HttpOnly",
        "SameSite=Strict",
        "Path=/",
        f"Max-Age={max(0, int(seconds))}",
        *(["Secure"] if is_safe else []),
    ]
    return "; ".join(parts)
