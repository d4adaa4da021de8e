"""`enginehouse join`: this machine as another node of a server, in the foreground. Calls run.worker."""

from __future__ import annotations

import os
from typing import Any

import click

from enginehouse.cli.options.programs import installing, node
from enginehouse.cli.options.shared import JOIN_TOKEN, command, given, log_level
from enginehouse.cli.terminal.output import remark
from enginehouse.core.errors import Invalid
from enginehouse.core.fingerprint import fingerprint_of
from enginehouse.settings.programs import WorkerSettings, load
from enginehouse.settings.values import parse_http_urls


@command(
    "join",
    meanings={"--context": "", "--url": "", "--token": JOIN_TOKEN, "--json": ""},
    examples=(
        "enginehouse join http://server:8080 --token @join.token",
        "ENGINEHOUSE_TOKEN=… enginehouse join http://server:8080 --name attic",
    ),
)
@click.argument("address", metavar="URL")
@node
@installing
@log_level
def entry(address: str, **flags: Any) -> int:
    """Join this machine to the server at URL as another node.

    The node is pending until `enginehouse nodes approve NAME` on the server; a node that was approved once joins by its
    key and needs no token. Runs until Ctrl-C; requests for the node
    while it is offline are carried out when it returns. For several frontends of one cluster, separate their addresses
    with commas.
    """
    try:
        url = parse_http_urls(address)
    except Invalid as error:
        raise Invalid(f"cannot join {address!r}: {error.message}", code="invalid_setting", param="url") from error
    shared = given()
    settings = load(WorkerSettings, {**flags, "data": shared.data, "url": url, "token": shared.token}, os.environ)
    has_key = (settings.data / "node.key").exists()  # it may be approved, and then needs no token
    if not settings.token and not has_key:
        raise Invalid(
            f"cannot join {settings.url} without a join token: create one there with "
            "`enginehouse tokens create --role join` and give it with --token @FILE, --token - or ENGINEHOUSE_TOKEN",
            code="unauthenticated",
            param="token",
        )
    remark(f"joining {settings.url} as {settings.name} (data in {settings.data}); Ctrl-C ends it")
    from enginehouse import run

    fingerprint = fingerprint_of(run.node_key(settings.data))
    if not (settings.data / "node.json").exists():
        remark(f"fingerprint of this machine's key: {fingerprint}")
        remark(f"approve it on the server: enginehouse nodes approve {settings.name} --fingerprint {fingerprint}")
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
                    return rest.partition("=")[2]
                case "worker.refused":
                    reason, _, seconds = rest.partition("=")[2].rpartition(" again_in_seconds=")
                    return f"this machine takes no work: {reason} (next attempt in {seconds} s)"
                case "worker.joined":
                    return "joined: this machine takes work now"
                case _:
                    return super().format(record)

    shown = logging.StreamHandler()
    shown.setFormatter(Plain("%(asctime)s %(levelname)s %(message)s", "%H:%M:%S"))
    # Before run.worker configures logging, which leaves existing handlers alone and sets the level of our own lines.
    # Libraries log only warnings here.
    logging.basicConfig(level=logging.WARNING, handlers=[shown])
