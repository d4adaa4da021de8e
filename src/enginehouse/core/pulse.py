"""Figures of the cluster as it works: what an event `pulse` has, and what the last hour was like.

The API sends these shapes and the command line reads them. What is not known is None, never 0: the time to the first
token while nobody asked for a stream, the memory of a node that does not report it.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from enginehouse.core.capacity import Capacity
from enginehouse.core.ids import NodeId


class TrafficFigures(Struct, frozen=True, kw_only=True):
    """The requests of all frontends in the last seconds, and those under way. Rates are None until a frontend has
    counted for a moment after its start.
    """

    requests_per_second: float | None = None  # that ended
    tokens_per_second: float | None = None  # made by engines, counted when their request ends
    time_to_first_token_seconds: float | None = None  # of streams, on average
    errors_per_second: float | None = None
    in_flight: int = 0  # that a replica is answering
    queued: int = 0  # that wait for a load, or for a replica with room


class ModelFigures(Struct, frozen=True, kw_only=True):
    """The part of one model."""

    requests_per_second: float | None = None
    tokens_per_second: float | None = None
    time_to_first_token_seconds: float | None = None
    in_flight: int = 0
    queued: int = 0


class NodePulse(Struct, frozen=True, kw_only=True):
    """What heartbeats and requests change of a node. Those of a node that is away are the last known ones."""

    heard_at: float | None = None  # by the store's clock
    available_ram: int | None = None
    available_vram: int | None = None
    available_disk: int | None = None
    used_cores: float | None = None
    in_flight: int = 0
    requests_per_second: float | None = None


class PulseEvent(Struct, frozen=True, kw_only=True):
    at: float  # the store's time
    traffic: TrafficFigures
    nodes: Mapping[NodeId, NodePulse] = {}  # all approved ones in the first event of a stream, then those that changed
    models: Mapping[str, ModelFigures] = {}  # with requests now


class NodeUse(Struct, frozen=True, kw_only=True):
    """How much of a node was in use, at one time after the other."""

    used_ram: list[int | None] = []
    used_vram: list[int | None] = []
    used_cores: list[float | None] = []


class ModelHistory(Struct, frozen=True, kw_only=True):
    requests_per_second: list[float | None] = []
    time_to_first_token_seconds: list[float | None] = []


class History(Struct, frozen=True, kw_only=True):
    """The last hour as one frontend saw it, oldest first; None where it does not know."""

    step_seconds: float
    ends_at: float | None  # the store's time at the end of the last step; None if this frontend does not know it yet
    series: Mapping[str, list[float | None]]  # the fields of `TrafficFigures`
    nodes: Mapping[NodeId, NodeUse] = {}
    models: Mapping[str, ModelHistory] = {}  # with requests in that time


def available_ram(capacity: Capacity) -> int | None:
    return capacity.available_ram or None  # 0 means not reported


def available_vram(capacity: Capacity) -> int | None:
    return capacity.available_vram if capacity.total_vram else None


def available_disk(capacity: Capacity) -> int | None:
    return capacity.available_disk if capacity.available_disk or capacity.total_disk else None


def used(total: int, available: int | None) -> int | None:
    return max(0, total - available) if total and available is not None else None
