"""The choice of a replica for a request: policies, the limit of a replica, and the queue in front of full ones."""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import msgspec
from tests.frontend.world import MODEL, Time, World

from enginehouse.core.errors import EnginehouseError, RateLimited, Unavailable
from enginehouse.core.model import Model, ModelOptions, parallel_requests
from enginehouse.core.node import Node
from enginehouse.core.prefix import Thresholds
from enginehouse.core.replica import Replica
from enginehouse.core.routing import Route
from enginehouse.core.schedule import Schedule
from enginehouse.frontend.serving.counts import InFlight
from enginehouse.frontend.serving.prefixes import Prefixes
from enginehouse.frontend.serving.queues import RequestQueues
from enginehouse.frontend.serving.route_rows import RouteRows
from enginehouse.frontend.serving.router import Router, RouterParts
from enginehouse.store import db, models, replicas, schedules

LIMITED = msgspec.structs.replace(MODEL, options=ModelOptions(parallel=2))


async def put(world: World, node: Node, nonce: str, model: Model = LIMITED) -> None:
    replica = Replica(
        node_id=node.id, model="tiny", slot=0, revision=model.revision, address="h:1", nonce=nonce, backend="engine"
    )
    await world.store.transaction(lambda c: replicas.put(c, replica, db.now(c)))


async def serving(world: World, *names: str, model: Model = LIMITED) -> list[Node]:
    """A replica on each of these nodes."""
    await world.store.transaction(lambda c: models.insert(c, model, 1.0))
    nodes = await world.join_many(*names)
    for node in nodes:
        await put(world, node, f"on {node.name}", model)
    await world.router.step()
    return nodes


def chat(text: str) -> bytes:
    return json.dumps({"model": "tiny", "messages": [{"role": "user", "content": text}]}).encode()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        for _ in range(10_000_000):
            if condition():
                return
            await asyncio.sleep(0)


class Asked:
    """Requests that run until they are told to end."""

    def __init__(self, router: Router, group: asyncio.TaskGroup) -> None:
        self.router = router
        self.served: list[str] = []  # names of requests, in the order in which they got a route
        self.refused: dict[str, EnginehouseError] = {}
        self.routes: dict[str, Route] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self._group = group

    def ask(self, name: str, token: str = "") -> None:
        self.tasks[name] = self._group.create_task(self._ask(name, token))

    async def _ask(self, name: str, token: str) -> None:
        try:
            self.routes[name] = await self.router.acquire("tiny", token, chat(name))
            self.served.append(name)
        except EnginehouseError as error:
            self.refused[name] = error

    def end(self, name: str) -> None:
        self.router.release(self.routes.pop(name))

    async def until_queued(self, number: int) -> None:
        await until(lambda: self.router.queues.lengths().get("tiny", 0) == number)

    async def until_served(self, number: int) -> None:
        await until(lambda: len(self.served) == number)


@asynccontextmanager
async def asking(router: Router) -> AsyncIterator[Asked]:
    async with asyncio.TaskGroup() as group:
        asked = Asked(router, group)
        yield asked
        for task in asked.tasks.values():
            task.cancel()
    for name in list(asked.routes):
        asked.end(name)
    assert router.in_flight == 0
    assert not router.queues.by_model


def short(world: World, *, length: int = 1024, wait_seconds: float = 5.0) -> Router:
    """Over the same store, with another queue."""
    parts = RouterParts(
        rows=RouteRows(),
        prefixes=Prefixes(lambda: 0.0, default=Thresholds()),
        queues=RequestQueues(length=length, wait_seconds=wait_seconds),
    )
    return Router(world.store, world.loader, wait_seconds=1.0, parts=parts)


# Policies ----------------------------------------------------------------------------------------


async def test_requests_that_begin_alike_go_to_one_replica_and_others_do_not(world: World) -> None:
    await serving(world, "first", "second", "third", model=MODEL)
    found: dict[str, set[str]] = {}
    for turn in range(4):
        for topic in ("sea", "sky", "sun"):
            route = await world.router.acquire("tiny", "", chat(f"{topic} " * 300 * (turn + 1)))
            world.router.release(route)
            found.setdefault(topic, set()).add(route.node_name)
    assert [len(nodes) for nodes in found.values()] == [1, 1, 1]
    assert len(set.union(*found.values())) == 3


