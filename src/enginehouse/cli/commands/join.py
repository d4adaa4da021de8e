"""`enginehouse join`: this machine as another node of a server, in the foreground. The work is run.worker's."""

from __future__ import annotations

import os
from typing import Any

import click

from enginehouse.cli.options.galleries import installing
from enginehouse.cli.options.shared import JOIN_TOKEN, command, given, log_level, setting
from enginehouse.core.errors import Invalid


@command(
    "join",
    meanings={"--url": "", "--token": JOIN_TOKEN, "--json": ""},
    examples=(
        "enginehouse join http://server:8080 --token @join.token",
        "ENGINEHOUSE_TOKEN=… enginehouse join http://server:8080 --name attic",
    ),
)
@click.argument("address", metavar="URL")
@setting("name", "Name of this node (the host name).", "NAME")
@setting("nats_url", "The NATS server, where the frontend does not say; may hold user:password@.", "URL")
@setting("advertise_host", "Address of this machine as the frontend reaches it.", "ADDRESS")
@setting("base_port", "First port for engines (50051).", "PORT")
@setting("labels", "Labels of this node.", "KEY=VALUE,…")
@installing
@log_level
def entry(address: str, **flags: Any) -> int:
    """Join this machine to the server at URL as another node.

    The node shows up as pending until `enginehouse nodes approve NAME` on the server. Runs until Ctrl-C; what is asked
    of the node while it is away happens when it returns. Several frontends of one cluster: their addresses with commas.
    """
    from enginehouse.cli.terminal.output import remark
    from enginehouse.settings.programs import WorkerSettings, load
    from enginehouse.settings.values import parse_http_urls

    try:
        url = parse_http_urls(address)
    except Invalid as error:
        raise Invalid(f"cannot join {address!r}: {error.message}", code="invalid_setting", param="url") from error
    shared = given()
    settings = load(WorkerSettings, {**flags, "data": shared.data, "url": url, "token": shared.token}, os.environ)
    if not settings.token:
        raise Invalid(
            f"cannot join {settings.url} without a join token: make one there with "
            "`enginehouse tokens create --role join` and give it with --token @FILE, --token - or ENGINEHOUSE_TOKEN",
            code="unauthenticated",
            param="token",
        )
    remark(f"joining {settings.url} as {settings.name} (data in {settings.data}); Ctrl-C ends it")
    from enginehouse import run

    _log_for_people()
    return run.worker(settings)


def _log_for_people() -> None:
    """Log to the terminal, with the states that matter to people in plain words."""
    import logging

    class Plain(logging.Formatter):
        def format(self, record: logging.LogRecord) -> str:
            event, _, rest = record.getMessage().partition(" ")
            match event:
                case "worker.waiting" | "worker.bus_unavailable":
                    return rest
                case "worker.joined":
                    return "joined: this machine takes work now"
                case _:
                    return super().format(record)

    shown = logging.StreamHandler()
    shown.setFormatter(Plain("%(asctime)s %(levelname)s %(message)s", "%H:%M:%S"))
    # Before run.worker configures logging, which leaves existing handlers alone and sets the level of our own lines.
    # Libraries log only warnings here.
    logging.basicConfig(level=logging.WARNING, handlers=[shown])
