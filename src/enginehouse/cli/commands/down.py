"""`enginehouse down`: stop the `up`, or the worker, of a data directory, and wait until it has stopped."""

from __future__ import annotations

import os
from pathlib import Path

import click

from enginehouse.cli.client.connect import waiting
from enginehouse.cli.options.durations import DURATION
from enginehouse.cli.options.shared import NO_SERVER, command, emit, given
from enginehouse.cli.terminal import output
from enginehouse.core.errors import Unavailable
from enginehouse.host import detached
from enginehouse.settings.programs import find_data_directory

LIMIT_SECONDS = "120s"  # three programs have 20 seconds each, and engines their own grace
_LOCKS = (("up", "lock"), ("worker", "worker.lock"))  # the worker of an `up` has the second one


@command(
    "down",
    meanings=NO_SERVER,
    examples=("enginehouse down", "enginehouse down --data ~/engines", "enginehouse down --force"),
)
@click.option("--force", "is_forced", is_flag=True, help="Kill it at once; everything recovers at the next start.")
@click.option(
    "--limit",
    "limit_seconds",
    type=DURATION,
    default=LIMIT_SECONDS,
    metavar="DURATION",
    help=f"How long to wait for it to stop ({LIMIT_SECONDS}).",
)
def entry(is_forced: bool, limit_seconds: float) -> None:
    """Stop what runs on this machine: the `up`, or the `join`, of this data directory.

    Stops worker, frontend and NATS in order and waits for their end. Installed backends and models are kept.
    """
    data = find_data_directory({"data": given().data}, os.environ)
    found = _running(data)
    if found is None:
        emit({"stopped": [], "data": str(data)}, f"nothing is running in {data}")
        return
    program, lock, pid = found
    parts, ran = detached.parts_of(pid) if program == "up" else ["worker"], detached.ran_seconds(pid)
    with waiting(f"stopping {', '.join(parts)}"):
        if not detached.stop(pid, lock, limit=limit_seconds, is_forced=is_forced):
            raise Unavailable(
                f"cannot stop process {pid} within {limit_seconds:g} s: it is still stopping. "
                "`enginehouse down` waits again, `enginehouse down --force` kills it"
            )
    answer = {"stopped": parts, "data": str(data), "pid": pid, "ran_seconds": round(ran, 1), "forced": is_forced}
    verb = "killed" if is_forced else "stopped"
    emit(answer, f"{verb} {', '.join(parts) or program} (process {pid}, ran for {output.duration(ran)})")


def _running(data: Path) -> tuple[str, Path, int] | None:
    for program, name in _LOCKS:
        pid = detached.holder(data / name)
        if pid is not None:
            return program, data / name, pid
    return None
