"""The bus between simulated processes: best effort, as NATS is, and worse where the run says so.

A message may be dropped, doubled, late or overtaken. A process that is cut off neither hears nor is heard; it notices
after a while, as a client does whose pings go unanswered. Where nobody listens, the server says so to the sender.
"""

from __future__ import annotations

import asyncio
from random import Random

from msgspec import Struct
from tests.bus.memory import MemoryBus, MemoryNetwork, Receive, Subscription
from tests.sim.loop import PROCESS, Process, SimLoop
from tests.sim.trace import Trace

from enginehouse.core.errors import Unavailable
from enginehouse.ports import Message

USUAL_SECONDS = (0.0003, 0.003)
LATE_FROM_SECONDS = 0.5
NOTICE_SECONDS = 2.0  # until a process knows that it is cut off


class BusWeather(Struct):
    drop_rate: float = 0.0
    duplicate_rate: float = 0.0
    late_rate: float = 0.0
    late_seconds: float = 5.0  # beyond what a report waits for a message (`DELIVERY_SECONDS`), at most
    reorder_rate: float = 0.0
    cut: dict[str, float] = {}  # process name -> since when it is cut off


class Network(MemoryNetwork):
    """The server between simulated processes, with the weather of the run."""

    def __init__(self, loop: SimLoop, chance: Random, weather: BusWeather, trace: Trace) -> None:
        super().__init__()
        self.loop = loop
        self.weather = weather
        self._chance = chance
        self._trace = trace
        self._last_arrival: dict[tuple[str, str], float] = {}
        self.quiet_at = 0.0  # when the last message on its way will have arrived

    def remove_process(self, process: Process) -> None:
        """Its connection is gone."""
        self.remove(lambda one: _process_of(one.bus) is process)

    def publish(self, sender: MemoryBus | None, message: Message) -> None:
        name = _process_of(sender).name
        if name in self.weather.cut or self._is_lucky(self.weather.drop_rate):
            self._trace.note(name, f"lost {message.subject}")
            return
        super().publish(sender, message)

    def deliver(self, sender: MemoryBus | None, to: Subscription, message: Message) -> None:
        for _ in range(2 if self._is_lucky(self.weather.duplicate_rate) else 1):
            self._deliver_once(_process_of(sender), to, message)

    def _deliver_once(self, sender: Process, to: Subscription, message: Message) -> None:
        chance, now, process = self._chance, self.loop.time(), _process_of(to.bus)
        late = self._is_lucky(self.weather.late_rate)
        arrival = now + chance.uniform(*((LATE_FROM_SECONDS, self.weather.late_seconds) if late else USUAL_SECONDS))
        if not self._is_lucky(self.weather.reorder_rate):
            # One connection delivers in order: whatever is behind a late one is late as well.
            pair = (sender.name, process.name)
            arrival = max(arrival, self._last_arrival.get(pair, 0.0))
            self._last_arrival[pair] = arrival
        self.quiet_at = max(self.quiet_at, arrival)

        def arrive() -> None:
            if process.name in self.weather.cut or not self.is_subscribed(to):
                self._trace.note(process.name, f"missed {message.subject}")
                return
            self._trace.note(process.name, f"got {message.subject}{' 503' if message.no_responders else ''}")
            to.receive(message)

        self.loop.call_at(arrival, arrive, context=process.context)

    def _is_lucky(self, rate: float) -> bool:
        return rate > 0.0 and self._chance.random() < rate


class SimBus(MemoryBus):
    """The bus of one process, which notices after a while that it is cut off."""

    def __init__(self, network: Network) -> None:
        super().__init__(network)
        self._weather, self._time = network.weather, network.loop.time
        self.process = PROCESS.get()

    @property
    def is_connected(self) -> bool:
        since = self._weather.cut.get(self.process.name)
        return not self.is_closed and (since is None or self._time() < since + NOTICE_SECONDS)

    @is_connected.setter
    def is_connected(self, value: bool) -> None:
        raise AssertionError("the weather decides that")

    async def publish(self, subject: str, payload: bytes, reply: str = "") -> None:
        if not self.is_connected:
            raise Unavailable("cannot reach the bus: not connected", code="bus_unavailable")
        self._network.publish(self, Message(subject, payload, reply))

    async def subscribe(self, subject: str, receive: Receive) -> None:
        if not self.is_connected:
            raise Unavailable("cannot reach the bus: not connected", code="bus_unavailable")
        await super().subscribe(subject, receive)
        await asyncio.sleep(0)

    async def answers(self, limit_seconds: float) -> bool:
        return self.is_connected

    async def renew(self, jwt: str, seed: str) -> None:
        raise AssertionError("the simulated bus asks for no credential")

    async def close(self) -> None:
        self.is_closed = True
        network = self._network
        assert isinstance(network, Network)
        network.remove_process(self.process)


def _process_of(bus: MemoryBus | None) -> Process:
    assert isinstance(bus, SimBus)
    return bus.process