async def test_round_robin_regards_no_prefix_and_equals_take_turns(world: World) -> None:
    """F-059."""
    await serving(world, "first", "second", "third", model=MODEL)
    policy = Schedule(model_name="tiny", route_policy="round_robin")
    await world.store.transaction(lambda c: schedules.put(c, policy, 1.0))
    await world.router.step()
    taken: Counter[str] = Counter()
    for _ in range(300):
        route = await world.router.acquire("tiny", "", chat("the same"))
        world.router.release(route)
        taken[route.node_name] += 1
    assert all(90 <= count <= 110 for count in taken.values())


async def test_a_model_with_one_replica_is_not_read(world: World) -> None:
    await serving(world, "first", model=MODEL)
    await world.router.acquire("tiny", "", chat("sea " * 300))
    assert world.router.prefixes.untold() == []


async def test_a_body_without_text_is_spread(world: World) -> None:
    await serving(world, "first", "second", model=MODEL)
    body = b'{"model":"tiny","input":"embed this"}'
    taken = [await world.router.acquire("tiny", "", body) for _ in range(6)]
    assert Counter(route.node_name for route in taken) == {"first": 3, "second": 3}


async def test_a_dropped_replica_keeps_nothing_and_the_last_one_needs_no_prefix(world: World) -> None:
    await serving(world, "first", "second", "third", model=MODEL)
    text = chat("sea " * 300)
    seen: list[str] = []
    for left in (2, 1, 0):
        route = await world.router.acquire("tiny", "", text)
        world.router.release(route)
        assert await world.router.acquire("tiny", "", text) == route
        world.router.release(route)
        world.router.drop(route)
        seen.append(route.node_name)
        assert len(world.router.routes()) == left
    assert sorted(seen) == ["first", "second", "third"]


# The limit ---------------------------------------------------------------------------------------


def test_the_limit_is_what_the_configuration_says() -> None:
    assert parallel_requests(MODEL) == 0
    assert parallel_requests(LIMITED) == 2
    for option in ("parallel:4", "n_parallel:4"):
        assert parallel_requests(msgspec.structs.replace(MODEL, config={"options": ["use_jinja:true", option]})) == 4
    assert parallel_requests(msgspec.structs.replace(MODEL, config={"options": ["parallel:many"]})) == 0


async def test_a_replica_gets_no_more_than_it_answers_at_once(world: World) -> None:
    await serving(world, "first", "second")
    async with asking(world.router) as asked:
        for number in range(6):
            asked.ask(f"{number}")
        await asked.until_queued(2)
        assert Counter(route.node_name for route in asked.routes.values()) == {"first": 2, "second": 2}
        asked.end("0")
        await asked.until_served(5)
        assert asked.served == ["0", "1", "2", "3", "4"], "first come, first served"
        asked.end("2")
        await asked.until_served(6)


async def test_a_model_without_a_limit_has_no_queue(world: World) -> None:
    await serving(world, "first", model=MODEL)
    taken = [await world.router.acquire("tiny") for _ in range(500)]
    assert world.router.in_flight == len(taken)


async def test_a_replica_of_an_older_revision_has_no_known_limit(world: World) -> None:
    (node,) = await serving(world, "first")
    assert [route.limit for route in world.router.routes()] == [2]
    edited = msgspec.structs.replace(LIMITED, options=ModelOptions(parallel=7))
    await world.store.transaction(lambda c: models.replace(c, edited))
    await world.router.step()
    assert [route.limit for route in world.router.routes()] == [2], "it still is the process that was started with 2"
    fresh = short(world)
    await fresh.step()
    assert [route.limit for route in fresh.routes()] == [0]
    await put(world, node, "new", edited)
    await fresh.step()
    assert [route.limit for route in fresh.routes()] == [7]


async def test_no_token_starves_another(world: World) -> None:
    await serving(world, "first")
    async with asking(world.router) as asked:
        for number in range(300):
            asked.ask(f"greedy {number}", "greedy")
        await asked.until_queued(298)
        asked.ask("modest", "modest")
        await asked.until_queued(299)
        for number in range(3):
            asked.end(asked.served[number])
            await asked.until_served(number + 3)
        assert "modest" in asked.served


