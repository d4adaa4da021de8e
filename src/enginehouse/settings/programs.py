"""One frozen struct of settings per program, from flags, environment and file; only run, build_* and cli read them.

A value is taken from the first place that has one: the flag, the `ENGINEHOUSE_*` variable, the `LOCALAI_*` variable if
LocalAI has the setting, the file `DATA/enginehouse.toml`, the default. Every value is checked wherever it came from,
and an error names the setting and that place. Names follow from the field: `stale_seconds` is `--stale`,
`ENGINEHOUSE_STALE` and `stale` in the file. The type of a field says how its value is read (`settings.values`).
A port of None means that no port was given: only then may the program use the next free one.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import msgspec
from msgspec import Struct

from enginehouse.core.errors import EnginehouseError, Invalid, Unavailable
from enginehouse.core.gallery_source import HUGGINGFACE, LOCALAI, LOCALAI_MODELS, encode_sources
from enginehouse.core.name import MAX_NAME
from enginehouse.settings.contexts import LOCAL, chosen_context
from enginehouse.settings.file import read_file
from enginehouse.settings.origins import DEFAULT, SettingOrigin, with_handed
from enginehouse.settings.values import (
    AbsolutePath,
    AbsolutePaths,
    AllowedHosts,
    Confinement,
    Count,
    CountOrZero,
    DatabaseUrl,
    Duration,
    DurationOrZero,
    EnginePort,
    Format,
    Galleries,
    Host,
    HttpUrls,
    HubUrl,
    Labels,
    Level,
    Networks,
    NodeKeys,
    NodeName,
    Port,
    SecretText,
    Size,
    Switch,
    Text,
    User,
    format_of,
    host_of_address,
    is_loopback_url,
    port_of_address,
)

FILE_NAME = "enginehouse.toml"
_OF_A_SERVER = ("ENGINEHOUSE_URL", "ENGINEHOUSE_TOKEN")
_NO_SETTINGS = ("data", "installing", "origins")  # fields that no flag of this name gives

ARCHIVE_LIMIT_BYTES = 20 * 1024**3  # unpacked; stops archive bombs, and larger engines need a higher limit
BLOB_CAP_BYTES = 20 * 1024**3  # enough for a few of the largest engines
SYSTEM_BACKENDS = Path("/var/lib/local-ai/backends")  # LocalAI's packages install here


class Timings(Struct, frozen=True, kw_only=True):
    """The intervals and timeouts of a frontend; `up` has them too and passes them on."""

    heartbeat_seconds: Duration = 10.0
    stale_seconds: Duration = 30.0
    lease_seconds: Duration = 30.0
    reconcile_seconds: Duration = 5.0
    stall_seconds: Duration = 120.0
    backend_install_timeout_seconds: Duration = 900.0
    backend_upgrade_timeout_seconds: Duration = 900.0
    model_load_wait_seconds: DurationOrZero = 60.0  # 0 waits without a limit, as in LocalAI
    bus_credential_seconds: Duration = 3600.0  # lifetime of a worker's bus credential; renewed at 75 %
    canary_seconds: DurationOrZero = 30.0  # that the first nodes of an upgrade must be ready before the others follow
    session_seconds: Duration = 7 * 86400.0  # after which a person in a browser signs in again
    audit_kept_seconds: Duration = 90 * 86400.0
    canary_limit_seconds: Duration = 900.0  # after which an upgrade whose first nodes are not ready is taken back


class ServingSettings(Timings, frozen=True, kw_only=True):
    """How requests find a replica; `up` has these too."""

    prefix_cache: Switch = True  # for models without a policy of their own
    prefix_cache_ttl_seconds: Duration = 300.0
    queue_length: CountOrZero = 1024  # requests of one model that wait for a replica; 0 refuses them at once
    queue_wait_seconds: Duration = 60.0


class InstallSettings(Struct, frozen=True, kw_only=True):
    """Where backends come from and what is accepted: settings of workers, and of commands that install."""

    allowed_hosts: AllowedHosts = ()  # hosts that may be reached although they are not public
    registry_credentials: AbsolutePath | None = None  # a file; docker's own credentials are read too
    archive_limit_bytes: Size = ARCHIVE_LIMIT_BYTES
    blob_cap_bytes: Size = BLOB_CAP_BYTES
    backends_system_path: AbsolutePath = SYSTEM_BACKENDS
    engine_confinement: Confinement = "auto"
    engine_user: User = ""


class UpSettings(ServingSettings, frozen=True, kw_only=True):
    data: Path
    log_level: Level = "info"
    installing: InstallSettings = InstallSettings()
    approve_keys: NodeKeys = ()
    node_networks: Networks = ()
    backend_galleries: Galleries = (LOCALAI,)
    model_galleries: Galleries = (LOCALAI_MODELS,)
    hf_endpoint: HubUrl = HUGGINGFACE
    model_credentials: AbsolutePath | None = None
    schedules: AbsolutePath | None = None
    host: Host = "127.0.0.1"
    port: Port | None = None
    name: NodeName
    nats_port: Port | None = None
    advertise_nats: Text = ""
    base_port: EnginePort | None = None


class FrontendSettings(ServingSettings, frozen=True, kw_only=True):
    data: Path
    log_level: Level = "info"
    host: Host = "127.0.0.1"
    port: Port | None = None
    processes: Count = 1  # equal frontends behind one port; Python uses one core in each
    database_url: DatabaseUrl = ""
    nats_url: SecretText = ""
    # A request gets 503 within five seconds; people do not wait longer for a slow disk or link.
    store_timeout_seconds: Duration = 4.0
    # For the database and the bus: recovery after a power cut takes minutes; after that an operator has to look.
    start_wait_seconds: Duration = 300.0
    # Without the store a frontend does not learn that a node or model is gone, so it uses known routes no longer.
    route_memory_seconds: Duration = 60.0
    approve_keys: NodeKeys = ()
    node_networks: Networks = ()  # an approved node may move within these without another approval
    advertise_nats: Text = ""
    backend_galleries: Galleries = (LOCALAI,)  # the built-in gallery always comes first
    allowed_hosts: AllowedHosts = ()  # hosts that may be reached although they are not public
    registry_credentials: AbsolutePath | None = None  # for resolving tags at registries
    model_galleries: Galleries = (LOCALAI_MODELS,)
    hf_endpoint: HubUrl = HUGGINGFACE  # Hugging Face, or a mirror of it
    model_credentials: AbsolutePath | None = None  # a file of lines NAME = "SECRET", for sources of models
    schedules: AbsolutePath | None = None  # a file with a list of schedules, which replace those of the same models
    # The same for all frontends of a cluster. If they are not given, the first frontend creates them.
    admin_token: SecretText = ""
    join_token: SecretText = ""
    origins: dict[str, SettingOrigin] = {}  # where each of these came from


class WorkerSettings(InstallSettings, frozen=True, kw_only=True):
    data: Path
    log_level: Level = "info"
    url: HttpUrls
    token: SecretText
    name: NodeName
    nats_url: SecretText = ""  # overrides the one that the frontend sends; may contain a user and a password
    advertise_host: Host = ""
    base_port: EnginePort | None = None
    http_port: Port | None = None
    model_credentials: AbsolutePath | None = None
    model_directories: AbsolutePaths = ()  # shared storage: models may name files below these
    labels: Labels = {}
    grace_seconds: DurationOrZero = 10.0
    max_replicas_per_model: Count = 1


class LocalSettings(InstallSettings, frozen=True, kw_only=True):
    """Settings of the commands that need no server: `gallery` and `local`."""

    data: Path
    backend_galleries: Galleries = (LOCALAI,)
    backends_path: AbsolutePath | None = None  # None is the worker's own in the data directory

    @property
    def backends(self) -> Path:
        return self.backends_path or self.data / "backends"


class ClientSettings(Struct, frozen=True, kw_only=True):
    data: Path
    url: HttpUrls
    token: SecretText


class RunningServer(Struct, frozen=True):
    """`DATA/server.json`, written by `up` when it is ready."""

    url: str
    pid: int = 0
    join_url: str = ""  # at which other machines reach it; "" if it listens on loopback only


Settings = UpSettings | FrontendSettings | WorkerSettings | LocalSettings | ClientSettings
T = TypeVar("T", UpSettings, FrontendSettings, WorkerSettings, LocalSettings, ClientSettings)

# LocalAI's variables. Its database variable is left out on purpose: our tables must never be created in its database.
_LOCALAI_GALLERIES = {"backend_galleries": ("LOCALAI_BACKEND_GALLERIES", "BACKEND_GALLERIES")}
_LOCALAI_SERVER = {
    **_LOCALAI_GALLERIES,
    "heartbeat_seconds": ("LOCALAI_HEARTBEAT_INTERVAL",),
    "backend_install_timeout_seconds": ("LOCALAI_NATS_BACKEND_INSTALL_TIMEOUT",),
    "backend_upgrade_timeout_seconds": ("LOCALAI_NATS_BACKEND_UPGRADE_TIMEOUT",),
    "model_load_wait_seconds": ("LOCALAI_MODEL_LOAD_WAIT",),
    "prefix_cache": ("LOCALAI_DISTRIBUTED_PREFIX_CACHE",),
    "prefix_cache_ttl_seconds": ("LOCALAI_DISTRIBUTED_PREFIX_CACHE_TTL",),
    "model_galleries": ("LOCALAI_GALLERIES", "GALLERIES"),
    "hf_endpoint": ("HF_MIRROR", "HF", "HF_ENDPOINT"),
}
_LOCALAI_SYSTEM = {"backends_system_path": ("LOCALAI_BACKENDS_SYSTEM_PATH",)}
_LOCALAI: dict[type[Settings], Mapping[str, tuple[str, ...]]] = {
    UpSettings: {**_LOCALAI_SERVER, **_LOCALAI_SYSTEM, "name": ("LOCALAI_NODE_NAME",)},
    FrontendSettings: {
        **_LOCALAI_SERVER,
        "nats_url": ("LOCALAI_NATS_URL",),
        "join_token": ("LOCALAI_REGISTRATION_TOKEN",),
    },
    WorkerSettings: {
        **_LOCALAI_SYSTEM,
        "url": ("LOCALAI_REGISTER_TO",),
        "token": ("LOCALAI_REGISTRATION_TOKEN",),
        "name": ("LOCALAI_NODE_NAME",),
        "nats_url": ("LOCALAI_NATS_URL",),
        "labels": ("LOCALAI_NODE_LABELS",),
        "max_replicas_per_model": ("LOCALAI_MAX_REPLICAS_PER_MODEL",),
        "advertise_host": ("LOCALAI_ADVERTISE_ADDR",),
        "base_port": ("LOCALAI_SERVE_ADDR", "LOCALAI_ADDR"),
        "http_port": ("LOCALAI_HTTP_ADDR",),
    },
    LocalSettings: {**_LOCALAI_GALLERIES, **_LOCALAI_SYSTEM, "backends_path": ("LOCALAI_BACKENDS_PATH",)},
    ClientSettings: {},
}
# LocalAI writes these as host:port.
_PART_OF_ADDRESS = {"advertise_host": host_of_address, "base_port": port_of_address, "http_port": port_of_address}
_PROGRAMS: dict[type[Settings], str] = {
    UpSettings: "up",
    FrontendSettings: "frontend",
    WorkerSettings: "worker",
    LocalSettings: "local",
    ClientSettings: "client",
}


def setting_name(field: str) -> str:
    """The public name of a setting: durations and sizes drop their unit, because the value carries it."""
    return field.removesuffix("_seconds").removesuffix("_bytes")


def flag_of(field: str) -> str:
    # The only flag that is repeated instead of taking a list.
    return "--allow-host" if field == "allowed_hosts" else f"--{setting_name(field).replace('_', '-')}"


def as_flags(settings: Settings | InstallSettings, fields: Iterable[str]) -> list[str]:
    """The flags that give another program the same settings."""
    words: list[str] = []
    for field in fields:
        value = getattr(settings, field)
        if field == "allowed_hosts":
            words += [word for host in value for word in (flag_of(field), host)]
        elif field in ("backend_galleries", "model_galleries"):
            words += [flag_of(field), encode_sources(value)]
        elif field == "node_networks":
            words += [flag_of(field), ",".join(value)] if value else []
        elif value not in (None, ""):
            words += [flag_of(field), f"{value}s" if field.endswith("_seconds") else str(value)]
    return words


def load(kind: type[T], flags: Mapping[str, object], environ: Mapping[str, str], file: Path | None = None) -> T:
    """Load the settings of one program. `flags` holds values by field name; None means not given.

    `file` defaults to `DATA/enginehouse.toml`, which need not exist.
    """
    directory = find_data_directory(flags, environ)
    path = file or directory / FILE_NAME
    known = {title: {setting_name(field) for field in fields_of(each)} for each, title in _PROGRAMS.items()}
    in_file = read_file(path, _PROGRAMS[kind], known, is_required=file is not None)
    if kind is ClientSettings:
        flags, environ = _with_context(flags, environ, in_file="url" in in_file)
    formats = _formats_of(kind)
    values: dict[str, Any] = {"data": directory}
    for field in formats:
        found = _first_given(kind, field, flags, environ, in_file)
        if found is not None:
            value, place = found
            values[field] = _checked(field, formats[field], value, place)
    if kind is FrontendSettings:
        values["origins"] = with_handed(origins_of(kind, flags, environ, file), environ)
    _fill_missing(kind, values, is_data_given=bool(flags.get("data") or environ.get("ENGINEHOUSE_DATA")))
    if kind is UpSettings:
        ours = set(values) & set(InstallSettings.__struct_fields__)
        values["installing"] = InstallSettings(**{field: values.pop(field) for field in ours})
    settings = kind(**values)
    if isinstance(settings, Timings):
        _check_timings(settings)
    return settings


def _with_context(
    flags: Mapping[str, object], environ: Mapping[str, str], *, in_file: bool
) -> tuple[Mapping[str, object], Mapping[str, str]]:
    """The flags with the address and the token of the chosen context, which belong together."""
    context = chosen_context(flags, environ, in_file=in_file)
    if context is not None:
        return {**flags, "url": context.url, "token": flags.get("token") or context.token or None}, environ
    if flags.get("context") == LOCAL:
        # The server of the data directory, whatever the variables name.
        environ = {name: value for name, value in environ.items() if name not in _OF_A_SERVER}
    return flags, environ


def origins_of(
    kind: type[Settings], flags: Mapping[str, object], environ: Mapping[str, str], file: Path | None = None
) -> dict[str, SettingOrigin]:
    """Where each setting of a program comes from, by field."""
    path = file or find_data_directory(flags, environ) / FILE_NAME
    known = {title: {setting_name(field) for field in fields_of(each)} for each, title in _PROGRAMS.items()}
    in_file = read_file(path, _PROGRAMS[kind], known, is_required=file is not None)
    origins: dict[str, SettingOrigin] = {}
    for field in fields_of(kind):
        found = _first_given(kind, field, flags, environ, in_file)
        if found is None:
            origins[field] = DEFAULT
        elif flags.get(field) is not None:
            origins[field] = SettingOrigin("flag", flag_of(field))
        elif found is in_file.get(setting_name(field)):
            origins[field] = SettingOrigin("file", str(path))
        else:
            origins[field] = SettingOrigin("variable", found[1])
    return origins


def _check_timings(settings: Timings) -> None:
    stale, credential, heartbeat = (settings.stale_seconds, settings.bus_credential_seconds, settings.heartbeat_seconds)
    if stale <= heartbeat:
        reason = "every node would look unhealthy between two heartbeats; make stale longer"
        name, seconds = "stale", stale
    elif credential < 4 * heartbeat:
        reason = "heartbeats renew it in its last quarter; make it at least four times as long"
        name, seconds = "bus_credential", credential
    else:
        return
    refused = f"cannot use {name} {seconds:g}s with heartbeat {heartbeat:g}s: {reason}"
    raise Invalid(refused, code="invalid_setting", param=name)


def default_data_directory(environ: Mapping[str, str]) -> Path:
    home = environ.get("HOME") or os.path.expanduser("~")
    if sys.platform == "darwin":
        return Path(home, "Library", "Application Support", "enginehouse")
    shared = environ.get("XDG_DATA_HOME", "")
    # The XDG specification: a relative path is invalid and must be ignored.
    place = Path(shared) if os.path.isabs(shared) else Path(home, ".local", "share")
    return place / "enginehouse"


def default_node_name(hostname: str) -> str:
    """The host name, changed into a valid node name."""
    cleaned = re.sub(r"[^A-Za-z0-9._-]+", "-", hostname).lstrip("._-")[:MAX_NAME].rstrip(".")
    return cleaned or "node"


def find_data_directory(flags: Mapping[str, object], environ: Mapping[str, str]) -> Path:
    given = flags.get("data") or environ.get("ENGINEHOUSE_DATA")
    if not given:
        return default_data_directory(environ)
    # Absolute, because children are started in other directories.
    return Path(os.path.abspath(os.path.expanduser(str(given))))


def _first_given(
    kind: type[Settings],
    field: str,
    flags: Mapping[str, object],
    environ: Mapping[str, str],
    in_file: Mapping[str, tuple[object, str]],
) -> tuple[object, str] | None:
    """The value with the highest precedence, and the place it came from as errors name it."""
    name = setting_name(field)
    flag = flags.get(field)
    if flag is not None:
        return flag, flag_of(field)
    variable = f"ENGINEHOUSE_{name.upper()}"
    # Compose files and shells pass an unset variable as an empty one.
    if environ.get(variable):
        return environ[variable], variable
    for localai_variable in _LOCALAI[kind].get(field, ()):
        value = _PART_OF_ADDRESS.get(field, str)(environ.get(localai_variable, ""))
        if value:
            return value, localai_variable
    return in_file.get(name)


def fields_of(kind: type[Settings]) -> list[str]:
    """The fields of a program's settings, also of those in `installing`; without `data`, which has rules of its own."""
    nested = InstallSettings.__struct_fields__ if kind is UpSettings else ()
    return [*(field for field in kind.__struct_fields__ if field not in _NO_SETTINGS), *nested]


