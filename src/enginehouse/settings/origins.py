"""Where the value of a setting came from, also through a parent that passes its own settings on as flags.

`up` starts its frontend with a flag for nearly every setting. It tells the child in a variable where each value really
came from, so that people find the place where they can change it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec
from msgspec import Struct

Source = Literal["flag", "variable", "file", "default", "up"]
ORIGINS_VARIABLE = "ENGINEHOUSE_ORIGINS"
# What a parent sets in other ways than by a flag.
_NOT_BY_FLAG = frozenset({"port", "admin_token", "join_token"})


class SettingOrigin(Struct, frozen=True):
    """`place` is the flag, the variable, or the path of the file; `up`: the parent chose the value itself."""

    source: Source = "default"
    place: str = ""


Origins = Mapping[str, SettingOrigin]
DEFAULT = SettingOrigin()
BY_UP = SettingOrigin("up", "enginehouse up")
_DECODER = msgspec.json.Decoder(dict[str, SettingOrigin])


def handed_on(origins: Origins) -> dict[str, str]:
    """The variable that tells a child where its settings came from."""
    return {ORIGINS_VARIABLE: msgspec.json.encode(dict(origins)).decode()}


def with_handed(own: Origins, environ: Mapping[str, str]) -> dict[str, SettingOrigin]:
    """The origins that a program found itself, with those of its parent where that only passed a value on."""
    try:
        handed = _DECODER.decode(environ.get(ORIGINS_VARIABLE, "{}"))
    except msgspec.DecodeError:
        handed = {}
    return {
        field: handed[field] if field in handed and (one.source == "flag" or field in _NOT_BY_FLAG) else one
        for field, one in own.items()
    }
