"""Checks names given on the command line, with the rules and messages of the frontend."""

from __future__ import annotations

from collections.abc import Iterable

from enginehouse.core.name import check_name


def checked_nodes(values: Iterable[str]) -> list[str]:
    """Names or ids of nodes; an id is also a valid name."""
    return [check_name(value, "node") for value in values]


def checked_backend(value: str) -> str:
    """`name`, or `gallery@name`."""
    gallery, sign, name = value.rpartition("@")
    if sign:
        check_name(gallery, "gallery")
    check_name(name, "backend")
    return value


def node_body(node: str | None) -> dict[str, str]:
    """The body of a request about one node; empty for all of them."""
    return {} if node is None else {"node": check_name(node, "node")}
