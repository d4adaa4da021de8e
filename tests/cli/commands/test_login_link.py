"""`login-link` prints a link and nothing else, so that it can be piped to whatever opens it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.cli.recorded import Answer, recorded, refused, run

MADE = {"url": "http://h:1/#/login/abc", "code": "abc", "expires_at": "2026-01-01T00:00:00Z"}


@pytest.mark.parametrize(("words", "role"), [((), "admin"), (("--role", "viewer"), "viewer")])
def test_only_the_link_goes_to_stdout(tmp_path: Path, words: tuple[str, ...], role: str) -> None:
    with recorded({"POST /api/session/links": Answer(MADE, 201)}) as world:
        result = run(world, tmp_path, "login-link", *words)
    assert (result.exit_code, result.stdout) == (0, f"{MADE['url']}\n")
    assert f"as {role}, once" in result.stderr
    assert world.bodies("/api/session/links") == [{"role": role}]


def test_programs_get_the_whole_answer(tmp_path: Path) -> None:
    with recorded({"POST /api/session/links": Answer(MADE, 201)}) as world:
        assert json.loads(run(world, tmp_path, "login-link", "--json").stdout) == MADE


def test_a_token_that_may_not_do_this_is_an_error(tmp_path: Path) -> None:
    answer = refused(403, "cannot do this with a viewer token: it needs the role admin", "forbidden")
    with recorded({"POST /api/session/links": answer}) as world:
        result = run(world, tmp_path, "login-link")
    assert (result.exit_code, result.stdout) == (4, "")
    assert "needs the role admin" in result.stderr
