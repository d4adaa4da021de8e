"""`enginehouse backends`: engines on the nodes.

Install, upgrade and delete are operations that go to all chosen nodes at once; following one is the default.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from enginehouse.cli.commands.plan import CHECK_SECONDS, plan, request_from, versions
from enginehouse.cli.options.names import checked_nodes
from enginehouse.cli.options.shared import command, group, wants_json
from enginehouse.cli.terminal import output
from enginehouse.core.errors import Conflict, NotFound, exit_code


@group(
    "backends",
    examples=("enginehouse backends available", "enginehouse backends install llama-cpp --all"),
)
def entry() -> None:
    """See, install, upgrade and delete engines."""


@command("list", examples=("enginehouse backends list",))
def list_backends() -> None:
    """What is installed, one line per backend and node."""
    from enginehouse.cli.answers import ListedBackend
    from enginehouse.cli.client.connect import connect, read

    answer = connect().get("/backends")
    if wants_json():
        output.emit_json(answer)
        return
    rows = [
        (
            backend.name,
            node.node_name,
            "broken" if node.is_broken else node.node_status,
            # A meta name has no version of its own; it may lead to another build on the next node.
            f"({node.meta_backend_for})" if node.meta_backend_for else node.version,
            node.digest.removeprefix("sha256:")[:12],
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
            output.remark(f"{backend.name}: its version is unknown on {unknown}; no digest is recorded there")


@command(
    "available",
    examples=("enginehouse backends available", "enginehouse backends available --all"),
)
@click.option("--all", "everything", is_flag=True, help="Also what fits no node, single builds, builds for developers.")
def available(everything: bool) -> None:
    """What the galleries offer to the nodes there are, what is installed first."""
    from enginehouse.cli.answers import AvailableBackend
    from enginehouse.cli.client.connect import connect, read

    answer = connect().get("/backends/available")
    if wants_json():
        output.emit_json(answer)
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
    output.emit_table(columns, output.fit_last(columns, rows), "no gallery offers a backend")
    stale = sorted({one.gallery_name for one in shown if one.stale})
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


_PARALLEL = click.option(
    "--max-parallel", type=click.IntRange(1), metavar="NUMBER", help="On so many nodes at the same time."
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
@click.option("--force", is_flag=True, help="Install again where it is already there.")
@click.option("--uri", metavar="URI", help="From this image, archive or package instead of a gallery.")
@click.option("--alias", metavar="NAME", help="Another name that workers know it by; with --uri.")
@click.option("--sha256", metavar="HEX", help="Of an archive; with --uri.")
@_PARALLEL
def install(name: str, nodes: tuple[str, ...], everywhere: bool, no_follow: bool, **more: Any) -> int:
    """Install the backend NAME: on all approved nodes, or on those given with --node.

    A node that is away gets it when it returns. Where it is there already nothing changes: `upgrade` brings a new
    version.
    """
    return _request("install", name, _chosen(nodes, everywhere), more, no_follow)


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
def upgrade(name: str | None, nodes: tuple[str, ...], everywhere: bool, no_follow: bool, **more: Any) -> int:
    """Bring the backend NAME to the version of the gallery wherever it is installed, or on the nodes given with --node.

    Without a NAME, --all upgrades everything that `enginehouse backends upgrades` shows. A quarter of the nodes at a
    time, unless --max-parallel says otherwise.
    """
    if name is not None:
        return _request("upgrade", name, _chosen(nodes, everywhere), more, no_follow)
    if nodes or not everywhere:
        what = "a name; --all is for every node" if everywhere else "a name, or --all"
        raise click.UsageError(f"Say what to upgrade: {what}")
    return _upgrade_everything(more, no_follow)


def _upgrade_everything(more: dict[str, Any], no_follow: bool) -> int:
    """Everything is asked for before anything is watched: whoever stops watching has asked for all of it."""
    from enginehouse.cli.answers import UpgradableBackend
    from enginehouse.cli.client.connect import connect, read
    from enginehouse.cli.commands.ops import finish

    frontend = connect()
    found = read(frontend.post("/backends/upgrades/check", timeout_seconds=CHECK_SECONDS), dict[str, UpgradableBackend])
    if not found:
        output.remark("everything is at the version of its gallery")
        return 0
    answers, ends = [], []
    for name, upgrade in found.items():
        output.remark(f"upgrading {name} on {', '.join(node.node_name for node in upgrade.nodes)}")
        request = request_from("upgrade", name, [node.node_id for node in upgrade.nodes], more)
        try:
            answers.append(frontend.request("POST", "/api/operations", request))
        except (Conflict, NotFound) as error:
            # Its nodes changed since the check; that is no reason to leave the others behind.
            output.remark(error.message)
            ends.append(exit_code(error))
    ends += [finish(frontend, answer, no_follow=no_follow) for answer in answers]
    if len(set(ends)) == 1:
        return ends[0]
    return 3  # some of it done and some not


@command("upgrades", examples=("enginehouse backends upgrades", "enginehouse backends upgrades --json"))
@click.option("--cached", is_flag=True, help="As of the last check, without asking the registries now.")
def upgrades(cached: bool) -> None:
    """What could be upgraded, one line per backend and node."""
    from enginehouse.cli.answers import UpgradableBackend
    from enginehouse.cli.client.connect import connect, read

    frontend = connect()
    answer = (
        frontend.get("/backends/upgrades")
        if cached
        else frontend.post("/backends/upgrades/check", timeout_seconds=CHECK_SECONDS)
    )
    if wants_json():
        output.emit_json(answer)
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
        for name, upgrade in read(answer, dict[str, UpgradableBackend]).items()
        for node in upgrade.nodes
    ]
    output.emit_table(("NAME", "NODE", "INSTALLED", "AVAILABLE"), rows, "everything is at the version of its gallery")


@command(
    "delete",
    examples=("enginehouse backends delete llama-cpp --node attic", "enginehouse backends delete llama-cpp --all"),
)
@click.argument("name")
@_targets
def delete(name: str, nodes: tuple[str, ...], everywhere: bool, no_follow: bool) -> int:
    """Delete the backend NAME from the nodes given with --node, or with --all from every approved node."""
    if not nodes and not everywhere:
        raise click.UsageError("Say where to delete it from: --all, or --node NODE")
    return _request("delete", name, _chosen(nodes, everywhere), {}, no_follow)


def _chosen(nodes: tuple[str, ...], everywhere: bool) -> list[str]:
    """Empty for all."""
    if nodes and everywhere:
        raise click.UsageError("--all and --node exclude each other")
    return checked_nodes(nodes)


def _request(kind: str, name: str, nodes: list[str], more: dict[str, Any], no_follow: bool) -> int:
    from enginehouse.cli.client.connect import connect
    from enginehouse.cli.commands.ops import finish

    frontend = connect()
    answer = frontend.request("POST", "/api/operations", request_from(kind, name, nodes, more))
    return finish(frontend, answer, no_follow=no_follow)


for each in (list_backends, available, install, upgrade, delete, upgrades, plan):
    entry.add_command(each)
