"""`enginehouse top` where it cannot be shown, and with what it cannot use."""

from __future__ import annotations

from pathlib import Path

from tests.cli.real_terminal import Terminal
from tests.cli.recorded import recorded, refused, run

NODES = "GET /api/nodes?limit=1"


def test_without_a_terminal_it_says_what_to_use_and_asks_nobody(tmp_path: Path) -> None:
    with recorded({}) as world:
        result = run(world, tmp_path, "top")
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    assert "use `enginehouse nodes list` and `enginehouse ops list`" in result.stderr
    assert world.requests == []


def test_on_a_dumb_terminal_it_says_the_same(tmp_path: Path) -> None:
    with recorded({}) as world, Terminal(world, tmp_path, "top", TERM="dumb") as terminal:
        terminal.wait_for("use `enginehouse nodes list`")
        assert terminal.exit_code() == 2


def test_a_token_that_may_not_look_is_refused_before_the_screen_is_taken(tmp_path: Path) -> None:
    sentence = "cannot list nodes with this token: it has the role `user`"
    with recorded({NODES: refused(403, sentence, "forbidden")}) as world, Terminal(world, tmp_path, "top") as terminal:
        terminal.wait_for(sentence)
        assert terminal.exit_code() == 4
    assert "\x1b[?1049h" not in terminal.raw
