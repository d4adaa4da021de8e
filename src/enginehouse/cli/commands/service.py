"""`enginehouse service`: Enginehouse starts with the machine. Installs, shows and removes units of systemd or launchd.

The options of a program become the command line of its unit, but for secrets: those, and variables that hold settings,
go to a file of mode 0600 in the data directory, a join token to `join.token` there. Nothing is written before all
settings are checked.
"""

from __future__ import annotations

import getpass
import importlib
import os
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import click

from enginehouse.cli.options.again import words_of
from enginehouse.cli.options.shared import NO_SERVER, CliCommand, command, emit_json, given, group, wants_json
from enginehouse.cli.terminal import output
from enginehouse.core.errors import Conflict, Hopeless, Invalid, NotFound
from enginehouse.core.fingerprint import fingerprint_of
from enginehouse.core.unit import Unit, environment_line
from enginehouse.host import disk
from enginehouse.host.units import PROGRAMS, UnitSystem
from enginehouse.settings.programs import (
    FrontendSettings,
    UpSettings,
    WorkerSettings,
    flag_of,
    load,
    origins_of,
    secret_fields,
    setting_name,
)

_ONCE = ("detach", "new_keys")  # options for one start, which a service must not repeat
_KINDS: Mapping[str, type[UpSettings | FrontendSettings | WorkerSettings]] = {
    "up": UpSettings,
    "frontend": FrontendSettings,
    "worker": WorkerSettings,
}
# Variables without a setting that decide whether an install works: package indexes, proxies, certificates, credentials.
_KEPT_PREFIXES = ("PIP_", "UV_", "SSL_", "HF_", "ENGINEHOUSE_CREDENTIAL_", "CUDA_", "ROCR_", "HIP_", "NVIDIA_")
_KEPT = {"DOCKER_CONFIG", "REGISTRY_AUTH_FILE", "XDG_CACHE_HOME", "FORWARDED_ALLOW_IPS"}
_PROXIES = {"http_proxy", "https_proxy", "all_proxy", "no_proxy"}
_EXAMPLES = {
    "up": ("enginehouse service install up --host 0.0.0.0", "enginehouse service install up --print"),
    "frontend": (
        "ENGINEHOUSE_DATABASE_URL=postgresql://… enginehouse service install frontend --nats-url nats://bus:4222",
    ),
    "worker": ("enginehouse service install worker --url http://server:8080 --token @join.token --name attic",),
}


@group("service", meanings=NO_SERVER, examples=("enginehouse service install up", "enginehouse service status"))
def entry() -> None:
    """Start Enginehouse with this machine: install, show and remove services.

    As root these are services of the system (systemd; on a Mac: launchd), otherwise services of this user.
    """


@group("install", meanings=NO_SERVER, examples=tuple(one for every in _EXAMPLES.values() for one in every))
def install() -> None:
    """Install or change the service of one program, with the options of that program."""


@command("status", meanings=NO_SERVER, examples=("enginehouse service status", "enginehouse service status --json"))
def status() -> None:
    """Show the services of this machine (as root) or of this user."""
    units = _units()
    states = units.states()
    if emit_json(states):
        return
    if states and not units.is_running:
        output.remark("systemd does not run here, so only the units are known")
    rows = [(one.program, one.active, one.enabled, str(one.pid or ""), one.path) for one in states]
    nothing = "no service is installed; `enginehouse service install up` installs one"
    output.emit_table(("PROGRAM", "STATE", "AT START", "PID", "UNIT"), rows, nothing)


@command("remove", meanings=NO_SERVER, examples=("enginehouse service remove up",))
@click.argument("program", type=click.Choice(PROGRAMS))
def remove(program: str) -> None:
    """Stop the service of PROGRAM and remove it. Its data directory is kept."""
    units = _units()
    path = units.path(program)
    if not path.exists():
        raise NotFound(f"cannot find a service for {program}: there is no {path}", code="not_found")
    units.remove(program)
    if not emit_json({"removed": program, "unit": str(path)}):
        output.say(f"removed {path}; the data directory is kept")


