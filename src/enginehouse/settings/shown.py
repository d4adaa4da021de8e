"""The settings of a frontend as it shows them: values as people write them, where they came from, and no secrets."""

from __future__ import annotations

from pathlib import Path
from typing import get_type_hints
from urllib.parse import urlsplit

from enginehouse.core.gallery_source import GallerySource, encode_sources
from enginehouse.core.views import SettingView
from enginehouse.settings.descriptions import DESCRIPTIONS
from enginehouse.settings.origins import DEFAULT
from enginehouse.settings.programs import FrontendSettings, fields_of, flag_of, setting_name
from enginehouse.settings.values import format_of

# A command line is there for every user of the machine to read, so these have no flag.
_WITHOUT_FLAG = frozenset({"admin_token", "join_token"})
_UNITS = (("h", 3600), ("m", 60), ("s", 1))


def shown_settings(settings: FrontendSettings, *, port: int | None) -> list[SettingView]:
    """Every setting, in the order of its struct. `port` is the one that is listened on."""
    hints = get_type_hints(FrontendSettings, include_extras=True)
    return [
        _view(settings, field, is_secret=format_of(hints[field]).is_secret, port=port)
        for field in fields_of(FrontendSettings)
    ]


def _view(settings: FrontendSettings, field: str, *, is_secret: bool, port: int | None) -> SettingView:
    value = getattr(settings, field)
    if field == "port":
        text = shown_value(field, value if port is None else port)
    elif field == "database_url":
        text = without_password(value or sqlite_url(settings.data))
    elif is_secret:
        text = "set" if value else "not set"
    else:
        text = shown_value(field, value)
    origin = settings.origins.get(field, DEFAULT)
    return SettingView(
        name=setting_name(field),
        value=text,
        source=origin.source,
        place=origin.place,
        flag="" if field in _WITHOUT_FLAG else flag_of(field),
        variable=f"ENGINEHOUSE_{setting_name(field).upper()}",
        help=DESCRIPTIONS[field],
        is_secret=is_secret,
    )


def sqlite_url(data: Path) -> str:
    return f"sqlite:///{data / 'enginehouse.db'}"


def shown_value(field: str, value: object) -> str:
    """A value as it is written with a flag; "" if there is none."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        if all(isinstance(one, GallerySource) for one in value):
            return encode_sources(value)
        return ",".join(str(one) for one in value)
    return shown_duration(value) if field.endswith("_seconds") and isinstance(value, int | float) else str(value)


def shown_duration(seconds: float) -> str:
    """As `parse_duration` reads it: 90 seconds are 1m30s."""
    if seconds != int(seconds):
        return f"{seconds:g}s"
    parts, left = "", int(seconds)
    for unit, size in _UNITS:
        count, left = divmod(left, size)
        parts += f"{count}{unit}" if count else ""
    return parts or "0s"


def without_password(url: str) -> str:
    """A database URL without what may be a secret: the password, and parameters."""
    parts = urlsplit(url)
    user, at, place = parts.netloc.rpartition("@")
    return f"{parts.scheme}://{user.partition(':')[0]}{at}{place}{parts.path}"
