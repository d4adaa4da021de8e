"""`enginehouse logout`: forgets a server that `enginehouse login` has stored, and its token."""

from __future__ import annotations

import os

import click

from enginehouse.cli.commands.contexts import forget
from enginehouse.cli.options.shared import NO_SERVER, command
from enginehouse.core.errors import Invalid
from enginehouse.settings.contexts import read_contexts


@command("logout", meanings=NO_SERVER, examples=("enginehouse logout", "enginehouse logout home"))
@click.argument("context_name", metavar="[NAME]", required=False)
def entry(context_name: str | None) -> None:
    """Forget a server and its token.

    NAME is the current context unless it is given. The token stays valid there until it is revoked.
    """
    name = context_name or read_contexts(os.environ).current
    if not name:
        raise Invalid(
            "cannot log out: no context is the current one. `enginehouse contexts list` shows the names", param="name"
        )
    forget(name)
