"""`enginehouse contexts`, and the file of named servers that it, `login` and `logout` change.

The file has tokens: it is written atomically, and only its owner may read it.
"""

from __future__ import annotations

import os
import sys

import click
import msgspec

from enginehouse.cli.options.shared import NO_SERVER, command, emit, emit_json, group
from enginehouse.cli.terminal import output
from enginehouse.core.errors import Invalid, NotFound
from enginehouse.core.name import check_name
from enginehouse.settings.contexts import LOCAL, StoredContexts, contexts_path, read_contexts


@group(
    "contexts",
    meanings=NO_SERVER,
    examples=("enginehouse contexts list", "enginehouse contexts use home", "enginehouse contexts remove home"),
)
def entry() -> None:
    """List, choose and forget the servers that `enginehouse login` has stored."""


@command("list", meanings=NO_SERVER, examples=("enginehouse contexts list",))
def list_contexts() -> None:
    """List the stored servers; commands use the current one. Tokens are not shown."""
    stored = read_contexts(os.environ)
    shown = [
        {"name": name, "url": one.url, "is_current": name == stored.current}
        for name, one in sorted(stored.contexts.items())
    ]
    shown.append({"name": LOCAL, "url": "", "is_current": not stored.current})
    if emit_json(shown):
        return
    rows = [
        (
            str(one["name"]),
            "current" if one["is_current"] else "",
            str(one["url"]) or "the server of the data directory of this machine",
        )
        for one in shown
    ]
    output.emit_table(("NAME", "", "SERVER"), rows, "")
    for variable in ("ENGINEHOUSE_URL", "ENGINEHOUSE_CONTEXT"):
        if os.environ.get(variable):
            output.remark(f"{variable} is set and is used instead of the current one")


@command("use", meanings=NO_SERVER, examples=("enginehouse contexts use home", "enginehouse contexts use local"))
@click.argument("context_name", metavar="NAME")
def use(context_name: str) -> None:
    """Make NAME the server that commands use; `local` is the one of this machine's data directory."""
    stored = read_contexts(os.environ)
    if context_name != LOCAL:
        _check_known(stored, context_name)
    now = "" if context_name == LOCAL else context_name
    if stored.current == now:
        emit({"current": now or LOCAL}, f"= {context_name} is already the current context")
        return
    write_contexts(msgspec.structs.replace(stored, current=now))
    emit({"current": now or LOCAL}, f"context: {stored.current or LOCAL} → {context_name}")


@command("remove", meanings=NO_SERVER, examples=("enginehouse contexts remove home",))
@click.argument("context_name", metavar="NAME")
def remove(context_name: str) -> None:
    """Forget the server NAME and its token; the token stays valid there until it is revoked."""
    forget(context_name)


def forget(name: str) -> None:
    stored = read_contexts(os.environ)
    _check_known(stored, name)
    left = {key: one for key, one in stored.contexts.items() if key != name}
    write_contexts(StoredContexts(current="" if stored.current == name else stored.current, contexts=left))
    emit({"removed": name}, f"forgot {name} ({stored.contexts[name].url}) and its token")
    output.remark("The token is still valid there. Revoke it with: enginehouse tokens revoke ID")


def write_contexts(stored: StoredContexts) -> None:
    from enginehouse.host import disk

    path = contexts_path(os.environ)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        disk.write_atomic(path, msgspec.json.format(msgspec.json.encode(stored)) + b"\n", 0o600)
    except OSError as error:
        raise Invalid(f"cannot write {path}: {error.strerror or error}", code="invalid_setting") from error


def check_new_name(name: str) -> str:
    if name == LOCAL:
        raise Invalid(
            f"cannot use the name {LOCAL!r}: it means the server of this machine's data directory; choose another",
            param="name",
        )
    return check_name(name, "context")


def _check_known(stored: StoredContexts, name: str) -> None:
    if name not in stored.contexts:
        known = ", ".join(sorted(stored.contexts)) or "none yet"
        raise NotFound(f"cannot find the context {name!r}. Stored: {known}", param="name")


def is_a_person() -> bool:
    return sys.stdin.isatty() and output.is_terminal(sys.stderr)


for each in (list_contexts, use, remove):
    entry.add_command(each)
