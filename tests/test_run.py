"""How programs are run: what they log."""

from __future__ import annotations

import subprocess
import sys

import pytest

# In a process of its own, because logging is configured once per process.
PROGRAM = """
import logging, sys
from enginehouse.run import _run

async def program():
    for name in ("enginehouse.part", "library"):
        for level in ("debug", "info", "warning", "error"):
            getattr(logging.getLogger(name), level)("line.written by=%s level=%s", name, level)

_run(program(), sys.argv[1])
"""


@pytest.mark.parametrize(
    ("level", "ours", "others"),
    [("debug", 4, 3), ("info", 3, 3), ("warning", 2, 2), ("error", 1, 1)],
)
def test_lines_below_the_log_level_are_left_out(level: str, ours: int, others: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, level], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stderr.count("by=enginehouse.part") == ours
    assert done.stderr.count("by=library") == others
