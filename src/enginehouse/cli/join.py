"""`enginehouse join`: this machine as another node of a server, in the foreground. The work is run.worker's."""

from __future__ import annotations

import os
from typing import Any

import click

from enginehouse.cli.command import command, given, setting
from enginehouse.core.errors import Invalid


@command(
    "join",
    examples=(
        "enginehouse join http://server:8080 --token - < join.token",
        "ENGINEHOUSE_TOKEN=… enginehouse join http://server:8080 --name attic",
    ),
)
@click.argument("url")
@setting("name", "Name of this node (the host name).", "NAME")
@setting("advertise_host", "Address of this machine as the frontend reaches it.", "ADDRESS")
@setting("base_port", "First port for engines (50051).", "PORT")
@setting("labels", "Labels of this node.", "KEY=VALUE,…")
def entry(**flags: Any) -> int:
    """Join this machine to the server at URL as another node.

    The node shows up as pending until `enginehouse nodes approve NAME` on the server. Runs until Ctrl-C; what is asked
    of the node while it is away happens when it returns.
    """
    from enginehouse import run
    from enginehouse.cli.output import remark
    from enginehouse.settings import WorkerSettings, load

    shared = given()
    settings = load(WorkerSettings, {**flags, "data": shared.data, "token": shared.token}, os.environ)
    if not settings.token:
        raise Invalid(
            f"cannot join {settings.url} without a join token: make one there with "
            "`enginehouse tokens create --role join` and give it with --token - or ENGINEHOUSE_TOKEN",
            code="unauthenticated",
            param="token",
        )
    remark(f"joining {settings.url} as {settings.name} (data in {settings.data}); Ctrl-C ends it")
    return run.worker(settings)
