"""What all commands share: `--data`, `--context`, `--url`, `--token` and `--json`, and examples in the help.

The shared options are accepted before and after the subcommand; the later one takes precedence. They are stored in the
context, so that no command has to list them. Nothing heavy is imported here, because every `--help` imports this.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import click

from enginehouse.cli.options import live_names, other_words
from enginehouse.core.errors import Invalid, NotFound
from enginehouse.settings.descriptions import DESCRIPTIONS

# Help texts of shared options for commands where they mean something else; "" hides an option without a meaning.
Meanings = Mapping[str, str]
_DEFAULT_MEANINGS: Meanings = {}
NO_SERVER: Meanings = {"--context": "", "--url": "", "--token": ""}
NO_ANSWER: Meanings = {**NO_SERVER, "--json": ""}
JOIN_TOKEN = "The join token; @FILE reads a file, - stdin (ENGINEHOUSE_TOKEN)."

MAX_TOKEN = 4096  # characters; a longer first line is not a token
_MAX_DESCRIPTION = 1000  # characters; longer than any description
_KEY = "enginehouse.given"


class Given(NamedTuple):
    """The shared options; None if not given."""

    data: str | None
    url: str | None
    token: str | None
    json: bool
    context: str | None = None

    @property
    def server(self) -> dict[str, str | None]:
        """The flags that say which server is meant."""
        return {"data": self.data, "url": self.url, "token": self.token, "context": self.context}


def given() -> Given:
    """The shared options of the running command. `--token -` and `--token @FILE` are read here, only when needed."""
    found: dict[str, Any] = click.get_current_context().meta.get(_KEY, {})
    token = found.get("token")
    if token == "-":
        token = found["token"] = _token_from_stdin()
    elif token is not None and token.startswith("@"):
        token = found["token"] = _token_from_file(token[1:])
    return Given(found.get("data"), found.get("url"), token, bool(found.get("json")), found.get("context"))


def given_for_completion() -> dict[str, str | None]:
    """The shared options that name a server. A token from stdin is not read: the shell's stdin is not meant."""
    found: dict[str, Any] = click.get_current_context().meta.get(_KEY, {})
    return {
        "data": found.get("data"),
        "url": found.get("url"),
        "token": None if found.get("token") == "-" else given().token,
        "context": found.get("context"),
    }


def wants_json() -> bool:
    return bool(click.get_current_context().meta.get(_KEY, {}).get("json"))


def emit_json(answer: object) -> bool:
    """Print the answer with --json; False without, when the command has to show it."""
    from enginehouse.cli.terminal import output

    if wants_json():
        output.emit_json(answer)
    return wants_json()


def emit(answer: object, sentence: str) -> None:
    """Print the answer with --json, otherwise a sentence about it."""
    from enginehouse.cli.terminal import output

    if not emit_json(answer):
        output.say(sentence)


def _token_from_stdin() -> str:
    token = sys.stdin.readline().strip()
    if not token:
        raise Invalid(
            "cannot read a token from stdin: it is empty; pipe one in, for example with `< token-file`",
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
            f"cannot read a token from {name!r}: {why}; --token @FILE takes the path of a file with the token",
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
        option("--context", "The server of this name (ENGINEHOUSE_CONTEXT).", metavar="NAME"),
        option("--url", "The frontend to talk to (ENGINEHOUSE_URL).", metavar="URL"),
        option("--token", "Its token; @FILE reads a file, - stdin (ENGINEHOUSE_TOKEN).", metavar="TOKEN"),
        option("--json", "Print JSON.", is_flag=True),
    ]


def _own_first(parameters: Sequence[click.Parameter], meanings: Meanings) -> list[click.Parameter]:
    taken = {name for parameter in parameters for name in parameter.opts}
    return [*parameters, *(one for one in _shared_options(meanings) if not taken & set(one.opts))]


def _refuse_repeated(order: Sequence[click.Parameter], ctx: click.Context) -> None:
    """Refuse what was given twice. The same switch twice means the same as once, unless it has an opposite."""
    seen: set[str | None] = set()
    for one in order:
        if not isinstance(one, click.Option) or one.multiple or one.count or ctx.resilient_parsing:
            continue
        if one.name in seen and not (one.is_flag and not one.secondary_opts):
            raise click.UsageError(f"{one.opts[-1]} was given twice, and takes one value. Give it once", ctx)
        seen.add(one.name)


