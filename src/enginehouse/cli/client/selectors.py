"""`--selector KEY=VALUE`, wherever `--node` is: the nodes with these labels.

Labels are read from the server and compared here, so that one rule holds for every command; what is sent are the ids of
the nodes that have them now. A selector that selects nothing is an error, because it is most likely a typing error.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import click

from enginehouse.cli.client.connect import FrontendApi, read
from enginehouse.cli.client.listing import every_node
from enginehouse.cli.options.names import checked_nodes
from enginehouse.core.errors import Invalid, NotFound
from enginehouse.core.name import check_name
from enginehouse.core.views import NodeView

selector_option = click.option(
    "--selector",
    "selectors",
    multiple=True,
    metavar="KEY=VALUE",
    help="Only nodes with this label; repeatable, all must match.",
)


def checked_selectors(selectors: Iterable[str]) -> dict[str, str]:
    """The labels that `--selector` names; several may be in one, separated by commas."""
    wanted: dict[str, str] = {}
    for pair in (part for one in selectors for part in one.split(",")):
        key, sign, value = (part.strip() for part in pair.partition("="))
        if not sign:
            raise Invalid(f"cannot read the selector {pair!r}: write KEY=VALUE, such as zone=home", param="selector")
        if wanted.setdefault(check_name(key, "label"), value) != value:
            raise Invalid(f"cannot select {key}={wanted[key]} and {key}={value}: no node has both", param="selector")
    return wanted


def has_labels(labels: Mapping[str, str], wanted: Mapping[str, str]) -> bool:
    return all(labels.get(key) == value for key, value in wanted.items())


def selected_nodes(frontend: FrontendApi, selectors: Collection[str]) -> list[NodeView]:
    """The approved nodes that have all of these labels; at least one."""
    wanted = checked_selectors(selectors)
    every = read(every_node(frontend), tuple[NodeView, ...])
    found = [node for node in every if node.approved and has_labels(node.labels, wanted)]
    if not found:
        named = ", ".join(f"{key}={value}" for key, value in wanted.items())
        raise NotFound(
            f"no approved node has the label{'s' if len(wanted) > 1 else ''} {named}. "
            "Set one: enginehouse nodes label NODE KEY=VALUE",
            param="selector",
        )
    return found


def chosen_nodes(frontend: FrontendApi, nodes: Iterable[str], selectors: Collection[str]) -> list[str]:
    """The nodes that `--node` and `--selector` name together; empty if neither was given."""
    named = checked_nodes(nodes)
    return [*named, *(node.id for node in selected_nodes(frontend, selectors))] if selectors else named


def one_at_a_time(frontend: FrontendApi, node: str | None, selectors: Collection[str]) -> list[str | None]:
    """The nodes of requests that are about one node each; [None] means no restriction."""
    if node is not None and selectors:
        raise click.UsageError("--node and --selector exclude each other")
    return [one.id for one in selected_nodes(frontend, selectors)] if selectors else [node]
