"""The command line: one group, its commands imported only when they are used.

This is the only place where an error becomes a line on stderr and an exit code. `--help` must stay fast, so the names
and one-line descriptions are here, and showing them imports nothing but click.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import sys
from collections.abc import Sequence
from typing import Any

import click
from click.shell_completion import CompletionItem

from enginehouse import __version__
from enginehouse.cli.options.shared import CliCommand, CliGroup
from enginehouse.core.errors import EnginehouseError, Hopeless, Invalid, Unauthenticated, exit_code

INTERRUPTED = 130  # the exit code that shells report after Ctrl-C

COMMANDS = {
    "up": "Run everything on this machine.",
    "down": "Stop what runs on this machine.",
    "run": "Chat with a model; installs and starts what it needs.",
    "embed": "Print the vectors of texts; installs and starts what the model needs.",
    "join": "Join this machine to a server as another node.",
    "nodes": "List, approve, reject, drain and remove nodes.",
    "backends": "List, install, upgrade, roll back and delete engines.",
    "gallery": "Browse the galleries, without a server.",
    "local": "Install, upgrade and delete engines in a directory, without a server.",
    "models": "Add, import, list, load, unload and delete models.",
    "replicas": "List the replicas of models.",
    "top": "Show the cluster live on the whole screen, with keys to act.",
    "ops": "List, follow, cancel, retry and release operations.",
    "status": "Show what is so and what needs you, on one screen.",
    "ps": "List what runs where.",
    "logs": "Show the log of a frontend, a worker, NATS or the engines of a model.",
    "doctor": "Check this machine and its server; say what to do.",
    "login": "Store the server at URL and a token for it.",
    "logout": "Forget a server and its token.",
    "contexts": "List, choose and forget the servers that `enginehouse login` has stored.",
    "login-link": "Print a link that signs you in to the web page.",
    "tokens": "Create, list, rotate and revoke access tokens.",
    "keys": "Create, list, rotate and revoke API keys of applications.",
    "audit": "List who changed what, newest first.",
    "usage": "Show what was used, by token, model and node.",
    "backup": "Write the database, keys and settings of a server into FILE.",
    "restore": "Bring a server back from the backup FILE.",
    "frontend": "Run one frontend alone.",
    "worker": "Run the worker of a node alone.",
    "service": "Start Enginehouse with this machine: install, show and remove services.",
    "completion": "Print the completion script of SHELL.",
    "version": "Show the version.",
}


class CommandLine(CliGroup):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"enginehouse.cli.commands.{cmd_name.replace('-', '_')}")
        found = module.entry
        assert isinstance(found, CliCommand | CliGroup)
        return found

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        # The default implementation would import every command for its short help.
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        # As in `format_commands`: the default implementation imports every command.
        named = [CompletionItem(name, help=text) for name, text in COMMANDS.items() if name.startswith(incomplete)]
        return named or click.Command.shell_complete(self, ctx, incomplete)

    def main(self, args: Sequence[str] | None = None, *ignored: Any, **extra: Any) -> Any:
        sys.exit(self._exit_code(args))

    def _exit_code(self, args: Sequence[str] | None) -> int:
        # Also known when the options could not be read.
        in_json = "--json" in (sys.argv[1:] if args is None else args)
        try:
            result = super().main(args, "enginehouse", standalone_mode=False)
            sys.stdout.flush()
        except EnginehouseError as error:
            # The frontend's message names HTTP headers; a command has other ways to give a token.
            ways = "; give one with --token @FILE, --token - or ENGINEHOUSE_TOKEN"
            hint = ways if isinstance(error, Unauthenticated) else ""
            return _fail(error, error.message + hint, in_json=in_json)
        except click.exceptions.NoArgsIsHelpError as error:
            error.show()
            return error.exit_code
        except click.UsageError as error:
            hint = f" (see `{error.ctx.command_path} --help`)" if error.ctx else ""
            message = error.format_message().rstrip(".") + hint
            return _fail(Invalid(message, code="invalid_usage"), message, in_json=in_json)
        except click.ClickException as error:
            message = error.format_message()
            _fail(Hopeless(message), message, in_json=in_json)
            return error.exit_code
        except (click.Abort, KeyboardInterrupt):
            return INTERRUPTED
        except BrokenPipeError:
            # The reader closed the pipe. The interpreter flushes stdout again at exit, which must not fail.
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            return 1
        return result if isinstance(result, int) else 0


def _fail(error: EnginehouseError, message: str, *, in_json: bool) -> int:
    """Print an error for people and, with --json, for programs in the shape of the API. Returns the exit code."""
    from enginehouse.cli.terminal import output

    print(output.wrapped(f"enginehouse: {output.printable(message)}", sys.stderr), file=sys.stderr)
    code = exit_code(error)
    if in_json:
        about: dict[str, object] = {"message": message, "code": error.code, "exit_code": code}
        if error.param:
            about["param"] = error.param
        with contextlib.suppress(BrokenPipeError):
            output.emit_json_line({"error": about, **error.details})
    return code


@click.group(
    "enginehouse",
    cls=CommandLine,
    examples=(
        "enginehouse up",
        "enginehouse run tiny-chat",
        "enginehouse backends install llama-cpp --all",
    ),
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, "--version", message="enginehouse %(version)s")
def program() -> None:
    """Turn a set of machines into one OpenAI-compatible inference service.

    A command finds its server through --context, or --url and --token, or ENGINEHOUSE_URL and ENGINEHOUSE_TOKEN, or
    `enginehouse login`, or the data directory of an `enginehouse up` on this machine.
    """


def main() -> None:
    for stream in (sys.stdout, sys.stderr):
        # A character that the terminal cannot show is printed as its number instead of failing.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    program.main()