async def test_whoever_comes_later_does_not_get_ahead(world: World) -> None:
    await serving(world, "first")
    async with asking(world.router) as asked:
        for number in range(3):
            asked.ask(f"{number}")
        await asked.until_queued(1)
        asked.end("0")
        asked.ask("late")
        await asked.until_served(3)
        assert asked.served == ["0", "1", "2"]
        await asked.until_queued(1)


async def test_a_full_queue_refuses_whoever_has_the_most_in_it(world: World) -> None:
    await serving(world, "first")
    router = short(world, length=3)
    async with asking(router) as asked:
        for number in range(6):
            asked.ask(f"greedy {number}", "greedy")
        await until(lambda: len(asked.refused) == 1)
        refused = asked.refused["greedy 5"]
        assert isinstance(refused, RateLimited)
        assert (refused.code, refused.retry_after_seconds) == ("rate_limited", 2.0)
        asked.ask("modest", "modest")
        await until(lambda: len(asked.refused) == 2)
        assert set(asked.refused) == {"greedy 5", "greedy 4"}
        await asked.until_queued(3)
    assert router.queues.refused == {("tiny", "full"): 2}


async def test_a_queue_of_no_length_refuses_at_once(world: World) -> None:
    await serving(world, "first")
    async with asking(short(world, length=0)) as asked:
        for number in range(3):
            asked.ask(f"{number}")
        await until(lambda: list(asked.refused) == ["2"])


async def test_whoever_waits_too_long_is_told_to_come_back(world: World) -> None:
    await serving(world, "first")
    router = short(world, wait_seconds=0.05)
    async with asking(router) as asked:
        for number in range(3):
            asked.ask(f"{number}")
        await asked.until_queued(1)
        async with asyncio.timeout(5):
            await asked.tasks["2"]
        error = asked.refused["2"]
        assert type(error) is Unavailable
        assert (error.code, error.retry_after_seconds) == ("resource_exhausted", 10.0)
        assert not router.queues.by_model
    assert router.queues.refused == {("tiny", "late"): 1}


async def test_a_client_that_goes_away_leaves_the_queue(world: World) -> None:
    await serving(world, "first")
    async with asking(world.router) as asked:
        for number in range(4):
            asked.ask(f"{number}")
        await asked.until_queued(2)
        asked.tasks["2"].cancel()
        await asked.until_queued(1)
        asked.end("0")
        await asked.until_served(3)
        assert asked.served == ["0", "1", "3"]


async def test_a_route_that_is_given_to_a_client_at_its_last_moment_goes_to_the_next(world: World) -> None:
    await serving(world, "first")
    async with asking(world.router) as asked:
        for number in range(4):
            asked.ask(f"{number}")
        await asked.until_queued(2)
        asked.end("0")
        asked.tasks["2"].cancel()  # its route is there, and it has not run since
        await asked.until_served(3)
        assert asked.served == ["0", "1", "3"]
        assert world.router.in_flight == 2


async def test_a_new_replica_serves_those_who_wait(world: World) -> None:
    await serving(world, "first")
    second = await world.join("second")
    async with asking(world.router) as asked:
        for number in range(5):
            asked.ask(f"{number}")
        await asked.until_queued(3)
        await put(world, second, "new")
        await world.router.step()
        await asked.until_served(4)
        assert asked.routes["3"].nonce == "new"
        await asked.until_queued(1)


async def test_a_route_that_failed_is_given_to_nobody_who_waits(world: World) -> None:
    await serving(world, "first", "second")
    async with asking(world.router) as asked:
        for number in range(5):
            asked.ask(f"{number}")
        await asked.until_queued(1)
        failed = asked.routes["0"]
        world.router.drop(failed)
        asked.end("0")
        await asked.until_queued(1)
        other = next(name for name, route in asked.routes.items() if route.id != failed.id)
        asked.end(other)
        await asked.until_served(5)
        assert asked.routes["4"].id != failed.id


