"""A real worker on a machine that seems small, as a program of its own: `python -m tests.fleet.small_worker worker …`,
with the arguments of `enginehouse`, and SMALL_MEMORY_BYTES in the environment.

Of that memory its engines have taken what they really hold; nothing else of the worker is changed. Without it, five
workers on one machine would all report the same free memory, and no test could fill them.
"""

from __future__ import annotations

import os
from pathlib import Path

import psutil

from enginehouse.cli.main import main
from enginehouse.host import hardware, processes

TOTAL_BYTES = int(os.environ["SMALL_MEMORY_BYTES"])


def small_memory(group: Path = Path()) -> tuple[int, int]:
    """The total, and what the engines of this worker left of it."""
    taken = sum(processes.memory_of(child.pid) for child in psutil.Process().children())
    return TOTAL_BYTES, max(1, TOTAL_BYTES - taken)


if __name__ == "__main__":
    hardware.memory = small_memory
    main()
