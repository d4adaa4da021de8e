"""Every test, in three streams side by side, so that both cores have work until the end.

Clusters of `fleet` mostly wait, and engines of `worker` and `e2e` compute and wait for each other; the rest runs beside
both. Only the simulation has a low priority: it knows no wall clock and takes every core that is free, while others
have limits of seconds. All streams are told in full; one that fails makes the whole fail.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO, NamedTuple

ROOT = Path(__file__).parents[1]
REAL = ("artifact", "worker", "host", "e2e", "replay")
CLUSTERS = ("fleet",)
PAGE = ("window",)  # apart from the others: while a browser is open, its run of pytest has no other loop
SIMULATED = ("sim",)


class Batch(NamedTuple):
    """Suites that one run of pytest takes."""

    places: tuple[str, ...]
    is_quiet: bool = False  # behind whatever else wants the cores

    def command(self) -> list[str]:
        pytest = [sys.executable, "-m", "pytest", "-q", "--durations=15", *self.places]
        return ["nice", "-n", "10", *pytest] if self.is_quiet else pytest


def run(batches: list[Batch], told: BinaryIO | None, ends: list[int]) -> None:
    """One after the other; into `told`, or to the terminal."""
    for batch in batches:
        began = time.monotonic()
        ends.append(subprocess.call(batch.command(), stdout=told, stderr=subprocess.STDOUT if told else None))
        line = f"== {time.monotonic() - began:.0f} s: {' '.join(batch.places)}\n"
        os.write(told.fileno() if told else 1, line.encode())


def suites(names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"tests/{name}" for name in names)


def main() -> int:
    os.chdir(ROOT)
    every = sorted(path for path in Path("tests").iterdir() if path.is_dir() or path.name.startswith("test_"))
    named = (*CLUSTERS, *REAL, *PAGE, *SIMULATED, "__pycache__")
    pure = tuple(str(path) for path in every if path.name not in named)
    others = ([Batch(suites(CLUSTERS))], [Batch(pure), Batch(suites(SIMULATED), is_quiet=True)])
    ends: list[int] = []
    with ExitStack() as stack:
        told = [stack.enter_context(tempfile.TemporaryFile()) for _ in others]
        beside = [
            threading.Thread(target=run, args=(each, file, ends)) for each, file in zip(others, told, strict=True)
        ]
        for thread in beside:
            thread.start()
        run([Batch(suites(REAL)), Batch(suites(PAGE))], None, ends)
        for thread, file in zip(beside, told, strict=True):
            thread.join()
            file.seek(0)
            sys.stdout.buffer.write(file.read())
            sys.stdout.flush()
    return 1 if any(ends) else 0


if __name__ == "__main__":
    sys.exit(main())
