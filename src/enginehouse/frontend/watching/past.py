"""The last hour in steps of ten seconds: rings of numbers in memory, of the cluster, of its nodes and its models.

Its size is bounded by the number of nodes: three rings of 360 short floats each. A step that this frontend did not see,
because it had not started or was frozen, is unknown, and so is a node while it is away. Nothing here is stored: after a
restart the hour begins anew.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TypeAlias

import msgspec

from enginehouse.core import pulse
from enginehouse.core.ids import NodeId
from enginehouse.core.pulse import ModelHistory, NodeUse
from enginehouse.frontend.watching.traffic import Occupancy, Sums, Tallied, add_to, by_model, sum_of
from enginehouse.host.blocking import in_thread
from enginehouse.store.liveness import HeardNode

STEP_SECONDS = 10.0
STEPS = 360
MAX_MODELS = 50
SERIES = (
    *("requests_per_second", "tokens_per_second", "time_to_first_token_seconds", "errors_per_second"),
    *("queued", "in_flight"),
)
_OF_NODES = NodeUse.__struct_fields__
_OF_MODELS = ModelHistory.__struct_fields__
_WHOLE = frozenset(("used_ram", "used_vram", "queued", "in_flight"))  # the others have a fraction
_UNKNOWN = array("f", [math.nan]) * STEPS

Ring: TypeAlias = "array[float]"  # Python 3.11 cannot take it unquoted
Rings = dict[str, Ring]


class Past:
    def __init__(self, began: float) -> None:
        """`began` is the time by the monotonic clock from which on this frontend counts."""
        self._began = began
        self._since = began  # of what was counted
        self._steps = 0  # that have ended since the beginning
        self._clock_offset: float | None = None  # between the monotonic clock and the store's
        self._sums: Sums = {}
        self._cluster = _rings(SERIES)
        self._nodes: dict[NodeId, Rings] = {}
        self._models: dict[str, Rings] = {}
        self._asked: dict[str, int] = {}  # the step in which each model last had a request
        self._left_out = -STEPS  # the step in which there were too many models

    def add(self, sums: Sums) -> None:
        """Note what was counted since the last call."""
        for place, one in sums.items():
            add_to(self._sums, place, one)

    def is_due(self, monotonic: float) -> bool:
        return self._step_at(monotonic) > self._steps

    def end_step(
        self, monotonic: float, store_time: float | None, occupancy: Occupancy, nodes: Sequence[HeardNode] | None
    ) -> None:
        """End a step, if one is due. `nodes` are the approved ones that are heard; None if that is unknown. Of several
        steps since the last call only the newest one is known.
        """
        step = self._step_at(monotonic)
        if step <= self._steps:
            return
        for missed in range(max(self._steps, step - STEPS), step):
            self._clear(missed)
        self._steps = step
        if store_time is not None:
            self._clock_offset = store_time - monotonic
        seconds = max(monotonic - self._since, 1.0)
        sums, self._sums, self._since = self._sums, {}, monotonic
        total = sum_of(sums)
        figures = (*_rates(total, seconds), total.errors / seconds, occupancy.queued, occupancy.in_flight)
        self._set(self._cluster, dict(zip(SERIES, figures, strict=True)))
        self._note_models(by_model(sums), seconds)
        if nodes is not None:
            self._note_nodes(nodes)

    def keep_only(self, node_ids: Collection[NodeId]) -> None:
        """Forget the nodes that were removed."""
        for gone in self._nodes.keys() - set(node_ids):
            del self._nodes[gone]

    async def encoded(self, only: Collection[NodeId] | None) -> bytes:
        """`core.pulse.History` as JSON, with these nodes or all of them. Made in a thread: a thousand nodes are a
        million numbers.
        """
        at = self._steps % STEPS
        # Copied here: the rings go on meanwhile.
        cluster = _ordered(self._cluster, at)
        chosen = [node_id for node_id in self._nodes if only is None or node_id in only]
        nodes = [(node_id, _ordered(self._nodes[node_id], at)) for node_id in chosen]
        models = [(model, _ordered(rings, at)) for model, rings in self._models.items()]
        head = {"step_seconds": STEP_SECONDS, "ends_at": self._ends_at()}
        return await in_thread(_encoded, head, cluster, nodes, models)

    def _ends_at(self) -> float | None:
        if self._clock_offset is None:
            return None
        return round(self._began + self._steps * STEP_SECONDS + self._clock_offset, 3)

    def _step_at(self, monotonic: float) -> int:
        return int((monotonic - self._began) / STEP_SECONDS)

    def _clear(self, step: int) -> None:
        for rings in (self._cluster, *self._nodes.values(), *self._models.values()):
            for ring in rings.values():
                ring[step % STEPS] = math.nan

    def _set(self, rings: Rings, figures: Mapping[str, float | None]) -> None:
        for name, figure in figures.items():
            rings[name][(self._steps - 1) % STEPS] = math.nan if figure is None else figure

    def _note_nodes(self, nodes: Iterable[HeardNode]) -> None:
        for node in nodes:
            rings = self._nodes.get(node.id)
            if rings is None:
                rings = self._nodes[node.id] = _rings(_OF_NODES)
            capacity = node.capacity
            self._set(
                rings,
                {
                    "used_ram": pulse.used(capacity.total_ram, pulse.available_ram(capacity)),
                    "used_vram": pulse.used(capacity.total_vram, pulse.available_vram(capacity)),
                    "used_cores": capacity.used_cores,
                },
            )

    def _note_models(self, sums: Mapping[str, Tallied], seconds: float) -> None:
        for model in sums:
            self._asked[model] = self._steps
        quiet = [model for model, step in self._asked.items() if step <= self._steps - STEPS]
        for model in quiet:
            del self._asked[model]
        if len(self._asked) > MAX_MODELS:
            # Those that were asked last, and of these the ones with the most requests.
            def weight(model: str) -> tuple[int, int]:
                return self._asked[model], sums[model].requests if model in sums else 0

            kept = sorted(self._asked, key=weight, reverse=True)[:MAX_MODELS]
            self._asked = {model: self._asked[model] for model in kept}
            self._left_out = self._steps
        for gone in self._models.keys() - self._asked.keys():
            del self._models[gone]
        for model in self._asked:
            if model not in self._models:
                self._models[model] = self._new_model()
            one = sums.get(model) or Tallied()
            requests, _, first_token = _rates(one, seconds)
            self._set(self._models[model], dict(zip(_OF_MODELS, (requests, first_token), strict=True)))

    def _new_model(self) -> Rings:
        """It had no requests before, unless it was left out."""
        rings = _rings(_OF_MODELS)
        if self._steps - self._left_out >= STEPS:
            known = self._cluster["requests_per_second"]
            rings["requests_per_second"] = array("f", (one if math.isnan(one) else 0.0 for one in known))
        return rings


def _rings(names: Iterable[str]) -> Rings:
    return {name: _UNKNOWN[:] for name in names}


def _ordered(rings: Rings, at: int) -> Rings:
    return {name: ring[at:] + ring[:at] for name, ring in rings.items()}


def _rates(counts: Tallied, seconds: float) -> tuple[float, float, float | None]:
    return counts.requests / seconds, counts.tokens / seconds, counts.mean_first_token_seconds


def _encoded(
    head: Mapping[str, float | None],
    cluster: Rings,
    nodes: Iterable[tuple[NodeId, Rings]],
    models: Iterable[tuple[str, Rings]],
) -> bytes:
    # Node by node, because one call for all of them would keep the event loop waiting.
    begin = msgspec.json.encode({**head, "series": _points(cluster)})[:-1]
    return b'%b,"nodes":{%b},"models":{%b}}' % (begin, _members(nodes), _members(models))


def _members(some: Iterable[tuple[str, Rings]]) -> bytes:
    return b",".join(b"%b:%b" % (msgspec.json.encode(name), msgspec.json.encode(_points(one))) for name, one in some)


def _points(rings: Rings) -> dict[str, list[int | None] | list[float | None]]:
    found: dict[str, list[int | None] | list[float | None]] = {}
    for name, ring in rings.items():
        if name in _WHOLE:
            found[name] = [None if one != one else int(one) for one in ring]
        else:
            found[name] = [None if one != one else round(one, 4) for one in ring]
    return found
