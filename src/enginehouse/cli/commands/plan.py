"""`enginehouse backends plan`: what a request would do, on the cluster or on this machine. Changes nothing.

A plan is requested with the same body as the operation; `request_from` builds it for both.
"""

from __future__ import annotations

import sys
from typing import Any

import click

from enginehouse.cli.client.connect import connect, has_server, read
from enginehouse.cli.client.selectors import chosen_nodes, selector_option
from enginehouse.cli.commands import local
from enginehouse.cli.options.names import checked_backend
from enginehouse.cli.options.shared import command, emit_json
from enginehouse.cli.terminal import output
from enginehouse.core.views import FleetPlan

CHECK_SECONDS = 60.0  # the frontend asks registries, each with a timeout of ten seconds


def request_from(kind: str, name: str, nodes: list[str], more: dict[str, Any]) -> dict[str, object]:
    body: dict[str, object] = {"kind": kind, "name": checked_backend(name)}
    if nodes:
        body["nodes"] = nodes
    # `canary` is the only option whose default is true.
    return body | {key: value for key, value in more.items() if value or key == "canary"}


def versions(before: tuple[str, str], after: tuple[str, str]) -> tuple[str, str]:
    """Two versions to compare, given as (version, digest): by version if the versions differ, otherwise by digest."""
    if before[0] and after[0] and before[0] != after[0]:
        return before[0], after[0]
    short = [output.short_digest(digest) or version for version, digest in (before, after)]
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
@click.option("--node", "nodes", multiple=True, metavar="NODE", help="Plan for this node; repeatable.")
@selector_option
@click.option("--upgrade", "is_upgrade", is_flag=True, help="Plan an upgrade instead of an install.")
@click.option("--local", "is_local", is_flag=True, help="Plan for this machine, without a server.")
@click.option("--name", "directory", metavar="NAME", help="The directory, if NAME is not a gallery name.")
@click.option("--sha256", metavar="HEX", default="", help="Expected SHA-256 of the archive.")
@local.place
def plan(
    name: str, nodes: tuple[str, ...], selectors: tuple[str, ...], is_upgrade: bool, is_local: bool, **flags: Any
) -> None:
    """Show what installing NAME would do on each node; changes nothing.

    With --local, or without a server: what an install would download, reuse and occupy on this machine.
    """
    directory, sha256 = flags.pop("directory"), flags.pop("sha256")
    if is_local or flags.get("backends_path") or not has_server():
        from enginehouse.cli.commands import local_work as working

        resolved, reasons = working.chosen(name, directory, flags, sha256=sha256)
        local.emit_plan(resolved, reasons, flags)
    else:
        chosen = chosen_nodes(connect(), nodes, selectors)
        _plan_fleet(request_from("upgrade" if is_upgrade else "install", name, chosen, {}))


def _plan_fleet(request: dict[str, object]) -> None:
    answer = connect().post("/api/operations/plan", request, timeout_seconds=CHECK_SECONDS)
    if emit_json(answer):
        return
    plan = read(answer, FleetPlan)
    rows = [
        (
            row.node_name,
            row.does,
            row.backend or "",
            *versions((row.installed_version or "", row.installed_digest or ""), (row.version or "", row.digest or "")),
            output.size(row.download_bytes) if row.download_bytes else "",
            output.size(row.free_disk_bytes) if row.free_disk_bytes else "",
            row.node_status,
            f"{row.capability} {row.platform}".strip(),
        )
        for row in plan.nodes
    ]
    columns = ("NODE", "DOES", "BUILD", "HAS", "WOULD BE", "FETCHES", "FREE DISK", "STATUS", "MACHINE")
    # The last two would wrap the lines on a terminal; a pipe and --json have them.
    shown = len(columns) - 2 if output.is_terminal(sys.stdout) else len(columns)
    output.emit_table(columns[:shown], [row[:shown] for row in rows], "nothing to do on any node")
    notes: dict[str, list[str]] = {}
    for row in plan.nodes:
        notes.setdefault(row.note or "", []).append(row.node_name)
    for note, names in notes.items():
        if note:
            output.remark(f"{', '.join(names)}: {note}")
    for excluded in plan.excluded:
        output.remark(f"left out: {excluded.node_name}: {excluded.reason}")
    if plan.canaries:
        output.remark(f"first: {', '.join(plan.canaries)}; the others follow if the new version stays ready there")
    if plan.max_parallel:
        output.remark(f"{plan.max_parallel} at a time")
