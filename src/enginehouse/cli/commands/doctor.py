"""`enginehouse doctor`: checks this machine, the server and all nodes, and says what to do about each finding.

It changes nothing. The exit code says whether something needs a person. On a machine without a server, such as a worker
that has joined one, it checks what can be checked there: the machine, and the way to its server.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import click
import msgspec
from msgspec import Struct

from enginehouse.cli.client.connect import connect, read
from enginehouse.cli.client.reaching import NodeRecord, is_of_server, reach_nats, reach_server, read_node_record
from enginehouse.cli.options.shared import command, emit_json, given
from enginehouse.cli.terminal import output
from enginehouse.core.errors import Denied, EnginehouseError, NotFound, Unauthenticated, Unavailable
from enginehouse.core.finding import Finding, ReachRecord, has_problem
from enginehouse.settings.programs import find_data_directory

LOOK_SECONDS = 30.0  # the frontend tries every node, each for two seconds at most
STALE_SECONDS = 900.0  # a worker asks every five minutes
COLLAPSED = 3  # findings of one area that are all right; more are counted
_MARKS = {"ok": "✓", "note": "!", "problem": "✗"}
_PLAIN = {"ok": "ok", "note": "note", "problem": "PROBLEM"}


class _Looked(Struct, frozen=True):
    findings: tuple[Finding, ...] = ()


@command("doctor", examples=("enginehouse doctor", "enginehouse doctor --all", "enginehouse doctor --json"))
@click.option("--all", "everything", is_flag=True, help="Show everything that is all right, too.")
def entry(everything: bool) -> int:
    """Check this machine and its server; say what to do.

    Looks at disk, ports, clock, kernel and graphics of this machine; at the server, its database, NATS and galleries;
    and at every node, in both directions. Exits with 1 if something needs a person, otherwise with 0.
    """
    from enginehouse.cli.commands.doctor_here import look_here

    data = find_data_directory({"data": given().data}, os.environ)
    found = [*look_here(data), *_look_at_server(read_node_record(data), data)]
    if not emit_json({"needs_person": has_problem(found), "findings": found}):
        _show(found, everything=everything)
    return 1 if has_problem(found) else 0


def _look_at_server(record: NodeRecord | None, data: Path) -> list[Finding]:
    try:
        frontend = connect()
    except Unavailable as error:
        if error.code != "no_server":
            raise
        return _look_as_worker(record, data)
    found = reach_server(frontend.url)
    if has_problem(found):
        return found
    try:
        answer = frontend.get("/api/doctor", timeout_seconds=LOOK_SECONDS)
    except (Unauthenticated, Denied) as error:
        advice = "Give a token with the role admin or viewer: --token @FILE, or enginehouse login"
        return [*found, Finding(area="server", level="problem", message=error.message, advice=advice)]
    except NotFound:
        older = "the server is older and does not examine itself"
        return [*found, Finding(area="server", level="note", message=older, advice="Upgrade it")]
    except EnginehouseError as error:
        return [*found, Finding(area="server", level="problem", message=error.message)]
    return [*found, *read(answer, _Looked).findings]


def _look_as_worker(record: NodeRecord | None, data: Path) -> list[Finding]:
    """From a machine that knows no server as a client: the way of its worker."""
    if record is None or not record.frontends:
        message = "no server is known here"
        advice = "Start one: enginehouse up. Or use one elsewhere: enginehouse login URL"
        return [Finding(area="server", level="note", message=message, advice=advice)]
    if is_of_server(data):
        return []  # it does not run, which is said already
    found = [one for url in record.frontends for one in reach_server(url)]
    found += reach_nats(record.nats_url) if record.nats_url else []
    return found if has_problem(found) else [*found, _reached_from_server(record, data)]


def _reached_from_server(record: NodeRecord, data: Path) -> Finding:
    """The other direction, which only the server can try: what it said to the worker last."""
    try:
        kept = msgspec.json.decode((data / "reach.json").read_bytes(), type=ReachRecord)
    except (OSError, msgspec.DecodeError):
        kept = None
    age = time.time() - kept.at if kept is not None else 0.0
    if kept is None or age > STALE_SECONDS:
        return Finding(
            area="reach",
            level="note",
            message=f"whether the server reaches this machine ({record.name}) is not known here",
            advice="Wait until its worker has joined, or run `enginehouse doctor` on the server",
        )
    message = f"{kept.finding.message} (asked {output.age(age)} ago)"
    return msgspec.structs.replace(kept.finding, message=message)


def _show(found: list[Finding], *, everything: bool) -> None:
    marks = _MARKS if output.can_show("✓✗→", sys.stdout) else _PLAIN
    arrow = "→" if marks is _MARKS else "->"
    width = max(len(marks[one.level]) for one in found)
    counts: dict[str, int] = {}
    for one in found:
        counts[one.area] = counts.get(one.area, 0) + (one.level == "ok")
    told: set[str] = set()
    for one in found:
        if one.level == "ok" and not everything and counts[one.area] > COLLAPSED:
            if one.area not in told:
                told.add(one.area)
                output.say_wrapped(
                    f"{counts[one.area]} checks passed; --all shows each", f"{marks['ok']:<{width}} {one.area:<9} "
                )
            continue
        output.say_wrapped(one.message, f"{marks[one.level]:<{width}} {one.area:<9} ")
        if one.advice and one.level != "ok":
            output.say_wrapped(f"{arrow} {one.advice}", " " * (width + 11))
    problems = sum(one.level == "problem" for one in found)
    output.remark(
        "nothing needs you" if not problems else f"{problems} {'thing needs' if problems == 1 else 'things need'} you"
    )