async def test_those_who_wait_for_the_last_replica_wait_for_a_load_when_it_is_gone(world: World) -> None:
    await serving(world, "first")
    second = await world.join("second")
    async with asking(world.router) as asked:
        for number in range(4):
            asked.ask(f"{number}")
        await asked.until_queued(2)
        world.router.drop(world.router.routes()[0])
        await until(lambda: world.router.waiting() == {"tiny": 2})
        assert not world.router.queues.by_model
        await put(world, second, "new")
        await world.router.step()
        await asked.until_served(4)
        assert {asked.routes[name].nonce for name in ("2", "3")} == {"new"}


# Other frontends ---------------------------------------------------------------------------------


async def tell(world: World, **fields: object) -> None:
    await world.bus.publish("frontends.other.in_flight", msgspec.json.encode(InFlight("other", **fields)))  # type: ignore[arg-type]


async def test_requests_of_other_frontends_fill_a_replica_too_and_their_end_is_heard(world: World) -> None:
    await serving(world, "first")
    await world.counts.listen()
    async with asking(world.router) as asked:
        await tell(world, counts={"on first": 2})
        asked.ask("0")
        await asked.until_queued(1)
        await tell(world, counts={"on first": 1})
        await asked.until_served(1)


async def test_frontends_whose_requests_wait_share_a_replica(world: World) -> None:
    await serving(world, "first", model=msgspec.structs.replace(MODEL, options=ModelOptions(parallel=4)))
    await world.counts.listen()
    async with asking(world.router) as asked:
        await tell(world, counts={"on first": 4}, queued={"tiny": 9})
        for number in range(4):
            asked.ask(f"{number}")
        await asked.until_served(2)
        await asked.until_queued(2)
        assert world.router.queued("tiny") == 11
        await tell(world, counts={"on first": 2})
        assert world.router.queued("tiny") == 2, "both still wait: the replica has four"


async def test_a_silent_frontend_is_no_reason_to_wait(world: World, time: Time) -> None:
    await serving(world, "first")
    await world.counts.listen()
    async with asking(world.router) as asked:
        await tell(world, counts={"on first": 2})
        asked.ask("0")
        await asked.until_queued(1)
        time.passed += 5.0
        await world.counts.step()
        await asked.until_served(1)


async def test_what_a_frontend_sees_reaches_the_others(world: World, time: Time) -> None:
    await serving(world, "first", "second", model=MODEL)
    other = World(world.store, time, owner="other")
    await other.router.step()
    await world.counts.listen()
    await other.counts.listen()
    text = chat("sea " * 300)
    route = await world.router.acquire("tiny", "", text)
    await world.counts.step()
    told = [message for message in world.bus.take() if message.subject == "frontends.me.in_flight"]
    assert len(told) == 1
    await other.bus.publish(told[0].subject, told[0].payload)
    decoy = await other.router.acquire("tiny", "", chat("sky " * 300))
    other.router.release(decoy)
    for _ in range(3):
        found = await other.router.acquire("tiny", "", text)
        assert found.id == route.id
        other.router.release(found)


async def test_a_request_that_lost_its_prefix_is_a_reason_to_scale_on_every_frontend(world: World, time: Time) -> None:
    await serving(world, "first", "second", model=MODEL)
    await world.counts.listen()
    assert world.router.disturbed_ago("tiny") is None
    await tell(world, counts={}, disturbed={"tiny": 20.0})
    time.passed += 3.0
    assert world.router.disturbed_ago("tiny") == 23.0
    text = chat("sea " * 300)
    for _ in range(3):
        await world.router.acquire("tiny", "", text)
    assert world.router.disturbed_ago("tiny") == 0.0


async def test_counts_can_be_asked_for_in_a_thread_while_requests_come_and_go(world: World) -> None:
    """As transactions do."""
    await serving(world, "first")
    router = world.router
    many = [msgspec.structs.replace(router.routes()[0], nonce=f"{number}") for number in range(2000)]
    is_over = False

    def ask() -> int:
        asked = 0
        while not is_over:
            router.in_flight_of("0")
            asked += 1
        return asked

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        async with asyncio.TaskGroup() as group:
            asking = group.create_task(asyncio.to_thread(ask))
            try:
                for _ in range(20):
                    for one in many:
                        router._in_flight[one.id] = 1
                    for one in many:
                        router.release(one)
                    await asyncio.sleep(0)
            finally:
                is_over = True
    finally:
        sys.setswitchinterval(before)
    assert asking.result() > 0
