"""An option that takes one value and is given twice is refused, on every command: none of the values is dropped."""

from __future__ import annotations

from pathlib import Path

import click
import pytest
from tests.cli.recorded import Answer, recorded, run
from tests.cli.test_main import ALL

VALUES = {"INT": "1", "integer range": "1", "duration": "1s", "float": "1", "integer": "1"}


def single_valued(command: click.Command) -> list[click.Option]:
    return [one for one in command.params if isinstance(one, click.Option) and not (one.multiple or one.is_flag)]


def test_there_are_many_to_look_at() -> None:
    assert sum(len(single_valued(command)) for command in ALL.values()) > 300


@pytest.mark.parametrize("path", sorted(ALL), ids=" ".join)
def test_each_option_given_twice_is_refused_by_name(path: tuple[str, ...]) -> None:
    command = ALL[path]
    for option in single_valued(command):
        value = option.type.choices[0] if isinstance(option.type, click.Choice) else VALUES.get(option.type.name, "x")
        words = [option.opts[-1], str(value)] * 2
        with pytest.raises(click.UsageError, match=f"{option.opts[-1]} was given twice"):
            command.make_context("x", words)


def test_the_refusal_is_wrong_usage_and_nothing_is_asked(tmp_path: Path) -> None:
    with recorded({}) as world:
        result = run(world, tmp_path, "ops", "cancel", "3f2a", "--node", "a", "--node", "b")
        assert (result.exit_code, world.requests) == (2, [])
        assert result.stderr.startswith("enginehouse: --node was given twice, and takes one value.")
        before = run(world, tmp_path, "--url", world.url, "--url", "http://h", "models", "list")
        assert (before.exit_code, world.requests) == (2, [])


def test_what_may_be_repeated_is_used_twice_and_a_switch_may_be_repeated(tmp_path: Path) -> None:
    with recorded({"GET /api/nodes?limit=500": Answer([])}) as world:
        assert run(world, tmp_path, "nodes", "list", "--json", "--json").exit_code == 0
        repeated = ("nodes", "list", "--selector", "a=b", "--selector", "c=d")
        assert run(world, tmp_path, *repeated).exit_code == 0


def test_the_later_of_two_places_takes_precedence_as_documented(tmp_path: Path) -> None:
    with recorded({"GET /api/models": Answer([])}) as world:
        assert run(world, tmp_path, "--url", "http://127.0.0.1:1", "models", "list", "--url", world.url).exit_code == 0
