"""`enginehouse backends plan`: what a request would do, on the fleet or on this machine; and how a request is sent.

A plan goes out as exactly the request it is a plan of. Nothing is changed here.
"""

from __future__ import annotations

import sys
from typing import Any

import click

from enginehouse.cli.commands import local
from enginehouse.cli.options.names import checked_backend, checked_nodes
from enginehouse.cli.options.shared import command, wants_json
from enginehouse.cli.terminal import output

CHECK_SECONDS = 60.0  # registries are asked; a slow one has ten seconds


def request_from(kind: str, name: str, nodes: list[str], more: dict[str, Any]) -> dict[str, object]:
    body: dict[str, object] = {"kind": kind, "name": checked_backend(name)}
    if nodes:
        body["nodes"] = nodes
    return body | {key: value for key, value in more.items() if value}


def versions(before: tuple[str, str], after: tuple[str, str]) -> tuple[str, str]:
    """Two versions, each with its digest: by name where the names tell them apart, else by digest."""
    if before[0] and after[0] and before[0] != after[0]:
        return before[0], after[0]
    short = [digest.removeprefix("sha256:")[:12] or version for version, digest in (before, after)]
    return short[0], short[1]


@command(
    "plan",
    examples=(
        "enginehouse backends plan llama-cpp",
        "enginehouse backends plan llama-cpp --upgrade --node attic",
        "enginehouse backends plan llama-cpp --local",
    ),
)
@click.argument("name")
@click.option("--node", "nodes", multiple=True, metavar="NODE", help="On this node; repeatable.")
@click.option("--upgrade", "is_upgrade", is_flag=True, help="Of an upgrade instead of an install.")
@click.option("--local", "is_local", is_flag=True, help="Of this machine, without a server.")
@click.option("--name", "directory", metavar="NAME", help="The directory, where NAME is not a gallery's name.")
@click.option("--sha256", metavar="HEX", default="", help="Of an archive.")
@local.place
def plan(name: str, nodes: tuple[str, ...], is_upgrade: bool, is_local: bool, **flags: Any) -> None:
    """What installing NAME would do on each node; nothing is changed.

    With --local, or where there is no server: what it would fetch, reuse and take on this machine.
    """
    from enginehouse.cli.client.connect import has_server

    directory, sha256 = flags.pop("directory"), flags.pop("sha256")
    if is_local or flags.get("backends_path") or not has_server():
        from enginehouse.cli.commands import local_work as working

        resolved, reasons = working.chosen(name, directory, flags, sha256=sha256)
        local.emit_plan(resolved, reasons, flags)
    else:
        _plan_fleet(request_from("upgrade" if is_upgrade else "install", name, checked_nodes(nodes), {}))


def _plan_fleet(request: dict[str, object]) -> None:
    from enginehouse.cli.answers import ListedPlan
    from enginehouse.cli.client.connect import connect, read

    answer = connect().post("/api/operations/plan", request, timeout_seconds=CHECK_SECONDS)
    if wants_json():
        output.emit_json(answer)
        return
    plan = read(answer, ListedPlan)
    rows = [
        (
            row.node_name,
            row.does,
            row.backend,
            *versions((row.installed_version, row.installed_digest), (row.version, row.digest)),
            output.size(row.download_bytes) if row.download_bytes else "",
            output.size(row.free_disk_bytes) if row.free_disk_bytes else "",
            row.node_status,
            f"{row.capability} {row.platform}".strip(),
        )
        for row in plan.nodes
    ]
    columns = ("NODE", "DOES", "BUILD", "HAS", "WOULD BE", "FETCHES", "FREE DISK", "STATUS", "MACHINE")
    # On a screen the last two would only break the lines; a pipe and --json have them.
    shown = len(columns) - 2 if output.is_terminal(sys.stdout) else len(columns)
    output.emit_table(columns[:shown], [row[:shown] for row in rows], "no node would do anything")
    notes: dict[str, list[str]] = {}
    for row in plan.nodes:
        notes.setdefault(row.note, []).append(row.node_name)
    for note, names in notes.items():
        if note:
            output.remark(f"{', '.join(names)}: {note}")
    for excluded in plan.excluded:
        output.remark(f"left out: {excluded.node_name}: {excluded.reason}")
    if plan.max_parallel:
        output.remark(f"{plan.max_parallel} at a time")
