"""The resources of a machine: one shape in the row, in a registration and in the view of a node.

The names are LocalAI's, because registrations and views have these fields beside others (they inherit them). A
heartbeat carries a change of some of them (`core.node_api.HeartbeatRequest`).
"""

from __future__ import annotations

from msgspec import Struct


class GraphicsCard(Struct, frozen=True, omit_defaults=True, kw_only=True):
    """One graphics card. An amount is absent if it is unknown, never 0."""

    index: int = 0  # as the vendor's tool counts
    name: str = ""
    total_vram: int | None = None
    available_vram: int | None = None


class Capacity(Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Resources as the machine reports them; 0 means not reported."""

    cores: int = 0
    used_cores: float | None = None  # additive; of `cores`, between its last two heartbeats. None if unknown, never 0
    total_vram: int = 0
    available_vram: int = 0
    total_ram: int = 0
    available_ram: int = 0
    total_disk: int = 0
    available_disk: int = 0
    gpu_vendor: str = ""
    gpu_compute_capability: str = ""
    gpu_cards: tuple[GraphicsCard, ...] = ()  # additive; empty if nothing is known about single cards


MAX_CORES = 1_000_000.0  # of a plausible machine
AMOUNTS = tuple(field for field in Capacity.__struct_fields__ if not field.startswith("gpu_") and field != "used_cores")


def capacity_of(described: Capacity) -> Capacity:
    """The resources alone, of what describes a machine with other fields beside."""
    return Capacity(**{field: getattr(described, field) for field in Capacity.__struct_fields__})
