"""`enginehouse tokens`: who may use the server, steer it, or join it."""

from __future__ import annotations

import click

from enginehouse.cli import output
from enginehouse.cli.command import command, group, wants_json


@group("tokens", examples=("enginehouse tokens create --role join", "enginehouse tokens list"))
def entry() -> None:
    """Make and list access tokens."""


@command(
    "create",
    examples=(
        "enginehouse tokens create --name laptop",
        "enginehouse tokens create --role join > join.token",
    ),
)
@click.option(
    "--role",
    type=click.Choice(("user", "admin", "join")),
    default="user",
    show_default=True,
    help="user: the OpenAI routes; admin: everything; join: add nodes.",
)
@click.option("--name", default="", metavar="NAME", help="What to remember it by.")
def create(role: str, name: str) -> None:
    """Make a token. It is shown once and never again."""
    from enginehouse.cli.connect import connect, read
    from enginehouse.cli.shapes import Token
    from enginehouse.core.name import check_name

    wanted = {"role": role}
    if name:
        wanted["name"] = check_name(name, "token")
    frontend = connect()
    answer = frontend.post("/api/tokens", wanted)
    if wants_json():
        output.emit_json(answer)
        return
    output.say(read(answer, Token).token)
    output.remark(f"a token for {role}; it is not shown again")
    if role == "join":
        output.remark(f"on the other machine: enginehouse join {frontend.url} --token - < FILE-WITH-THE-TOKEN")


@command("list", examples=("enginehouse tokens list",))
def list_tokens() -> None:
    """All tokens, without the secrets."""
    from enginehouse.cli.connect import connect, read
    from enginehouse.cli.shapes import Token

    answer = connect().get("/api/tokens")
    if wants_json():
        output.emit_json(answer)
        return
    rows = [(one.id, one.role, one.name, output.age_of(str(one.created_at))) for one in read(answer, tuple[Token, ...])]
    output.emit_table(("ID", "ROLE", "NAME", "AGE"), rows, "no tokens")


for each in (create, list_tokens):
    entry.add_command(each)