def _refuse_bare_name(
    used: click.Command, options: Mapping[str, object], left: Sequence[str], ctx: click.Context
) -> None:
    """Say how a name is given, where a word is left over and the command takes a name by its flag."""
    takes_words = any(isinstance(one, click.Argument) for one in used.params)
    takes_name = not takes_words and any("--name" in one.opts for one in used.params)
    if len(left) == 1 and takes_name and "name" not in options and not ctx.resilient_parsing:
        raise click.UsageError(f"a name is given with --name: {ctx.command_path} --name {shlex.quote(left[0])}", ctx)


def _write_examples(formatter: click.HelpFormatter, examples: Sequence[str]) -> None:
    with formatter.section("Examples"):
        for example in examples:
            formatter.write(f"{'':>{formatter.current_indent}}{example}\n")


class _WithExamples(click.Command):
    """A command with the shared options, and with examples at the end of its help."""

    def __init__(
        self, *arguments: Any, examples: Sequence[str] = (), meanings: Meanings = _DEFAULT_MEANINGS, **attributes: Any
    ) -> None:
        attributes["params"] = _own_first(attributes.get("params") or [], meanings)
        super().__init__(*arguments, **attributes)
        self.examples = tuple(examples)
        for parameter in self.params:
            live_names.complete_names(parameter)

    def make_parser(self, ctx: click.Context) -> Any:
        """A parser that refuses an option given twice that takes one value, which click would drop silently."""
        parser: Any = super().make_parser(ctx)
        parse = parser.parse_args

        def parse_once(args: list[str]) -> Any:
            parsed = parse(args)
            _refuse_repeated(parsed[2], ctx)
            _refuse_bare_name(self, parsed[0], parsed[1], ctx)
            return parsed

        parser.parse_args = parse_once
        return parser

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        _write_examples(formatter, self.examples)


class CliCommand(_WithExamples):
    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except NotFound as error:
            live_names.add_hint(ctx, error)
            raise


class CliGroup(_WithExamples, click.Group):
    command_class = CliCommand

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Accept the aliases of commands, and say which command an unknown word may mean."""
        known = self.list_commands(ctx)
        word = args[0]
        if word not in known and not word.startswith("-"):
            command = other_words.meant(word, known)
            if command is None and not ctx.resilient_parsing:
                hint = other_words.hint(word, ctx.command_path, known)
                ctx.fail(f"there is no command {word!r}. {hint}".rstrip())
            if command is not None:
                args = [command, *args[1:]]
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        # The default implementation truncates descriptions to one line.
        rows = [(name, one.get_short_help_str(_MAX_DESCRIPTION)) for name, one in sorted(self.commands.items())]
        if rows:
            with formatter.section("Commands"):
                formatter.write_dl(rows)


def command(
    name: str, *, examples: Sequence[str], meanings: Meanings = _DEFAULT_MEANINGS
) -> Callable[[Callable[..., Any]], click.Command]:
    return click.command(name, cls=CliCommand, examples=examples, meanings=meanings)


def group(
    name: str, *, examples: Sequence[str], meanings: Meanings = _DEFAULT_MEANINGS
) -> Callable[[Callable[..., Any]], CliGroup]:
    return click.group(name, cls=CliGroup, examples=examples, meanings=meanings)


def setting(field: str, help: str, metavar: str = "TEXT") -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A flag for a field of settings. Its text is passed on unchecked: `settings.load` checks every value."""
    name = field.removesuffix("_seconds").removesuffix("_bytes").replace("_", "-")
    return click.option(f"--{name}", field, metavar=metavar, help=help)


def described(field: str, metavar: str = "TEXT") -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A flag for a setting of frontends, whose description their settings page shows too."""
    return setting(field, DESCRIPTIONS[field], metavar)


no_follow_option = click.option("--no-follow", is_flag=True, help="Do not wait; print the id of the operation.")
log_level = described("log_level", "LEVEL")
