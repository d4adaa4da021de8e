"""The words that give another process the options of the running command.

A secret must not become a word: other users can read the command line of a process. What is not given is left out, so
that the other process reads variables and files as this one would.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import click


def words_of(
    command: click.Command, values: Mapping[str, object], *, without: Collection[str] = frozenset()
) -> list[str]:
    """The options in `values`, by the names of their parameters, as they are written on a command line."""
    words: list[str] = []
    for parameter in command.params:
        name, value = parameter.name or "", values.get(parameter.name or "")
        if not isinstance(parameter, click.Option) or name in without or value in (None, False, ()):
            continue
        flag = parameter.opts[0]
        if value is True:
            words.append(flag)
        elif isinstance(value, tuple | list):
            words += [word for one in value for word in (flag, str(one))]
        else:
            words += [flag, str(value)]
    return words
