"""How many threads an engine gets: a share of the cores that gets smaller with every engine, never a reason to refuse.

Engines that compete for cores slow each other down, so the first ones get half of them each; whoever comes when they
are promised gets an equal part. What limits how many engines run is memory.
"""

from __future__ import annotations

import re

from msgspec import Struct

# In the names of builds for graphics cards, LocalAI's and ours.
_CARD = re.compile(r"(?:^|[-_.@])(?:cuda|rocm|hip|sycl|vulkan|metal|mlx|l4t|nvidia|intel|amd|gpu)", re.IGNORECASE)
CARD_THREADS = 1  # an engine on a graphics card computes there


class Promised(Struct, frozen=True):
    """What the engines of a machine were promised so far."""

    threads: int = 0
    engines: int = 0


def share(cores: int, wanted: int, promised: Promised) -> int:
    """`wanted` is what the model says, 0 where it says nothing."""
    full = min(cores, wanted or max(1, cores // 2))
    equal = cores // (promised.engines + 1)
    return max(1, min(full, max(cores - promised.threads, equal)))


def is_for_card(directory: str, gpu_vendor: str) -> bool:
    """Whether a backend computes on a graphics card of this machine, as far as its name tells."""
    return bool(gpu_vendor) and _CARD.search(directory) is not None
