"""`enginehouse tokens`: access tokens of users, admins and joining nodes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import click

from enginehouse.cli.answers import ListedToken
from enginehouse.cli.client.connect import FrontendApi, connect, read, segment
from enginehouse.cli.options.shared import command, emit_json, group
from enginehouse.cli.terminal import output
from enginehouse.core.errors import Invalid, NotFound
from enginehouse.core.name import check_name

_DAY_SECONDS = 86400.0
_LIMITS = (
    click.option("--model", "models", multiple=True, metavar="MODEL", help="Only this model or pattern; repeatable."),
    click.option("--requests-per-minute", type=click.IntRange(1), metavar="N", help="At most so many requests."),
    click.option("--tokens-per-minute", type=click.IntRange(1), metavar="N", help="At most so many tokens."),
    click.option("--ttl", default="", metavar="DURATION", help="It expires after this time, such as 12h or 30d."),
)


def limits(function: Callable[..., Any]) -> Callable[..., Any]:
    """The options that limit a token."""
    for option in reversed(_LIMITS):
        function = option(function)
    return function


def wanted_limits(
    models: tuple[str, ...], requests_per_minute: int | None, tokens_per_minute: int | None, ttl: str
) -> dict[str, object]:
    """The fields of a request for a token; those that are not limited are left out."""
    every: dict[str, object] = {
        "models": list(models),
        "requests_per_minute": requests_per_minute,
        "tokens_per_minute": tokens_per_minute,
        "ttl_seconds": _seconds("--ttl", ttl) if ttl else None,
    }
    return {name: value for name, value in every.items() if value}


def _seconds(option: str, text: str) -> float:
    from enginehouse.settings.values import parse_duration

    days, _, rest = text.strip().partition("d")
    try:
        if days.isdecimal() and not rest and text.strip().endswith("d") and int(days):
            return int(days) * _DAY_SECONDS
        return parse_duration(text)
    except Invalid as error:
        raise Invalid(
            f"cannot use {text!r} as {option}: {error.message}, or like 30d",
            code="invalid_setting",
            param=option.strip("-"),
        ) from error


@group(
    "tokens",
    examples=(
        "enginehouse tokens create --role join",
        "enginehouse tokens rotate admin",
        "enginehouse tokens revoke laptop",
    ),
)
def entry() -> None:
    """Create, list, rotate and revoke access tokens."""


@command(
    "create",
    examples=(
        "enginehouse tokens create --name laptop --ttl 30d",
        "enginehouse tokens create --name chatbot --model 'tiny-*' --requests-per-minute 60",
        "enginehouse tokens create --role join > join.token",
        "enginehouse tokens create --role join --node attic > attic.token",
    ),
)
@click.option(
    "--role",
    type=click.Choice(("user", "admin", "viewer", "join")),
    default="user",
    show_default=True,
    help="user: the OpenAI routes; admin: everything; viewer: see everything, change nothing; join: add nodes.",
)
@click.option("--name", default="", metavar="NAME", help="A name for it.")
@click.option("--node", default="", metavar="NODE", help="With --role join: only the node of this name may use it.")
@limits
def create(role: str, name: str, node: str, **limited: Any) -> None:
    """Create a token. It is shown only once.

    A user token can be limited to models and to a rate, and any token to a time.
    """
    make_token(role, name, ({"node": check_name(node, "node")} if node else {}) | wanted_limits(**limited))


@command("list", examples=("enginehouse tokens list",))
def list_tokens() -> None:
    """List tokens; secrets are omitted."""
    show_tokens("")


@command("revoke", examples=("enginehouse tokens revoke laptop",))
@click.argument("name", metavar="TOKEN")
def revoke(name: str) -> None:
    """Revoke TOKEN (a name or id). Every frontend refuses it within a second."""
    end_token(name, "")


keep_old = click.option(
    "--keep-old", default="", metavar="DURATION", help="How long the old one is good beside the new one (not at all)."
)


@command(
    "rotate",
    examples=("enginehouse tokens rotate admin", "enginehouse tokens rotate laptop --keep-old 24h > laptop.token"),
)
@click.argument("name", metavar="TOKEN")
@keep_old
def rotate(name: str, keep_old: str) -> None:
    """Give TOKEN (a name or id) a new secret and print it. Name, limits and usage stay.

    The old secret ends within a second, and sessions of browsers that came from it end too. The files `admin.token` and
    `join.token` of the server's data directory are renewed.
    """
    renew_token(name, "", keep_old)


def make_token(role: str, name: str, more: dict[str, object]) -> None:
    wanted: dict[str, object] = {"role": role, **more}
    if name:
        wanted["name"] = check_name(name, "token")
    frontend = connect()
    answer = frontend.post("/api/tokens", wanted)
    if emit_json(answer):
        return
    output.say(read(answer, ListedToken).token)
    output.remark(f"a token with the role {role}; it is not shown again")
    if role == "join":
        output.remark(f"on the other machine: enginehouse join {frontend.url} --token @FILE-WITH-THE-TOKEN")
        output.remark("a machine without Enginehouse installs it first: `enginehouse nodes add` shows the line")


def show_tokens(role: str) -> None:
    answer = connect().get("/api/tokens")
    if role and isinstance(answer, list):
        answer = [one for one in answer if one.get("role") == role]
    if emit_json(answer):
        return
    rows = [
        (
            one.id,
            one.role,
            one.name,
            one.node,
            output.age_of(str(one.created_at)),
            f"{output.age_of(one.last_used_at)} ago" if one.last_used_at else "never",
            _expiry(one),
            _limits_of(one),
        )
        for one in read(answer, tuple[ListedToken, ...])
    ]
    columns = ("ID", "ROLE", "NAME", "FOR NODE", "AGE", "LAST USED", "EXPIRES", "LIMITS")
    # On a terminal the id would wrap the lines; it is needed only where two tokens have one name.
    is_short = output.is_terminal(sys.stdout) and len({row[2] for row in rows}) == len(rows)
    output.emit_table(columns[is_short:], [row[is_short:] for row in rows], "no tokens")


def _expiry(one: ListedToken) -> str:
    return "expired" if one.expired else shown_time(one.expires_at)


def shown_time(text: str) -> str:
    return text.partition(".")[0].rstrip("Z").replace("T", " ")


def _limits_of(one: ListedToken) -> str:
    rates = ((one.requests_per_minute, "requests/min"), (one.tokens_per_minute, "tokens/min"))
    return ", ".join([*one.models, *(f"{count} {what}" for count, what in rates if count)])


def end_token(name_or_id: str, role: str) -> None:
    frontend = connect()
    answer = frontend.delete(f"/api/tokens/{segment(_id_of(frontend, name_or_id, role))}")
    if not emit_json(answer):
        row = read(answer, ListedToken)
        output.say(f"revoked the {row.role} token {row.name}")


def renew_token(name_or_id: str, role: str, keep_old: str) -> None:
    frontend = connect()
    wanted = {"keep_seconds": _seconds("--keep-old", keep_old)} if keep_old else {}
    answer = frontend.post(f"/api/tokens/{segment(_id_of(frontend, name_or_id, role))}/rotate", wanted)
    if emit_json(answer):
        return
    made = read(answer, ListedToken)
    output.say(made.token)
    until = f"the old one is good until {shown_time(made.old_until)}" if made.old_until else "the old one has ended"
    output.remark(f"the {made.role} token {made.name} has a new secret, which is not shown again; {until}")
    if made.file_renewed:
        output.remark(f"{made.role}.token in the data directory of that server has the new one")
    elif made.name in ("admin", "join"):
        variable = f"ENGINEHOUSE_{made.name.upper()}_TOKEN"
        output.remark(f"a frontend that gets it from {variable} needs the new one before its next start")


def _id_of(frontend: FrontendApi, name_or_id: str, role: str) -> str:
    """Search among tokens of this role only, if one is given: an admin token may have the same name as an API key."""
    if not role:
        return name_or_id
    every = read(frontend.get("/api/tokens"), tuple[ListedToken, ...])
    found = [one.id for one in every if one.role == role and name_or_id in (one.id, one.name)]
    if not found:
        raise NotFound(f"cannot find an API key {name_or_id!r}: `enginehouse keys list` shows them")
    return found[0]


for each in (create, list_tokens, revoke, rotate):
    entry.add_command(each)
