"""The types of settings and how a value of each type is read: from text (flag, variable) or from a value in the file.

Pure. Every parser raises `Invalid` with the reason only; the caller adds the name of the setting and where its value
came from. A field of the settings has one of the types at the end, and `format_of` finds the parser in that type.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Literal, NamedTuple, get_args
from urllib.parse import urlsplit

from enginehouse.core.errors import Invalid
from enginehouse.core.gallery_source import GallerySource, decode_sources
from enginehouse.core.name import check_name

_UNIT_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_DURATION_PART = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ns|us|µs|ms|s|m|h)")
_MAX_DURATION_SECONDS = 365 * 24 * 3600.0  # a longer one is a typing error


def parse_duration(value: object, *, zero_allowed: bool = False) -> float:
    """Read `90`, `90s`, `15m` or `1h30m`: Go's durations, or plain seconds."""
    seconds = _seconds(value)
    if seconds < 0:
        raise Invalid("a duration cannot be negative")
    if seconds == 0 and not zero_allowed:
        raise Invalid("a duration must be longer than zero")
    if seconds > _MAX_DURATION_SECONDS:
        raise Invalid("a duration can be a year at most")
    return seconds


def _seconds(value: object) -> float:
    wrong = Invalid("a duration is written like 90, 90s, 15m or 1h30m")
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise wrong
    text = str(value).strip()
    sign = -1.0 if text.startswith("-") else 1.0
    text = text.lstrip("+-")
    if re.fullmatch(r"\d+(\.\d*)?|\.\d+", text):
        return sign * float(text)
    parts = _DURATION_PART.findall(text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        raise wrong
    return sign * sum(float(number) * _UNIT_SECONDS[unit] for number, unit in parts)


def parse_size(value: object) -> int:
    """Read `500`, `2GiB` or `1.5 GB`. Units are always binary, as everywhere in this program."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", str(value).strip(), re.IGNORECASE)
    if isinstance(value, bool) or found is None:
        raise Invalid("a size is written like 500MiB or 20GiB")
    return int(float(found[1]) * 1024 ** " KMGT".index(found[2].upper() or " "))


def _parse_paths(value: object) -> tuple[Path, ...]:
    return tuple(parse_path(one) for one in parse_list(value))


def parse_path(value: object) -> Path:
    # Absolute, because children are started in other directories.
    return Path(os.path.abspath(os.path.expanduser(parse_text(value))))


def one_of(*words: str) -> Callable[[object], str]:
    """A parser that accepts one of these words, in any case."""

    def parse(value: object) -> str:
        text = parse_text(value).lower()
        if text not in words:
            raise Invalid(f"it must be {', '.join(words[:-1])} or {words[-1]}")
        return text

    return parse


def parse_node_name(value: object) -> str:
    return check_name(parse_text(value), "node")


def parse_user(value: object) -> str:
    name = parse_text(value)
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_.-]*\$?", name):
        raise Invalid("it must be the name of a user of this machine")
    return name


def parse_port(value: object, *, lowest: int = 1) -> int:
    number = _whole_number(value, "a port is a number")
    if not lowest <= number <= 65535:
        raise Invalid(f"a port is a number from {lowest} to 65535")
    return number


def parse_count(value: object, *, lowest: int = 1) -> int:
    number = _whole_number(value, "it must be a whole number")
    if number < lowest:
        raise Invalid(f"it must be at least {lowest}")
    return number


def parse_switch(value: object) -> bool:
    """Read `on` or `off`, in one of the usual ways to write it."""
    text = str(value).strip().lower()
    if text in ("on", "true", "yes", "1"):
        return True
    if text in ("off", "false", "no", "0"):
        return False
    raise Invalid("it must be on or off")


def _whole_number(value: object, wrong: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise Invalid(wrong)
    text = str(value).strip()
    # At most nine digits: int() is slow on very long text, and no setting is that large.
    if not re.fullmatch(r"[+-]?[0-9]{1,9}", text):
        raise Invalid(wrong)
    return int(text)


def parse_text(value: object) -> str:
    if not isinstance(value, str):
        raise Invalid("it must be text")
    if not value.strip():
        raise Invalid("it is empty")
    if not value.isprintable():
        raise Invalid("it contains control characters")
    return value.strip()


def parse_host(value: object) -> str:
    host = parse_text(value)
    if "/" in host or " " in host or (":" in host and not _is_ipv6(host)):
        raise Invalid("a host is a name or an address, without a scheme and without a port")
    return host


def _is_ipv6(host: str) -> bool:
    return ":" in host and _is_network(host.strip("[]").partition("%")[0])


def _is_network(text: str, *, strict: bool = True) -> bool:
    """Whether it is a network or a single address."""
    import ipaddress

    try:
        ipaddress.ip_network(text, strict=strict)
    except ValueError:
        return False
    return True


def parse_database_url(value: object) -> str:
    text = parse_text(value)
    if not re.match(r"(sqlite|postgres(ql)?(\+psycopg)?)://", text):
        raise _no_database()
    try:
        parts = urlsplit(text)
        if parts.port == 0 or parts.netloc.endswith(":"):
            raise _no_database()
    except ValueError:
        raise _no_database() from None
    return text


def _no_database() -> Invalid:
    return Invalid("a database is written like postgresql://user:password@host:5432/name or sqlite:////path/of/file.db")


def parse_http_url(value: object) -> str:
    text = parse_text(value)
    wrong = Invalid("an address is written like http://host:8080")
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError:
        raise wrong from None
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0 or parts.query or parts.fragment:
        raise wrong
    if parts.username is not None or parts.password is not None:
        raise Invalid("an address must not contain a password; give the token with --token - or ENGINEHOUSE_TOKEN")
    return text.rstrip("/")


def parse_hub_url(value: object) -> str:
    """Read the address of a hub; LocalAI's variables have it without a scheme too."""
    text = parse_text(value)
    return parse_http_url(text if "://" in text else f"https://{text}")


def parse_http_urls(value: object) -> str:
    """Read one address, or those of several frontends of one cluster, separated by commas."""
    return ",".join(parse_http_url(one) for one in parse_text(value).split(","))


def is_loopback_url(url: str) -> bool:
    if "," in url:
        return all(is_loopback_url(one) for one in url.split(","))
    host = urlsplit(url).hostname or ""
    return host in ("localhost", "::1") or bool(re.fullmatch(r"127(\.\d{1,3}){3}", host))


def parse_list(value: object) -> tuple[str, ...]:
    """Read `a,b`, or a list: from the file or from a repeated flag."""
    items = value.split(",") if isinstance(value, str) else value
    if not isinstance(items, list | tuple):
        raise Invalid("it must be a list: a,b")
    return tuple(parse_text(item) for item in items if not isinstance(item, str) or item.strip())


def parse_node_keys(value: object) -> tuple[str, ...]:
    """Read a list of public keys, as `enginehouse nodes key` prints them."""
    keys = tuple(item.strip().lower() for item in parse_list(value))
    for key in keys:
        if len(key) != 64 or any(digit not in "0123456789abcdef" for digit in key):
            raise Invalid("it must have public keys of 64 hexadecimal digits, as `enginehouse nodes key` prints them")
    return keys


def parse_labels(value: object) -> dict[str, str]:
    """Read `key=value,key=value`, or a table in the file."""
    if isinstance(value, dict):
        pairs = [(parse_text(key), parse_text(item)) for key, item in value.items()]
    else:
        pairs = []
        for item in parse_list(value):
            key, sign, text = item.partition("=")
            if not sign:
                raise Invalid("labels are written like gpu=yes,room=attic")
            pairs.append((key.strip(), text.strip()))
    return {check_name(key, "label"): text for key, text in pairs}


def parse_networks(value: object) -> tuple[str, ...]:
    """Read networks such as `192.168.1.0/24,fd00::/8`."""
    words = parse_list(value)
    for word in words:
        if not _is_network(word, strict=False):
            raise Invalid(f"{word!r} is not a network, like 192.168.1.0/24", code="invalid_setting")
    return words


def parse_allowed_hosts(value: object) -> tuple[str, ...]:
    """Read a list of `host`, `host:port`, networks such as 10.0.0.0/8, or `http://host[:port]`."""
    hosts = parse_list(value)
    for host in hosts:
        bare = host.removeprefix("http://").removeprefix("https://")
        is_network = bare == host and "/" in bare and _is_network(bare)
        if not is_network and not re.fullmatch(
            r"(\[[0-9A-Fa-f:.]+\]|[0-9A-Fa-f:]*::[0-9A-Fa-f:.]*|[\w.-]+)(:\d{1,5})?", bare
        ):
            raise Invalid(f"{host!r} is not a host, host:port, a network like 10.0.0.0/8 or http://host:port")
    return hosts


def host_of_address(address: str) -> str:
    """The host of LocalAI's `host:port`; "" if there is none."""
    host, sign, port = address.rpartition(":")
    return (host if sign and port.isdecimal() else address).strip("[]")


def port_of_address(address: str) -> str:
    _, sign, port = address.rpartition(":")
    return port if sign else ""


class Format(NamedTuple):
    """How values of a type are read; put into the type with `Annotated`."""

    parse: Callable[[object], object]
    is_secret: bool = False  # error messages must not repeat the value


def format_of(hint: object) -> Format:
    """The format in the type of a field; `Port | None` has that of `Port`."""
    for part in (hint, *get_args(hint)):
        for metadata in getattr(part, "__metadata__", ()):
            if isinstance(metadata, Format):
                return metadata
    raise TypeError(f"cannot read a setting of the type {hint}: it has no format")


LogLevel = Literal["debug", "info", "warning", "error"]

Text = Annotated[str, Format(parse_text)]
SecretText = Annotated[str, Format(parse_text, is_secret=True)]
NodeKeys = Annotated[tuple[str, ...], Format(parse_node_keys)]
Count = Annotated[int, Format(parse_count)]
CountOrZero = Annotated[int, Format(partial(parse_count, lowest=0))]
Switch = Annotated[bool, Format(parse_switch)]
Duration = Annotated[float, Format(parse_duration)]
DurationOrZero = Annotated[float, Format(partial(parse_duration, zero_allowed=True))]
Size = Annotated[int, Format(parse_size)]
AbsolutePaths = Annotated[tuple[Path, ...], Format(_parse_paths)]
AbsolutePath = Annotated[Path, Format(parse_path)]
Host = Annotated[str, Format(parse_host)]
Port = Annotated[int, Format(parse_port)]
# The worker's HTTP server listens on the port below.
EnginePort = Annotated[int, Format(partial(parse_port, lowest=2))]
HubUrl = Annotated[str, Format(parse_hub_url)]
HttpUrls = Annotated[str, Format(parse_http_urls)]
DatabaseUrl = Annotated[str, Format(parse_database_url, is_secret=True)]
AllowedHosts = Annotated[tuple[str, ...], Format(parse_allowed_hosts)]
Networks = Annotated[tuple[str, ...], Format(parse_networks)]
NodeName = Annotated[str, Format(parse_node_name)]
Labels = Annotated[dict[str, str], Format(parse_labels)]
Galleries = Annotated[tuple[GallerySource, ...], Format(decode_sources)]
Confinement = Annotated[Literal["auto", "off"], Format(one_of("auto", "off"))]
User = Annotated[str, Format(parse_user)]
Level = Annotated[LogLevel, Format(one_of("debug", "info", "warning", "error"))]
