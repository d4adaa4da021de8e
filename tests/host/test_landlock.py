"""Landlock as the kernel has it: what is not allowed is refused, whatever the age of its interface."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from enginehouse.host import landlock

# In CI the kernel has it; elsewhere a machine without it is no fault of the program.
pytestmark = pytest.mark.skipif(not landlock.detect()[0] and "CI" not in os.environ, reason=landlock.detect()[1])
_TRY = """
import ctypes, os, sys
from pathlib import Path
from enginehouse.host import landlock
abi, allowed, path, right = int(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]
ctypes.CDLL(None).prctl(38, 1, 0, 0, 0)
with landlock.Ruleset(abi) as rules:
    rules.allow(allowed, landlock.OWN)
    rules.allow(allowed / "absent", landlock.READ)
    assert landlock.restrict(rules.descriptor)
try:
    match right:
        case "read": path.read_bytes()
        case "truncate": os.truncate(path, 0)
        case "signal": os.kill(os.getppid(), 0)
except PermissionError:
    print("refused")
else:
    print("done")
"""


def tried(abi: int, allowed: Path, path: Path, right: str) -> str:
    command = [sys.executable, "-c", _TRY, str(abi), str(allowed), str(path), right]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=30).stdout.strip()


@pytest.mark.parametrize("abi", range(1, landlock.detect()[0] + 1))
def test_every_age_of_the_interface_refuses_what_it_can(abi: int, tmp_path: Path) -> None:
    own, other = tmp_path / "own", tmp_path / "other"
    for directory in (own, other):
        directory.mkdir()
        (directory / "file").write_text("x")
    assert tried(abi, own, own / "file", "read") == "done"
    assert tried(abi, own, other / "file", "read") == "refused"
    assert tried(abi, own, own / "file", "truncate") == "done"
    assert tried(abi, own, other / "file", "truncate") == ("refused" if abi >= 3 else "done")
    assert tried(abi, own, own, "signal") == ("refused" if abi >= 6 else "done")


def test_a_rule_for_a_file_takes_only_what_files_have(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with landlock.Ruleset(landlock.detect()[0]) as rules:
        rules.allow(tmp_path / "file", landlock.OWN)
        rules.allow(tmp_path / "file" / "below", landlock.OWN)
        assert not os.get_inheritable(rules.descriptor)
