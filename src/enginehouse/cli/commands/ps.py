"""`enginehouse ps`: what runs where, one line per replica; also what is being loaded or was given up."""

from __future__ import annotations

import time
from collections.abc import Iterable
from datetime import datetime

import click
from msgspec import Struct

from enginehouse.cli.answers import OperationPage
from enginehouse.cli.client.connect import FrontendApi, connect, read
from enginehouse.cli.client.listing import every_node, must_exist
from enginehouse.cli.client.selectors import checked_selectors, has_labels, selector_option
from enginehouse.cli.client.watching import watchable
from enginehouse.cli.options.shared import command, emit_json
from enginehouse.cli.terminal import output
from enginehouse.core.name import check_name
from enginehouse.core.views import ListedReplica, NodeView


class _Process(Struct, kw_only=True, omit_defaults=False):
    node_name: str
    node_id: str
    model: str
    slot: int | None
    state: str  # ready, leaving, unreachable, loading, failed
    backend: str = ""
    memory_bytes: int | None = None
    age_seconds: float | None = None
    in_flight: int | None = None


@command("ps", examples=("enginehouse ps", "enginehouse ps --node attic", "enginehouse ps --watch"))
@click.option("--node", metavar="NODE", help="Only on this node (a name or id).")
@selector_option
@watchable
def entry(node: str | None, selectors: tuple[str, ...]) -> None:
    """List what runs where: node, model, state, memory, age, and requests under way.

    `loading` is a replica that is being started, `failed` one that its worker has given up.
    """
    if node is not None:
        check_name(node, "node")
    wanted = checked_selectors(selectors)
    frontend = connect()
    nodes = {one.id: one for one in read(every_node(frontend), tuple[NodeView, ...])}
    within = {one.id for one in nodes.values() if node in (None, one.name, one.id) and has_labels(one.labels, wanted)}
    found = [one for one in _processes(frontend, nodes.values()) if one.node_id in within]
    if node is not None and not within:
        must_exist(frontend, node)
    found.sort(key=lambda one: (one.node_name, one.model, one.slot if one.slot is not None else -1))
    if emit_json(found):
        return
    rows = [
        (
            one.node_name,
            one.model if not one.slot else f"{one.model}#{one.slot}",
            one.state,
            output.size(one.memory_bytes or 0),
            "" if one.age_seconds is None else output.age(one.age_seconds),
            "" if one.in_flight is None else str(one.in_flight),
        )
        for one in found
    ]
    output.emit_table(("NODE", "MODEL", "STATE", "MEMORY", "AGE", "REQUESTS"), rows, "nothing runs")


def _processes(frontend: FrontendApi, nodes: Iterable[NodeView]) -> list[_Process]:
    replicas = read(frontend.get("/api/replicas"), tuple[ListedReplica, ...])
    found = [
        _Process(
            node_name=one.node_name,
            node_id=one.node_id,
            model=one.model,
            slot=one.slot,
            state=one.state,
            backend=one.backend,
            memory_bytes=one.memory_bytes,
            age_seconds=one.age_seconds,
            in_flight=one.in_flight,
        )
        for one in replicas
    ]
    for one in read(frontend.get("/api/operations"), OperationPage).operations:
        if one.kind == "load" and not one.has_ended:
            age = max(0.0, time.time() - _seconds(one.createdAt))
            found += [
                _Process(node_name=name, node_id=node_id, model=one.name, slot=None, state="loading", age_seconds=age)
                for node_id, name in {row.node_id: row.node_name for row in one.nodes if row.is_open}.items()
            ]
    for node in nodes:
        found += [
            _Process(node_name=node.name, node_id=node.id, model=one.model_id, slot=one.replica_index, state="failed")
            for one in node.failed_replicas
        ]
    return found


def _seconds(moment: str) -> float:
    try:
        return datetime.fromisoformat(moment).timestamp()
    except ValueError:
        return time.time()
