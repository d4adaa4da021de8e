"""Which server a command talks to: contexts beside flags, variables, files and data directories."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from enginehouse.core.errors import Invalid
from enginehouse.settings.contexts import contexts_path, read_contexts
from enginehouse.settings.programs import ClientSettings, load

STORED = {
    "current": "home",
    "contexts": {
        "home": {"url": "http://home:1", "token": "of-home"},
        "work": {"url": "https://work:2", "token": "of-work"},
    },
}


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    path = tmp_path / "config" / "enginehouse" / "contexts.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(STORED))
    for name in ("given", "default"):
        data = tmp_path / name / "enginehouse"
        data.mkdir(parents=True)
        (data / "server.json").write_text(json.dumps({"url": f"http://127.0.0.1:3/{name}"}))
        (data / "admin.token").write_text(f"of-{name}\n")
    return {
        "XDG_CONFIG_HOME": str(tmp_path / "config"),
        "XDG_DATA_HOME": str(tmp_path / "default"),
        "HOME": str(tmp_path),
    }


def chosen(flags: dict[str, object], environ: dict[str, str]) -> tuple[str, str]:
    found = load(ClientSettings, flags, environ)
    return found.url, found.token


def test_without_anything_the_current_context_is_used_with_its_token(environ: dict[str, str]) -> None:
    assert chosen({}, environ) == ("http://home:1", "of-home")
    assert chosen({}, {**environ, "ENGINEHOUSE_TOKEN": "of-another"}) == ("http://home:1", "of-home")
    assert chosen({"token": "given"}, environ) == ("http://home:1", "given")


def test_the_nearest_wins(environ: dict[str, str], tmp_path: Path) -> None:
    data = str(tmp_path / "given" / "enginehouse")
    assert chosen({"context": "work"}, environ) == ("https://work:2", "of-work")
    with_url = {**environ, "ENGINEHOUSE_URL": "http://elsewhere:4", "ENGINEHOUSE_TOKEN": "of-elsewhere"}
    assert chosen({"context": "work"}, with_url) == ("https://work:2", "of-work")
    assert chosen({}, with_url) == ("http://elsewhere:4", "of-elsewhere")
    assert chosen({}, {**with_url, "ENGINEHOUSE_CONTEXT": "work"}) == ("http://elsewhere:4", "of-elsewhere")
    assert chosen({"url": "http://flag:5", "token": "t"}, {**environ, "ENGINEHOUSE_CONTEXT": "work"})[0] == (
        "http://flag:5"
    )
    assert chosen({"data": data}, {**environ, "ENGINEHOUSE_CONTEXT": "work"}) == (
        "http://127.0.0.1:3/given",
        "of-given",
    )
    both = {**environ, "ENGINEHOUSE_CONTEXT": "work", "ENGINEHOUSE_DATA": data}
    assert chosen({}, both) == ("https://work:2", "of-work")
    assert chosen({}, {**environ, "ENGINEHOUSE_DATA": data}) == ("http://127.0.0.1:3/given", "of-given")


def test_local_is_the_server_of_this_machine_whatever_else_is_set(environ: dict[str, str]) -> None:
    here = ("http://127.0.0.1:3/default", "of-default")
    assert chosen({"context": "local"}, environ) == here
    with_url = {**environ, "ENGINEHOUSE_URL": "http://elsewhere:4", "ENGINEHOUSE_TOKEN": "of-elsewhere"}
    assert chosen({"context": "local"}, with_url) == here
    assert chosen({}, {**environ, "ENGINEHOUSE_CONTEXT": "local"}) == here


def test_an_address_in_the_settings_file_of_the_data_directory_is_nearer_than_the_current_context(
    environ: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "default" / "enginehouse" / "enginehouse.toml").write_text('[client]\nurl = "http://filed:6"\n')
    assert chosen({}, environ)[0] == "http://filed:6"


def test_an_unknown_name_names_the_flag_or_the_variable_and_what_there_is(environ: dict[str, str]) -> None:
    with pytest.raises(Invalid, match="'nope' from --context: there is no such context; there are home, work, local"):
        chosen({"context": "nope"}, environ)
    with pytest.raises(Invalid, match="from ENGINEHOUSE_CONTEXT"):
        chosen({}, {**environ, "ENGINEHOUSE_CONTEXT": "nope"})
    with pytest.raises(Invalid, match="--context and --url"):
        chosen({"context": "home", "url": "http://h"}, environ)


def test_a_damaged_file_is_named_and_a_missing_one_is_empty(environ: dict[str, str], tmp_path: Path) -> None:
    contexts_path(environ).write_text("{")
    with pytest.raises(Invalid, match=r"contexts\.json"):
        chosen({}, environ)
    assert chosen({"url": "http://h", "token": "t"}, environ) == ("http://h", "t"), "it is not needed then"
    assert read_contexts({"XDG_CONFIG_HOME": str(tmp_path / "none")}).contexts == {}
