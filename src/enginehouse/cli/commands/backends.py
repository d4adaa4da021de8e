"""`enginehouse backends`: engines on the nodes.

Install, upgrade, rollback and delete are operations that go to all selected nodes at once. By default they are
followed.
"""

from __future__ import annotations

from typing import Any

import click

from enginehouse.cli.answers import AvailableBackend, ListedBackend
from enginehouse.cli.client.connect import connect, read
from enginehouse.cli.client.selectors import chosen_nodes, selector_option
from enginehouse.cli.client.watching import watchable
from enginehouse.cli.commands.ops import finish
from enginehouse.cli.commands.plan import CHECK_SECONDS, plan, request_from, versions
from enginehouse.cli.options.names import checked_nodes
from enginehouse.cli.options.programs import together
from enginehouse.cli.options.shared import command, emit_json, group, no_follow_option
from enginehouse.cli.terminal import output
from enginehouse.core.errors import Conflict, NotFound, exit_code
from enginehouse.core.views import Upgrade


@group(
    "backends",
    examples=("enginehouse backends available", "enginehouse backends install llama-cpp --all"),
)
def entry() -> None:
    """List, install, upgrade, roll back and delete engines."""


@command("list", examples=("enginehouse backends list", "enginehouse backends list --watch"))
@watchable
def list_backends() -> None:
    """List installed backends, one line per backend and node."""
    answer = connect().get("/backends")
    if emit_json(answer):
        return
    rows = [
        (
            backend.name,
            node.node_name,
            "broken" if node.is_broken else node.node_status,
            # A meta backend has no version of its own; it may point to another build on each node.
            f"({node.meta_backend_for})" if node.meta_backend_for else node.version,
            output.short_digest(node.digest),
            f"{output.age_of(node.installed_at)} ago" if node.installed_at else "",
            "" if node.report_age_seconds is None else f"{output.age(node.report_age_seconds)} ago",
        )
        for backend in read(answer, tuple[ListedBackend, ...])
        for node in backend.nodes or ()
    ]
    columns = ("NAME", "NODE", "STATUS", "VERSION", "DIGEST", "INSTALLED", "SEEN")
    output.emit_table(columns, rows, "no backends yet; see `enginehouse backends available`")
    for backend in read(answer, tuple[ListedBackend, ...]):
        differs = ", ".join(one.node_name for one in backend.drift or () if not one.unknown)
        if differs:
            output.remark(f"{backend.name} differs on {differs}")
        unknown = ", ".join(one.node_name for one in backend.drift or () if one.unknown)
        if unknown:
            output.remark(f"{backend.name}: version unknown on {unknown}, because no digest is recorded there")


@command(
    "available",
    examples=("enginehouse backends available", "enginehouse backends available --all"),
)
@click.option(
    "--all", "everything", is_flag=True, help="Include single builds, development builds and what fits no node."
)
def available(everything: bool) -> None:
    """List the backends that the galleries offer for these nodes, installed ones first."""
    answer = connect().get("/backends/available")
    if emit_json(answer):
        return
    offered = read(answer, tuple[AvailableBackend, ...])
    first = {one.name: one.gallery_name for one in reversed(offered)}
    shown = [
        one
        for one in sorted(offered, key=lambda one: not one.installed)
        if everything or one.installed or (one.fits and not one.is_development and not one.is_variant)
    ]
    rows = [
        [
            one.name if first[one.name] == one.gallery_name else f"{one.gallery_name}@{one.name}",
            "installed" if one.installed else "" if one.fits else "no node",
            one.version,
            one.license,
            " ".join(one.description.split()),
        ]
        for one in shown
    ]
    columns = ("NAME", "", "VERSION", "LICENSE", "DESCRIPTION")
    output.emit_table(columns, rows, "no gallery offers a backend", is_last_cut=True)
    stale = sorted({one.gallery_name for one in shown if one.stale})
    if stale:
        output.remark(f"stale galleries: {', '.join(stale)}; see `enginehouse gallery list`")
    if len(shown) < len(offered):
        output.remark(f"{len(offered) - len(shown)} more with --all: single builds, and backends that fit no node")


# Of commands that act on nodes.
_targets = together(
    click.option("--all", "everywhere", is_flag=True, help="On all approved nodes."),
    click.option("--node", "nodes", multiple=True, metavar="NODE", help="On this node; repeatable."),
    selector_option,
    no_follow_option,
)


_PARALLEL = click.option(
    "--max-parallel", type=click.IntRange(1), metavar="NUMBER", help="Work on at most this many nodes at a time."
)


@command(
    "install",
    examples=(
        "enginehouse backends install llama-cpp --all",
        "enginehouse backends install llama-cpp --node attic --node cellar",
    ),
)
@click.argument("name")
@_targets
@click.option("--force", is_flag=True, help="Install again where it is already installed.")
@click.option("--uri", metavar="URI", help="Install from this image, archive or package instead of a gallery.")
@click.option("--alias", metavar="NAME", help="Another name for it on the workers; with --uri.")
@click.option("--sha256", metavar="HEX", help="Expected SHA-256 of the archive; with --uri.")
@_PARALLEL
def install(name: str, no_follow: bool, **more: Any) -> int:
    """Install the backend NAME on all approved nodes, or on those given with --node.

    An offline node installs it when it returns. Where it is already installed nothing changes; use `upgrade` for a
    newer version.
    """
    return _request("install", name, _chosen(more), more, no_follow)


