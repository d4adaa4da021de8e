"""Every test, in two streams side by side, so that both cores have work until the end.

What only computes runs at low priority and gives way to real processes that wait for each other. The clusters of
`fleet` mostly wait, so they come beside the engines of `worker` and `e2e`, which mostly compute. The simulation comes
last, because it takes every core there is. Both streams are told in full; one that fails makes the whole fail.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import BinaryIO, NamedTuple

ROOT = Path(__file__).parents[1]
CLUSTERS = ("fleet",)
REAL = ("artifact", "worker", "host", "e2e", "replay")
SIMULATED = ("sim",)


class Batch(NamedTuple):
    """Suites that one run of pytest takes."""

    places: tuple[str, ...]
    is_quiet: bool  # behind whatever else wants the cores

    def command(self) -> list[str]:
        pytest = [sys.executable, "-m", "pytest", "-q", "--durations=15", *self.places]
        return ["nice", "-n", "10", *pytest] if self.is_quiet else pytest


def run(batches: list[Batch], told: BinaryIO | None, ends: list[int]) -> None:
    """One after the other; into `told`, or to the terminal."""
    errors = subprocess.STDOUT if told else None
    ends.extend(subprocess.call(batch.command(), stdout=told, stderr=errors) for batch in batches)


def suites(names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"tests/{name}" for name in names)


def main() -> int:
    os.chdir(ROOT)
    every = sorted(path for path in Path("tests").iterdir() if path.is_dir() or path.name.startswith("test_"))
    named = (*CLUSTERS, *REAL, *SIMULATED, "__pycache__")
    pure = tuple(str(path) for path in every if path.name not in named)
    first = [Batch(pure, is_quiet=True), Batch(suites(CLUSTERS), is_quiet=False)]
    second = [Batch(suites(REAL), is_quiet=False), Batch(suites(SIMULATED), is_quiet=True)]
    with tempfile.TemporaryFile() as told:
        ends: list[int] = []
        beside = threading.Thread(target=run, args=(first, told, ends))
        beside.start()
        print(f"== {' '.join(place for batch in second for place in batch.places)}", flush=True)
        run(second, None, ends)
        beside.join()
        print(f"== beside it: {' '.join(place for batch in first for place in batch.places)}", flush=True)
        told.seek(0)
        sys.stdout.buffer.write(told.read())
        sys.stdout.flush()
    return 1 if any(ends) else 0


if __name__ == "__main__":
    sys.exit(main())
