"""`enginehouse backends`: engines on the nodes.

Install, upgrade and delete are operations that go to all chosen nodes at once; following one is the default.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from enginehouse.cli import local, output
from enginehouse.cli.command import command, group, wants_json
from enginehouse.cli.names import checked_backend, checked_nodes


@group(
    "backends",
    examples=("enginehouse backends available", "enginehouse backends install llama-cpp --all"),
)
def entry() -> None:
    """See, install, upgrade and delete engines."""


@command("list", examples=("enginehouse backends list",))
def list_backends() -> None:
    """What is installed, one line per backend and node."""
    from enginehouse.cli.connect import connect, read
    from enginehouse.cli.shapes import Backend

    answer = connect().get("/backends")
    if wants_json():
        output.emit_json(answer)
        return
    rows = [
        (
            backend.name,
            node.node_name,
            "broken" if node.is_broken else node.node_status,
            node.version,
            node.digest.removeprefix("sha256:")[:12],
            f"{output.age_of(node.installed_at)} ago" if node.installed_at else "",
        )
        for backend in read(answer, tuple[Backend, ...])
        for node in backend.nodes or ()
    ]
    columns = ("NAME", "NODE", "STATUS", "VERSION", "DIGEST", "INSTALLED")
    output.emit_table(columns, rows, "no backends yet; see `enginehouse backends available`")


@command("available", examples=("enginehouse backends available", "enginehouse backends available --all"))
@click.option("--all", "everything", is_flag=True, help="Also what fits no node, single builds, builds for developers.")
def available(everything: bool) -> None:
    """What the galleries offer to the nodes there are, what is installed first."""
    from enginehouse.cli.connect import connect, read
    from enginehouse.cli.shapes import AvailableBackend

    answer = connect().get("/backends/available")
    if wants_json():
        output.emit_json(answer)
        return
    offered = read(answer, tuple[AvailableBackend, ...])
    first = {one.name: one.gallery for one in reversed(offered)}
    shown = [
        one
        for one in sorted(offered, key=lambda one: not one.installed)
        if everything or one.installed or (one.fits and not one.is_development and not one.is_variant)
    ]
    rows = [
        [
            one.name if first[one.name] == one.gallery else f"{one.gallery}@{one.name}",
            "installed" if one.installed else "" if one.fits else "no node",
            one.version,
            one.license,
            " ".join(one.description.split()),
        ]
        for one in shown
    ]
    columns = ("NAME", "", "VERSION", "LICENSE", "DESCRIPTION")
    output.emit_table(columns, output.fit_last(columns, rows), "no gallery offers a backend")
    stale = sorted({one.gallery for one in shown if one.stale})
    if stale:
        output.remark(f"not asked lately: {', '.join(stale)}; see `enginehouse gallery list`")
    if len(shown) < len(offered):
        output.remark(f"{len(offered) - len(shown)} more with --all: single builds, and what fits no node")


def _targets(function: Callable[..., Any]) -> Callable[..., Any]:
    """The options of everything that is done on nodes."""
    function = click.option("--no-follow", is_flag=True, help="Do not wait; show the operation and end.")(function)
    function = click.option("--node", "nodes", multiple=True, metavar="NODE", help="On this node; repeatable.")(
        function
    )
    return click.option("--all", "everywhere", is_flag=True, help="On all approved nodes.")(function)


@command(
    "install",
    examples=(
        "enginehouse backends install llama-cpp --all",
        "enginehouse backends install llama-cpp --node attic --node cellar",
    ),
)
@click.argument("name")
@_targets
@click.option("--force", is_flag=True, help="Install again where it is already there.")
def install(name: str, nodes: tuple[str, ...], everywhere: bool, force: bool, no_follow: bool) -> int:
    """Install the backend NAME: on all approved nodes, or on those given with --node.

    A node that is away gets it when it returns.
    """
    return _request("install", name, _chosen(nodes, everywhere), force, no_follow)


@command("upgrade", examples=("enginehouse backends upgrade llama-cpp --all",))
@click.argument("name")
@_targets
def upgrade(name: str, nodes: tuple[str, ...], everywhere: bool, no_follow: bool) -> int:
    """Bring the backend NAME to the version of the gallery: on all approved nodes, or on those given with --node."""
    return _request("upgrade", name, _chosen(nodes, everywhere), False, no_follow)


@command(
    "delete",
    examples=("enginehouse backends delete llama-cpp --node attic", "enginehouse backends delete llama-cpp --all"),
)
@click.argument("name")
@_targets
def delete(name: str, nodes: tuple[str, ...], everywhere: bool, no_follow: bool) -> int:
    """Delete the backend NAME from the nodes given with --node, or from --all."""
    if not nodes and not everywhere:
        raise click.UsageError("Say where to delete it from: --all, or --node NODE")
    return _request("delete", name, _chosen(nodes, everywhere), False, no_follow)


def _chosen(nodes: tuple[str, ...], everywhere: bool) -> list[str]:
    """Empty for all."""
    if nodes and everywhere:
        raise click.UsageError("--all and --node exclude each other")
    return checked_nodes(nodes)


def _request(kind: str, name: str, nodes: list[str], force: bool, no_follow: bool) -> int:
    from enginehouse.cli.connect import connect
    from enginehouse.cli.ops import finish

    body: dict[str, object] = {"kind": kind, "name": checked_backend(name)}
    if nodes:
        body["nodes"] = nodes
    if force:
        body["force"] = True
    frontend = connect()
    return finish(frontend, frontend.post("/api/operations", body), no_follow=no_follow)


@command(
    "plan",
    examples=("enginehouse backends plan llama-cpp", "enginehouse backends plan llama-cpp --backends-path ./backends"),
)
@click.argument("name")
@click.option("--name", "directory", metavar="NAME", help="The directory, where NAME is not a gallery's name.")
@click.option("--sha256", metavar="HEX", default="", help="Of an archive.")
@local.place
def plan(name: str, directory: str | None, sha256: str, **flags: Any) -> None:
    """What installing NAME on this machine would fetch, reuse and take; nothing is changed."""
    from enginehouse.cli import working

    resolved, reasons = working.chosen(name, directory, flags, sha256=sha256)
    local.emit_plan(resolved, reasons, flags)


for each in (list_backends, available, install, upgrade, delete, plan):
    entry.add_command(each)
