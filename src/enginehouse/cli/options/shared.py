"""What all commands have in common: the options `--data`, `--url`, `--token` and `--json`, examples in the help.

The shared options are accepted before and after the subcommand; the later one wins. They are kept in the context,
so that no command has to list them. Nothing heavy is imported here: every `--help` pays for it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import click

from enginehouse.core.errors import Invalid

# What shared options mean to a command for which they mean something else; "" for nothing, then its help is silent.
Meanings = Mapping[str, str]
_AS_EVERYWHERE: Meanings = {}
NO_SERVER: Meanings = {"--url": "", "--token": ""}
NO_ANSWER: Meanings = {**NO_SERVER, "--json": ""}
JOIN_TOKEN = "The join token; @FILE reads a file, - stdin (ENGINEHOUSE_TOKEN)."

MAX_TOKEN = 4096  # characters of a file: a token is a line, and what is longer is something else
_WHOLE_SENTENCE = 1000  # characters: longer than any
_KEY = "enginehouse.given"
_SHARED = frozenset({"data", "url", "token", "json"})


class Given(NamedTuple):
    """The shared options as they were given; None where they were not."""

    data: str | None
    url: str | None
    token: str | None
    json: bool


def given() -> Given:
    """What the running command was given. `--token -` and `--token @FILE` are read here, and only when needed."""
    found: dict[str, Any] = click.get_current_context().meta.get(_KEY, {})
    token = found.get("token")
    if token == "-":
        token = found["token"] = _token_from_stdin()
    elif token is not None and token.startswith("@"):
        token = found["token"] = _token_from_file(token[1:])
    return Given(found.get("data"), found.get("url"), token, bool(found.get("json")))


def wants_json() -> bool:
    return bool(click.get_current_context().meta.get(_KEY, {}).get("json"))


def _token_from_stdin() -> str:
    token = sys.stdin.readline().strip()
    if not token:
        raise Invalid(
            "cannot read a token from stdin: it is empty; pipe it in, for example with `< token-file`",
            code="invalid_setting",
            param="token",
        )
    return token


def _token_from_file(name: str) -> str:
    try:
        with open(os.path.expanduser(name), encoding="utf-8") as file:
            token = file.readline(MAX_TOKEN).strip()
    except (OSError, UnicodeDecodeError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise Invalid(
            f"cannot read a token from {name!r}: {why}; --token @FILE takes the path of a file that holds it",
            code="invalid_setting",
            param="token",
        ) from error
    if not token:
        raise Invalid(f"cannot read a token from {name!r}: it is empty", code="invalid_setting", param="token")
    return token


def _remember(context: click.Context, parameter: click.Parameter, value: object) -> None:
    if value not in (None, False):
        context.meta.setdefault(_KEY, {})[parameter.name] = value


def _shared_options(meanings: Meanings) -> list[click.Parameter]:
    def option(name: str, help: str, **attributes: Any) -> click.Option:
        meaning = meanings.get(name, help)
        return click.Option(
            [name], expose_value=False, callback=_remember, help=meaning, hidden=not meaning, **attributes
        )

    return [
        option("--data", "Data directory (ENGINEHOUSE_DATA).", metavar="DIR"),
        option("--url", "The frontend to talk to (ENGINEHOUSE_URL).", metavar="URL"),
        option("--token", "Its token; @FILE reads a file, - stdin (ENGINEHOUSE_TOKEN).", metavar="TOKEN"),
        option("--json", "Answer in JSON.", is_flag=True),
    ]


def _own_first(parameters: Sequence[click.Parameter], meanings: Meanings) -> list[click.Parameter]:
    taken = {name for parameter in parameters for name in parameter.opts}
    return [*parameters, *(one for one in _shared_options(meanings) if not taken & set(one.opts))]


def _write_examples(formatter: click.HelpFormatter, examples: Sequence[str]) -> None:
    with formatter.section("Examples"):
        for example in examples:
            formatter.write(f"{'':>{formatter.current_indent}}{example}\n")


class CliCommand(click.Command):
    def __init__(
        self, *arguments: Any, examples: Sequence[str] = (), meanings: Meanings = _AS_EVERYWHERE, **attributes: Any
    ) -> None:
        attributes["params"] = _own_first(attributes.get("params") or [], meanings)
        super().__init__(*arguments, **attributes)
        self.examples = tuple(examples)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        _write_examples(formatter, self.examples)


class CliGroup(click.Group):
    command_class = CliCommand

    def __init__(
        self, *arguments: Any, examples: Sequence[str] = (), meanings: Meanings = _AS_EVERYWHERE, **attributes: Any
    ) -> None:
        attributes["params"] = _own_first(attributes.get("params") or [], meanings)
        super().__init__(*arguments, **attributes)
        self.examples = tuple(examples)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        # The default cuts descriptions off where a line ends.
        rows = [(name, one.get_short_help_str(_WHOLE_SENTENCE)) for name, one in sorted(self.commands.items())]
        if rows:
            with formatter.section("Commands"):
                formatter.write_dl(rows)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        _write_examples(formatter, self.examples)


def command(
    name: str, *, examples: Sequence[str], meanings: Meanings = _AS_EVERYWHERE
) -> Callable[[Callable[..., Any]], click.Command]:
    return click.command(name, cls=CliCommand, examples=examples, meanings=meanings)


def group(
    name: str, *, examples: Sequence[str], meanings: Meanings = _AS_EVERYWHERE
) -> Callable[[Callable[..., Any]], CliGroup]:
    return click.group(name, cls=CliGroup, examples=examples, meanings=meanings)


def setting(field: str, help: str, metavar: str = "TEXT") -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A flag for a field of settings. Its text is passed on unread: `settings.load` checks it like any other place."""
    name = field.removesuffix("_seconds").removesuffix("_bytes").replace("_", "-")
    return click.option(f"--{name}", field, metavar=metavar, help=help)


log_level = setting("log_level", "Least severity that is logged: debug, info, warning or error (info).", "LEVEL")
