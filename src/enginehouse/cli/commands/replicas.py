"""`enginehouse replicas`: the processes that serve models, and how they are."""

from __future__ import annotations

import click

from enginehouse.cli.client.connect import connect, read
from enginehouse.cli.client.listing import must_exist
from enginehouse.cli.client.selectors import selected_nodes, selector_option
from enginehouse.cli.client.watching import watchable
from enginehouse.cli.options.shared import command, emit_json, group
from enginehouse.cli.terminal import output
from enginehouse.core.name import check_model_name, check_name
from enginehouse.core.views import ListedReplica

_SHOWN_REVISION = 8  # characters: enough to tell two revisions of one model apart


@group("replicas", examples=("enginehouse replicas list", "enginehouse replicas list --node attic"))
def entry() -> None:
    """List the replicas of models."""


@command(
    "list",
    examples=("enginehouse replicas list", "enginehouse replicas list --model tiny-chat --json"),
)
@click.option("--model", metavar="MODEL", help="Only replicas of this model.")
@click.option("--node", metavar="NODE", help="Only replicas on this node (a name or id).")
@selector_option
@watchable
def list_replicas(model: str | None, node: str | None, selectors: tuple[str, ...]) -> None:
    """List replicas: state, revision, requests in flight, age, last use and memory."""
    if model is not None:
        check_model_name(model)
    if node is not None:
        check_name(node, "node")
    frontend = connect()
    within = {one.id for one in selected_nodes(frontend, selectors)} if selectors else None
    answer = frontend.get("/api/replicas")
    listed = read(answer, tuple[ListedReplica, ...])
    found = [
        one
        for one in listed
        if model in (None, one.model)
        and node in (None, one.node_name, one.node_id)
        and (within is None or one.node_id in within)
    ]
    if node is not None and not found:
        must_exist(frontend, node)
    # Fields that this version does not know are printed too, unless something was left out.
    if emit_json(answer if len(found) == len(listed) else found):
        return
    rows = [
        (
            one.model,
            one.node_name,
            str(one.slot),
            one.backend,
            one.state,
            one.revision[:_SHOWN_REVISION] + (" outdated" if one.outdated else ""),
            str(one.in_flight),
            output.age(one.age_seconds),
            _last_use(one),
            output.size(one.memory_bytes or 0),
        )
        for one in found
    ]
    columns = ("MODEL", "NODE", "SLOT", "BACKEND", "STATE", "REVISION", "IN FLIGHT", "AGE", "USED", "MEMORY")
    output.emit_table(columns, rows, "no replicas")
    for one in found:
        if one.outdated:
            output.remark(f"{one.model}#{one.slot} on {one.node_name} is to be replaced: {one.outdated}")


def _last_use(replica: ListedReplica) -> str:
    if replica.unused_seconds is not None:
        return f"{output.age(replica.unused_seconds)} ago"
    return "unknown" if replica.use_unknown else "never"


entry.add_command(list_replicas)
