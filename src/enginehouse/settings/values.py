"""How the value of a setting is read: text of a flag or a variable, or a typed value of the file.

Pure. Every function raises `Invalid` with the reason alone; the caller adds which setting it was and where
its value came from. `PARSERS` at the end says which function reads which setting.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

from enginehouse.core.errors import Invalid
from enginehouse.core.gallery_source import GallerySource, decode_sources
from enginehouse.core.name import check_name

_UNIT_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_DURATION_PART = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ns|us|µs|ms|s|m|h)")
_MAX_DURATION_SECONDS = 365 * 24 * 3600.0  # longer is a slip of the keyboard; timers overflow far beyond


def parse_duration(value: object, *, zero_allowed: bool = False) -> float:
    """`90`, `90s`, `15m`, `1h30m`: Go's durations, and plain seconds."""
    seconds = _seconds(value)
    if seconds < 0:
        raise Invalid("a duration cannot be negative")
    if seconds == 0 and not zero_allowed:
        raise Invalid("a duration must be longer than nothing")
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
    """`500`, `2GiB`, `1.5 GB`: binary units either way, as everything else here counts."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", str(value).strip(), re.IGNORECASE)
    if isinstance(value, bool) or found is None:
        raise Invalid("a size is written like 500MiB or 20GiB")
    return int(float(found[1]) * 1024 ** " KMGT".index(found[2].upper() or " "))


def parse_path(value: object) -> Path:
    # Absolute, because children are started in other directories.
    return Path(os.path.abspath(os.path.expanduser(parse_text(value))))


def parse_confinement(value: object) -> str:
    text = parse_text(value).lower()
    if text not in ("auto", "off"):
        raise Invalid("it is either auto or off")
    return text


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


def parse_count(value: object) -> int:
    number = _whole_number(value, "it must be a whole number")
    if number < 1:
        raise Invalid("it must be at least 1")
    return number


def _whole_number(value: object, wrong: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise Invalid(wrong)
    text = str(value).strip()
    # At most nine digits: int() of a very long text is slow, and nothing here is that large.
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
    import ipaddress

    try:
        ipaddress.IPv6Address(host.strip("[]").partition("%")[0])
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
        raise Invalid("an address holds no password: give the token with --token - or ENGINEHOUSE_TOKEN")
    return text.rstrip("/")


def parse_http_urls(value: object) -> str:
    """One address, or several of equal frontends with commas between them."""
    return ",".join(parse_http_url(one) for one in parse_text(value).split(","))


def is_loopback_url(url: str) -> bool:
    if "," in url:
        return all(is_loopback_url(one) for one in url.split(","))
    host = urlsplit(url).hostname or ""
    return host in ("localhost", "::1") or bool(re.fullmatch(r"127(\.\d{1,3}){3}", host))


def parse_list(value: object) -> tuple[str, ...]:
    """`a,b`, or a list in the file or of a repeated flag."""
    items = value.split(",") if isinstance(value, str) else value
    if not isinstance(items, list | tuple):
        raise Invalid("it must be a list: a,b")
    return tuple(parse_text(item) for item in items if not isinstance(item, str) or item.strip())


def parse_labels(value: object) -> dict[str, str]:
    """`key=value,key=value`, or a table in the file."""
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
    """`192.168.1.0/24,fd00::/8`"""
    import ipaddress

    words = parse_list(value)
    for word in words:
        try:
            ipaddress.ip_network(word, strict=False)
        except ValueError as error:
            raise Invalid(f"{word!r} is not a network, like 192.168.1.0/24", code="invalid_setting") from error
    return words


def parse_allowed_hosts(value: object) -> tuple[str, ...]:
    """`host`, `host:port`, a network like 10.0.0.0/8, or `http://host[:port]`; several as in `parse_list`."""
    hosts = parse_list(value)
    for host in hosts:
        bare = host.removeprefix("http://").removeprefix("https://")
        is_network = bare == host and _is_network(bare)
        if not is_network and not re.fullmatch(
            r"(\[[0-9A-Fa-f:.]+\]|[0-9A-Fa-f:]*::[0-9A-Fa-f:.]*|[\w.-]+)(:\d{1,5})?", bare
        ):
            raise Invalid(f"{host!r} is neither a host, host:port, a network like 10.0.0.0/8 nor http://host:port")
    return hosts


def _is_network(text: str) -> bool:
    import ipaddress

    try:
        ipaddress.ip_network(text)
    except ValueError:
        return False
    return "/" in text


def parse_galleries(value: object) -> tuple[GallerySource, ...]:
    """LocalAI's JSON list, or the same as tables in the file."""
    return decode_sources(value)


def host_of_address(address: str) -> str:
    """The host of LocalAI's `host:port`; "" where it names none."""
    host, sign, port = address.rpartition(":")
    return (host if sign and port.isdecimal() else address).strip("[]")


def port_of_address(address: str) -> str:
    _, sign, port = address.rpartition(":")
    return port if sign else ""


# How a value of each setting is read. One table for all programs: a name means the same everywhere.
PARSERS: dict[str, Callable[[object], object]] = {
    "host": parse_host,
    "port": parse_port,
    "name": lambda value: check_name(parse_text(value), "node"),
    "nats_port": parse_port,
    "advertise_nats": parse_text,
    "base_port": lambda value: parse_port(value, lowest=2),  # the worker's own HTTP listens one below
    "database_url": parse_database_url,
    "nats_url": parse_text,
    "approve_keys": parse_list,
    "node_networks": parse_networks,
    "backend_galleries": parse_galleries,
    "allowed_hosts": parse_allowed_hosts,
    "registry_credentials": parse_path,
    "archive_limit_bytes": parse_size,
    "blob_cap_bytes": parse_size,
    "engine_confinement": parse_confinement,
    "engine_user": parse_user,
    "backends_path": parse_path,
    "backends_system_path": parse_path,
    "url": parse_http_urls,
    **dict.fromkeys(("token", "admin_token", "join_token"), parse_text),
    "advertise_host": parse_host,
    "labels": parse_labels,
    "max_replicas_per_model": parse_count,
    "grace_seconds": lambda value: parse_duration(value, zero_allowed=True),
    "model_load_wait_seconds": lambda value: parse_duration(value, zero_allowed=True),
    **dict.fromkeys(
        (
            "store_timeout_seconds",
            "start_wait_seconds",
            "route_memory_seconds",
            "heartbeat_seconds",
            "stale_seconds",
            "lease_seconds",
            "reconcile_seconds",
            "stall_seconds",
            "bus_credential_seconds",
            "backend_install_timeout_seconds",
            "backend_upgrade_timeout_seconds",
        ),
        parse_duration,
    ),
}
