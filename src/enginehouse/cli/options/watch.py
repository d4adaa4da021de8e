"""`-w`/`--watch` for commands that list something."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import click


def watchable(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add `--watch`, which shows the list again and again until Ctrl-C."""

    @functools.wraps(function)
    def once_or_again(*arguments: Any, is_watched: bool = False, **more: Any) -> Any:
        if not is_watched:
            return function(*arguments, **more)
        from enginehouse.cli.terminal.watching import watch

        return watch(lambda: function(*arguments, **more))

    add = click.option("-w", "--watch", "is_watched", is_flag=True, help="Show it again after every change.")
    return add(once_or_again)
