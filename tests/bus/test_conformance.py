"""What every implementation of `ports.Bus` promises: the real one against a real server, and the one in memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
from tests.bus.memory import MemoryBus, MemoryNetwork
from tests.bus.test_nats import World, until

from enginehouse.core.errors import Unavailable
from enginehouse.core.subjects import Permissions
from enginehouse.ports import Bus, Message

EVERYTHING = Permissions(publish=(">",), subscribe=(">",))
Connect = Callable[[str], Awaitable[Bus]]


@pytest.fixture(params=["nats", "memory"])
async def connect(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Connect]:
    """Makes one more bus on the same network."""
    if request.param == "memory":
        network = MemoryNetwork()

        async def connect_in_memory(_name: str) -> Bus:
            return MemoryBus(network)

        yield connect_in_memory
        return
    world = World(tmp_path)
    await world.start()

    async def connect_for_real(name: str) -> Bus:
        return await world.connect(name, EVERYTHING)

    try:
        yield connect_for_real
    finally:
        await world.close()


async def test_a_bus_answers_until_it_is_closed(connect: Connect) -> None:
    bus = await connect("one")
    assert await bus.answers(10.0)
    await bus.close()
    assert not await bus.answers(10.0)


async def test_every_subscriber_gets_every_message_in_order(connect: Connect) -> None:
    sender, first, second = [await connect(name) for name in ("sender", "first", "second")]
    heard: dict[str, list[bytes]] = {"first": [], "second": []}
    await first.subscribe("a.b.c", lambda message: heard["first"].append(message.payload))
    await second.subscribe("a.*.c", lambda message: heard["second"].append(message.payload))
    wanted = [str(number).encode() for number in range(200)]
    for payload in wanted:
        await sender.publish("a.b.c", payload)
    await until(lambda: all(len(one) == len(wanted) for one in heard.values()))
    assert heard == {"first": wanted, "second": wanted}


async def test_a_pattern_takes_whole_tokens(connect: Connect) -> None:
    bus, heard = await connect("one"), list[str]()
    await bus.subscribe("a.*", lambda message: heard.append(f"star {message.subject}"))
    await bus.subscribe("b.>", lambda message: heard.append(f"rest {message.subject}"))
    for subject in ("a", "a.x", "a.x.y", "b", "b.x", "b.x.y", "end.x"):
        await bus.publish(subject, b"")
    await bus.subscribe("end", lambda message: heard.append("end"))
    await bus.publish("end", b"")
    await until(lambda: "end" in heard)
    assert sorted(heard[:-1]) == ["rest b.x", "rest b.x.y", "star a.x"]


async def test_a_reply_subject_travels_along_and_is_answered(connect: Connect) -> None:
    asking, answering = await connect("asking"), await connect("answering")
    heard: list[Message] = []
    asked: list[Message] = []
    await asking.subscribe("_INBOX.mine.*", heard.append)
    await answering.subscribe("question", asked.append)
    await asking.publish("question", b"what", "_INBOX.mine.1")
    await until(lambda: bool(asked))
    await answering.publish(asked[0].reply, b"that")
    await until(lambda: bool(heard))
    assert (asked[0].payload, asked[0].reply) == (b"what", "_INBOX.mine.1")
    assert (heard[0].subject, heard[0].payload, heard[0].no_responders) == ("_INBOX.mine.1", b"that", False)


async def test_a_question_without_a_subscriber_is_answered_by_the_server(connect: Connect) -> None:
    asking, other = await connect("asking"), await connect("other")
    heard: list[Message] = []
    elsewhere: list[Message] = []
    await asking.subscribe("_INBOX.mine.*", heard.append)
    await other.subscribe("_INBOX.mine.*", elsewhere.append)
    await asking.publish("nobody", b"what", "_INBOX.mine.7")
    await until(lambda: bool(heard))
    assert [(one.subject, one.no_responders) for one in heard] == [("_INBOX.mine.7", True)]
    assert not elsewhere, "only the connection that asked is told"


async def test_a_receiver_that_raises_does_not_cost_the_next_message(connect: Connect) -> None:
    bus, heard = await connect("one"), list[bytes]()

    def receive(message: Message) -> None:
        heard.append(message.payload)
        if message.payload == b"bad":
            raise ValueError("cannot use it")

    await bus.subscribe("subject", receive)
    for payload in (b"bad", b"good"):
        await bus.publish("subject", payload)
    await until(lambda: len(heard) == 2)
    assert heard == [b"bad", b"good"]


def _is_connected(bus: Bus) -> bool:
    """Read anew: the type checker takes a property for what it was before."""
    return bus.is_connected


async def test_a_closed_bus_neither_sends_nor_hears(connect: Connect) -> None:
    closed, other = await connect("closed"), await connect("other")
    heard: list[bytes] = []
    await closed.subscribe("subject", lambda message: heard.append(message.payload))
    assert _is_connected(closed)
    await closed.close()
    assert not _is_connected(closed)
    with pytest.raises(Unavailable) as refused:
        await closed.publish("subject", b"one")
    assert refused.value.code == "bus_unavailable"
    done: list[bytes] = []
    await other.subscribe("subject", lambda message: done.append(message.payload))
    await other.publish("subject", b"two")
    async with asyncio.timeout(5):
        await until(lambda: bool(done))
    assert heard == []
