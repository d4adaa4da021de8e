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
from enginehouse.core.errors import Hopeless, Invalid, Unavailable
from enginehouse.settings.programs import UpSettings, load, origins_of

if TYPE_CHECKING:
    from enginehouse.parent import Welcome

DETACH_SECONDS = 300.0  # a first start on a slow machine takes half a minute; a frontend may wait for its store


@command(
    "up",
    meanings=NO_SERVER,
    examples=(
        "enginehouse up",
        "enginehouse up --host 0.0.0.0        # open to other machines, with credentials",
        "enginehouse up --port 9000 --data ~/engines",
        "enginehouse up --detach",
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
@click.option("--detach", is_flag=True, help="Return when everything is ready; `enginehouse down` stops it.")
def entry(detach: bool, new_keys: bool, **flags: Any) -> int:
    """Run everything on this machine.

    Starts NATS, a frontend and a worker and keeps them running. Ctrl-C stops them in order; the next `up` on the same
    data directory continues with the same state.
    """
    asked = {**flags, "data": given().data}
    settings = load(UpSettings, asked, os.environ)
    if detach:
        return _detach(settings, flags | {"new_keys": new_keys})
    # Imported after the settings, so that a bad setting is reported at once.
    from enginehouse import run

    greet = _greeting(_greet_programs if wants_json() else _greet_people)
    return run.up(settings, greet, origins_of(UpSettings, asked, os.environ), new_keys=new_keys)


def _detach(settings: UpSettings, flags: dict[str, Any]) -> int:
    """Start the same command without a terminal, and greet in its place."""
    from enginehouse.cli.client.connect import waiting
    from enginehouse.cli.options.again import words_of
    from enginehouse.host import detached, disk

    disk.make_usable(settings.data)
    log = settings.data / "logs" / "up.log"
    with disk.naming_the_file(settings.data):
        log.parent.mkdir(exist_ok=True)
    argv = [sys.executable, "-m", "enginehouse", "up", "--data", str(settings.data), "--json"]
    argv += words_of(click.get_current_context().command, flags)
    with waiting("starting nats-server, frontend and worker"):
        line = detached.start(argv, os.environ, log, remark=output.remark, limit=DETACH_SECONDS)
    welcome = _welcome_in(line)
    if wants_json():
        output.emit_json_line(welcome)
    else:
        _greet_people(welcome, is_detached=True, log=str(log))
    return 0


def _welcome_in(line: bytes) -> Welcome:
    """What the detached program printed: its greeting, or the error it ended with."""
    import msgspec

    from enginehouse.parent import Welcome

    said = msgspec.json.decode(line)
    if error := said.get("error"):
        refusal = {2: Invalid, 4: Unavailable}.get(error["exit_code"], Hopeless)
        raise refusal(error["message"], code=error["code"], param=error.get("param"))
    return msgspec.convert(said, Welcome)


def _greeting(greet: Callable[[Welcome], None]) -> Callable[[Welcome], None]:
    """`greet`, with a closed stdout ignored: the server must run all the same."""

    def greeting(welcome: Welcome) -> None:
        try:
            greet(welcome)
        except OSError:
            from enginehouse.host.children import silence

            silence(sys.stdout)

    return greeting


def _greet_people(welcome: Welcome, *, is_detached: bool = False, log: str = "") -> None:
    if welcome.is_open:
        hints = [f"(on a machine with Python 3.11 or newer; it asks for the token in {welcome.join_token_file})"]
        hints += [f"sha256 of join.sh: {welcome.join_sha256}"] if welcome.join_sha256 else []
    else:
        hints = ["(here with another --data; for other machines: up --host 0.0.0.0)"]
    how_it_ends = "Ctrl-C stops everything; installed backends and models are kept."
    if is_detached:
        how_it_ends = f"It goes on without this terminal (log: {log}).\n  `{welcome.down}` stops it."
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
        *(f"               {hint}" for hint in hints),
        f"  try it       {welcome.try_it}",
        "",
        f"  {how_it_ends}",
        "",
    ]
    print("\n".join(lines), flush=True)


def _greet_programs(welcome: Welcome) -> None:
    output.emit_json_line(welcome)
