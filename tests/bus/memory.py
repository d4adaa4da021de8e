"""The bus in memory: one network, any number of buses on it. The one fake of `ports.Bus`; `test_conformance.py` holds
it to what the real bus promises.

Messages are handed over within `publish`. The simulation overrides `deliver` to make them late, double or lost.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from msgspec import Struct

from enginehouse.core import wire
from enginehouse.core.errors import EnginehouseError, Unavailable
from enginehouse.ports import Message

log = logging.getLogger(__name__)
ANSWER_SECONDS = 30.0
Receive = Callable[[Message], None]


class Subscription(Struct, frozen=True, eq=False):
    bus: MemoryBus
    subject: str
    receive: Receive


class MemoryNetwork:
    """The server: it knows who listens to what."""

    def __init__(self, *, tells_no_responders: bool = True) -> None:
        self._tells_no_responders = tells_no_responders
        self._exact: dict[str, list[Subscription]] = {}
        self._patterns: list[Subscription] = []

    def add(self, subscription: Subscription) -> None:
        if "*" in subscription.subject or ">" in subscription.subject:
            self._patterns.append(subscription)
        else:
            self._exact.setdefault(subscription.subject, []).append(subscription)

    def remove(self, is_gone: Callable[[Subscription], bool]) -> None:
        """A connection has ended: the server forgets its subscriptions."""
        self._patterns = [one for one in self._patterns if not is_gone(one)]
        for subject, ones in list(self._exact.items()):
            self._exact[subject] = [one for one in ones if not is_gone(one)]

    def is_subscribed(self, subscription: Subscription) -> bool:
        subject = subscription.subject
        return subscription in self._exact.get(subject, self._patterns)

    def hears(self, subject: str) -> bool:
        return bool(self._exact.get(subject))

    def publish(self, sender: MemoryBus | None, message: Message) -> None:
        listeners = list(self._exact.get(message.subject, ()))
        listeners += [one for one in self._patterns if matches(one.subject, message.subject)]
        if not listeners and message.reply and self._tells_no_responders:
            message = Message(message.reply, b"", no_responders=True)
            own = (*self._exact.get(message.subject, ()), *self._patterns)
            listeners = [one for one in own if one.bus is sender and matches(one.subject, message.subject)]
        for one in listeners:
            self.deliver(sender, one, message)

    def deliver(self, sender: MemoryBus | None, to: Subscription, message: Message) -> None:
        try:
            to.receive(message)
        except Exception:
            log.exception("receiver.failed subject=%s", message.subject)


class Published(Struct, frozen=True):
    subject: str
    payload: bytes
    reply: str


class MemoryBus:
    """One connection. It keeps what was published through it; a test may disconnect it or make it refuse."""

    def __init__(self, network: MemoryNetwork | None = None) -> None:
        self._network = network or MemoryNetwork()
        self._is_connected = True
        self.is_refused = False
        self.is_closed = False
        self.error: EnginehouseError | None = None  # raised by every `publish`
        self.renewed: list[tuple[str, str]] = []
        self.published: list[Published] = []

    @property
    def is_connected(self) -> bool:
        return self._is_connected and not self.is_closed

    @is_connected.setter
    def is_connected(self, value: bool) -> None:
        self._is_connected = value

    async def publish(self, subject: str, payload: bytes, reply: str = "") -> None:
        if self.error is not None:
            raise self.error
        if self.is_closed:
            raise Unavailable("cannot reach the bus: not connected", code="bus_unavailable")
        self.published.append(Published(subject, payload, reply))
        self._network.publish(self, Message(subject, payload, reply))

    async def subscribe(self, subject: str, receive: Receive) -> None:
        self._network.add(Subscription(self, subject, receive))

    async def answers(self, limit_seconds: float) -> bool:
        return self.is_connected

    async def renew(self, jwt: str, seed: str) -> None:
        self.renewed.append((jwt, seed))

    async def close(self) -> None:
        self.is_closed = True
        self._network.remove(lambda one: one.bus is self)

    # For tests ------------------------------------------------------------------------------------

    def take(self) -> list[Published]:
        """What was published since the last call."""
        taken, self.published = self.published, []
        return taken

    def deliver(self, message: Message) -> None:
        """A message from elsewhere on the network."""
        self._network.publish(None, message)

    def hears(self, subject: str) -> bool:
        return self._network.hears(subject)

    @property
    def said(self) -> list[tuple[str, bytes]]:
        return [(one.subject, one.payload) for one in self.published]

    async def ask(self, subject: str, payload: bytes, reply: str) -> bytes:
        """Publish, and wait for the next answer on `reply`."""
        before = sum(one.subject == reply for one in self.published)
        await self.publish(subject, payload, reply)
        async with asyncio.timeout(ANSWER_SECONDS):
            while True:
                answers = [one.payload for one in self.published if one.subject == reply]
                if len(answers) > before:
                    return answers[before]
                await asyncio.sleep(0.01)

    def replies(self, subject: str) -> list[wire.AnyReply]:
        found = [one.payload for one in self.published if one.subject == subject]
        return [wire.decode(payload, wire.AnyReply, "a reply") for payload in found]


def matches(pattern: str, subject: str) -> bool:
    wanted, found = pattern.split("."), subject.split(".")
    for place, token in enumerate(wanted):
        if token == ">":
            return len(found) > place
        if place >= len(found) or token not in ("*", found[place]):
            return False
    return len(wanted) == len(found)
