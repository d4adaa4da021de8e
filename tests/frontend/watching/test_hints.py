"""Frontends tell each other that rows have changed: once per change, and never because of what another one said."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from tests.bus.memory import MemoryBus, MemoryNetwork
from tests.frontend.world import Time, WatchedStore, World

from enginehouse.core.ids import OperationId
from enginehouse.core.intent import Outcome
from enginehouse.core.node_api import HeartbeatRequest
from enginehouse.frontend.watching.hints import ChangeHints


class Looks:
    """One frontend's hints, and how often it was told to look."""

    def __init__(self, world: World, network: MemoryNetwork, owner: str) -> None:
        self.world = world
        self.bus = MemoryBus(network)
        self.count = 0
        self.hints = ChangeHints(self.bus, owner, self._look)
        world.board.on_own_changes(self.hints.note)

    def _look(self) -> None:
        self.count += 1

    def told(self) -> int:
        """How often it has been told since the last time."""
        count, self.count = self.count, 0
        return count


@pytest.fixture
async def pair(sqlite_url: str, time: Time) -> AsyncIterator[tuple[Looks, Looks]]:
    network, made = MemoryNetwork(), []
    for owner in ("first", "second"):
        store = await WatchedStore.open(sqlite_url)
        assert isinstance(store, WatchedStore)
        world = World(store, time, owner=owner)
        await world.start()
        made.append(Looks(world, network, owner))
        await made[-1].hints.listen()
    yield made[0], made[1]
    for one in made:
        one.world.store.close()


async def step(*some: Looks) -> None:
    for one in some:
        await one.hints.step()


async def test_a_change_is_hinted_to_the_others_and_not_to_oneself(pair: tuple[Looks, Looks]) -> None:
    one, two = pair
    node = await one.world.join("first")
    await step(one, two)
    assert (one.count, two.told()) == (0, 1)
    view = await one.world.install("first")
    await one.world.dispatcher.step()
    await step(one, two)
    assert two.told() == 1, "for any number of changes"
    await one.world.reply(await one.world.intent(view), Outcome(digest="d"))
    await step(one)
    assert two.told() == 1
    await one.world.cancellation.remove_node(node.id, "someone", force=True)
    await step(one)
    assert two.told() == 1


async def test_what_another_frontend_changed_is_not_hinted_again(pair: tuple[Looks, Looks]) -> None:
    one, two = pair
    node = await one.world.join("first")
    view = await one.world.install("first")
    await one.world.dispatcher.step()
    await one.world.reply(await one.world.intent(view), Outcome(digest="d"))
    await one.world.set_health(node.id, "offline")
    await two.world.board.catch_up_step()
    await two.world.board.step()
    await two.world.board.show([OperationId(view.jobID)])
    await step(two)
    assert one.told() == 0


async def test_nothing_is_hinted_while_nothing_changes_and_heartbeats_are_no_change(pair: tuple[Looks, Looks]) -> None:
    one, two = pair
    node = await one.world.join("first")
    await one.world.report(node.id)
    await step(one)
    assert two.told() == 1
    for _ in range(3):
        await one.world.reports.heartbeat(node.id, HeartbeatRequest(available_ram=5))
        await one.world.report(node.id)
        await one.world.dispatcher.step()
        await one.world.nodes.step()
        await one.world.board.step()
        await step(one)
    assert two.told() == 0


async def test_a_hint_waits_for_the_bus(pair: tuple[Looks, Looks]) -> None:
    one, two = pair
    one.bus.is_connected = False
    await one.world.join("first")
    await step(one)
    assert two.told() == 0
    one.bus.is_connected = True
    await step(one)
    assert two.told() == 1
