"""`enginehouse nodes add`: the line that makes another machine a node, with a fresh token for it.

The token is printed beside the line and never in it: the line ends up in the history and the process list of the other
machine. The machine appears by itself and waits for approval.
"""

from __future__ import annotations

import hashlib
import os
from urllib.parse import urlsplit

import click

from enginehouse.cli.answers import ListedToken
from enginehouse.cli.client.connect import FrontendApi, connect, read
from enginehouse.cli.options.durations import DURATION
from enginehouse.cli.options.shared import command, given, wants_json
from enginehouse.cli.terminal import output
from enginehouse.core.join_line import join_line
from enginehouse.core.name import check_name
from enginehouse.settings.programs import find_data_directory, running_server

TTL_SECONDS = 3600.0  # enough to walk to the other machine; the node keeps its own credential afterwards
_LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})


@command(
    "add",
    examples=(
        "enginehouse nodes add",
        "enginehouse nodes add --name attic --service",
        "enginehouse nodes add --join-url https://engines.example.org",
    ),
)
@click.option("--name", default="", metavar="NAME", help="Name of the node; the token is then for this node only.")
@click.option("--service", "is_service", is_flag=True, help="Install a service there instead of running until Ctrl-C.")
@click.option(
    "--join-url",
    "join_url",
    default="",
    metavar="URL",
    help="Address at which the machine reaches this server; several frontends with commas.",
)
@click.option(
    "--ttl",
    "ttl_seconds",
    type=DURATION,
    default=f"{TTL_SECONDS:.0f}s",
    metavar="DURATION",
    help="How long the token may be used to join (1h).",
)
def add(name: str, is_service: bool, join_url: str, ttl_seconds: float) -> None:
    """Show the line that makes another machine a node, with a token for it.

    The machine needs Python 3.11 or newer and nothing else. It waits for approval when it has joined.
    """
    from enginehouse.settings.values import parse_http_urls

    frontend = connect()
    urls = parse_http_urls(join_url) if join_url else _address_for_others(frontend)
    script_sha256 = hashlib.sha256(frontend.client.request_bytes("GET", "/join.sh")).hexdigest()
    limited: dict[str, object] = {"node": check_name(name, "node")} if name else {}
    made = read(frontend.post("/api/tokens", {"role": "join", "ttl_seconds": ttl_seconds, **limited}), ListedToken)
    line = join_line(urls, name=name, is_service=is_service)
    if wants_json():
        output.emit_json({"line": line, "script_sha256": script_sha256, "token": made.token, "token_id": made.id})
        return
    output.say(
        f"On the other machine (Python 3.11 or newer):\n\n  {line}\n\n"
        f"It asks for this join token, valid for {output.duration(ttl_seconds)}:\n\n  {made.token}\n\n"
        f"Then, here: enginehouse nodes approve {name or 'NAME'}\n\n"
        f"sha256 of join.sh: {script_sha256}",
        lines=True,
    )
    if urlsplit(urls.split(",")[0]).hostname in _LOOPBACK:
        output.remark(
            f"other machines cannot reach {urls}: start the server with `enginehouse up --host 0.0.0.0`, or name the "
            "address of a proxy with --join-url"
        )


def _address_for_others(frontend: FrontendApi) -> str:
    """The address of this server for other machines: as `up` knows it, if the server is that of the data directory."""
    running = running_server(find_data_directory({"data": given().data}, os.environ))
    return running.join_url if running and running.url == frontend.url and running.join_url else frontend.url
