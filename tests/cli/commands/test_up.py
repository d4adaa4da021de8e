"""What `up` says when everything is ready, to people and to programs."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import msgspec
import pytest

from enginehouse.bus.embedded import EmbeddedServer
from enginehouse.cli.commands.up import _greet_people, _greet_programs
from enginehouse.parent import Welcome, _frontend, _worker
from enginehouse.settings.programs import UpSettings

CLOSED = Welcome(
    url="http://127.0.0.1:8080",
    login="http://127.0.0.1:8080/#/login/abc",
    login_again="enginehouse login-link",
    admin_token_file="/data/admin.token",
    is_open=False,
    join="enginehouse join http://127.0.0.1:8080 --token T --name second",
    join_sha256="",
    join_token_file="/data/join.token",
    try_it="enginehouse run tiny-chat",
    down="enginehouse down",
)
OPEN = msgspec.structs.replace(
    CLOSED,
    is_open=True,
    join="curl -fsS http://10.0.0.1:8080/join.sh | sh -s -- http://10.0.0.1:8080",
    join_sha256="ab" * 32,
)


def test_people_see_the_address_the_token_the_join_line_and_what_to_try(capsys: pytest.CaptureFixture[str]) -> None:
    _greet_people(CLOSED)
    said = capsys.readouterr().out
    for told in ("http://127.0.0.1:8080/v1", CLOSED.admin_token_file, CLOSED.join, CLOSED.try_it, "--host 0.0.0.0"):
        assert told in said


def test_an_open_server_shows_the_line_for_a_bare_machine_with_the_digest_of_its_script(
    capsys: pytest.CaptureFixture[str],
) -> None:
    _greet_people(OPEN)
    said = capsys.readouterr().out
    for told in (OPEN.join, OPEN.join_sha256, OPEN.join_token_file):
        assert told in said


def test_a_detached_server_says_how_to_stop_it(capsys: pytest.CaptureFixture[str]) -> None:
    _greet_people(CLOSED, is_detached=True, log="/data/logs/up.log")
    said = capsys.readouterr().out
    assert "`enginehouse down` stops it" in said
    assert "/data/logs/up.log" in said
    assert "Ctrl-C" not in said


def test_people_see_a_link_that_signs_them_in_and_without_one_how_to_get_it(capsys: pytest.CaptureFixture[str]) -> None:
    _greet_people(CLOSED)
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "web page" in line]
    assert CLOSED.login in line
    assert "`enginehouse login-link` makes another" in line
    _greet_people(msgspec.structs.replace(CLOSED, login=""))
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "web page" in line]
    assert line.split()[2] == CLOSED.url
    assert "`enginehouse login-link`" in line


def test_programs_get_the_same_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    _greet_programs(CLOSED)
    said = capsys.readouterr().out
    assert said.count("\n") == 1
    assert json.loads(said) == {
        "url": CLOSED.url,
        "login": CLOSED.login,
        "login_again": CLOSED.login_again,
        "admin_token_file": CLOSED.admin_token_file,
        "is_open": False,
        "join": CLOSED.join,
        "join_sha256": "",
        "join_token_file": CLOSED.join_token_file,
        "try_it": CLOSED.try_it,
        "down": CLOSED.down,
    }


def test_the_log_level_is_handed_to_both_children(tmp_path: Path) -> None:
    for role in ("admin", "join"):
        (tmp_path / f"{role}.token").write_text("secret")
    settings = UpSettings(data=tmp_path, name="main", log_level="debug")
    server = EmbeddedServer(argv=(), host="127.0.0.1", port=4222, pid_path=tmp_path / "pid", log_path=tmp_path / "log")
    with socket.socket() as listener:
        children = (_frontend(settings, listener, server, {}), _worker(settings, "http://127.0.0.1:8080"))
    for child in children:
        assert child.argv[child.argv.index("--log-level") + 1] == "debug", child.name
