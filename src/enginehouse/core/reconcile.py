"""Reconciling: what to load and what to stop so that each model has the replicas that are wanted.

Pure. Wanted are the minimum of a schedule, one per matching node where it says so, and what operators loaded by hand.
A replica counts while its node serves; one that is busy is never stopped. One change of scale per delay, so that load
that goes up and down does not make replicas come and go. Replicas that are out of date are replaced one after the
other: the new one first, then the old one is stopped.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from enginehouse.core.ids import NodeId
from enginehouse.core.pace import USUAL, ServingPace
from enginehouse.core.prefix import DISTURBED_SECONDS
from enginehouse.core.schedule import LoadInfo, Schedule

LOADS_PER_PASS = 4  # of one model
RECONCILER = "reconciler"  # the author of loads and stops that keep the wanted number of replicas


class ServingReplica(Struct, frozen=True, kw_only=True):
    node_id: NodeId
    slot: int
    created_at: float
    last_used: float
    in_flight: int = 0
    nonce: str = ""
    outdated: str = ""  # why it is to be replaced; "" if it is not
    leaves_node: bool = False  # its node is drained


class ModelFacts(Struct, frozen=True, kw_only=True):
    """One model at one moment."""

    now: float
    info: LoadInfo
    schedule: Schedule | None = None
    replicas: Sequence[ServingReplica] = ()  # on nodes that serve, not about to stop
    leaving: int = 0  # replicas that are about to stop
    loading: Sequence[NodeId] = ()  # open loads: the node that was named, or ""
    matching: Sequence[NodeId] = ()  # schedulable nodes that can run it and that the selector matches
    queued: int = 0  # requests that wait because all replicas have as many as they can answer
    disturbed_ago: float | None = None  # seconds since a request could not go to the replica that has its prefix
    pace: ServingPace = USUAL
    selected: Sequence[NodeId] = ()  # every node that the selector matches: also silent ones, which get nothing new


class ModelPlan(Struct, frozen=True, kw_only=True):
    loads: tuple[NodeId, ...] = ()  # a node each, or "" for any
    stops: tuple[ServingReplica, ...] = ()
    replaced: ServingReplica | None = None
    is_scaled: bool = False  # the number changes for the load's sake
    reason: str = ""

    @property
    def is_empty(self) -> bool:
        return not self.loads and not self.stops and self.replaced is None


def plan_model(facts: ModelFacts) -> ModelPlan:
    missing = _missing(facts)
    if missing:
        # One attempt per cooldown, however much is missing. Where a replica does not belong it serves no longer, also
        # if its successor finds no place.
        loads = () if facts.now < facts.info.retry_at else tuple(missing[:LOADS_PER_PASS])
        return ModelPlan(loads=loads, stops=tuple(one for one in _misplaced(facts) if not one.in_flight))
    return _surplus(facts) or _outdated(facts) or _busy(facts) or _idle(facts) or ModelPlan()


def quiet_until(facts: ModelFacts) -> float:
    """Until when an empty plan stays empty while the facts are the same but for time and uses. `facts.now` if that is
    not known: something is waited for that no row shows. Uses only put stops off; requests that are a reason to grow
    come from elsewhere (`can_grow`).
    """
    if _missing(facts):
        return facts.now if _misplaced(facts) else facts.info.retry_at
    if _surplus(facts) is not None:
        return facts.now
    due = float("inf")
    if any(one.outdated for one in facts.replicas):
        due = max(facts.now, facts.info.retry_at)
    schedule = facts.schedule
    if not facts.replicas or (schedule is not None and schedule.spread_all):
        return due
    wanted = wanted_replicas(facts)
    if schedule is not None and schedule.idle_seconds and not wanted:
        due = min(due, max(one.last_used for one in facts.replicas) + schedule.idle_seconds)
    used = [one.last_used for one in facts.replicas if one.node_id not in facts.info.kept]
    if used and len(facts.replicas) > max(1, wanted):
        due = min(due, max(facts.info.scaled_at, min(used)) + facts.pace.scale_down_seconds)
    return due


def can_grow(facts: ModelFacts) -> bool:
    """Whether requests alone may be a reason for another replica."""
    schedule = facts.schedule
    if schedule is None or schedule.spread_all or not facts.replicas:
        return False
    if schedule.max_replicas == 0 and schedule.min_replicas == 0:
        return False
    return not schedule.max_replicas or len(facts.replicas) < schedule.max_replicas


def must_move(facts: ModelFacts, replica: ServingReplica) -> bool:
    """Whether a replica on a drained node has to be replaced on another one before it stops: the model is wanted or in
    use, and the others are too few. What was loaded on this node in particular waits for its return, if there are
    others.
    """
    others = [one for one in facts.replicas if not one.leaves_node and one.nonce != replica.nonce]
    is_used = replica.in_flight > 0 or facts.now - replica.last_used < facts.pace.scale_down_seconds
    lowest = facts.schedule.min_replicas if facts.schedule is not None else 0
    return len(others) < max(lowest, 1 if is_used or facts.info.kept else 0)


def wanted_replicas(facts: ModelFacts) -> int:
    """How many replicas are wanted without any request."""
    schedule = facts.schedule
    if schedule is not None and schedule.spread_all:
        return len(facts.matching)
    return max(schedule.min_replicas if schedule is not None else 0, facts.info.kept_replicas)


def retry_seconds(failures: int, pace: ServingPace = USUAL) -> float:
    """The pause after so many failed attempts in a row."""
    return min(pace.max_retry_seconds, pace.retry_seconds * 2.0 ** min(failures - 1, 8))


def _missing(facts: ModelFacts) -> list[NodeId]:
    """The loads that are to begin."""
    strangers = _strangers(facts)
    replicas = [one for one in facts.replicas if one not in strangers] if strangers else facts.replicas
    here = {one.node_id for one in replicas} | {one for one in facts.loading if one}
    schedule = facts.schedule
    if schedule is not None and schedule.spread_all:
        return [node_id for node_id in facts.matching if node_id not in here]
    named = [one for one in facts.info.kept if one and one not in here and one in facts.matching]
    if schedule is not None and schedule.max_replicas:
        # Otherwise what was loaded by hand beyond the maximum would be stopped and loaded for ever.
        named = named[: max(0, schedule.max_replicas - len(replicas) - len(facts.loading))]
    total = len(replicas) + len(facts.loading) + len(named)
    # Nodes that were named and are away are waited for; a minimum goes elsewhere meanwhile.
    lowest = schedule.min_replicas if schedule is not None else 0
    if NodeId("") in facts.info.kept:
        lowest = max(lowest, 1)
    return [*named, *[NodeId("")] * max(0, lowest - total)]


def _strangers(facts: ModelFacts) -> list[ServingReplica]:
    """The replicas on nodes that the selector does not match. That a node is silent, or that no build is known for it
    at the moment, is no reason to stop what runs there.
    """
    schedule = facts.schedule
    if schedule is None or not (schedule.spread_all or schedule.node_selector):
        return []
    known = {*facts.matching, *facts.selected}
    return [one for one in facts.replicas if one.node_id not in known]


def _misplaced(facts: ModelFacts) -> list[ServingReplica]:
    """The replicas that do not belong where they are: strangers, and the second one on a node of a spread model."""
    found = _strangers(facts)
    if facts.schedule is None or not facts.schedule.spread_all:
        return found
    seen: set[NodeId] = set()
    for one in sorted(facts.replicas, key=lambda each: (bool(each.outdated), each.slot)):
        if one.node_id in seen and one not in found:
            found.append(one)
        seen.add(one.node_id)
    return found


def _surplus(facts: ModelFacts) -> ModelPlan | None:
    """Stop what is over the maximum, or where a spread model no longer belongs."""
    schedule = facts.schedule
    if schedule is None:
        return None
    over = _misplaced(facts)
    if not schedule.spread_all:
        number = max(0, len(facts.replicas) - schedule.max_replicas) if schedule.max_replicas else 0
        rest = [one for one in _newest_first(facts) if one not in over]
        rest.sort(key=lambda one: not one.outdated)  # stable; those that are to be replaced go first
        over = [*over, *rest[: max(0, number - len(over))]]
    quiet = tuple(one for one in over if not one.in_flight)
    # Busy ones are waited for; no other replica is stopped in their place.
    return ModelPlan(stops=quiet, reason="its schedule wants fewer replicas or other nodes") if over else None


def _outdated(facts: ModelFacts) -> ModelPlan | None:
    """Replace one replica, the least busy first. The next one follows when the old one has stopped."""
    if facts.loading or facts.leaving or facts.now < facts.info.retry_at:
        return None
    old = [one for one in facts.replicas if one.outdated and (not one.leaves_node or must_move(facts, one))]
    if not old:
        return None
    chosen = min(old, key=lambda one: (one.in_flight, one.created_at, one.node_id, one.slot))
    return ModelPlan(replaced=chosen, reason=chosen.outdated)


def _busy(facts: ModelFacts) -> ModelPlan | None:
    """Add one replica where all are busy, requests wait, or requests lose the replica that has their prefix."""
    if facts.loading or not can_grow(facts):
        return None
    is_time = facts.now >= facts.info.scaled_at + facts.pace.scale_up_seconds and facts.now >= facts.info.retry_at
    reason = _reason_to_grow(facts)
    if not is_time or not reason:
        return None
    return ModelPlan(loads=(NodeId(""),), is_scaled=True, reason=reason)


def _reason_to_grow(facts: ModelFacts) -> str:
    if facts.queued:
        return f"{facts.queued} requests wait for it"
    if all(one.in_flight for one in facts.replicas):
        return "all its replicas are busy"
    ago = facts.disturbed_ago
    # What happened before the last change of scale was a reason for that one.
    if ago is not None and ago <= DISTURBED_SECONDS and facts.now - ago > facts.info.scaled_at:
        return "the replica that has the prefix of a request was too busy for it"
    return ""


def _idle(facts: ModelFacts) -> ModelPlan | None:
    """Stop one replica that nobody uses, the newest first; all of them where the schedule allows zero."""
    schedule = facts.schedule
    if facts.loading or facts.leaving or (schedule is not None and schedule.spread_all):
        return None
    wanted = wanted_replicas(facts)
    quiet = [one for one in _newest_first(facts) if not one.in_flight]
    if schedule is not None and schedule.idle_seconds and not wanted and len(quiet) == len(facts.replicas):
        if quiet and all(facts.now - one.last_used >= schedule.idle_seconds for one in quiet):
            return ModelPlan(stops=tuple(quiet), reason=f"nobody used it for {schedule.idle_seconds:g} s")
        return None
    if len(facts.replicas) <= max(1, wanted) or facts.now < facts.info.scaled_at + facts.pace.scale_down_seconds:
        return None
    named = set(facts.info.kept)
    unused = [
        one for one in quiet if facts.now - one.last_used >= facts.pace.scale_down_seconds and one.node_id not in named
    ]
    if not unused:
        return None
    return ModelPlan(
        stops=(unused[0],), is_scaled=True, reason=f"nobody used it for {facts.pace.scale_down_seconds:g} s"
    )


def _newest_first(facts: ModelFacts) -> list[ServingReplica]:
    return sorted(facts.replicas, key=lambda one: (one.created_at, one.slot, one.node_id), reverse=True)
