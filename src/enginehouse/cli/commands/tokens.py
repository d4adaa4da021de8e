"""`enginehouse tokens`: access tokens of users, admins and joining nodes."""

from __future__ import annotations

import click

from enginehouse.cli.options.shared import command, group, wants_json
from enginehouse.cli.terminal import output


@group("tokens", examples=("enginehouse tokens create --role join", "enginehouse tokens revoke laptop"))
def entry() -> None:
    """Create, list and revoke access tokens."""


@command(
    "create",
    examples=(
        "enginehouse tokens create --name laptop",
        "enginehouse tokens create --role join > join.token",
        "enginehouse tokens create --role join --node attic > attic.token",
    ),
)
@click.option(
    "--role",
    type=click.Choice(("user", "admin", "join")),
    default="user",
    show_default=True,
    help="user: the OpenAI routes; admin: everything; join: add nodes.",
)
@click.option("--name", default="", metavar="NAME", help="A name for it.")
@click.option("--node", default="", metavar="NODE", help="With --role join: only the node of this name may use it.")
def create(role: str, name: str, node: str) -> None:
    """Create a token. It is shown only once."""
    from enginehouse.core.name import check_name

    make_token(role, name, {"node": check_name(node, "node")} if node else {})


@command("list", examples=("enginehouse tokens list",))
def list_tokens() -> None:
    """List tokens; secrets are omitted."""
    show_tokens("")


@command("revoke", examples=("enginehouse tokens revoke laptop",))
@click.argument("name", metavar="TOKEN")
def revoke(name: str) -> None:
    """Revoke TOKEN (a name or id). Every frontend refuses it within a second."""
    end_token(name, "")


def make_token(role: str, name: str, more: dict[str, str]) -> None:
    from enginehouse.cli.answers import ListedToken
    from enginehouse.cli.client.connect import connect, read
    from enginehouse.core.name import check_name

    wanted = {"role": role, **more}
    if name:
        wanted["name"] = check_name(name, "token")
    frontend = connect()
    answer = frontend.post("/api/tokens", wanted)
    if wants_json():
        output.emit_json(answer)
        return
    output.say(read(answer, ListedToken).token)
    output.remark(f"a token with the role {role}; it is not shown again")
    if role == "join":
        output.remark(f"on the other machine: enginehouse join {frontend.url} --token @FILE-WITH-THE-TOKEN")


def show_tokens(role: str) -> None:
    from enginehouse.cli.answers import ListedToken
    from enginehouse.cli.client.connect import connect, read

    answer = connect().get("/api/tokens")
    if wants_json():
        output.emit_json(answer)
        return
    rows = [
        (one.id, one.role, one.name, one.node, output.age_of(str(one.created_at)))
        for one in read(answer, tuple[ListedToken, ...])
        if role in ("", one.role)
    ]
    output.emit_table(("ID", "ROLE", "NAME", "FOR NODE", "AGE"), rows, "no tokens")


def end_token(name_or_id: str, role: str) -> None:
    from enginehouse.cli.answers import ListedToken
    from enginehouse.cli.client.connect import connect, read, segment
    from enginehouse.core.errors import NotFound

    frontend = connect()
    if role:
        # Search among tokens of this role only: an admin token may have the same name.
        every = read(frontend.get("/api/tokens"), tuple[ListedToken, ...])
        found = [one.id for one in every if one.role == role and name_or_id in (one.id, one.name)]
        if not found:
            raise NotFound(f"cannot find an API key {name_or_id!r}: `enginehouse keys list` shows them")
        name_or_id = found[0]
    answer = frontend.delete(f"/api/tokens/{segment(name_or_id)}")
    if wants_json():
        output.emit_json(answer)
    else:
        row = read(answer, ListedToken)
        output.say(f"revoked the {row.role} token {row.name}")


for each in (create, list_tokens, revoke):
    entry.add_command(each)
