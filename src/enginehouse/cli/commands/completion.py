"""`enginehouse completion`: the script that lets a shell complete commands, options and names."""

from __future__ import annotations

import click

from enginehouse.cli.options.shared import NO_ANSWER, command

VARIABLE = "_ENGINEHOUSE_COMPLETE"  # set by the script while the shell asks for completions


@command(
    "completion",
    meanings={**NO_ANSWER, "--data": ""},
    examples=(
        "enginehouse completion bash >> ~/.bashrc",
        "enginehouse completion zsh >> ~/.zshrc",
        "enginehouse completion fish > ~/.config/fish/completions/enginehouse.fish",
    ),
)
@click.argument("shell", type=click.Choice(("bash", "zsh", "fish")))
def entry(shell: str) -> None:
    """Print the completion script of SHELL.

    It completes commands and options, and the names of nodes, models, backends and operations as the server has them.
    """
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    assert kind is not None
    print(kind(click.get_current_context().find_root().command, {}, "enginehouse", VARIABLE).source())
