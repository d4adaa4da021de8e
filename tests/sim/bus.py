"""The bus between simulated processes: best effort, as NATS is, and worse where the run says so.

A message may be dropped, doubled, late or overtaken. A process that is cut off neither hears nor is heard; it notices
after a while, as a client does whose pings go unanswered. Where nobody listens, the server says so to the sender.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from random import Random

from msgspec import Struct
from tests.sim.loop import PROCESS, Process, SimLoop
from tests.sim.trace import Trace

from enginehouse.core.errors import Unavailable
from enginehouse.ports import Message

Receive = Callable[[Message], None]
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


class _Subscription(Struct, frozen=True, eq=False):
    process: Process
    subject: str
    receive: Receive


class Network:
    def __init__(self, loop: SimLoop, chance: Random, weather: BusWeather, trace: Trace) -> None:
        self.loop = loop
        self.weather = weather
        self._chance = chance
        self._trace = trace
        self._exact: dict[str, list[_Subscription]] = {}
        self._patterns: list[_Subscription] = []
        self._last_arrival: dict[tuple[str, str], float] = {}
        self.quiet_at = 0.0  # when the last message on its way will have arrived

    def add(self, subscription: _Subscription) -> None:
        if "*" in subscription.subject or ">" in subscription.subject:
            self._patterns.append(subscription)
        else:
            self._exact.setdefault(subscription.subject, []).append(subscription)

    def remove(self, process: Process) -> None:
        """Its connection is gone: the server forgets what it listened to."""
        self._patterns = [one for one in self._patterns if one.process is not process]
        for subject, ones in list(self._exact.items()):
            self._exact[subject] = [one for one in ones if one.process is not process]

    def publish(self, sender: Process, message: Message) -> None:
        if sender.name in self.weather.cut or self._is_lucky(self.weather.drop_rate):
            self._trace.note(sender.name, f"lost {message.subject}")
            return
        listeners = list(self._exact.get(message.subject, ()))
        listeners += [one for one in self._patterns if matches(one.subject, message.subject)]
        if not listeners and message.reply:
            nobody = Message(message.reply, b"", no_responders=True)
            listeners = [
                one for one in self._patterns if one.process is sender and matches(one.subject, nobody.subject)
            ]
            message = nobody
        for one in listeners:
            for _ in range(2 if self._is_lucky(self.weather.duplicate_rate) else 1):
                self._deliver(sender, one, message)

    def _deliver(self, sender: Process, to: _Subscription, message: Message) -> None:
        chance, now = self._chance, self.loop.time()
        late = self._is_lucky(self.weather.late_rate)
        arrival = now + chance.uniform(*((LATE_FROM_SECONDS, self.weather.late_seconds) if late else USUAL_SECONDS))
        if not self._is_lucky(self.weather.reorder_rate):
            # One connection delivers in order: whatever is behind a late one is late as well.
            pair = (sender.name, to.process.name)
            arrival = max(arrival, self._last_arrival.get(pair, 0.0))
            self._last_arrival[pair] = arrival
        self.quiet_at = max(self.quiet_at, arrival)

        def arrive() -> None:
            if to.process.name in self.weather.cut or to not in self._listening(to):
                self._trace.note(to.process.name, f"missed {message.subject}")
                return
            self._trace.note(to.process.name, f"got {message.subject}{' 503' if message.no_responders else ''}")
            to.receive(message)

        self.loop.call_at(arrival, arrive, context=to.process.context)

    def _listening(self, to: _Subscription) -> list[_Subscription]:
        return self._exact.get(to.subject, []) if to.subject in self._exact else self._patterns

    def _is_lucky(self, rate: float) -> bool:
        return rate > 0.0 and self._chance.random() < rate


class SimBus:
    """`ports.Bus` of one process."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._process = PROCESS.get()
        self._is_closed = False

    @property
    def is_connected(self) -> bool:
        since = self._network.weather.cut.get(self._process.name)
        return not self._is_closed and (since is None or self._network.loop.time() < since + NOTICE_SECONDS)

    async def publish(self, subject: str, payload: bytes, reply: str = "") -> None:
        if not self.is_connected:
            raise Unavailable("cannot reach the bus: not connected", code="bus_unavailable")
        self._network.publish(self._process, Message(subject, payload, reply))

    async def subscribe(self, subject: str, receive: Receive) -> None:
        if not self.is_connected:
            raise Unavailable("cannot reach the bus: not connected", code="bus_unavailable")
        self._network.add(_Subscription(self._process, subject, receive))
        await asyncio.sleep(0)

    @property
    def is_refused(self) -> bool:
        return False

    async def renew(self, jwt: str, seed: str) -> None:
        raise AssertionError("the simulated bus asks for no credential")

    async def close(self) -> None:
        self._is_closed = True
        self._network.remove(self._process)


def matches(pattern: str, subject: str) -> bool:
    wanted, found = pattern.split("."), subject.split(".")
    for place, token in enumerate(wanted):
        if token == ">":
            return len(found) > place
        if place >= len(found) or token not in ("*", found[place]):
            return False
    return len(wanted) == len(found)
