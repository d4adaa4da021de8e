"""What `up` says when everything is ready, to people and to programs."""

from __future__ import annotations

import json

import pytest

from enginehouse.cli.commands.up import _greet_people, _greet_programs
from enginehouse.parent import Welcome

CLOSED = Welcome(
    url="http://127.0.0.1:8080",
    admin_token_file="/data/admin.token",
    is_open=False,
    join="enginehouse join http://127.0.0.1:8080 --token T --name second",
    try_it="enginehouse run tiny-chat",
)


def test_people_see_the_address_the_token_the_join_line_and_what_to_try(capsys: pytest.CaptureFixture[str]) -> None:
    _greet_people(CLOSED)
    said = capsys.readouterr().out
    for told in ("http://127.0.0.1:8080/v1", CLOSED.admin_token_file, CLOSED.join, CLOSED.try_it, "--host 0.0.0.0"):
        assert told in said


def test_programs_get_the_same_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    _greet_programs(CLOSED)
    said = capsys.readouterr().out
    assert said.count("\n") == 1
    assert json.loads(said) == {
        "url": CLOSED.url,
        "admin_token_file": CLOSED.admin_token_file,
        "is_open": False,
        "join": CLOSED.join,
        "try_it": CLOSED.try_it,
    }
