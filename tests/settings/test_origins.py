"""Where settings came from, and that a parent which passes them on does not hide it."""

from __future__ import annotations

from pathlib import Path

import pytest

from enginehouse.settings.origins import BY_UP, DEFAULT, ORIGINS_VARIABLE, SettingOrigin, handed_on, with_handed
from enginehouse.settings.programs import FrontendSettings, UpSettings, fields_of, load, origins_of


def written(data: Path, content: str) -> str:
    path = data / "enginehouse.toml"
    path.write_text(content)
    return str(path)


def test_each_place_is_named(tmp_path: Path) -> None:
    file = written(tmp_path, 'stall = "3m"\nlease = "40s"\n[frontend]\nqueue_length = 7\n[up]\nqueue_wait = "1s"\n')
    flags = {"data": str(tmp_path), "stale_seconds": "40s", "heartbeat_seconds": None}
    environ = {
        "ENGINEHOUSE_LEASE": "50s",
        "ENGINEHOUSE_STALE": "60s",
        "LOCALAI_MODEL_LOAD_WAIT": "2m",
        "ENGINEHOUSE_RECONCILE": "",
    }
    settings = load(FrontendSettings, flags, environ)
    found = {field: one for field, one in settings.origins.items() if one != DEFAULT}
    assert found == {
        "stale_seconds": SettingOrigin("flag", "--stale"),
        "lease_seconds": SettingOrigin("variable", "ENGINEHOUSE_LEASE"),
        "model_load_wait_seconds": SettingOrigin("variable", "LOCALAI_MODEL_LOAD_WAIT"),
        "stall_seconds": SettingOrigin("file", file),
        "queue_length": SettingOrigin("file", file),
    }
    assert settings.origins.keys() == set(fields_of(FrontendSettings))
    assert (settings.lease_seconds, settings.stall_seconds, settings.queue_length) == (50.0, 180.0, 7)


def test_a_child_tells_what_its_parent_was_given_and_not_that_it_got_a_flag(tmp_path: Path) -> None:
    written(tmp_path, 'stall = "3m"\n[frontend]\nschedules = "/etc/schedules"\n')
    asked = {"data": str(tmp_path), "stale_seconds": "40s", "port": "9000"}
    parents = origins_of(UpSettings, asked, {"ENGINEHOUSE_LEASE": "50s"})
    # What `up` gives its child: flags for nearly everything, tokens by variable, the port as a socket.
    given = {"data": str(tmp_path), "stale_seconds": "40.0s", "lease_seconds": "50.0s", "stall_seconds": "180.0s"}
    given |= {"heartbeat_seconds": "10.0s", "nats_url": "nats://h:1", "approve_keys": "0" * 64, "processes": "1"}
    own = {"nats_url": BY_UP, "approve_keys": BY_UP, "admin_token": SettingOrigin("file", "/d/admin.token")}
    environ = {"ENGINEHOUSE_ADMIN_TOKEN": "t" * 40, "ENGINEHOUSE_START_WAIT": "9s", **handed_on({**parents, **own})}
    child = load(FrontendSettings, given, environ).origins
    assert child["stale_seconds"] == SettingOrigin("flag", "--stale")
    assert child["lease_seconds"] == SettingOrigin("variable", "ENGINEHOUSE_LEASE")
    assert child["stall_seconds"] == SettingOrigin("file", str(tmp_path / "enginehouse.toml"))
    assert child["heartbeat_seconds"] == DEFAULT
    assert child["port"] == SettingOrigin("flag", "--port")
    assert child["nats_url"] == child["approve_keys"] == BY_UP
    assert child["admin_token"] == SettingOrigin("file", "/d/admin.token")
    # What the parent did not pass on, the child found itself.
    assert child["schedules"] == SettingOrigin("file", str(tmp_path / "enginehouse.toml"))
    assert child["start_wait_seconds"] == SettingOrigin("variable", "ENGINEHOUSE_START_WAIT")
    assert child["processes"] == SettingOrigin("flag", "--processes")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"stale_seconds": 1}', '{"stale_seconds": {"source": "moon"}}'])
def test_a_variable_that_is_no_origins_changes_nothing(text: str) -> None:
    own = {"stale_seconds": SettingOrigin("flag", "--stale")}
    assert with_handed(own, {ORIGINS_VARIABLE: text} if text else {}) == own
