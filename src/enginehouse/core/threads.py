"""Threads per engine: a share of the cores that shrinks with every engine. It is never a reason to refuse a start.

Engines that compete for cores slow each other down, so the first ones get half of the cores each. Once all cores are
assigned, a new engine gets an equal share. The number of engines is limited by memory.
"""

from __future__ import annotations

import re

from msgspec import Struct

# Words in the names of GPU builds, LocalAI's and ours.
_CARD = re.compile(r"(?:^|[-_.@])(?:cuda|rocm|hip|sycl|vulkan|metal|mlx|l4t|nvidia|intel|amd|gpu)", re.IGNORECASE)
CARD_THREADS = 1  # an engine on a graphics card computes there


class AssignedThreads(Struct, frozen=True):
    """Threads and engines already assigned on a machine."""

    threads: int = 0
    engines: int = 0


def share(cores: int, wanted: int, assigned: AssignedThreads) -> int:
    """`wanted` is the model's setting, 0 if it has none."""
    full = min(cores, wanted or max(1, cores // 2))
    equal = cores // (assigned.engines + 1)
    return max(1, min(full, max(cores - assigned.threads, equal)))


def is_for_card(directory: str, gpu_vendor: str) -> bool:
    """Whether a backend computes on a graphics card of this machine, judging by its name."""
    return bool(gpu_vendor) and _CARD.search(directory) is not None