def _install(program: str, *, start: bool | None, is_shown: bool, user: str, **flags: Any) -> None:
    units = _units()
    unit, secrets, token = _unit_of(program, flags, units, user)
    if is_shown:
        click.echo(units.text(unit), nl=False)
        return
    _check_free(units, program)
    _prepare_data(Path(unit.data), unit, secrets, token)
    path = units.write(unit)
    is_started = units.is_running and (start if start is not None else _is_wanted(program))
    if is_started:
        units.start(program)
    if emit_json({"program": program, "unit": str(path), "started": is_started}):
        return
    output.say(f"installed {path}" + (" and started it" if is_started else ""))
    if program == "worker":
        _show_fingerprint(Path(unit.data), flags.get("name"), unit.user)
    if not is_started:
        when = "start it with" if units.is_running else "systemd does not run here now; where it does, start it with"
        output.remark(f"{when}: {units.commands(program)}")
    elif not units.is_system and not units.is_launchd and not Path("/var/lib/systemd/linger", _user()).exists():
        output.remark(f"it ends when you sign out; `sudo loginctl enable-linger {_user()}` keeps it running")


def _show_fingerprint(data: Path, name: str | None, user: str) -> None:
    """What a person compares before the first approval."""
    if (data / "node.json").exists():
        return
    from enginehouse import run

    fingerprint = fingerprint_of(run.node_key(data))
    if user:
        _give([data / "node.key"], user)
    output.remark(f"approve it on the server: enginehouse nodes approve {name or 'NAME'} --fingerprint {fingerprint}")


def _units() -> UnitSystem:
    return UnitSystem(os.environ, is_root=os.geteuid() == 0)


def _user() -> str:
    return getpass.getuser()


def _is_wanted(program: str) -> bool:
    """Ask a person; a script gets what it asked for by --start."""
    if wants_json() or not (sys.stdin.isatty() and output.is_terminal(sys.stderr)):
        return False
    return click.confirm(f"Start {program} now, and with the machine?", default=True, err=True)


def _unit_of(program: str, flags: dict[str, Any], units: UnitSystem, user: str) -> tuple[Unit, dict[str, str], str]:
    """The unit, the variables for its file of secrets, and the join token ("" if none is needed)."""
    shared = given()
    asked = {**flags, "data": shared.data}
    if program == "worker":
        asked |= {"url": shared.url, "token": shared.token}
    settings, kind = _load(program, asked), _KINDS[program]
    _check_complete(settings)
    if user and not units.is_system:
        raise Invalid("cannot run a service as another user: only root can", code="invalid_setting", param="run-as")
    data, origins = settings.data, origins_of(kind, asked, os.environ)
    secret = secret_fields(kind) & set(flags)
    argv = [*_own_command(), program, "--data", str(data)]
    if isinstance(settings, WorkerSettings):
        argv += ["--url", settings.url]
    argv += words_of(click.get_current_context().command, flags, without=secret)
    named = {field: one.place for field, one in origins.items() if one.source == "variable"}
    variables = {place: os.environ[place] for field, place in named.items() if field not in ("token", "url")}
    variables |= {f"ENGINEHOUSE_{setting_name(field).upper()}": str(flags[field]) for field in secret if flags[field]}
    variables |= {name: value for name, value in os.environ.items() if value and _is_kept(name)}
    unit = Unit(
        program=program,
        argv=argv,
        data=str(data),
        variables={"HOME": os.path.expanduser(f"~{user}"), "PATH": os.environ.get("PATH", os.defpath)},
        secrets_file=str(data / f"{program}.env") if variables else "",
        is_system=units.is_system,
        user=user,
    )
    return unit, variables, settings.token if isinstance(settings, WorkerSettings) else ""


def _own_command() -> list[str]:
    """This program as a service starts it: by the command that the join script keeps, which leads to the newest of the
    versions beside each other, so that no upgrade takes the program of a service away.
    """
    kept, own = (Path(place, "bin", "enginehouse") for place in (Path(sys.prefix).parent, sys.prefix))
    if kept.is_symlink() and kept.resolve() == own.resolve():
        return [str(kept)]
    return [sys.executable, "-m", "enginehouse"]


