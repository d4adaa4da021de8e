"""`enginehouse gallery`: the entries of the galleries and the build for a machine, without a server.

Reads the configured galleries through their cached copies; installs nothing and contacts no node. The machine is this
one unless `--capability` or `--platform` is given.
"""

from __future__ import annotations

import sys
from typing import Any

import click

from enginehouse.cli.options import galleries as sources
from enginehouse.cli.options import programs
from enginehouse.cli.options.names import checked_backend
from enginehouse.cli.options.shared import NO_SERVER, command, emit_json, group, wants_json
from enginehouse.cli.terminal import output
from enginehouse.core.capability import check_capability
from enginehouse.core.errors import Hopeless
from enginehouse.core.gallery import Catalogue, Choice
from enginehouse.core.gallery_entry import Gallery, GalleryEntry

Machine = tuple[str, str, str]  # capability, why, platform


@group(
    "gallery",
    meanings=NO_SERVER,
    examples=("enginehouse gallery list", "enginehouse gallery resolve llama-cpp --capability nvidia"),
)
def entry() -> None:
    """Browse the galleries, without a server."""


_READ = "Read this gallery instead of the configured ones; repeatable."
# Of commands that choose a build for a machine.
_machine = programs.together(
    click.option("--capability", metavar="WORD", help="Choose for this capability instead of this machine's."),
    click.option("--platform", metavar="OS/ARCH", help="Choose for this platform instead of this machine's."),
    click.option("--gallery", "chosen", multiple=True, metavar="FILE|URL", help=_READ),
    programs.galleries,
    programs.allow_host,
)


@command(
    "list",
    meanings=NO_SERVER,
    examples=("enginehouse gallery list", "enginehouse gallery list --all --capability nvidia-cuda-12"),
)
@click.option("--all", "everything", is_flag=True, help="List every entry, with the reason if it cannot be installed.")
@_machine
def list_entries(
    everything: bool, capability: str | None, platform: str | None, chosen: tuple[str, ...], **flags: Any
) -> None:
    """List what can be installed on this machine, and which build it gets."""
    galleries, states = sources.load_galleries(flags, chosen)
    catalogue = Catalogue(galleries)
    machine = _this_machine(capability, platform)
    rows = [_row(catalogue, one, entry, machine) for one, entry in catalogue.entries()]
    total, fitting = len(rows), sum(1 for row in rows if row["build"])
    if not everything:
        variants = catalogue.variants()
        rows = [row for row in rows if row["build"] and not row["is_development"] and row["entry"] not in variants]
    if emit_json({"capability": machine[0], "platform": machine[2], "galleries": states, "entries": rows}):
        return
    _emit(rows, everything)
    about = f"capability {machine[0]} ({machine[1]}), {machine[2]}"
    more = "" if everything else f"; --all shows all {total}, with reasons"
    output.remark(f"{len(rows)} shown, {fitting} of {total} entries can be installed here: {about}{more}")


@command(
    "show",
    meanings=NO_SERVER,
    examples=("enginehouse gallery show llama-cpp", "enginehouse gallery show localai@llama-cpp"),
)
@click.argument("name")
@_machine
def show(name: str, capability: str | None, platform: str | None, chosen: tuple[str, ...], **flags: Any) -> None:
    """Show the entry NAME and the build that this machine gets."""
    catalogue = Catalogue(sources.load_galleries(flags, chosen)[0])
    found = catalogue.builds(checked_backend(name))
    machine = _this_machine(capability, platform)
    try:
        choice: Choice | None = catalogue.explain(name, machine[0], machine[2])
        reasons = choice.reasons if choice else ()
    except Hopeless as error:
        choice, reasons = None, (error.message,)
    if wants_json():
        body = [{"gallery": one.name, "entry": entry} for one, entry in found]
        output.emit_json({"found": body, "build": choice.resolved if choice else None, "reasons": reasons})
        return
    for one, entry in found:
        output.emit_facts(_facts(one, entry))
        output.say("")
    output.emit_facts([("here", choice.resolved.directory if choice else "none"), *(("why", one) for one in reasons)])


