"""`enginehouse keys`: the API keys of applications, which are tokens with the role `user`."""

from __future__ import annotations

import click

from enginehouse.cli.commands.tokens import end_token, make_token, show_tokens
from enginehouse.cli.options.shared import command, group


@group("keys", examples=("enginehouse keys create --name my-app", "enginehouse keys revoke my-app"))
def entry() -> None:
    """Make, list and revoke API keys of applications.

    A key is a token that opens the OpenAI routes and nothing else.
    """


@command("create", examples=("enginehouse keys create --name my-app",))
@click.option("--name", default="", metavar="NAME", help="What to remember it by.")
def create(name: str) -> None:
    """Make an API key. It is shown once and never again."""
    make_token("user", name, {})


@command("list", examples=("enginehouse keys list",))
def list_keys() -> None:
    """All API keys, without the secrets."""
    show_tokens("user")


@command("revoke", examples=("enginehouse keys revoke my-app",))
@click.argument("key")
def revoke(key: str) -> None:
    """End KEY (its name or id): it counts for nothing within a second, on every frontend."""
    end_token(key, "user")


for each in (create, list_keys, revoke):
    entry.add_command(each)
