"""`enginehouse local`: backends in a directory of this machine, without a server.

The directory has LocalAI's layout, so that of a LocalAI worker can be used. Only one process changes a directory at a
time; a running worker holds the lock on its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from enginehouse.cli.options import galleries as sources
from enginehouse.cli.options import programs
from enginehouse.cli.options.shared import NO_SERVER, command, emit, emit_json, group, setting
from enginehouse.cli.terminal import output
from enginehouse.core.backend import Resolved
from enginehouse.core.errors import Invalid
from enginehouse.core.progress import format_bytes
from enginehouse.core.reference import parse_uri
from enginehouse.settings.values import parse_size

if TYPE_CHECKING:
    from enginehouse.worker.backends.listing import LocalBackend
    from enginehouse.worker.local import Local


@group(
    "local",
    meanings=NO_SERVER,
    examples=(
        "enginehouse local install llama-cpp --backends-path ./backends",
        "enginehouse local list --backends-path ./backends",
        "enginehouse local rollback llama-cpp --backends-path ./backends",
    ),
)
def entry() -> None:
    """Install, upgrade and delete engines in a directory, without a server."""


# Of commands that use a backends directory.
place = programs.together(
    setting("backends_path", "The directory, in LocalAI's layout (the worker's in --data).", "DIR"),
    programs.galleries,
    programs.installing,
)


@command(
    "install",
    meanings=NO_SERVER,
    examples=(
        "enginehouse local install llama-cpp",
        "enginehouse local install quay.io/acme/engine:latest --name my-engine",
        "enginehouse local install https://example.org/engine.tar.zst --name my-engine --sha256 0123…",
        "enginehouse local install ./my-engine",
    ),
)
@click.argument("backend")
@click.option("--name", metavar="NAME", help="The directory to install into, if BACKEND is not a gallery name.")
@click.option("--alias", metavar="NAME", default="", help="Another name that models may use for it.")
@click.option("--sha256", metavar="HEX", default="", help="Expected SHA-256 of the archive.")
@click.option("--force", is_flag=True, help="Install again even if it is already installed.")
@place
def install(backend: str, name: str | None, alias: str, sha256: str, force: bool, **flags: Any) -> None:
    """Install BACKEND: a name from a gallery, an image, an archive, a directory or pypi:NAME==VERSION."""
    from enginehouse.cli.commands import local_work as working

    resolved, reasons = working.chosen(backend, name, flags, alias=alias, sha256=sha256)
    for reason in reasons:
        output.remark(reason)
    working.install(resolved, flags, force=force)


@command(
    "upgrade", meanings=NO_SERVER, examples=("enginehouse local upgrade llama-cpp", "enginehouse local upgrade --all")
)
@click.argument("names", nargs=-1)
@click.option("--all", "everything", is_flag=True, help="Upgrade everything that is installed.")
@click.option("--check", is_flag=True, help="Only show what could be upgraded.")
@place
def upgrade(names: tuple[str, ...], everything: bool, check: bool, **flags: Any) -> int:
    """Upgrade NAMES to the current version of their source. The previous version is kept for `rollback`."""
    from enginehouse.cli.commands import local_work as working

    if bool(names) == everything:
        raise click.UsageError("Specify what to upgrade: names, or --all")
    return working.upgrade(names, flags, check=check)


@command("rollback", meanings=NO_SERVER, examples=("enginehouse local rollback llama-cpp",))
@click.argument("name")
@place
def rollback(name: str, **flags: Any) -> None:
    """Restore the previous version of NAME; run it again to undo that."""
    from enginehouse.cli.commands import local_work as working

    async def work(local: Local) -> None:
        metadata = await local.roll_back(name)
        emit(metadata, f"{name} is back at {metadata.version or metadata.digest[:19] or 'the previous version'}")

    working.run(work, flags, doing=f"roll {name} back")


@command("delete", meanings=NO_SERVER, examples=("enginehouse local delete llama-cpp",))
@click.argument("name")
@place
def delete(name: str, **flags: Any) -> None:
    """Delete NAME, its previous version and the meta names that point to it."""
    from enginehouse.cli.commands import local_work as working

    async def work(local: Local) -> None:
        directory = await local.delete(name)
        emit({"deleted": directory}, f"deleted {directory}")

    working.run(work, flags, doing=f"delete {name}")


@command("list", meanings=NO_SERVER, examples=("enginehouse local list", "enginehouse local list --json"))
@place
def list_backends(**flags: Any) -> None:
    """List installed backends, those of the system, meta names and broken ones."""
    from enginehouse.host import disk
    from enginehouse.worker.backends import listing
    from enginehouse.worker.backends.trees import Trees

    settings = sources.local_settings(flags)
    # Listing takes no lock, so it works beside a running worker.
    with disk.naming_the_file(settings.backends, "--backends-path"):
        backends = listing.list_backends(Trees(settings.backends, settings.backends_system_path))
    if emit_json(backends):
        return
    columns = ("NAME", "KIND", "VERSION", "DIGEST", "INSTALLED", "PREVIOUS", "FROM")
    rows = [_cells(one) for one in backends]
    output.emit_table(columns, rows, "nothing is installed here", is_last_cut=True)


@command("gc", meanings=NO_SERVER, examples=("enginehouse local gc", "enginehouse local gc --cap 2GiB"))
@click.option("--cap", metavar="SIZE", help="How much to keep, for example 2GiB.")
@place
def collect(cap: str | None, **flags: Any) -> None:
    """Remove downloads that no version needs any more, least recently used first."""
    from enginehouse.cli.commands import local_work as working

    try:
        limit = parse_size(cap) if cap else None
    except Invalid as error:
        raise Invalid(f"cannot use {cap!r} as --cap: {error.message}", code="invalid_setting") from None

    async def work(local: Local) -> None:
        result = await local.collect(limit)
        if not emit_json(result):
            output.say(
                f"removed {result.removed}, {format_bytes(result.freed_bytes)} freed, "
                f"{format_bytes(result.kept_bytes)} kept"
            )

    working.run(work, flags, doing="collect garbage")


def _cells(one: LocalBackend) -> list[str]:
    previous = one.previous_version or output.short_digest(one.previous_digest) or "yes"
    return [
        one.name,
        f"meta → {one.leads_to}" if one.kind == "meta" else one.kind,
        one.version,
        output.short_digest(one.digest),
        f"{output.age_of(one.installed_at)} ago" if one.installed_at else "",
        previous if one.can_roll_back else "",
        one.uri,
    ]


def emit_plan(resolved: Resolved, reasons: tuple[str, ...], flags: dict[str, Any]) -> None:
    """Show the plan of an install on this machine, for `enginehouse backends plan`."""
    from enginehouse.cli.commands import local_work as working

    plan = working.plan(resolved, flags)
    if emit_json({"plan": plan, "reasons": reasons}):
        return
    unpacked = f"about {format_bytes(plan.unpacked_bytes)}" if plan.unpacked_bytes else "unknown until it is fetched"
    is_counted = plan.layers or plan.is_current or parse_uri(plan.source).kind != "package"
    state = "installed, nothing to do" if plan.is_current else "another version" if plan.installed_digest else ""
    output.emit_facts(
        [
            ("backend", plan.directory),
            ("now", state or ("installed" if plan.tree_bytes else "not installed")),
            ("source", plan.source),
            ("digest", plan.digest),
            ("platform", plan.platform),
            ("to fetch", format_bytes(plan.fetch_bytes) if is_counted else "what uv has not cached"),
            ("reused", format_bytes(plan.reused_bytes) if plan.layers else ""),
            ("unpacked", unpacked),
            ("on disk now", format_bytes(plan.tree_bytes)),
            ("free now", format_bytes(plan.free_bytes)),
            ("free after", format_bytes(plan.free_after_bytes)),
            *(("why", reason) for reason in reasons),
        ]
    )


for each in (install, upgrade, rollback, delete, list_backends, collect):
    entry.add_command(each)
