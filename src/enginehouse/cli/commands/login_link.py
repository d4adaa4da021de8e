"""`enginehouse login-link`: a link that signs a person in to the web page, once."""

from __future__ import annotations

import click

from enginehouse.cli.answers import LoginLink
from enginehouse.cli.client.connect import connect, read
from enginehouse.cli.options.shared import command, emit_json
from enginehouse.cli.terminal import output


@command("login-link", examples=("enginehouse login-link", "enginehouse login-link --role viewer"))
@click.option(
    "--role",
    type=click.Choice(("admin", "viewer")),
    default="admin",
    show_default=True,
    help="admin: everything; viewer: see everything, change nothing.",
)
def entry(role: str) -> None:
    """Print a link that signs you in to the web page.

    It works once, within ten minutes. Its host is the one with which this command reaches the server.
    """
    answer = connect().post("/api/session/links", {"role": role})
    if emit_json(answer):
        return
    output.say(read(answer, LoginLink).url)
    output.remark(f"signs one browser in as {role}, once, within 10 minutes")
