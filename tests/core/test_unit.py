"""What systemd and launchd are told: words that mean themselves, no secret, and nothing that engines need is hidden."""

from __future__ import annotations

import plistlib
import re
import shlex
import subprocess
from pathlib import Path

import pytest
from tests.outside import tool

from enginehouse.core.unit import Unit, environment_line, launchd_plist, systemd_unit, unit_name

ODD = ["--name", "a b", "--labels", 'x="y"', "50%", "$HOME", "back\\slash", "it's", "%n", "${X}"]


def unit_of(**changes: object) -> Unit:
    given = {"program": "worker", "argv": ["/usr/bin/env", *ODD], "data": "/tmp/data of mine", **changes}
    return Unit(**given)  # type: ignore[arg-type]


def line_of(text: str, key: str) -> str:
    found = re.search(rf"^{key}=(.*)$", text, re.MULTILINE)
    assert found, key
    return found[1]


def test_words_of_the_command_mean_themselves() -> None:
    written = line_of(systemd_unit(unit_of()), "ExecStart")
    # A shell reads quotes and backslashes as systemd does here; specifiers and variables are systemd's own.
    read = [word.replace("%%", "%").replace("$$", "$") for word in shlex.split(written)]
    assert read == ["/usr/bin/env", *ODD]


def test_the_main_process_alone_gets_the_signal_and_invalid_settings_are_not_tried_again() -> None:
    text = systemd_unit(unit_of())
    assert line_of(text, "KillMode") == "mixed"
    assert line_of(text, "Restart") == "on-failure"
    assert line_of(text, "RestartPreventExitStatus") == "2"
    assert line_of(text, "WantedBy") == "multi-user.target"
    assert line_of(systemd_unit(unit_of(is_system=False)), "WantedBy") == "default.target"


def test_the_greeting_which_holds_a_login_link_goes_to_no_log() -> None:
    text = systemd_unit(unit_of(program="up"))
    assert (line_of(text, "StandardOutput"), line_of(text, "StandardError")) == ("null", "journal")
    described = plistlib.loads(launchd_plist(unit_of(program="up")).encode())
    assert described["StandardOutPath"] == "/dev/null"
    assert described["StandardErrorPath"] == "/tmp/data of mine/logs/up.launchd.log"


@pytest.mark.parametrize("is_system", [True, False])
def test_engines_keep_their_devices_and_the_kernels_confinement(is_system: bool) -> None:
    keys = {line.partition("=")[0] for line in systemd_unit(unit_of(is_system=is_system)).splitlines()}
    hidden = {"PrivateDevices", "DevicePolicy", "DeviceAllow", "ProtectClock", "SystemCallFilter", "ProtectHome"}
    assert not keys & (hidden | {"MemoryDenyWriteExecute", "PrivateUsers", "RestrictNamespaces", "PrivateTmp"})


def test_values_of_the_file_of_secrets_are_those_that_a_shell_reads() -> None:
    for value in ("plain", 'a "b" $c `d` \\e', "postgresql://u:p%40@h/db?x=1&y='z'"):
        script = environment_line("VALUE", value) + 'printf %s "$VALUE"'
        assert subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True).stdout == value


def test_launchd_starts_the_same_words_and_reads_secrets_from_their_file(tmp_path: Path) -> None:
    plain = plistlib.loads(launchd_plist(unit_of()).encode())
    assert plain["ProgramArguments"] == ["/usr/bin/env", *ODD]
    assert plain["KeepAlive"] == {"SuccessfulExit": False}
    assert plain["WorkingDirectory"] == "/tmp/data of mine"
    secrets = tmp_path / "worker.env"
    secrets.write_text(environment_line("SECRET", 'x"y'))
    shown = unit_of(argv=["/bin/sh", "-c", 'printf %s "$SECRET"'], secrets_file=str(secrets))
    command = plistlib.loads(launchd_plist(shown).encode())["ProgramArguments"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == 'x"y'


@pytest.mark.parametrize("is_system", [True, False])
def test_systemd_accepts_the_unit(tmp_path: Path, is_system: bool) -> None:
    path = tmp_path / unit_name("worker")
    secrets = tmp_path / "worker.env"
    secrets.write_text("A=1\n")
    full = unit_of(data=str(tmp_path), secrets_file=str(secrets), variables={"PATH": "/bin"}, is_system=is_system)
    path.write_text(systemd_unit(full))
    asked = [tool("systemd-analyze"), "verify", *(() if is_system else ("--user",)), "--man=no", str(path)]
    done = subprocess.run(asked, capture_output=True, text=True, env={"XDG_RUNTIME_DIR": str(tmp_path), "HOME": "/"})
    said = [line for line in (done.stdout + done.stderr).splitlines() if "enginehouse" in line]
    assert said == []
    # A check that cannot fail is none.
    path.write_text(systemd_unit(full).replace("Restart=on-failure", "Restart=sometimes"))
    done = subprocess.run(asked, capture_output=True, text=True, env={"XDG_RUNTIME_DIR": str(tmp_path), "HOME": "/"})
    assert "sometimes" in done.stdout + done.stderr
