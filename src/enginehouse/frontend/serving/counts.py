"""What frontends tell each other of their requests: how many are in flight and wait, and which prefixes they have seen.

Best effort: told on the bus every second, forgotten soon after. Each frontend tells its own; it lives in memory only,
so nothing can leak. A frontend that is not heard for a few seconds counts as having none.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Protocol

import msgspec
from msgspec import Struct

from enginehouse.core import subjects
from enginehouse.core.errors import EnginehouseError
from enginehouse.frontend.serving.prefixes import Prefixes
from enginehouse.frontend.serving.queues import RequestQueues
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

    @property
    def is_empty(self) -> bool:
        return not (self.counts or self.queued or self.disturbed or self.prefixes)


class OwnRequests(Protocol):
    """The part of the router that tells and is told."""

    prefixes: Prefixes
    queues: RequestQueues

    def counts(self) -> Mapping[str, int]: ...

    def room_changed(self) -> None: ...


class SharedCounts:
    def __init__(self, bus: Bus, clock: Clock, owner: str, own: OwnRequests) -> None:
        self._bus = bus
        self._clock = clock
        self._owner = owner
        self._subject = subjects.in_flight_subject(owner)
        self._own = own
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
        self._heard[told.owner] = (self._clock.monotonic(), msgspec.structs.replace(told, prefixes=[]))
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


_TOLD = msgspec.json.Decoder(InFlight)
