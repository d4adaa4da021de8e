"""Every test, in two streams side by side: what only computes, at low priority, and what runs real processes and waits
for them.

Engines of two streams would take each other's cores, so all that start any are in the second. The simulation comes last
in the first, because it takes every core there is. Both are told in full; one that fails makes the whole fail.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import BinaryIO

ROOT = Path(__file__).parents[1]
REAL = ("artifact", "worker", "host", "e2e", "replay", "fleet")
SIMULATED = ("sim",)


def pytest(*places: str, more: tuple[str, ...] = ()) -> list[str]:
    return [sys.executable, "-m", "pytest", "-q", *more, *places]


def run_quietly(commands: list[list[str]], told: BinaryIO, ends: list[int]) -> None:
    """One after the other, behind whatever else wants the cores."""
    quietly = [["nice", "-n", "10", *command] for command in commands]
    ends.extend(subprocess.call(command, stdout=told, stderr=subprocess.STDOUT) for command in quietly)


def main() -> int:
    os.chdir(ROOT)
    every = sorted(path for path in Path("tests").iterdir() if path.is_dir() or path.name.startswith("test_"))
    pure = [str(path) for path in every if path.name not in (*REAL, *SIMULATED, "__pycache__")]
    real = [f"tests/{name}" for name in REAL]
    simulated = [f"tests/{name}" for name in SIMULATED]
    with tempfile.TemporaryFile() as told:
        ends: list[int] = []
        beside = threading.Thread(target=run_quietly, args=([pytest(*pure), pytest(*simulated)], told, ends))
        beside.start()
        print(f"== real processes: {' '.join(real)}", flush=True)
        ends.append(subprocess.call(pytest(*real, more=("--durations=10",))))
        print(f"== beside it: {' '.join([*pure, *simulated])}", flush=True)
        beside.join()
        told.seek(0)
        sys.stdout.buffer.write(told.read())
        sys.stdout.flush()
    return 1 if any(ends) else 0


if __name__ == "__main__":
    sys.exit(main())
