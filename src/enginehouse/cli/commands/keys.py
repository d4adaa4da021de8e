"""`enginehouse keys`: the API keys of applications, which are tokens with the role `user`."""

from __future__ import annotations

from typing import Any

import click

from enginehouse.cli.commands.tokens import (
    end_token,
    keep_old,
    limits,
    make_token,
    renew_token,
    show_tokens,
    wanted_limits,
)
from enginehouse.cli.options.shared import command, group


@group("keys", examples=("enginehouse keys create --name my-app", "enginehouse keys revoke my-app"))
def entry() -> None:
    """Create, list, rotate and revoke API keys of applications.

    A key is a token for the OpenAI routes only.
    """


@command("create", examples=("enginehouse keys create --name my-app --model tiny-chat --tokens-per-minute 10000",))
@click.option("--name", default="", metavar="NAME", help="A name for it.")
@limits
def create(name: str, **limited: Any) -> None:
    """Create an API key. It is shown only once."""
    make_token("user", name, wanted_limits(**limited))


@command("list", examples=("enginehouse keys list",))
def list_keys() -> None:
    """List API keys; secrets are omitted."""
    show_tokens("user")


@command("revoke", examples=("enginehouse keys revoke my-app",))
@click.argument("key")
def revoke(key: str) -> None:
    """Revoke KEY (a name or id). Every frontend refuses it within a second."""
    end_token(key, "user")


@command("rotate", examples=("enginehouse keys rotate my-app --keep-old 24h",))
@click.argument("key")
@keep_old
def rotate(key: str, keep_old: str) -> None:
    """Give KEY (a name or id) a new secret and print it. Name, limits and usage stay."""
    renew_token(key, "user", keep_old)


for each in (create, list_keys, revoke, rotate):
    entry.add_command(each)