@command(
    "resolve",
    meanings=NO_SERVER,
    examples=(
        "enginehouse gallery resolve llama-cpp",
        "enginehouse gallery resolve localai@llama-cpp --capability nvidia-cuda-12 --platform linux/amd64",
    ),
)
@click.argument("name")
@_machine
def resolve(name: str, capability: str | None, platform: str | None, chosen: tuple[str, ...], **flags: Any) -> None:
    """Show the build that NAME resolves to on this machine, and why; or every reason why there is none."""
    catalogue = Catalogue(sources.load_galleries(flags, chosen)[0])
    machine = _this_machine(capability, platform)
    choice = catalogue.explain(checked_backend(name), machine[0], machine[2])
    if emit_json({"capability": machine[0], "capability_reason": machine[1], **_as_dict(choice)}):
        return
    resolved = choice.resolved
    output.emit_facts(
        [
            ("build", resolved.directory),
            ("uri", resolved.uri),
            *(("mirror", one) for one in resolved.mirrors),
            ("sha256", resolved.sha256),
            ("version", resolved.version),
            ("gallery", choice.gallery),
            ("capability", f"{machine[0]} ({machine[1]})"),
            ("platform", machine[2]),
            *(("why", one) for one in choice.reasons),
        ]
    )


def _this_machine(capability: str | None, platform: str | None) -> Machine:
    from enginehouse.host import hardware

    if capability:
        return check_capability(capability), "given", platform or hardware.platform()
    decision = hardware.detect()
    return decision.capability, decision.reason, platform or hardware.platform()


def _row(catalogue: Catalogue, gallery: Gallery, entry: GalleryEntry, machine: Machine) -> dict[str, Any]:
    full = f"{gallery.name}@{entry.name}"
    build, reason = "", ""
    try:
        build = catalogue.explain(full, machine[0], machine[2]).resolved.directory
    except Hopeless as error:
        reason = error.message.removeprefix(f"cannot install {full}: ")
    is_first = catalogue.find(entry.name)[0] is gallery
    return {
        "name": entry.name if is_first else full,
        "entry": entry.name,
        "gallery": gallery.name,
        "is_meta": entry.is_meta,
        "is_development": entry.is_development,
        "build": build,
        "reason": reason,
        "description": entry.description,
    }


def _emit(rows: list[dict[str, Any]], everything: bool) -> None:
    cells = [
        [row["name"], row["build"], row["gallery"], " ".join((row["reason"] or row["description"]).split())]
        for row in rows
    ]
    head: tuple[str, ...] = ("NAME", "BUILD HERE", "GALLERY", "DESCRIPTION")
    if everything and output.is_terminal(sys.stdout):
        # Names are long here, so one column shows the build or the reason.
        head = ("NAME", "GALLERY", "HERE")
        cells = [
            [name, gallery, f"no: {text}" if not build else text if build == row["entry"] else f"→ {build}"]
            for row, (name, build, gallery, text) in zip(rows, cells, strict=True)
        ]
    output.emit_table(head, cells, "no gallery has any entries", is_last_cut=True)


def _facts(gallery: Gallery, entry: GalleryEntry) -> list[tuple[str, str]]:
    return [
        ("name", entry.name),
        ("gallery", f"{gallery.name} ({gallery.url})"),
        ("kind", "meta: resolves to a build for the machine" if entry.is_meta else "build"),
        ("alias", entry.alias),
        ("version", entry.version),
        ("uri", entry.uri),
        *(("mirror", one) for one in entry.mirrors),
        ("sha256", entry.sha256),
        ("platforms", ", ".join(entry.platforms)),
        *((("for " + key), target) for key, target in (sorted(entry.capabilities.items()) if entry.is_meta else ())),
        ("license", entry.license),
        ("tags", ", ".join(entry.tags)),
        *(("home", one) for one in entry.urls),
        ("description", " ".join(entry.description.split())),
    ]


def _as_dict(choice: Choice) -> dict[str, Any]:
    return {"gallery": choice.gallery, "resolved": choice.resolved, "reasons": choice.reasons}


for each in (list_entries, show, resolve):
    entry.add_command(each)
