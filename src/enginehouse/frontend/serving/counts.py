"""What frontends tell each other of their requests: how many are in flight, wait and have ended, and which prefixes
they have seen.

Best effort: told on the bus every second, forgotten soon after. Each frontend tells its own; it lives in memory only,
so nothing can leak. A frontend that is not heard for a few seconds counts as having none.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec
from msgspec import Struct

from enginehouse.core import subjects
from enginehouse.core.errors import EnginehouseError
from enginehouse.core.ids import NodeId
from enginehouse.core.routing import Route
from enginehouse.frontend.serving.prefixes import Prefixes
from enginehouse.frontend.serving.queues import RequestQueues
from enginehouse.frontend.watching.traffic import Occupancy, PlaceCounts, TrafficCounts
from enginehouse.ports import Bus, Clock, Message

log = logging.getLogger(__name__)

TELL_SECONDS = 1.0
FORGET_SECONDS = 4.0
MAX_BYTES = 512 * 1024  # of one message: some ten thousand processes


class InFlight(Struct, frozen=True, omit_defaults=True):
    """The message. All but the first two fields are newer, and older frontends neither send nor read them."""

    owner: str
    counts: dict[str, int]  # by the nonce of a process
    queued: dict[str, int] = {}  # requests that wait for a replica with room, by model
    disturbed: dict[str, float] = {}  # seconds since a request could not go to the replica with its prefix, by model
    prefixes: list[tuple[str, list[int]]] = []  # ids of routes, and the hashes of a prompt that they got
    loading: dict[str, int] = {}  # requests that wait for a load, by model
    ended: list[PlaceCounts] = []  # since the last message

    @property
    def is_empty(self) -> bool:
        return not (self.counts or self.queued or self.disturbed or self.prefixes or self.loading or self.ended)


class OwnRequests(Protocol):
    """The part of the router that tells and is told."""

    prefixes: Prefixes
    queues: RequestQueues

    def counts(self) -> Mapping[str, int]: ...

    def waiting(self) -> Mapping[str, int]: ...

    def routes(self) -> Sequence[Route]: ...

    def room_changed(self) -> None: ...


class SharedCounts:
    def __init__(self, bus: Bus, clock: Clock, owner: str, own: OwnRequests, traffic: TrafficCounts) -> None:
        self._bus = bus
        self._clock = clock
        self._owner = owner
        self._subject = subjects.in_flight_subject(owner)
        self._own = own
        self._traffic = traffic
        self._heard: dict[str, tuple[float, InFlight]] = {}
        self._total: dict[str, int] = {}
        self._queued: dict[str, int] = {}
        self._has_told = False

    async def listen(self) -> None:
        await self._bus.subscribe(subjects.ALL_IN_FLIGHT, self._take)

    def of(self, nonce: str) -> int:
        return self._total.get(nonce, 0)

    def queued(self, model: str) -> int:
        return self._queued.get(model, 0)

    def contenders(self, model: str) -> int:
        if model not in self._queued:
            return 0
        return sum(1 for _, told in self._heard.copy().values() if told.queued.get(model, 0) > 0)

    def disturbed_ago(self, model: str) -> float | None:
        now = self._clock.monotonic()
        ages = [now - at + told.disturbed[model] for at, told in self._heard.copy().values() if model in told.disturbed]
        return min(ages, default=None)

    def pressing(self) -> set[str]:
        disturbed = (told.disturbed for _, told in self._heard.copy().values())
        return {*(model for model, count in self._queued.items() if count), *itertools.chain(*disturbed)}

    def occupancy(self) -> Occupancy:
        """The requests of all frontends that are under way, for showing."""
        own = self._own
        in_flight = _summed(own.counts(), self._total)
        of_models: dict[str, int] = {}
        of_nodes: dict[NodeId, int] = {}
        for route in own.routes() if in_flight else ():
            if count := in_flight.get(route.nonce, 0):
                of_models[route.model] = of_models.get(route.model, 0) + count
                if route.node_id:
                    of_nodes[route.node_id] = of_nodes.get(route.node_id, 0) + count
        loading = [told.loading for _, told in self._heard.values()]
        return Occupancy(
            in_flight=sum(in_flight.values()),
            in_flight_by_model=of_models,
            in_flight_by_node=of_nodes,
            queued_by_model=_summed(own.queues.lengths(), own.waiting(), self._queued, *loading),
        )

    async def step(self) -> None:
        """Tell the own counts, and forget those of frontends that are silent."""
        limit = self._clock.monotonic() - FORGET_SECONDS
        silent = [owner for owner, heard in self._heard.items() if heard[0] <= limit]
        for owner in silent:
            del self._heard[owner]
        self._add_up()
        if silent:
            self._own.room_changed()
        told = self._to_tell()
        if (not told.is_empty or self._has_told) and self._bus.is_connected:
            payload = msgspec.json.encode(told)
            try:
                if len(payload) <= MAX_BYTES:
                    await self._bus.publish(self._subject, payload)
                self._has_told = not told.is_empty
            except EnginehouseError as error:
                log.debug("counts.unsent error=%s", error)

    def _to_tell(self) -> InFlight:
        own = self._own
        return InFlight(
            self._owner,
            dict(own.counts()),
            own.queues.lengths(),
            own.prefixes.disturbed(),
            [(route_id, list(chain)) for route_id, chain in own.prefixes.untold()],
            {model: count for model, count in own.waiting().items() if count},
            self._traffic.untold(),
        )

    def _take(self, message: Message) -> None:
        if message.subject == self._subject:
            return  # the own one
        try:
            told = _TOLD.decode(message.payload)
        except msgspec.DecodeError as error:
            log.warning("counts.dropped subject=%s error=%s", message.subject, error)
            return
        self._own.prefixes.take(told.prefixes)
        self._traffic.hear(told.ended)
        self._heard[told.owner] = (self._clock.monotonic(), msgspec.structs.replace(told, prefixes=[], ended=[]))
        self._add_up()
        self._own.room_changed()

    def _add_up(self) -> None:
        total: dict[str, int] = {}
        queued: dict[str, int] = {}
        for _, told in self._heard.values():
            for nonce, count in told.counts.items():
                total[nonce] = total.get(nonce, 0) + max(0, count)
            for model, count in told.queued.items():
                queued[model] = queued.get(model, 0) + max(0, count)
        self._total = total
        self._queued = queued


def _summed(*counts: Mapping[str, int]) -> dict[str, int]:
    total: dict[str, int] = {}
    for some in counts:
        for name, count in some.items():
            if count > 0:
                total[name] = total.get(name, 0) + count
    return total


_TOLD = msgspec.json.Decoder(InFlight)
