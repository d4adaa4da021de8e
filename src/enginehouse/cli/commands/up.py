"""`enginehouse up`: a whole server on this machine in one command. Calls run.up."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from enginehouse.cli.options.programs import (
    galleries,
    installing,
    listening,
    model_sources,
    node_networks,
    serving,
    timings,
)
from enginehouse.cli.options.shared import NO_SERVER, command, described, given, log_level, setting, wants_json
from enginehouse.cli.terminal import output
from enginehouse.settings.programs import UpSettings, load, origins_of

if TYPE_CHECKING:
    from enginehouse.parent import Welcome


@command(
    "up",
    meanings=NO_SERVER,
    examples=(
        "enginehouse up",
        "enginehouse up --host 0.0.0.0        # open to other machines, with credentials",
        "enginehouse up --port 9000 --data ~/engines",
    ),
)
@listening
@setting("name", "Name of this node (the host name).", "NAME")
@setting("nats_port", "Port of the embedded NATS; if not given, 4222 or the next free one.", "PORT")
@setting("advertise_nats", "Address at which other machines reach NATS.", "HOST[:PORT]")
@setting("base_port", "First port for engines (50051).", "PORT")
@described("approve_keys", "KEY,…")
@node_networks
@galleries
@model_sources
@installing
@timings
@serving
@log_level
@click.option("--new-keys", is_flag=True, help="Make new keys where those of the database are missing.")
def entry(new_keys: bool, **flags: Any) -> int:
    """Run everything on this machine.

    Starts NATS, a frontend and a worker and keeps them running. Ctrl-C stops them in order; the next `up` on the same
    data directory continues with the same state.
    """
    asked = {**flags, "data": given().data}
    settings = load(UpSettings, asked, os.environ)
    # Imported after the settings, so that a bad setting is reported at once.
    from enginehouse import run

    greet = _greeting(_greet_programs if wants_json() else _greet_people)
    return run.up(settings, greet, origins_of(UpSettings, asked, os.environ), new_keys=new_keys)


def _greeting(greet: Callable[[Welcome], None]) -> Callable[[Welcome], None]:
    """`greet`, with a closed stdout ignored: the server must run all the same."""

    def greeting(welcome: Welcome) -> None:
        try:
            greet(welcome)
        except OSError:
            from enginehouse.host.children import silence

            silence(sys.stdout)

    return greeting


def _greet_people(welcome: Welcome) -> None:
    hint = (
        "on the other machine, with a copy of that file"
        if welcome.is_open
        else "here with another --data; for other machines: up --host 0.0.0.0"
    )
    page = (
        f"{welcome.login}   (one use, 10 minutes; `{welcome.login_again}` makes another)"
        if welcome.login
        else f"{welcome.url}   (`{welcome.login_again}` prints a link that signs you in)"
    )
    lines = [
        "",
        f"  Enginehouse is up: {welcome.url}",
        "",
        f"  web page     {page}",
        f"  API          {welcome.url}/v1   (any OpenAI client)",
        f"  admin token  {welcome.admin_token_file}   (commands on this machine find it)",
        f"  add a node   {welcome.join}",
        f"               ({hint})",
        f"  try it       {welcome.try_it}",
        "",
        "  Ctrl-C stops everything; installed backends and models are kept.",
        "",
    ]
    print("\n".join(lines), flush=True)


def _greet_programs(welcome: Welcome) -> None:
    output.emit_json_line(welcome)
