"""What the service manager of a machine is told about a program of ours: a systemd unit or a launchd property list.

No secret may be in either: both are readable, and their command lines are shown. The program ends in order by itself
when its main process is asked to, so only that one gets the signal. What the unit forbids must leave engines their
devices and the kernel's own confinement (Landlock): nothing here hides `/dev` or a system call.
"""

from __future__ import annotations

import plistlib
from collections.abc import Mapping, Sequence

from msgspec import Struct

STOP_SECONDS = 120  # three programs have 20 seconds each, and engines their own grace
RESTART_SECONDS = 5
INVALID = 2  # the exit code of invalid settings, which a restart does not change
LABEL = "org.enginehouse"
# Of system units only: those of a user need the right to make namespaces for these. `ProtectClock` and
# `PrivateDevices` are left out on purpose, because both hide graphics cards.
_OF_SYSTEM = (
    "ProtectSystem=full",
    "ProtectControlGroups=yes",
    "ProtectKernelLogs=yes",
    "ProtectHostname=yes",
)


class Unit(Struct, frozen=True, kw_only=True):
    """One program that starts with the machine, or with a user's session."""

    program: str  # up, frontend or worker
    argv: Sequence[str]
    data: str
    variables: Mapping[str, str] = {}  # no secrets
    secrets_file: str = ""  # a file of NAME="VALUE" lines, mode 0600; "" if there are none
    is_system: bool = True
    user: str = ""  # of a unit of the system; "" is root


def unit_name(program: str) -> str:
    return f"enginehouse-{program}.service"


def systemd_unit(unit: Unit) -> str:
    lines = [
        "[Unit]",
        f"Description=Enginehouse {unit.program}",
        "Wants=network-online.target",
        "After=network-online.target",
        # A machine that starts before its network, or before its server, tries for as long as it takes.
        "StartLimitIntervalSec=0",
        "",
        "[Service]",
        "Type=exec",
        f"ExecStart={' '.join(quoted_word(word) for word in unit.argv)}",
        *((f"User={unit.user}",) if unit.user else ()),
        f"WorkingDirectory={_path(unit.data)}",
        *(f"Environment={_assigned(f'{name}={value}')}" for name, value in sorted(unit.variables.items())),
        *((f"EnvironmentFile={_path(unit.secrets_file)}",) if unit.secrets_file else ()),
        # What `up` greets with holds a link that signs in; its messages are on the other stream.
        "StandardOutput=null",
        "StandardError=journal",
        "Restart=on-failure",
        f"RestartSec={RESTART_SECONDS}",
        f"RestartPreventExitStatus={INVALID}",
        # The main process stops its children in order; what is left after the limit is killed.
        "KillMode=mixed",
        f"TimeoutStopSec={STOP_SECONDS}",
        # An engine that the kernel ends for want of memory must not end the others.
        "OOMPolicy=continue",
        "LimitNOFILE=65536",
        "TasksMax=infinity",
        "UMask=0077",
        "NoNewPrivileges=yes",
        "LockPersonality=yes",
        "RestrictSUIDSGID=yes",
        *((*_OF_SYSTEM, f"ReadWritePaths={_assigned(unit.data)}") if unit.is_system else ()),
        "",
        "[Install]",
        f"WantedBy={'multi-user.target' if unit.is_system else 'default.target'}",
    ]
    return "\n".join(lines) + "\n"


def quoted_word(word: str) -> str:
    """A word of a command line as systemd reads it: quoted, with its specifiers and variables taken literally."""
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("$", "$$")
    return f'"{_path(escaped)}"'


def _assigned(text: str) -> str:
    """A word of another line than a command's: a dollar means itself there."""
    return quoted_word(text).replace("$$", "$")


def environment_line(name: str, value: str) -> str:
    """A line of an environment file of systemd."""
    escaped = "".join(f"\\{one}" if one in '"\\`$' else one for one in value)
    return f'{name}="{escaped}"\n'


def _path(path: str) -> str:
    """Paths are read up to the end of the line; only specifiers mean something in them."""
    return path.replace("%", "%%")


def launchd_label(program: str) -> str:
    return f"{LABEL}.{program}"


def launchd_plist(unit: Unit) -> str:
    """launchd has no file of secrets: `unit.secrets_file` is read by a shell before the program starts."""
    argv = list(unit.argv)
    if unit.secrets_file:
        argv = ["/bin/sh", "-c", 'set -a; . "$0"; exec "$@"', unit.secrets_file, *argv]
    log = f"{unit.data}/logs/{unit.program}.launchd.log"
    described: dict[str, object] = {
        "Label": launchd_label(unit.program),
        "ProgramArguments": argv,
        "WorkingDirectory": unit.data,
        "EnvironmentVariables": dict(sorted(unit.variables.items())),
        "RunAtLoad": True,
        # Started again after a crash, and left alone after `enginehouse down`.
        "KeepAlive": {"SuccessfulExit": False},
        "ThrottleInterval": RESTART_SECONDS,
        "ExitTimeOut": STOP_SECONDS,
        **({"UserName": unit.user} if unit.user else {}),
        "Umask": 0o077,
        "ProcessType": "Interactive",  # others are slowed down in favour of what is on the screen
        "SoftResourceLimits": {"NumberOfFiles": 65536},
        "StandardOutPath": "/dev/null",  # the greeting of `up` holds a link that signs in
        "StandardErrorPath": log,
    }
    return plistlib.dumps(described, sort_keys=False).decode()
