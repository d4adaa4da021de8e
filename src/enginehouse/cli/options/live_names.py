"""Names of nodes, models, backends and operations for the shell's completion and for hints, asked of the server.

A completion must be quick and must not write anything: without a server, without a right, or after a moment there are
no names.
"""

from __future__ import annotations

import os
from typing import Any

import click
from click.shell_completion import CompletionItem
from click.types import StringParamType

from enginehouse.cli.options.other_words import nearest
from enginehouse.core.errors import EnginehouseError, NotFound

ANSWER_SECONDS = 1.5  # somebody waits at a prompt
# What each kind of name is asked of, and the field of an item that has the name.
_ROUTES = {
    "node": ("/api/nodes", "name"),
    "model": ("/api/models", "name"),
    "installed": ("/backends", "Name"),
    "available": ("/backends/available", "name"),
    "operation": ("/api/operations?rows=false&limit=50", "jobID"),
    "token": ("/api/tokens", "name"),
}
_BY_PARAMETER = {
    "node": "node",
    "nodes": "node",
    "model": "model",
    "models": "model",
    "operation_id": "operation",
    "operations": "operation",
    "backend": "available",
    "key": "token",
    "context": "context",
    "context_name": "context",
    "words": "log",
}
_HINTED = frozenset({"node", "model", "installed", "available", "token", "context", "log"})  # ids are no words
# What `name` and `names` mean depends on the command.
_BY_COMMAND = (
    ("enginehouse backends install", "available"),
    ("enginehouse backends plan", "available"),
    ("enginehouse backends", "installed"),
    ("enginehouse models add", ""),  # a new name
    ("enginehouse models", "model"),
    ("enginehouse run", "model"),
    ("enginehouse embed", "model"),
    ("enginehouse tokens", "token"),
)


class LiveName(StringParamType):
    """A text that the shell completes with names the server knows."""

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        kind = kind_of(ctx.command_path, param.name or "")
        if not kind:
            return []
        with ctx.scope(cleanup=False):
            return [CompletionItem(name) for name in _names(kind) if name.startswith(incomplete)]


def kind_of(command_path: str, parameter: str) -> str:
    """What a parameter names; "" if nothing that the server knows."""
    if command_path.startswith(("enginehouse local", "enginehouse gallery")):
        return ""  # they need no server
    if parameter not in ("name", "names"):
        return _BY_PARAMETER.get(parameter, "")
    return next((kind for path, kind in _BY_COMMAND if command_path.startswith(path)), "")


def complete_names(parameter: click.Parameter) -> None:
    """Let the shell complete a parameter that names something; what it accepts stays the same."""
    if type(parameter.type) is StringParamType and parameter.name in {*_BY_PARAMETER, "name", "names"}:
        parameter.type = LiveName()


def add_hint(context: click.Context, error: NotFound) -> None:
    """Add the names that the server has and that may have been meant by the one which the error quotes."""
    for parameter in context.command.params:
        kind = kind_of(context.command_path, parameter.name or "") if isinstance(parameter.type, LiveName) else ""
        if kind not in _HINTED:
            continue
        given = context.params.get(parameter.name or "") or ()
        for word in (given,) if isinstance(given, str) else given:
            if repr(word) in error.message:
                near = [repr(one) for one in nearest(word, _names(kind)) if one != word]
                error.message += f". Did you mean {' or '.join(near)}?" if near else ""
                return


def _names(kind: str) -> list[str]:
    if kind == "context":
        return _context_names()
    if kind == "log":
        return ["frontend", "nats", "worker", *_names("model"), *_names("node")]
    from enginehouse.cli.options.shared import given_for_completion
    from enginehouse.link.client import FrontendClient
    from enginehouse.settings.programs import ClientSettings, load

    path, field = _ROUTES[kind]
    try:
        settings = load(ClientSettings, given_for_completion(), os.environ)
        client = FrontendClient(settings.url, settings.token, user_agent="enginehouse-completion")
        try:
            answer = client.request("GET", path, None, object, timeout_seconds=ANSWER_SECONDS)
        finally:
            client.close()
    except EnginehouseError:
        return []
    return sorted({str(one[field]) for one in _items(answer) if one.get(field)})


def _context_names() -> list[str]:
    from enginehouse.settings.contexts import LOCAL, read_contexts

    try:
        return [*sorted(read_contexts(os.environ).contexts), LOCAL]
    except EnginehouseError:
        return []


def _items(answer: Any) -> list[dict[str, Any]]:
    """The items of a list, or of the only list in an object."""
    if isinstance(answer, dict):
        answer = next((value for value in answer.values() if isinstance(value, list)), [])
    return [one for one in answer if isinstance(one, dict)] if isinstance(answer, list) else []
