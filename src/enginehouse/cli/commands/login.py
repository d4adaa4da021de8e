"""`enginehouse login`: stores a server and a token under a name, after the server has accepted the token."""

from __future__ import annotations

import os
import sys
from urllib.parse import urlsplit

import click

from enginehouse import __version__
from enginehouse.cli.commands.contexts import check_new_name, is_a_person, write_contexts
from enginehouse.cli.options.shared import MAX_TOKEN, command, emit, given
from enginehouse.cli.terminal import output
from enginehouse.core.errors import Denied, Invalid
from enginehouse.core.name import MAX_NAME, check_name
from enginehouse.link.client import FrontendClient
from enginehouse.settings.contexts import LOCAL, ServerContext, StoredContexts, read_contexts
from enginehouse.settings.values import is_loopback_url, parse_http_url

CHECK_SECONDS = 10.0


@command(
    "login",
    meanings={
        "--url": "",
        "--context": "",
        "--data": "",
        "--token": "Its token; @FILE reads a file, - stdin. Without it: asked for, or read from stdin.",
    },
    examples=(
        "enginehouse login http://desk:8080 --name home",
        "enginehouse login https://models.example.org --name work --token @work.token",
        "ssh desk cat .local/share/enginehouse/admin.token | enginehouse login http://desk:8080",
    ),
)
@click.argument("address", metavar="URL")
@click.option("--name", "context_name", metavar="NAME", help="The name of the context (the host of URL).")
@click.option("--no-use", is_flag=True, help="Store it, and leave the current context as it is.")
def entry(address: str, context_name: str | None, no_use: bool) -> None:
    """Store the server at URL and a token for it.

    Commands use it from now on. The token is checked first, and kept in a file that only you can read.
    `enginehouse contexts list` shows what is stored, --context NAME chooses for one command, `enginehouse logout NAME`
    forgets.
    """
    try:
        url = parse_http_url(address)
    except Invalid as error:
        raise Invalid(f"cannot log in to {address!r}: {error.message}", code="invalid_setting", param="url") from error
    name = check_new_name(context_name) if context_name is not None else _name_of(url)
    stored = read_contexts(os.environ)
    token = given().token or _asked_for(url)
    role = _role_at(url, token)
    before = stored.contexts.get(name)
    contexts = {**stored.contexts, name: ServerContext(url=url, token=token)}
    current = stored.current if no_use else name
    write_contexts(StoredContexts(current=current, contexts=contexts))
    changed = f" (was {before.url})" if before is not None and before.url != url else ""
    emit({"name": name, "url": url, "role": role}, f"{name}: {url}{changed}, signed in as {role}")
    if not no_use and stored.current != name:
        output.remark(f"Commands use {name} from now on (before: {stored.current or LOCAL})")
    if url.startswith("http://") and not is_loopback_url(url):
        output.remark("The token crosses the network unencrypted. Use https or a private network")


def _name_of(url: str) -> str:
    host = (urlsplit(url).hostname or "").replace(":", "-")[:MAX_NAME]
    return check_new_name(check_name(host, "context"))


def _asked_for(url: str) -> str:
    if is_a_person():
        import getpass

        token = getpass.getpass(f"token for {url}: ", stream=sys.stderr).strip()
    else:
        token = sys.stdin.readline(MAX_TOKEN).strip()
    if not token:
        raise Invalid(
            f"cannot log in to {url} without a token: pipe one in, or give it with --token @FILE. "
            "On the server: cat DATA/admin.token, or enginehouse tokens create",
            code="unauthenticated",
            param="token",
        )
    return token


def _role_at(url: str, token: str) -> str:
    """The role of the token; raises if the server does not accept it."""
    client = FrontendClient(url, token, user_agent=f"enginehouse/{__version__}")
    try:
        answer = client.request("GET", "/api/session", None, dict[str, object], timeout_seconds=CHECK_SECONDS)
    except Denied:
        # A token that may only use models may not ask who it is.
        client.request("GET", "/version", None, object, timeout_seconds=CHECK_SECONDS)
        return "user"
    finally:
        client.close()
    return str(answer.get("role", "unknown"))
