"""Settings as they are shown: complete, as people write them, and without secrets."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from enginehouse.core.views import SettingView
from enginehouse.settings.programs import FrontendSettings, fields_of, load, setting_name
from enginehouse.settings.shown import shown_duration, shown_settings, without_password
from enginehouse.settings.values import parse_duration

SECRETS = {
    "admin_token": "admin-secret-of-more-than-32-characters",
    "join_token": "join-secret-of-more-than-32-characters",
    "nats_url": "nats://user:bus-secret@h:4222",
    "database_url": "postgresql://user:store-secret@h/name?password=other-secret",
}


def shown(settings: FrontendSettings, port: int | None = None) -> dict[str, SettingView]:
    return {one.name: one for one in shown_settings(settings, port=port)}


def test_every_setting_is_there_with_its_names_and_a_sentence(tmp_path: Path) -> None:
    found = shown(load(FrontendSettings, {"data": str(tmp_path)}, {}))
    assert set(found) == {setting_name(field) for field in fields_of(FrontendSettings)}
    for one in found.values():
        assert one.help.endswith("."), one.name
        assert one.variable == f"ENGINEHOUSE_{one.name.upper()}"
        assert one.source == "default"
    assert {name for name, one in found.items() if not one.flag} == {"admin_token", "join_token"}
    assert found["allowed_hosts"].flag == "--allow-host"


def test_values_are_written_as_people_write_them(tmp_path: Path) -> None:
    given = {"data": str(tmp_path), "allowed_hosts": ("a:1", "b"), "prefix_cache": "off", "stall_seconds": "90"}
    found = shown(load(FrontendSettings, given, {}), port=8081)
    values = {name: one.value for name, one in found.items()}
    assert (values["allowed_hosts"], values["prefix_cache"], values["stall"]) == ("a:1,b", "off", "1m30s")
    assert (values["port"], values["schedules"], values["session"]) == ("8081", "", "168h")
    assert values["database_url"] == f"sqlite:///{tmp_path}/enginehouse.db"
    assert values["backend_galleries"].startswith('[{"name":"localai"')


def test_of_secrets_only_is_shown_whether_they_are_set(tmp_path: Path) -> None:
    found = shown(load(FrontendSettings, {"data": str(tmp_path), **SECRETS}, {}))
    assert {name for name, one in found.items() if one.is_secret} == set(SECRETS)
    assert "secret" not in "".join(one.value for one in found.values())
    assert {found[name].value for name in ("admin_token", "join_token", "nats_url")} == {"set"}
    assert found["database_url"].value == "postgresql://user@h/name"
    plain = shown(load(FrontendSettings, {"data": str(tmp_path)}, {}))
    assert {plain[name].value for name in ("admin_token", "join_token", "nats_url")} == {"not set"}


@pytest.mark.parametrize(
    ("url", "found"),
    [
        ("postgresql://u:p@h:5432/d", "postgresql://u@h:5432/d"),
        ("postgresql://u:p@ss:x@h/d", "postgresql://u@h/d"),
        ("postgresql://h/d?host=/run", "postgresql://h/d"),
        ("sqlite:////var/lib/e.db", "sqlite:////var/lib/e.db"),
    ],
)
def test_a_database_is_shown_without_its_password(url: str, found: str) -> None:
    assert without_password(url) == found


@given(st.integers(0, 365 * 86400) | st.sampled_from([0.25, 0.5, 1.5]))
def test_a_duration_is_read_as_it_is_shown(seconds: float) -> None:
    assert parse_duration(shown_duration(seconds), zero_allowed=True) == seconds
