"""Many messages at once: each is told to have arrived, none holds up another subject, nothing grows without bound."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import pytest
from tests.bus.memory import MemoryBus
from tests.bus.server import plain_server
from tests.worker.shelf import write_backend
from tests.worker.world import World, until

from enginehouse.bus.nats import BusOptions, NatsBus
from enginehouse.core import subjects, wire
from enginehouse.core.backend import InstalledBackend
from enginehouse.core.ids import IntentId, NodeId
from enginehouse.core.wire import Command
from enginehouse.ports import Bus, Message
from enginehouse.worker.protocol.listener import MAX_MESSAGES, MAX_REFUSALS, Listener

NODE = NodeId("node-1")
FLOOD = """
import asyncio, sys
from tests.worker.protocol.test_listener import DELETES, delete
from enginehouse.bus.nats import BusOptions, NatsBus

async def flood(place, count):
    bus = await NatsBus.connect(BusOptions(url=f"nats://{place}", name="flood"), limit_seconds=10)
    for number in range(count):
        await bus.publish(DELETES, delete(number + 1, "held"), "burst.replies")
    await bus.close()

asyncio.run(flood(sys.argv[1], int(sys.argv[2])))
"""
DELETES = subjects.node_subject(NODE, subjects.DELETE)


@contextlib.asynccontextmanager
async def listening(world: World, bus: Bus) -> AsyncIterator[Listener]:
    listener = Listener(bus, NODE, world.parts, world.actions)
    heard, stop = asyncio.Event(), asyncio.Event()
    async with asyncio.TaskGroup() as group:
        group.create_task(listener.run(heard, stop))
        async with asyncio.timeout(10):
            await heard.wait()
        try:
            yield listener
        finally:
            stop.set()


def delete(number: int, directory: str) -> bytes:
    command = Command(intent=IntentId(f"i{number}"), generation=number, attempt=1, fence=1)
    return wire.encode(wire.BackendDeleteRequest(backend=directory, op_id=f"op{number}", command=command))


def slow(look: Callable[[], tuple[InstalledBackend, ...]]) -> Callable[[], tuple[InstalledBackend, ...]]:
    def looking() -> tuple[InstalledBackend, ...]:
        time.sleep(0.2)  # in a thread of its own: this is the disk, not a wait of the test
        return look()

    return looking


async def test_two_hundred_commands_at_once_are_told_to_have_arrived_though_the_disk_is_slow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, bus = World(tmp_path), MemoryBus()
    monkeypatch.setattr(world.trees, "list_installed", slow(world.trees.list_installed))
    async with listening(world, bus):
        began = time.monotonic()
        for number in range(200):
            await bus.publish(
                subjects.node_subject(NODE, subjects.DELETE), delete(number + 1, f"b{number}"), f"r{number}"
            )
        arrived = {subjects.progress_subject(NODE, f"op{number + 1}") for number in range(200)}
        await until(lambda: arrived <= {subject for subject, _ in bus.said}, limit_seconds=1.0)
        assert time.monotonic() - began < 1.0
        assert not bus.replies("r0")
        # And all of them are answered. They look together; only each removal looks once more by itself.
        await until(lambda: all(bus.replies(f"r{number}") for number in range(200)), limit_seconds=40.0)


async def test_an_install_of_what_is_there_is_one_look(tmp_path: Path) -> None:
    world, bus = World(tmp_path), MemoryBus()
    write_backend(world.place.backends / "engine", "one")
    async with listening(world, bus):
        began = time.monotonic()
        request = wire.encode(wire.BackendInstallRequest(backend="engine", backend_galleries='[{"url":"http://x"}]'))
        answer = await bus.ask(subjects.node_subject(NODE, subjects.INSTALL), request, "r")
        assert time.monotonic() - began < 1.0
    assert wire.decode(answer, wire.AnyReply, "the reply").success


async def test_a_burst_on_one_subject_is_bounded_answered_and_holds_up_no_other(tmp_path: Path) -> None:
    count, world = 10_000, World(tmp_path)
    replies: list[bytes] = []
    waits: list[float] = []
    worked: list[float] = []  # the same without what other programs took of the cores
    async with plain_server(tmp_path) as place, contextlib.AsyncExitStack() as stack:
        buses = []
        for name in ("worker", "other"):
            bus = await NatsBus.connect(BusOptions(url=f"nats://{place}", name=name), limit_seconds=10)
            stack.push_async_callback(bus.close)
            buses.append(bus)
        ours, other = buses
        answers: asyncio.Queue[Message] = asyncio.Queue()
        await other.subscribe("burst.replies", lambda message: replies.append(message.payload))
        await other.subscribe("other.replies", answers.put_nowait)
        async with listening(world, ours) as listener, world.actions._locks.hold("backend:held"):
            # Another program, so that what is measured is the worker's share alone.
            flooding = await asyncio.create_subprocess_exec(sys.executable, "-c", FLOOD, place, str(count))
            most = 0
            async with asyncio.timeout(60):
                while flooding.returncode is None or len(replies) + listener.dropped < count - MAX_MESSAGES:
                    began, spent = time.monotonic(), time.process_time()
                    await other.publish(subjects.node_subject(NODE, subjects.RUNNING), b"{}", "other.replies")
                    await answers.get()
                    waits.append(time.monotonic() - began)
                    worked.append(time.process_time() - spent)
                    most = max(most, len(listener._tasks))
                    assert len(listener._refused) <= MAX_REFUSALS
            assert flooding.returncode == 0
        print(f"slowest answer on another subject: {max(waits):.3f} s, dropped: {listener.dropped}")
        assert max(worked) <= 1.0
        assert max(waits) <= 5.0
        assert most <= MAX_MESSAGES + 1
        assert listener.dropped < count / 2
        refused = [wire.decode(reply, wire.BackendUpgradeReply, "a reply") for reply in replies]
        codes = {(reply.outcome.code, reply.outcome.can_heal) for reply in refused if reply.outcome}
        assert ("resource_exhausted", True) in codes
        assert codes <= {("resource_exhausted", True), ("superseded", False), ("conflict", False)}


async def test_messages_that_nobody_could_have_meant_harm_nothing(tmp_path: Path) -> None:
    world, bus = World(tmp_path), MemoryBus()
    write_backend(world.place.backends / "engine", "one")
    payloads = [
        b"",
        b"[]",
        b"{" * 2000,
        b'{"backend": "nobody", "model_name": "m", "process_key": "m#' + b"9" * 5000 + b'", "expected_address": ""}',
        b'{"backend": "\\ud800", "model_name": "\\u0000", "process_key": "#", "expected_address": ""}',
        b'{"backend": "' + b"x" * 300_000 + b'"}',
        msgspec.json.encode({"backend": "x" * 1000, "model_name": "x" * 1000, "uri": "x" * 3000, "name": "@"}),
    ]
    verbs = [verb for verb in subjects.WORKER_SUBJECTS if verb != subjects.STOP_NODE]
    async with listening(world, bus) as listener:
        for _ in range(20):
            for verb in verbs:
                for payload in payloads:
                    await bus.publish(subjects.node_subject(NODE, verb), payload, f"r.{verb}")
            await until(lambda: len(listener._tasks) == 0)
        assert [backend.name for backend in world.trees.list_installed()] == ["engine"]
    silent_verbs = {subjects.STOP, subjects.CANCEL}
    for verb in verbs:
        answered = sum(1 for subject, _ in bus.said if subject == f"r.{verb}")
        assert answered == (0 if verb in silent_verbs else 20 * len(payloads))
