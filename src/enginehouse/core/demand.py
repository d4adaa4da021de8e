"""Demand: the memory and disk that one replica of a model needs on a node.

Pure. In this order: what the model's configuration says (`memory`), what a replica of this revision was seen to take,
an estimate from the size of the weights and of the context. 0 means unknown: an unknown demand fits everywhere.
"""

from __future__ import annotations

import re
from typing import Literal

from msgspec import Struct

from enginehouse.core.model import GIB, HeldModel, Model
from enginehouse.core.progress import format_bytes

_AMOUNT = re.compile(r"(\d{1,12}(?:\.\d{1,6})?)\s*([KMGT]?)(?:i?B)?", re.IGNORECASE)
Origin = Literal["configured", "measured", "estimated", "unknown"]

ASSUMED_CONTEXT = 8192  # of a model whose context is unknown; the same as in LocalAI
CACHE_BYTES_PER_TOKEN = 128 * 1024  # of a model whose header is unknown: that of a model of eight billion parameters
# Buffers for computing, beside weights and cache. Engines for small models need some ten MiB.
BUFFERS_PART, BUFFERS_BYTES = 20, 32 * 1024**2
SMALL_BYTES = 512 * 1024**2  # below this, an unknown header is that of a small model, with a cache of its size
HEADROOM_PART = 20  # of what is fetched, to be left free on the disk: a twentieth, at least a GiB, as in LocalAI


class Demand(Struct, frozen=True, kw_only=True):
    memory_bytes: int = 0
    origin: Origin = "unknown"

    @property
    def phrase(self) -> str:
        return format_bytes(self.memory_bytes) if self.memory_bytes else "an unknown amount of memory"


def demand_of(model: Model, measured_bytes: int = 0) -> Demand:
    """`measured_bytes` is what a replica of this revision took; 0 if none has run yet."""
    configured = configured_memory(model)
    if configured:
        return Demand(memory_bytes=configured, origin="configured")
    if measured_bytes:
        return Demand(memory_bytes=measured_bytes, origin="measured")
    weights = model.size_bytes
    if not weights:
        return Demand()
    return Demand(memory_bytes=weights + cache_bytes(model) + buffers_bytes(weights), origin="estimated")


def buffers_bytes(weights_bytes: int) -> int:
    return max(BUFFERS_BYTES, weights_bytes // BUFFERS_PART)


def cache_bytes(model: Model) -> int:
    """The keys and values of a full context, as engines reserve it at the start."""
    return cache_bytes_of(model, model.options.context_size)


def cache_bytes_of(model: Model, context_size: int, bytes_per_token: int = 0) -> int:
    """The same for a context of this size; 0 is an unknown one. `bytes_per_token` is from the header of the weights,
    for a model whose row does not have it.
    """
    context = context_size or ASSUMED_CONTEXT
    known = model.cache_bytes_per_token or bytes_per_token
    if known:
        return known * context
    return min(CACHE_BYTES_PER_TOKEN * context, model.size_bytes if model.size_bytes < SMALL_BYTES else GIB)


def configured_memory(model: Model) -> int:
    """The `memory` of the configuration in bytes: a number, or a text such as `6 GiB`. 0 if it has none."""
    said = model.config.get("memory")
    if said is None or isinstance(said, bool):
        return 0
    if isinstance(said, int):
        return max(0, said)
    found = _AMOUNT.fullmatch(str(said).strip())
    return int(float(found[1]) * 1024 ** " KMGT".index(found[2].upper() or " ")) if found else 0


def missing_bytes(model: Model, held: tuple[HeldModel, ...]) -> int:
    """What a node would have to fetch: the files that it does not have. Those on shared storage stay there."""
    there = {digest for one in held if one.name == model.name for digest in one.sha256}
    return sum(file.size_bytes for file in model.files if file.sha256 not in there and not file.uri.startswith("file:"))


def disk_needed(fetched_bytes: int) -> int:
    """Free disk that must be there for a download of this size."""
    return fetched_bytes + max(GIB, fetched_bytes // HEADROOM_PART) if fetched_bytes else 0