def _load(program: str, asked: dict[str, Any]) -> UpSettings | FrontendSettings | WorkerSettings:
    match program:
        case "up":
            return load(UpSettings, asked, os.environ)
        case "frontend":
            return load(FrontendSettings, asked, os.environ)
        case _:
            return load(WorkerSettings, asked, os.environ)


def _is_kept(name: str) -> bool:
    return name in _KEPT or name.startswith(_KEPT_PREFIXES) or name.lower() in _PROXIES


def _check_complete(settings: UpSettings | FrontendSettings | WorkerSettings) -> None:
    if isinstance(settings, FrontendSettings) and not settings.nats_url:
        raise Invalid(
            f"cannot install a frontend without a NATS server: give one with {flag_of('nats_url')} or "
            "ENGINEHOUSE_NATS_URL",
            code="invalid_setting",
            param="nats_url",
        )
    has_key = (settings.data / "node.key").exists()  # it may be approved, and then needs no token
    if isinstance(settings, WorkerSettings) and not settings.token and not has_key:
        raise Invalid(
            f"cannot install a worker of {settings.url} without a join token: give it with --token @FILE, --token - or "
            "ENGINEHOUSE_TOKEN (`enginehouse nodes add` on the server makes one)",
            code="unauthenticated",
            param="token",
        )


def _check_free(units: UnitSystem, program: str) -> None:
    """`up` brings its own worker and frontend; two services over one data directory would not start."""
    others = {one.program for one in units.states()} - {program}
    if (program == "up" and others) or "up" in others:
        raise Conflict(
            f"cannot install {program} beside {', '.join(sorted(others))}: `up` runs a frontend and a worker itself; "
            f"remove the other first (`enginehouse service remove {sorted(others)[0]}`)"
        )


def _prepare_data(data: Path, unit: Unit, secrets: Mapping[str, str], token: str) -> None:
    is_new = not data.exists()
    disk.make_usable(data)
    if token and (data / "admin.token").exists():
        raise Conflict(f"cannot use {data} for a worker: it is the data directory of a server; choose another --data")
    written = []
    with disk.naming_the_file(data):
        if secrets:
            lines = "".join(environment_line(name, value) for name, value in sorted(secrets.items()))
            written.append(Path(unit.secrets_file))
            disk.write_atomic(written[-1], lines.encode(), 0o600)
        if token:
            written.append(data / "join.token")
            disk.write_atomic(written[-1], f"{token}\n".encode(), 0o600)
        (data / "logs").mkdir(exist_ok=True)
    if unit.user:
        _give(([data] if is_new else []) + written + [data / "logs"], unit.user)


def _give(paths: list[Path], user: str) -> None:
    import shutil

    for path in paths:
        try:
            shutil.chown(path, user, None)
        except (OSError, LookupError) as error:
            raise Hopeless(f"cannot give {path} to {user}: {error}; does this user exist?") from error


def _install_command(program: str) -> CliCommand:
    """The program's own options, and those of every install."""
    own = importlib.import_module(f"enginehouse.cli.commands.{program}").entry
    callback: Callable[..., None] = partial(_install, program)
    more = [
        click.Option(
            ["--start/--no-start"], default=None, help="Start it now; without either, a person is asked at a terminal."
        ),
        click.Option(["--print", "is_shown"], is_flag=True, help="Print the unit and install nothing."),
        click.Option(["--run-as", "user"], default="", metavar="USER", help="As root: run it as this user."),
    ]
    return CliCommand(
        program,
        params=[*more, *(one for one in own.params if one.name not in _ONCE)],
        callback=callback,
        help=f"Install the service of `enginehouse {program}`; all options of that command are accepted.",
        examples=_EXAMPLES[program],
    )


for each in PROGRAMS:
    install.add_command(_install_command(each))
for one in (install, status, remove):
    entry.add_command(one)
