"""How programs are run: what they log, and what they load before they can work."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

# In a process of its own, because logging is configured once per process.
PROGRAM = """
import logging, pathlib, sys
from enginehouse.run import _run
from enginehouse.settings.programs import FrontendSettings

async def program():
    for name in ("enginehouse.part", "library"):
        for level in ("debug", "info", "warning", "error"):
            getattr(logging.getLogger(name), level)("line.written by=%s level=%s", name, level)

_run(program(), FrontendSettings(data=pathlib.Path(sys.argv[2]), log_level=sys.argv[1]), "frontend")
"""


@pytest.mark.parametrize(
    ("level", "ours", "others"),
    [("debug", 4, 3), ("info", 3, 3), ("warning", 2, 2), ("error", 1, 1)],
)
def test_lines_below_the_log_level_are_left_out(tmp_path: Path, level: str, ours: int, others: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, level, str(tmp_path)], capture_output=True, text=True, check=True, timeout=60
    )
    for said in (done.stderr, (tmp_path / "frontend.log").read_text()):
        assert said.count("by=enginehouse.part") == ours
        assert said.count("by=library") == others


LATE = {"aiohttp", "alembic", "google", "isal", "prometheus_client", "psutil", "psycopg", "tomllib", "zstandard"}
LOADED = """
import sys
from enginehouse.cli.main import program
program.get_command(None, sys.argv[1])
import enginehouse.run
{module}
print(*sys.modules)
"""


@pytest.mark.parametrize(
    ("command", "module", "late"),
    [
        # `up` starts its children first: what they need and it does not, and what it needs later, comes afterwards.
        ("up", "enginehouse.parent", LATE | {"http", "nats", "sqlalchemy", "starlette", "uvloop", "yaml"}),
        # What a frontend needs for its first request from outside, its first scrape, its first engine of LocalAI.
        ("frontend", "enginehouse.build_frontend", LATE | {"sqlalchemy.dialects.postgresql", "enginehouse.parent"}),
    ],
)
def test_a_start_loads_nothing_that_is_needed_later(command: str, module: str, late: set[str]) -> None:
    script = LOADED.format(module=f"import {module}")
    done = subprocess.run(
        [sys.executable, "-c", script, command], capture_output=True, text=True, check=True, timeout=60
    )
    loaded = set(done.stdout.split())
    assert module in loaded
    assert not loaded & late