@command(
    "upgrade",
    examples=(
        "enginehouse backends upgrade llama-cpp",
        "enginehouse backends upgrade llama-cpp --node attic",
        "enginehouse backends upgrade --all",
    ),
)
@click.argument("name", required=False)
@_targets
@_PARALLEL
@click.option("--no-canary", is_flag=True, help="Upgrade all nodes without waiting for the first of each kind.")
def upgrade(name: str | None, no_follow: bool, **more: Any) -> int:
    """Upgrade the backend NAME to the version of the gallery wherever it is installed, or on those given with --node.

    Without a NAME, --all upgrades everything that `enginehouse backends upgrades` shows. By default a quarter of the
    nodes is upgraded at a time; --max-parallel changes that. Where engines run, one node of each kind of hardware comes
    first; the others follow if it stays ready, otherwise it gets its version back.
    """
    if more.pop("no_canary"):
        more["canary"] = False
    if name is not None:
        return _request("upgrade", name, _chosen(more), more, no_follow)
    if more["nodes"] or more["selectors"] or not more["everywhere"]:
        what = "a name; --all means every node" if more["everywhere"] else "a name, or --all"
        raise click.UsageError(f"Specify what to upgrade: {what}")
    _chosen(more)
    return _upgrade_everything(more, no_follow)


def _upgrade_everything(more: dict[str, Any], no_follow: bool) -> int:
    """Request every upgrade before following the first, so that Ctrl-C while following leaves none out."""
    frontend = connect()
    found = read(frontend.post("/backends/upgrades/check", timeout_seconds=CHECK_SECONDS), dict[str, Upgrade])
    if not found:
        output.remark("everything is up to date")
        return 0
    answers, ends = [], []
    for name, upgrade in found.items():
        output.remark(f"upgrading {name} on {', '.join(node.node_name for node in upgrade.nodes)}")
        request = request_from("upgrade", name, [node.node_id for node in upgrade.nodes], more)
        try:
            answers.append(frontend.request("POST", "/api/operations", request))
        except (Conflict, NotFound) as error:
            # Its nodes changed since the check; the other upgrades go on.
            output.remark(error.message)
            ends.append(exit_code(error))
    ends += [finish(frontend, answer, no_follow=no_follow) for answer in answers]
    if len(set(ends)) == 1:
        return ends[0]
    return 3  # partial success


@command("upgrades", examples=("enginehouse backends upgrades", "enginehouse backends upgrades --json"))
@click.option("--cached", is_flag=True, help="Show the last check; do not ask the registries now.")
def upgrades(cached: bool) -> None:
    """List available upgrades, one line per backend and node."""
    frontend = connect()
    answer = (
        frontend.get("/backends/upgrades")
        if cached
        else frontend.post("/backends/upgrades/check", timeout_seconds=CHECK_SECONDS)
    )
    if emit_json(answer):
        return
    rows = [
        (
            name,
            node.node_name,
            *versions(
                (node.installed_version, "unknown" if node.unknown else node.installed_digest),
                (node.available_version, node.available_digest),
            ),
        )
        for name, upgrade in read(answer, dict[str, Upgrade]).items()
        for node in upgrade.nodes
    ]
    output.emit_table(("NAME", "NODE", "INSTALLED", "AVAILABLE"), rows, "everything is up to date")


@command(
    "delete",
    examples=("enginehouse backends delete llama-cpp --node attic", "enginehouse backends delete llama-cpp --all"),
)
@click.argument("name")
@_targets
@click.option("--force", is_flag=True, help="Delete it although models run from it, which are stopped.")
def delete(name: str, no_follow: bool, **more: Any) -> int:
    """Delete the backend NAME from the nodes given with --node, or with --all from every approved node.

    Where models run from it nothing is deleted, and the message names them, unless --force is given.
    """
    _check_where(more, "Specify where to delete it from")
    return _request("delete", name, _chosen(more), more, no_follow)


@command(
    "rollback",
    examples=("enginehouse backends rollback llama-cpp --node attic", "enginehouse backends rollback llama-cpp --all"),
)
@click.argument("name")
@_targets
@_PARALLEL
def rollback(name: str, no_follow: bool, **more: Any) -> int:
    """Return the backend NAME to its previous version on the nodes given with --node, or with --all on every node.

    Workers keep the version before the current one, so nothing is downloaded. Running replicas are replaced one after
    the other. Run it again to undo it. Nodes without a previous version are left out.
    """
    _check_where(more, "Specify where to roll it back")
    return _request("rollback", name, _chosen(more), more, no_follow)


def _check_where(more: dict[str, Any], what: str) -> None:
    if not (more["nodes"] or more["selectors"] or more["everywhere"]):
        raise click.UsageError(f"{what}: --all, --node NODE or --selector KEY=VALUE")


def _chosen(more: dict[str, Any]) -> list[str]:
    """Take the options that choose nodes out of `more`; the selected nodes, or none for all."""
    nodes, selectors, everywhere = more.pop("nodes"), more.pop("selectors"), more.pop("everywhere")
    if (nodes or selectors) and everywhere:
        raise click.UsageError(f"--all and {'--node' if nodes else '--selector'} exclude each other")
    return chosen_nodes(connect(), nodes, selectors) if selectors else checked_nodes(nodes)


def _request(kind: str, name: str, nodes: list[str], more: dict[str, Any], no_follow: bool) -> int:
    frontend = connect()
    answer = frontend.request("POST", "/api/operations", request_from(kind, name, nodes, more))
    return finish(frontend, answer, no_follow=no_follow)


for each in (list_backends, available, install, upgrade, rollback, delete, upgrades, plan):
    entry.add_command(each)
