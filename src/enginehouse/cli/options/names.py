"""Names given on the command line, checked by the same rules and with the same sentences as the frontend's."""

from __future__ import annotations

from collections.abc import Iterable

from enginehouse.core.name import check_name


def checked_nodes(values: Iterable[str]) -> list[str]:
    """Names or ids of nodes; an id passes as a name."""
    return [check_name(value, "node") for value in values]


def checked_backend(value: str) -> str:
    """`name`, or `gallery@name`."""
    gallery, sign, name = value.rpartition("@")
    if sign:
        check_name(gallery, "gallery")
    check_name(name, "backend")
    return value
