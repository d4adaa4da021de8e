"""Offload: how many layers of a model an engine keeps on the graphics cards, and how many requests it answers at once.

Pure. What the model's configuration says always wins. Otherwise all layers go to the cards if the replica fits there,
as many as fit if it does not, and none without a card. Unknown amounts are never full: then all layers go there, as in
LocalAI, and the engine decides. This is also where it stands which engines spread one model over several cards.
"""

from __future__ import annotations

from msgspec import Struct

from enginehouse.core.capacity import Capacity, GraphicsCard
from enginehouse.core.demand import buffers_bytes
from enginehouse.core.load_options import ALL_LAYERS
from enginehouse.core.model import GIB, Model, served_config
from enginehouse.core.threads import is_for_card

# LocalAI's numbers: from so much memory of the largest card on, so many requests at once.
PARALLEL_BY_VRAM = ((32 * GIB, 8), (8 * GIB, 4), (4 * GIB, 2))


class ReplicaSize(Struct, frozen=True, kw_only=True):
    """What decides about a replica: its model's files, and what its configuration says."""

    weights_bytes: int = 0
    layers: int = 0  # from the header of the weights; 0 if unknown
    cache_bytes: int = 0  # keys and values of one full context
    gpu_layers: int | None = None  # of the configuration
    parallel: int = 0  # of the configuration; 0 if it says nothing

    def bytes_with(self, parallel: int) -> int:
        return self.weights_bytes + self.cache_bytes * max(1, parallel)


class Offload(Struct, frozen=True, kw_only=True):
    gpu_layers: int
    parallel: int = 0  # 0 leaves it to the engine


def splits_over_cards(backend: str) -> bool:
    """Whether an engine spreads one model over all cards by itself: llama.cpp does, in every build of it."""
    return "llama" in backend.lower()


def is_on_one_card(model: Model, directory: str, gpu_vendor: str) -> bool:
    """Whether a replica computes on a card and its engine does not spread it over several."""
    if not is_for_card(directory, gpu_vendor) or splits_over_cards(directory):
        return False
    config = served_config(model)
    spread = config.engine_args.get("tensor_parallel_size")  # as vLLM's own option
    return config.tensor_parallel_size < 2 and not (isinstance(spread, int) and spread > 1)


def known_cards(capacity: Capacity) -> tuple[GraphicsCard, ...]:
    """The cards, if the free memory of each is known; else none."""
    cards = capacity.gpu_cards
    return cards if all(card.available_vram is not None for card in cards) else ()


def plan_offload(size: ReplicaSize, capacity: Capacity, directory: str, *, has_card: bool) -> Offload:
    """`directory` is the build on this machine; `has_card` also counts a chip that reports no memory of its own."""
    free = _free_bytes(capacity, directory, buffers_bytes(size.weights_bytes))
    parallel = size.parallel or _parallel(size, capacity, directory, free)
    if size.gpu_layers is not None:
        return Offload(gpu_layers=size.gpu_layers, parallel=parallel)
    return Offload(gpu_layers=_layers(size, free, parallel) if has_card else 0, parallel=parallel)


def _free_bytes(capacity: Capacity, directory: str, buffers: int) -> int | None:
    """What weights and caches may take: on all cards, or on the best one. Buffers are on every card that is used. None
    if it is unknown.
    """
    cards = [max(0, (card.available_vram or 0) - buffers) for card in known_cards(capacity)]
    if cards:
        return sum(cards) if splits_over_cards(directory) else max(cards)
    return max(0, capacity.available_vram - buffers) if capacity.total_vram else None


def _layers(size: ReplicaSize, free: int | None, parallel: int) -> int:
    need = size.bytes_with(parallel)
    if free is None or not size.weights_bytes or not size.layers or need <= free:
        return ALL_LAYERS
    # Tables of words count as a part of every layer, so a layer is never taken for smaller than it is.
    return min(size.layers, free * size.layers // need)


def _parallel(size: ReplicaSize, capacity: Capacity, directory: str, free: int | None) -> int:
    """LocalAI's number for the card, halved until the contexts of all requests fit beside the weights; 0 if the engine
    does not compute on a card or its memory is unknown.
    """
    if not splits_over_cards(directory) or not is_for_card(directory, capacity.gpu_vendor) or free is None:
        return 0
    largest = max((card.total_vram or 0 for card in capacity.gpu_cards), default=0) or capacity.total_vram
    wanted = next((number for least, number in PARALLEL_BY_VRAM if largest >= least), 0)
    while wanted > 1 and size.bytes_with(wanted) > free:
        wanted //= 2
    return wanted if wanted > 1 else 0