def secret_fields(kind: type[Settings]) -> set[str]:
    """The settings whose value nobody else may see."""
    return {field for field, format in _formats_of(kind).items() if format.is_secret}


def _formats_of(kind: type[Settings]) -> dict[str, Format]:
    """How each setting is read, by field."""
    hints = get_type_hints(InstallSettings, include_extras=True) | get_type_hints(kind, include_extras=True)
    return {field: format_of(hints[field]) for field in fields_of(kind)}


def _checked(field: str, format: Format, value: object, place: str) -> object:
    try:
        return format.parse(value)
    except EnginehouseError as error:
        reason = error.message
    shown = "the value" if format.is_secret else repr(value)
    raise Invalid(f"cannot use {shown} from {place}: {reason}", code="invalid_setting", param=setting_name(field))


def _fill_missing(kind: type[Settings], values: dict[str, Any], *, is_data_given: bool) -> None:
    """Add the defaults that depend on this machine: the node's name, the frontend and its token."""
    if "name" in kind.__struct_fields__ and "name" not in values:
        import platform

        values["name"] = default_node_name(platform.node())
    if kind not in (ClientSettings, WorkerSettings):
        return
    directory: Path = values["data"]
    running, is_of_server = _running_server(directory), (directory / "admin.token").exists()
    if "url" not in values:
        if not running:
            refusal, what = (Unavailable, "a server") if kind is ClientSettings else (Invalid, "a frontend to join")
            is_node = (directory / "node.json").exists() and not is_of_server
            advice = "start one with `enginehouse up`, or name one with --url"
            if is_node and kind is ClientSettings:
                advice = "this machine is a node. Work on its server, or name that once with `enginehouse login URL`"
            raise refusal(f"cannot find {what} in {directory}: {advice}", code="no_server", param="url")
        values["url"] = running
    if "token" not in values:
        name = "admin.token" if kind is ClientSettings else "join.token"
        # The token of this machine's server must not be sent to another server given with --url. Without a server here,
        # the join token is what an earlier join was given.
        is_ours = is_data_given or values["url"] == running or is_loopback_url(values["url"])
        is_ours |= kind is WorkerSettings and not is_of_server
        values["token"] = _token_in(directory / name) if is_ours else ""


def _running_server(directory: Path) -> str:
    running = running_server(directory)
    return running.url if running else ""


def running_server(directory: Path) -> RunningServer | None:
    """The `up` of a data directory as it described itself; None if none has, or it ended in order."""
    try:
        return msgspec.json.decode((directory / "server.json").read_bytes(), type=RunningServer)
    except (OSError, msgspec.DecodeError):
        return None


def _token_in(path: Path) -> str:
    try:
        return path.read_text("utf-8").strip()
    except FileNotFoundError:
        return ""
    except (OSError, UnicodeDecodeError) as error:
        raise Invalid(f"cannot read {path}: {error}; give the token with --token -", code="invalid_setting") from error
