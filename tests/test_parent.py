"""What `up` says about itself."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from enginehouse.parent import shown_command


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    made = tmp_path / "checkout" / ".venv" / "bin" / "enginehouse"
    made.parent.mkdir(parents=True)
    made.touch(mode=0o755)
    monkeypatch.setattr(sys, "argv", [str(made), "up"])
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    return made


def test_the_command_is_shown_as_the_shell_takes_it(program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(program.parents[2])
    assert shown_command() == ".venv/bin/enginehouse"
    monkeypatch.chdir(program.parents[3])
    assert shown_command() == "checkout/.venv/bin/enginehouse"
    monkeypatch.chdir("/")
    assert shown_command() == str(program)
    monkeypatch.chdir("/usr")
    assert shown_command() == str(program)
    monkeypatch.setenv("PATH", f"/usr/bin:{program.parent}")
    assert shown_command() == "enginehouse"


def test_another_program_of_that_name_is_not_meant(
    program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other" / "enginehouse"
    other.parent.mkdir()
    other.touch(mode=0o755)
    monkeypatch.setenv("PATH", str(other.parent))
    monkeypatch.chdir(program.parents[2])
    assert shown_command() == ".venv/bin/enginehouse"
