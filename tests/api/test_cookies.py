"""The cookie of a session: found among any others, in any header, and never under another name."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from enginehouse.api.cookies import COOKIE, cookie_name, read_cookie, session_secret, set_cookie

SECRETS = st.from_regex(r"[A-Za-z0-9_-]{16,128}", fullmatch=True)
NAMES = st.from_regex(r"[A-Za-z0-9_!#$%&'*+.^`|~-]{1,40}", fullmatch=True)
OTHERS = st.lists(st.tuples(NAMES, st.text(st.characters(min_codepoint=33, max_codepoint=126, exclude_characters=";"))))
PORTS = st.integers(1, 65535)


def scope(*headers: tuple[str, str]) -> Any:
    return {"headers": [(key.encode(), value.encode("latin-1")) for key, value in headers], "scheme": "http"}


@given(SECRETS, OTHERS, OTHERS, PORTS)
def test_a_secret_is_found_among_any_other_cookies(
    secret: str, before: list[tuple[str, str]], after: list[tuple[str, str]], port: int
) -> None:
    name = f"{COOKIE}_{port}"
    others = [[f"{key}={value}" for key, value in some if key != name] for some in (before, after)]
    text = "; ".join([*others[0], f"{name}={secret}", *others[1]])
    assert session_secret(scope(("host", f"h:{port}"), ("cookie", text))) == secret
    split = [("cookie", part) for part in text.split("; ")]
    assert session_secret(scope(*split, ("host", f"h:{port}"))) == secret


@given(st.text(st.characters(max_codepoint=255)), st.text(st.characters(max_codepoint=255)))
def test_any_header_is_read_without_an_error_and_gives_a_secret_or_nothing(text: str, host: str) -> None:
    found = session_secret(scope(("cookie", text), ("host", host)))
    assert found == "" or (found in text and found.isascii() and 16 <= len(found) <= 128)


@given(SECRETS, PORTS, PORTS)
def test_the_cookie_of_another_port_is_none_of_ours(secret: str, port: int, other: int) -> None:
    text = f"{COOKIE}_{other}={secret}"
    assert session_secret(scope(("host", f"h:{port}"), ("cookie", text))) == (secret if port == other else "")
    assert session_secret(scope(("host", "h"), ("cookie", text))) == ""


@given(SECRETS, NAMES)
def test_the_name_must_be_the_same_to_the_last_character(secret: str, name: str) -> None:
    assert read_cookie(f"{name}={secret}", COOKIE) == (secret if name == COOKIE else "")
    assert read_cookie(f"x{COOKIE}={secret}; {COOKIE}x={secret}; {COOKIE}", COOKIE) == ""


@given(SECRETS, PORTS, st.sampled_from(["127.0.0.1", "[::1]", "box.example"]))
def test_what_is_set_is_read_again(secret: str, port: int, host: str) -> None:
    at = f"{host}:{port}"
    pair, *attributes = set_cookie(scope(("host", at)), secret, 60).split("; ")
    assert attributes == ["HttpOnly", "SameSite=Strict", "Path=/", "Max-Age=60"]
    assert session_secret(scope(("host", at), ("cookie", pair))) == secret


@pytest.mark.parametrize(
    ("host", "name"),
    [
        ("127.0.0.1:8080", f"{COOKIE}_8080"),
        ("[::1]:9000", f"{COOKIE}_9000"),
        ("box.example", COOKIE),
        ("", COOKIE),
        ("[", COOKIE),
        ("h:port", COOKIE),
        ("h:99999", COOKIE),
    ],
)
def test_the_name_has_the_port_of_the_host(host: str, name: str) -> None:
    assert cookie_name(host) == name


def test_over_https_the_cookie_is_for_https_only() -> None:
    assert set_cookie({"headers": [], "scheme": "https"}, "", -5).split("; ")[-2:] == ["Max-Age=0", "Secure"]
