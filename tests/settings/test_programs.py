"""Settings: where a value comes from, and which values are refused."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from enginehouse.core.errors import EnginehouseError, Invalid, Unavailable
from enginehouse.core.gallery_source import LOCALAI, LOCALAI_MODELS
from enginehouse.settings.file import read_credentials, read_model_credentials
from enginehouse.settings.programs import (
    ClientSettings,
    FrontendSettings,
    InstallSettings,
    LocalSettings,
    UpSettings,
    WorkerSettings,
    as_flags,
    default_data_directory,
    default_node_name,
    fields_of,
    load,
)


def up(tmp_path: Path, flags: Mapping[str, object] = {}, environ: Mapping[str, str] = {}, file: str = "") -> UpSettings:
    if file:
        (tmp_path / "enginehouse.toml").write_text(file)
    return load(UpSettings, {"data": str(tmp_path), **flags}, environ)


def refusal(tmp_path: Path, **given: object) -> str:
    with pytest.raises(Invalid) as caught:
        up(tmp_path, **given)  # type: ignore[arg-type]
    assert caught.value.message.startswith("cannot ")
    assert caught.value.code == "invalid_setting"
    return caught.value.message


def test_the_flag_wins_over_our_variable_over_localais_over_the_file_over_the_default(tmp_path: Path) -> None:
    field = "backend_install_timeout_seconds"
    file = 'backend_install_timeout = "4m"'
    theirs = {"LOCALAI_NATS_BACKEND_INSTALL_TIMEOUT": "3m"}
    ours = {**theirs, "ENGINEHOUSE_BACKEND_INSTALL_TIMEOUT": "2m"}

    assert up(tmp_path).backend_install_timeout_seconds == 900
    assert up(tmp_path, file=file).backend_install_timeout_seconds == 240
    assert up(tmp_path, environ=theirs).backend_install_timeout_seconds == 180
    assert up(tmp_path, environ=ours).backend_install_timeout_seconds == 120
    assert up(tmp_path, {field: "1m"}, ours).backend_install_timeout_seconds == 60


def test_a_port_that_nobody_gave_is_none_and_a_given_one_is_itself(tmp_path: Path) -> None:
    assert up(tmp_path).port is None
    assert up(tmp_path, {"port": "8080"}).port == 8080
    assert up(tmp_path, environ={"ENGINEHOUSE_PORT": "9"}).port == 9
    assert up(tmp_path, file="port = 7000").port == 7000


def test_an_empty_variable_is_one_that_is_not_set(tmp_path: Path) -> None:
    assert up(tmp_path, environ={"ENGINEHOUSE_PORT": ""}).port is None


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 90), ("90s", 90), ("15m", 900), ("1h30m", 5400), ("1.5h", 5400), ("500ms", 0.5), ("2m0.5s", 120.5)],
)
def test_durations_are_written_as_in_go_or_as_plain_seconds(tmp_path: Path, text: str, seconds: float) -> None:
    assert up(tmp_path, {"stall_seconds": text}).stall_seconds == pytest.approx(seconds)


@pytest.mark.parametrize(
    "text", ["-5s", "-5", "0", "0s", "abc", "", "5x", "5 m", "1h30", "nan", "inf", "1e9", "9999999h"]
)
def test_a_bad_duration_is_refused_and_the_flag_is_named(tmp_path: Path, text: str) -> None:
    message = refusal(tmp_path, flags={"lease_seconds": text})
    assert "--lease" in message


@pytest.mark.parametrize("text", ["0", "65536", "-1", "http", "80.5", "", "9" * 5000])
def test_a_bad_port_is_refused_and_the_variable_is_named(tmp_path: Path, text: str) -> None:
    if text:
        assert "ENGINEHOUSE_NATS_PORT" in refusal(tmp_path, environ={"ENGINEHOUSE_NATS_PORT": text})
    assert "--nats-port" in refusal(tmp_path, flags={"nats_port": text})


@pytest.mark.parametrize("line", ["port = true", 'port = "x"', "port = 1.5", "port = [1]", "heartbeat = true"])
def test_a_value_of_the_wrong_type_in_the_file_is_refused_and_the_file_is_named(tmp_path: Path, line: str) -> None:
    assert str(tmp_path / "enginehouse.toml") in refusal(tmp_path, file=line)


@pytest.mark.parametrize("line", ["prot = 1", "[worker]\nport = 1", "[upp]\nport = 1", 'data = "/x"', "up = 3"])
def test_an_unknown_key_in_the_file_is_refused_by_name(tmp_path: Path, line: str) -> None:
    message = refusal(tmp_path, file=line)
    assert str(tmp_path / "enginehouse.toml") in message


def test_a_file_that_is_not_toml_or_not_there_although_named_is_refused(tmp_path: Path) -> None:
    assert "not TOML" in refusal(tmp_path, file="port = = 1")
    with pytest.raises(Invalid, match="no such file"):
        load(UpSettings, {"data": str(tmp_path)}, {}, tmp_path / "missing.toml")


def test_a_table_of_the_file_is_for_its_program_alone_and_wins(tmp_path: Path) -> None:
    (tmp_path / "enginehouse.toml").write_text('port = 1000\n[frontend]\nport = 2000\n[worker]\nname = "attic"\n')
    assert load(UpSettings, {"data": str(tmp_path)}, {}).port == 1000
    assert load(FrontendSettings, {"data": str(tmp_path)}, {}).port == 2000
    worker = load(WorkerSettings, {"data": str(tmp_path), "url": "http://h", "token": "t"}, {})
    assert worker.name == "attic"


def test_nodes_that_would_look_unhealthy_between_two_heartbeats_are_refused(tmp_path: Path) -> None:
    assert "stale" in refusal(tmp_path, flags={"stale_seconds": "5"})


def test_waiting_for_a_model_without_an_end_is_allowed(tmp_path: Path) -> None:
    assert up(tmp_path, {"model_load_wait_seconds": "0"}).model_load_wait_seconds == 0


@pytest.mark.parametrize(("text", "is_on"), [("false", False), ("0", False), ("OFF", False), ("true", True)])
def test_the_switches_of_localai_are_read_as_it_writes_them(tmp_path: Path, text: str, is_on: bool) -> None:
    environ = {"LOCALAI_DISTRIBUTED_PREFIX_CACHE": text, "LOCALAI_DISTRIBUTED_PREFIX_CACHE_TTL": "10m"}
    found = up(tmp_path, environ=environ)
    assert (found.prefix_cache, found.prefix_cache_ttl_seconds) == (is_on, 600.0)
    assert up(tmp_path, file="prefix_cache = false").prefix_cache is False
    words = as_flags(found, ("prefix_cache", "queue_length"))
    again = up(tmp_path, {"prefix_cache": words[1], "queue_length": words[3]})
    assert (again.prefix_cache, again.queue_length) == (is_on, 1024)


def test_a_queue_may_have_no_length_and_must_end(tmp_path: Path) -> None:
    assert up(tmp_path, {"queue_length": "0"}).queue_length == 0
    assert "--queue-length" in refusal(tmp_path, flags={"queue_length": "-1"})
    assert "--queue-wait" in refusal(tmp_path, flags={"queue_wait_seconds": "0"})
    assert "--prefix-cache" in refusal(tmp_path, flags={"prefix_cache": "perhaps"})


def test_a_worker_reads_the_variables_of_localai(tmp_path: Path) -> None:
    environ = {
        "LOCALAI_REGISTER_TO": "http://server:8080/",
        "LOCALAI_REGISTRATION_TOKEN": "secret",
        "LOCALAI_NODE_NAME": "attic",
        "LOCALAI_NODE_LABELS": "gpu=yes, room=attic",
        "LOCALAI_MAX_REPLICAS_PER_MODEL": "3",
        "LOCALAI_ADVERTISE_ADDR": "10.0.0.7:50051",
        "LOCALAI_ADDR": "0.0.0.0:50100",
    }
    settings = load(WorkerSettings, {"data": str(tmp_path)}, environ)
    assert settings == WorkerSettings(
        data=tmp_path,
        url="http://server:8080",
        token="secret",
        name="attic",
        advertise_host="10.0.0.7",
        base_port=50100,
        labels={"gpu": "yes", "room": "attic"},
        max_replicas_per_model=3,
    )


def test_localais_database_is_never_ours(tmp_path: Path) -> None:
    environ = {"LOCALAI_AUTH_DATABASE_URL": "postgresql://localai"}
    assert load(FrontendSettings, {"data": str(tmp_path)}, environ).database_url == ""


@pytest.mark.parametrize(
    "url", ["server:8080", "ftp://server", "http://", "http://h:99999", "http://h:x", "http://u:p@h"]
)
def test_a_bad_address_of_a_frontend_is_refused(tmp_path: Path, url: str) -> None:
    with pytest.raises(Invalid):
        load(WorkerSettings, {"data": str(tmp_path), "url": url, "token": "t"}, {})


@pytest.mark.parametrize("name", ["a b", "*", ">", "a/b", "x" * 300, "..", ""])
def test_a_bad_node_name_is_refused(tmp_path: Path, name: str) -> None:
    assert "--name" in refusal(tmp_path, flags={"name": name})


def test_a_secret_is_not_repeated_in_the_refusal(tmp_path: Path) -> None:
    with pytest.raises(Invalid) as caught:
        load(ClientSettings, {"data": str(tmp_path), "url": "http://h", "token": "hush\x01hush"}, {})
    assert "hush" not in caught.value.message


def test_a_client_finds_the_server_of_its_data_directory(tmp_path: Path) -> None:
    (tmp_path / "server.json").write_text('{"url":"http://127.0.0.1:8081","pid":1}')
    (tmp_path / "admin.token").write_text("secret\n")
    settings = load(ClientSettings, {}, {"ENGINEHOUSE_DATA": str(tmp_path)})
    assert settings == ClientSettings(data=tmp_path, url="http://127.0.0.1:8081", token="secret")


@pytest.mark.parametrize("content", [None, "", "{", '{"pid": 1}', '{"url": 5}'])
def test_a_client_without_a_server_is_told_what_to_do(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "server.json").write_text(content)
    with pytest.raises(Unavailable) as caught:
        load(ClientSettings, {"data": str(tmp_path)}, {})
    assert "enginehouse up" in caught.value.message
    assert "--url" in caught.value.message


def test_the_join_token_of_an_earlier_join_is_good_for_the_next_one(tmp_path: Path) -> None:
    """The script keeps it in the data directory; that of a server there is never sent elsewhere."""
    environ = {"HOME": str(tmp_path)}
    directory = default_data_directory(environ)
    directory.mkdir(parents=True)
    (directory / "join.token").write_text("given\n")
    assert load(WorkerSettings, {"url": "http://elsewhere:8080"}, environ).token == "given"
    (directory / "admin.token").touch()
    assert load(WorkerSettings, {"url": "http://elsewhere:8080"}, environ).token == ""


def test_the_token_of_this_machine_is_not_sent_to_a_server_elsewhere(tmp_path: Path) -> None:
    environ = {"HOME": str(tmp_path), "XDG_DATA_HOME": str(tmp_path)}
    directory = default_data_directory(environ)
    directory.mkdir(parents=True)
    (directory / "admin.token").write_text("secret")
    (directory / "server.json").write_text('{"url":"http://10.0.0.1:8080","pid":1}')

    def token(url: str) -> str:
        return load(ClientSettings, {"url": url}, environ).token

    assert token("http://elsewhere:8080") == ""
    assert token("http://127.0.0.1:9000") == "secret"
    assert token("http://10.0.0.1:8080") == "secret"
    assert load(ClientSettings, {"url": "http://elsewhere", "data": str(directory)}, {}).token == "secret"


def test_the_data_directory_is_the_platforms_unless_given(tmp_path: Path) -> None:
    assert default_data_directory({"HOME": "/h", "XDG_DATA_HOME": "/x"}).name == "enginehouse"
    relative = load(UpSettings, {"data": "some/where"}, {})
    assert relative.data == Path(os.getcwd(), "some/where")


@pytest.mark.parametrize(
    ("hostname", "name"),
    [
        ("attic", "attic"),
        ("my box!.local", "my-box-.local"),
        ("-x-", "x-"),
        ("", "node"),
        ("ümlaut", "mlaut"),
        ("a" * 200, "a" * 128),
    ],
)
def test_a_host_name_is_made_valid_as_a_node_name(hostname: str, name: str) -> None:
    assert default_node_name(hostname) == name


@pytest.mark.parametrize("value", [5, -5, 1.5, True, "", " ", "\x00", [], ["a"], {}, {"a": 1}, "é" * 10, object()])
def test_whatever_a_value_is_it_is_taken_or_refused_in_our_words(tmp_path: Path, value: object) -> None:
    for field in fields_of(UpSettings):
        with contextlib.suppress(EnginehouseError):
            up(tmp_path, {field: value})


def test_galleries_are_localais_unless_the_flag_a_variable_or_the_file_says_otherwise(tmp_path: Path) -> None:
    def named(name: str) -> str:
        return f'[{{"name": "{name}", "url": "file:///{name}"}}]'

    def names(**given: object) -> list[str]:
        return [source.name for source in up(tmp_path, **given).backend_galleries]  # type: ignore[arg-type]

    assert up(tmp_path).backend_galleries == (LOCALAI,)
    assert names(file='[[backend_galleries]]\nname = "file"\nurl = "file:///file"') == ["file"]
    assert names(environ={"BACKEND_GALLERIES": named("old")}) == ["old"]
    theirs = {"BACKEND_GALLERIES": named("old"), "LOCALAI_BACKEND_GALLERIES": named("theirs")}
    assert names(environ=theirs) == ["theirs"]
    ours = {**theirs, "ENGINEHOUSE_BACKEND_GALLERIES": named("ours")}
    assert names(environ=ours) == ["ours"]
    assert names(flags={"backend_galleries": named("flag")}, environ=ours) == ["flag"]
    assert names(flags={"backend_galleries": "[]"}, environ=ours) == []
    assert load(LocalSettings, {"data": str(tmp_path)}, ours).backend_galleries[0].name == "ours"


def test_sources_of_models_are_localais_and_can_be_others(tmp_path: Path) -> None:
    (tmp_path / "secrets.toml").write_text('mine = "s3cret"\n')
    assert up(tmp_path).model_galleries == (LOCALAI_MODELS,)
    assert up(tmp_path, environ={"GALLERIES": "[]"}).model_galleries == ()
    assert up(tmp_path).hf_endpoint == "https://huggingface.co"
    assert up(tmp_path, environ={"HF_ENDPOINT": "http://mirror:80/", "HF": "hub.example"}).hf_endpoint == (
        "https://hub.example"
    )
    given = up(tmp_path, {"model_credentials": str(tmp_path / "secrets.toml"), "model_galleries": "[]"})
    words = as_flags(given, ("model_galleries", "hf_endpoint", "model_credentials"))
    assert words == [
        *("--model-galleries", "[]", "--hf-endpoint", "https://huggingface.co"),
        *("--model-credentials", str(tmp_path / "secrets.toml")),
    ]
    assert read_model_credentials(given.model_credentials) == {"mine": "s3cret"}
    (tmp_path / "secrets.toml").write_text("mine = 5\nother = 's3cret'\n")
    with pytest.raises(Invalid) as caught:
        read_model_credentials(given.model_credentials)
    assert "s3cret" not in caught.value.message


@pytest.mark.parametrize(
    "host", ["h", "h:5000", "10.0.0.0/8", "fd00::/8", "http://h:5000", "127.0.0.1:5000", "[::1]:5000"]
)
def test_hosts_that_may_be_reached_are_taken(tmp_path: Path, host: str) -> None:
    assert up(tmp_path, {"allowed_hosts": (host,)}).installing.allowed_hosts == (host,)
    environ = {"ENGINEHOUSE_ALLOWED_HOSTS": f"{host}, other"}
    assert up(tmp_path, environ=environ).installing.allowed_hosts == (host, "other")
    assert load(FrontendSettings, {"data": str(tmp_path)}, environ).allowed_hosts == (host, "other")


@pytest.mark.parametrize("host", ["ftp://h", "h/path", "a b", "10.0.0.0/99", "http://h/path", "h:port", "*"])
def test_what_is_no_host_is_refused_with_the_flag_that_people_know(tmp_path: Path, host: str) -> None:
    assert "--allow-host" in refusal(tmp_path, flags={"allowed_hosts": (host,)})


def test_settings_as_flags_give_another_program_the_same(tmp_path: Path) -> None:
    given = up(tmp_path, {"allowed_hosts": ("a:1", "b"), "stale_seconds": "40s", "heartbeat_seconds": "7s"})
    words = as_flags(given, ("stale_seconds", "heartbeat_seconds", "backend_galleries"))
    words += as_flags(given.installing, ("allowed_hosts",))
    hosts = tuple(value for flag, value in zip(words[::2], words[1::2], strict=True) if flag == "--allow-host")
    others = {flag: value for flag, value in zip(words[::2], words[1::2], strict=True) if flag != "--allow-host"}
    assert others.keys() == {"--stale", "--heartbeat", "--backend-galleries"}
    again = up(
        tmp_path,
        {
            "stale_seconds": others["--stale"],
            "heartbeat_seconds": others["--heartbeat"],
            "backend_galleries": others["--backend-galleries"],
            "allowed_hosts": hosts,
        },
    )
    assert again == given


@pytest.mark.parametrize(
    ("text", "size"), [("500", 500), ("2GiB", 2 * 2**30), ("1.5 MB", 3 * 2**19), ("20g", 20 * 2**30), (7, 7)]
)
def test_sizes_are_read_in_binary_units(tmp_path: Path, text: object, size: int) -> None:
    assert up(tmp_path, {"blob_cap_bytes": text}).installing.blob_cap_bytes == size


@pytest.mark.parametrize("text", ["much", "-1", "1PB2", "", "1e3", True])
def test_what_is_no_size_is_refused(tmp_path: Path, text: object) -> None:
    assert "a size is written like" in refusal(tmp_path, flags={"archive_limit_bytes": text or " "})


def test_what_a_worker_may_install_is_handed_on_by_up(tmp_path: Path) -> None:
    given = {"archive_limit_bytes": "1GiB", "blob_cap_bytes": "2GiB"}
    flags = as_flags(up(tmp_path, given).installing, InstallSettings.__struct_fields__)
    assert flags[:4] == ["--archive-limit", str(2**30), "--blob-cap", str(2**31)]
    assert "--registry-credentials" not in flags


def test_the_confinement_of_engines_is_handed_on_by_up(tmp_path: Path) -> None:
    given = {"engine_confinement": "off", "engine_user": "engines"}
    flags = as_flags(up(tmp_path, given).installing, InstallSettings.__struct_fields__)
    assert flags[-4:] == ["--engine-confinement", "off", "--engine-user", "engines"]
    assert "--engine-user" not in as_flags(up(tmp_path).installing, InstallSettings.__struct_fields__)
    assert "it must be auto or off" in refusal(tmp_path, flags={"engine_confinement": "on"})
    assert "the name of a user" in refusal(tmp_path, flags={"engine_user": "a b"})


def test_the_log_level_comes_from_flag_variable_and_file_and_is_info_otherwise(tmp_path: Path) -> None:
    environ = {"ENGINEHOUSE_LOG_LEVEL": "error"}
    assert up(tmp_path).log_level == "info"
    assert up(tmp_path, {"log_level": "debug"}, environ).log_level == "debug"
    assert load(FrontendSettings, {"data": str(tmp_path)}, environ).log_level == "error"
    assert up(tmp_path, file='log_level = "Warning"').log_level == "warning"
    assert "debug, info, warning or error" in refusal(tmp_path, flags={"log_level": "loud"})


def test_backends_are_looked_for_where_localai_has_them(tmp_path: Path) -> None:
    environ = {"LOCALAI_BACKENDS_PATH": "/srv/backends", "LOCALAI_BACKENDS_SYSTEM_PATH": "/srv/system"}
    settings = load(LocalSettings, {"data": str(tmp_path)}, environ)
    assert (settings.backends, settings.backends_system_path) == (Path("/srv/backends"), Path("/srv/system"))
    assert load(LocalSettings, {"data": str(tmp_path)}, {}).backends == tmp_path / "backends"


def test_registry_credentials_are_read_from_a_file_and_never_repeated(tmp_path: Path) -> None:
    file = tmp_path / "registries.toml"
    file.write_text('"registry.example.org" = "me:secret"\n"10.0.0.7:5000" = "you:other"\n')
    assert read_credentials(file) == {"registry.example.org": "me:secret", "10.0.0.7:5000": "you:other"}
    assert read_credentials(None) == {}
    for content in ('"host" = "secret"', "host = 7", "secret secret"):
        file.write_text(content)
        with pytest.raises(Invalid) as caught:
            read_credentials(file)
        assert "secret" not in caught.value.message
    with pytest.raises(Invalid):
        read_credentials(tmp_path / "missing")


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://u:secret@h:abc/db",
        "postgresql://u:secret@h:/db",
        "postgresql://u:secret@h:0/db",
        "postgresql://u:secret@h:99999/db",
        "postgresql://u:secret@[::1/db",
        "mysql://u:secret@h/db",
    ],
)
def test_an_address_of_a_database_that_is_none_is_one_sentence_without_its_password(tmp_path: Path, url: str) -> None:
    with pytest.raises(Invalid) as caught:
        load(FrontendSettings, {"data": str(tmp_path), "database_url": url}, {})
    assert "secret" not in caught.value.message
    assert "--database-url" in caught.value.message
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    "url", ["postgresql:///db?host=/run/postgresql", "postgresql://u:p%3A@[::1]:5432/db", "sqlite:////data/file.db"]
)
def test_an_address_of_a_database_is_taken_as_it_is(tmp_path: Path, url: str) -> None:
    assert load(FrontendSettings, {"data": str(tmp_path), "database_url": url}, {}).database_url == url


def test_a_credential_that_could_not_be_renewed_in_time_is_refused(tmp_path: Path) -> None:
    assert up(tmp_path, {"bus_credential_seconds": "40s"}).bus_credential_seconds == 40
    with pytest.raises(Invalid) as caught:
        up(tmp_path, {"bus_credential_seconds": "39s"})
    assert caught.value.param == "bus_credential"
