"""Schedules: how many replicas of a model are wanted, and where. The fields are LocalAI's, with additive ones.

A load that an operator asked for is wanted too, until it is unloaded (`LoadInfo.kept`). Both outlive every replica and
every frontend.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct

from enginehouse.core.errors import Invalid
from enginehouse.core.ids import NodeId

MAX_REPLICAS = 1000  # of one model
POLICIES = ("", "round_robin", "prefix_cache")
MAX_LABELS, MAX_LABEL = 64, 255


class Schedule(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`max_replicas` 0 means no limit; `spread_all` means one on each node that the selector matches."""

    model_name: str
    node_selector: dict[str, str] = {}
    min_replicas: int = 0
    max_replicas: int = 0
    spread_all: bool = False
    route_policy: str = ""
    balance_abs_threshold: int = 0
    balance_rel_threshold: float = 0.0
    min_prefix_match: float = 0.0
    idle_seconds: float = 0.0  # additive: after so long without a request the last replicas stop too; 0 means never
    created_at: float = 0.0
    updated_at: float = 0.0

    @property
    def is_kept(self) -> bool:
        """Whether replicas are wanted without a request."""
        return self.spread_all or self.min_replicas > 0


class ScheduleRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of a request for a schedule. The four fields about prefixes keep their value if they are absent."""

    model_name: str
    node_selector: dict[str, str] = {}
    min_replicas: int = 0
    max_replicas: int = 0
    spread_all: bool = False
    route_policy: str | None = None
    balance_abs_threshold: int | None = None
    balance_rel_threshold: float | None = None
    min_prefix_match: float | None = None
    idle_seconds: float = 0.0


class LoadInfo(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is known of a model beyond its replicas. `kept` has a node's id per load that an operator asked for, or ""
    for one on any node.
    """

    model: str
    revision: str = ""  # of the last replica that was ready
    memory_bytes: int = 0  # the most that a replica of this revision was seen to take
    kept: tuple[NodeId, ...] = ()
    author: str = ""  # of the last load that was asked for
    scaled_at: float = 0.0  # when the number of replicas last changed for the load's sake
    # Since the last replica that was ready: loads that failed, when the next may begin, and why they failed.
    failures: int = 0
    retry_at: float = 0.0
    reason: str = ""

    @property
    def kept_replicas(self) -> int:
        """How many replicas the kept loads ask for: one on a certain node is also one on any node."""
        named = sum(1 for one in self.kept if one)
        return named or len(self.kept[:1])


def checked(request: ScheduleRequest, before: Schedule | None) -> Schedule:
    """The schedule of a request. Raises `Invalid` with the field that is wrong."""
    name = request.model_name
    if not name.strip():
        raise _wrong("model_name", "it must name a model")
    lowest, highest = request.min_replicas, request.max_replicas
    if not 0 <= lowest <= MAX_REPLICAS:
        raise _wrong("min_replicas", f"it must be 0 to {MAX_REPLICAS}")
    if not 0 <= highest <= MAX_REPLICAS:
        raise _wrong("max_replicas", f"it must be 0 (no limit) to {MAX_REPLICAS}")
    if highest and lowest > highest:
        raise _wrong("min_replicas", f"{lowest} is more than max_replicas, which is {highest}")
    if request.spread_all and (lowest or highest):
        raise _wrong("spread_all", "it means one replica per node; leave out min_replicas and max_replicas")
    if not 0 <= request.idle_seconds <= 365 * 86400:
        raise _wrong("idle_seconds", "it must be 0 (never) to a year")
    _check_labels(request.node_selector)
    made = Schedule(
        model_name=name,
        node_selector=dict(request.node_selector),
        min_replicas=lowest,
        max_replicas=highest,
        spread_all=request.spread_all,
        idle_seconds=request.idle_seconds,
        **_prefix_fields(request, before),
    )
    if made.route_policy not in POLICIES:
        raise _wrong("route_policy", "it must be empty, round_robin or prefix_cache")
    if not 0 <= made.min_prefix_match <= 1:
        raise _wrong("min_prefix_match", "it must be from 0 to 1")
    if made.balance_abs_threshold < 0:
        raise _wrong("balance_abs_threshold", "it must not be negative")
    if made.balance_rel_threshold and made.balance_rel_threshold < 1:
        raise _wrong("balance_rel_threshold", "it must be 0 or at least 1")
    return made


def _prefix_fields(request: ScheduleRequest, before: Schedule | None) -> dict[str, Any]:
    names = ("route_policy", "balance_abs_threshold", "balance_rel_threshold", "min_prefix_match")
    said = {name: getattr(request, name) for name in names}
    kept = {name: getattr(before, name) for name in names} if before is not None else {}
    return {**kept, **{name: value for name, value in said.items() if value is not None}}


def _check_labels(selector: dict[str, str]) -> None:
    if len(selector) > MAX_LABELS or any(
        not key or len(key) > MAX_LABEL or len(value) > MAX_LABEL for key, value in selector.items()
    ):
        raise _wrong("node_selector", f"it must have at most {MAX_LABELS} labels of at most {MAX_LABEL} characters")


def _wrong(field: str, why: str) -> Invalid:
    return Invalid(f"cannot use {field}: {why}", code="invalid_request", param=field)


def with_kept(found: LoadInfo, node_id: NodeId | None) -> LoadInfo:
    """After an operator asked for a load, on one node or anywhere."""
    wanted = node_id or NodeId("")
    return found if wanted in found.kept else msgspec.structs.replace(found, kept=(*found.kept, wanted))


def without_kept(found: LoadInfo, node_id: NodeId | None) -> LoadInfo:
    """After an operator asked for an unload; from one node, a load that could be anywhere is no longer wanted either,
    unless others are.
    """
    left = tuple(one for one in found.kept if node_id is not None and one not in (node_id, ""))
    return msgspec.structs.replace(found, kept=left)
