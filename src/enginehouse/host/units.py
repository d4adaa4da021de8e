"""Units of ours on this machine: where they are, and what systemd or launchd is asked to do with them.

Root's are units of the system, a user's are units of that user. A unit is written atomically before it is enabled, and
nothing is reported as running that the service manager does not report. Everything blocks for a moment.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct

from enginehouse.core.errors import Hopeless
from enginehouse.core.unit import Unit, launchd_label, launchd_plist, systemd_unit, unit_name
from enginehouse.host import disk

PROGRAMS = ("up", "frontend", "worker")
_LIMIT_SECONDS = 150.0  # a stop waits for engines
_BOOTED = Path("/run/systemd/system")


class UnitState(Struct, frozen=True, kw_only=True):
    program: str
    unit: str
    path: str
    enabled: str  # as systemd says it: enabled, disabled …
    active: str  # active, inactive, failed, activating …
    pid: int = 0


class UnitSystem:
    """The service manager of this machine, of root or of this user."""

    def __init__(self, environ: Mapping[str, str], *, is_root: bool, platform: str = sys.platform) -> None:
        self.is_system = is_root
        self.is_launchd = platform == "darwin"
        self._home = Path(environ.get("HOME") or os.path.expanduser("~"))
        self._config = Path(environ.get("XDG_CONFIG_HOME") or self._home / ".config")

    @property
    def is_running(self) -> bool:
        """Whether there is somebody to ask. A container has the files of systemd and mostly not the process."""
        if self.is_launchd:
            return shutil.which("launchctl") is not None
        if not _BOOTED.is_dir() or shutil.which("systemctl") is None:
            return False
        return self.is_system or self._systemctl("is-system-running").stdout.strip() not in ("", "offline", "unknown")

    def path(self, program: str) -> Path:
        if self.is_launchd:
            library = Path("/Library/LaunchDaemons") if self.is_system else self._home / "Library" / "LaunchAgents"
            return library / f"{launchd_label(program)}.plist"
        units = Path("/etc/systemd/system") if self.is_system else self._config / "systemd" / "user"
        return units / unit_name(program)

    def text(self, unit: Unit) -> str:
        return launchd_plist(unit) if self.is_launchd else systemd_unit(unit)

    def write(self, unit: Unit) -> Path:
        if not self.is_launchd and shutil.which("systemctl") is None:
            raise Hopeless(
                "cannot install a service: this machine has no systemd; `--print` shows the unit for another"
            )
        path = self.path(unit.program)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            disk.write_atomic(path, self.text(unit).encode(), 0o644)
        except OSError as error:
            raise Hopeless(f"cannot write {path}: {error.strerror or error}") from error
        if self.is_running and not self.is_launchd:
            self._checked("daemon-reload")
        return path

    def start(self, program: str) -> None:
        """Enable it, and start it anew if it runs: it may be another version now."""
        if self.is_launchd:
            self._launchctl("bootout", f"{self._domain()}/{launchd_label(program)}")
            self._launchctl("bootstrap", self._domain(), str(self.path(program)), is_checked=True)
            return
        self._checked("enable", unit_name(program))
        self._checked("restart", unit_name(program))

    def remove(self, program: str) -> None:
        if self.is_launchd:
            self._launchctl("bootout", f"{self._domain()}/{launchd_label(program)}")
        elif self.is_running:
            self._checked("disable", "--now", unit_name(program))
        with contextlib.suppress(FileNotFoundError):
            self.path(program).unlink()
        if self.is_running and not self.is_launchd:
            self._checked("daemon-reload")
            # A unit that failed is remembered by systemd after its file is gone.
            self._systemctl("reset-failed", unit_name(program))

    def states(self) -> list[UnitState]:
        return [self._state(program) for program in PROGRAMS if self.path(program).exists()]

    def commands(self, program: str) -> str:
        """What a person types to start it where nobody could be asked."""
        if self.is_launchd:
            return f"launchctl bootstrap {self._domain()} {self.path(program)}"
        return f"systemctl {'' if self.is_system else '--user '}enable --now {unit_name(program)}"

    def _state(self, program: str) -> UnitState:
        path, name = self.path(program), unit_name(program)
        if self.is_launchd:
            found = self._launchctl("print", f"{self._domain()}/{launchd_label(program)}")
            active = "active" if "state = running" in found else "inactive"
            return UnitState(
                program=program, unit=launchd_label(program), path=str(path), enabled="enabled", active=active
            )
        if not self.is_running:
            return UnitState(
                program=program,
                unit=name,
                path=str(path),
                enabled="unknown",
                active="unknown",
            )
        shown = self._systemctl("show", "--property=ActiveState,UnitFileState,MainPID", name).stdout
        values = dict(line.partition("=")[::2] for line in shown.splitlines())
        return UnitState(
            program=program,
            unit=name,
            path=str(path),
            enabled=values.get("UnitFileState", "") or "unknown",
            active=values.get("ActiveState", "") or "unknown",
            pid=int(values.get("MainPID") or 0),
        )

    def _systemctl(self, *words: str) -> subprocess.CompletedProcess[str]:
        command = ["systemctl", *(() if self.is_system else ("--user",)), "--no-pager", *words]
        return _run(command)

    def _checked(self, *words: str) -> None:
        done = self._systemctl(*words)
        if done.returncode != 0:
            said = " ".join((done.stderr or done.stdout).split())
            raise Hopeless(f"cannot {words[0]} {words[-1]}: systemctl said: {said or f'code {done.returncode}'}")

    def _launchctl(self, *words: str, is_checked: bool = False) -> str:
        done = _run(["launchctl", *words])
        if is_checked and done.returncode != 0:
            raise Hopeless(f"cannot {words[0]} {words[-1]}: launchctl said: {' '.join(done.stderr.split())}")
        return done.stdout

    def _domain(self) -> str:
        return "system" if self.is_system else f"gui/{os.getuid()}"


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_SECONDS, stdin=subprocess.DEVNULL)
    except FileNotFoundError:
        return subprocess.CompletedProcess(command, 127, "", f"there is no {command[0]}")
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 1, "", f"no answer within {_LIMIT_SECONDS:.0f} s")
