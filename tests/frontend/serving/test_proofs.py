"""Routes of engines that answer whoever asks: used only while their worker says that the process is still there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec
import pytest
from tests.frontend.serving.test_loader import add_model, put_replica
from tests.frontend.world import Time, World, plain_parts

from enginehouse.core import subjects, wire
from enginehouse.core.ids import NodeId
from enginehouse.core.intent import Outcome
from enginehouse.core.replica import Replica, RunningReplica
from enginehouse.core.routing import Route
from enginehouse.frontend.serving import proofs
from enginehouse.frontend.serving.proofs import Proofs
from enginehouse.frontend.serving.router import Router
from enginehouse.ports import Message
from enginehouse.store import db, replicas


class Workers:
    """A bus with workers on it: each node's processes, None for one that is silent; the others are not there."""

    def __init__(self) -> None:
        self.is_connected = True
        self.nonces: dict[str, tuple[str, ...] | None] = {}
        self.asked: list[str] = []
        self._receive: Callable[[Message], None] | None = None

    async def subscribe(self, subject: str, receive: Callable[[Message], None]) -> None:
        assert subject == subjects.all_polls("me-proofs")
        self._receive = receive

    async def publish(self, subject: str, payload: bytes, reply: str = "") -> None:
        assert self._receive is not None
        node_id = subject.split(".")[1]
        self.asked.append(node_id)
        if node_id not in self.nonces:
            self._receive(Message(reply, b"", no_responders=True))
            return
        nonces = self.nonces[node_id]
        if nonces is not None:
            running = tuple(RunningReplica(model_id="m", replica_index=0, nonce=nonce) for nonce in nonces)
            self._receive(Message(reply, wire.encode(wire.ModelsRunningReply(models=running))))

    @property
    def is_refused(self) -> bool:
        return False

    async def answers(self, limit_seconds: float) -> bool:
        return self.is_connected

    async def renew(self, jwt: str, seed: str) -> None:
        raise AssertionError("nobody renews here")

    async def close(self) -> None:
        self.is_connected = False

    def say(self, message: Message) -> None:
        assert self._receive is not None
        self._receive(message)


@pytest.fixture
def bus() -> Workers:
    return Workers()


@pytest.fixture
async def made(bus: Workers, time: Time) -> Proofs:
    found = Proofs(bus, time, "me")
    await found.listen()
    return found


def route(nonce: str = "one", *, checks_key: bool = False) -> Route:
    return Route(
        model="m", slot=0, node_id=NodeId("a"), node_name="a", address="h:1", key="k", revision="r", nonce=nonce,
        checks_key=checks_key,
    )  # fmt: skip


async def test_a_route_holds_while_its_worker_has_that_process_and_is_asked_for_once_a_second(
    bus: Workers, made: Proofs, time: Time
) -> None:
    bus.nonces = {"a": ("one", "two")}
    async with asyncio.TaskGroup() as group:
        asked = [group.create_task(made.holds(route())) for _ in range(50)]
    assert all(task.result() for task in asked)
    assert await made.holds(route("two"))
    assert bus.asked == ["a"]
    time.passed += proofs.HOLDS_SECONDS
    bus.nonces = {"a": ("two",)}
    assert not await made.holds(route())
    assert bus.asked == ["a", "a"]


async def test_a_process_that_was_started_since_the_last_answer_is_asked_for(bus: Workers, made: Proofs) -> None:
    bus.nonces = {"a": ("one",)}
    assert await made.holds(route())
    bus.nonces = {"a": ("one", "two")}
    async with asyncio.TaskGroup() as group:
        asked = [group.create_task(made.holds(route("two"))) for _ in range(50)]
    assert all(task.result() for task in asked)
    assert bus.asked == ["a", "a"]
    assert not await made.holds(route("three"))


async def test_a_worker_that_is_not_there_disproves_and_one_that_is_silent_does_not(
    bus: Workers, made: Proofs, time: Time, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not await made.holds(route())
    monkeypatch.setattr(proofs, "ANSWER_SECONDS", 0.05)
    time.passed += proofs.HOLDS_SECONDS
    bus.nonces = {"a": None}
    assert await made.holds(route())
    time.passed += proofs.SILENT_SECONDS - 0.1
    assert await made.holds(route())
    assert len(bus.asked) == 2
    time.passed += 0.1
    bus.nonces = {"a": ("another",)}
    assert not await made.holds(route())


async def test_nobody_is_asked_for_engines_that_check_or_without_a_bus(bus: Workers, made: Proofs) -> None:
    assert await made.holds(route(checks_key=True))
    bus.is_connected = False
    assert await made.holds(route())
    assert bus.asked == []


async def test_answers_to_other_questions_and_nonsense_change_nothing(bus: Workers, made: Proofs) -> None:
    bus.nonces = {"a": ("one",)}
    assert await made.holds(route())
    for number, payload in ((0, b'{"models":[]}'), (1, b"{"), (1, b'{"models":null,"error":"no"}')):
        bus.say(Message(subjects.poll_subject(NodeId("a"), "me-proofs", subjects.RUNNING, number), payload))
    bus.say(Message(subjects.poll_subject(NodeId("b"), "me-proofs", subjects.RUNNING, 1), b'{"models":[]}'))
    assert await made.holds(route())


async def put(world: World, replica: Replica) -> None:
    await world.store.transaction(lambda c: replicas.put(c, replica, db.now(c)))


async def test_a_request_goes_to_no_address_whose_process_is_another(
    world: World, bus: Workers, made: Proofs, time: Time
) -> None:
    await add_model(world)
    first, second = await world.join_many("first", "second")
    for node in (first, second):
        found = await put_replica(world, node, f"of {node.name}")
        await put(world, msgspec.structs.replace(found, checks_key=False))
    router = Router(world.store, world.loader, wait_seconds=0.2, parts=plain_parts(made))
    await router.step()
    # The worker of the first was started anew, and its port may be another model's.
    bus.nonces = {first.id: ("another",), second.id: ("of second",)}
    assert {(await router.acquire("tiny")).nonce for _ in range(5)} == {"of second"}
    assert [one.nonce for one in router.routes()] == ["of second"]
    # A report of its node brings it back, as after any connection that failed.
    await router.step()
    time.passed += 1
    await world.report(first.id, replicas=(RunningReplica(model_id="tiny", replica_index=0, nonce="of first"),))
    await router.step()
    assert len(router.routes()) == 2


async def test_a_start_says_whether_its_engine_checks_its_key(world: World) -> None:
    await add_model(world)
    node = await world.join("first")
    checked = await put_replica(world, node, "n")
    assert checked.checks_key
    await put(world, msgspec.structs.replace(checked, checks_key=False))
    await world.router.step()
    assert [one.checks_key for one in world.router.routes()] == [False]
    assert Outcome().checks_key
    assert b"checks_key" not in msgspec.json.encode(Outcome())
