"""The pulse on a given clock: what an event has, who gets it and when, and what it asks of the store."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from tests.frontend.serving.test_router import serving
from tests.frontend.world import MODEL, STALE_SECONDS, Time, World

from enginehouse.core import node_api
from enginehouse.core.pulse import PulseEvent
from enginehouse.frontend.serving.counts import InFlight
from enginehouse.frontend.watching.events import Event, Watcher
from enginehouse.frontend.watching.pulse import PULSE_SECONDS
from enginehouse.frontend.watching.traffic import PlaceCounts

GIB = 2**30


def read(events: list[Event]) -> list[Any]:
    bodies = [event.body for event in events if event.kind == "pulse"]
    for body in bodies:
        msgspec.json.decode(body, type=PulseEvent)
    return [json.loads(body) for body in bodies]


async def beat(world: World, time: Time, watcher: Watcher) -> Any:
    """The figures after the next step."""
    time.passed += PULSE_SECONDS
    await world.pulse.step()
    (figures,) = read(watcher.take())
    return figures


@pytest.fixture
async def watcher(world: World) -> AsyncIterator[Watcher]:
    with world.events.watch() as made:
        yield made


def count(world: World, model: str = "tiny", node_id: str = "", **changed: Any) -> None:
    fields = {"tokens": 8, "is_error": False, "first_token_seconds": None} | changed
    world.traffic.count(model, node_id, **fields)


async def test_requests_of_the_last_seconds_are_shown_of_all_of_each_model_and_of_each_node(
    world: World, time: Time, watcher: Watcher
) -> None:
    node = await world.join("first")
    for _ in range(9):
        count(world, node_id=node.id, first_token_seconds=0.2)
    count(world, first_token_seconds=0.4, is_error=True, tokens=0)
    count(world, model="", is_error=True, tokens=0)
    figures = await beat(world, time, watcher)
    assert abs(figures["at"] - await world.now()) < 60
    assert figures["traffic"] == {
        "requests_per_second": 2.2,
        "tokens_per_second": 14.4,
        "time_to_first_token_seconds": 0.22,
        "errors_per_second": 0.4,
        "in_flight": 0,
        "queued": 0,
    }
    assert figures["models"] == {
        "tiny": {
            "requests_per_second": 2.0,
            "tokens_per_second": 14.4,
            "time_to_first_token_seconds": 0.22,
            "in_flight": 0,
            "queued": 0,
        }
    }
    assert figures["nodes"][node.id]["requests_per_second"] == 1.8
    calm = await beat(world, time, watcher)
    assert calm["traffic"]["requests_per_second"] == 0.0
    assert calm["traffic"]["time_to_first_token_seconds"] is None
    assert calm["models"] == {}
    assert calm["nodes"][node.id]["requests_per_second"] == 0.0, "it changed"


async def test_what_is_under_way_is_shown_of_all_frontends(world: World, time: Time, watcher: Watcher) -> None:
    await serving(world, "first", model=MODEL)
    await world.counts.listen()
    route = await world.router.acquire("tiny")
    other = InFlight("other", {route.nonce: 2}, queued={"tiny": 3}, loading={"cold": 1})
    await world.bus.publish("frontends.other.in_flight", msgspec.json.encode(other))
    figures = await beat(world, time, watcher)
    assert (figures["traffic"]["in_flight"], figures["traffic"]["queued"]) == (3, 4)
    assert figures["nodes"][route.node_id]["in_flight"] == 3
    models = figures["models"]
    assert (models["tiny"]["in_flight"], models["tiny"]["queued"], models["cold"]["queued"]) == (3, 3, 1)
    world.router.release(route)
    figures = await beat(world, time, watcher)
    assert figures["traffic"]["in_flight"] == 2
    await world.counts.step()
    figures = await beat(world, time, watcher)
    assert (figures["traffic"]["in_flight"], figures["traffic"]["queued"]) == (0, 0), "it has vanished"


async def test_what_ended_on_another_frontend_counts_once_and_nothing_of_it_is_told_on(
    world: World, time: Time, watcher: Watcher
) -> None:
    await world.counts.listen()
    count(world)
    await world.counts.step()
    ended = [PlaceCounts("tiny", "", 4, 1, 100, 1, 0.5), PlaceCounts("tiny", "", -9, 0, 0, 0, -1.0)]
    await world.bus.publish("frontends.other.in_flight", msgspec.json.encode(InFlight("other", {}, ended=ended)))
    figures = await beat(world, time, watcher)
    assert figures["traffic"]["requests_per_second"] == 1.0
    assert figures["traffic"]["tokens_per_second"] == 21.6
    assert figures["traffic"]["errors_per_second"] == 0.2
    assert figures["traffic"]["time_to_first_token_seconds"] == 0.5
    await world.counts.step()
    told = [one for one in world.bus.take() if one.subject == "frontends.me.in_flight"]
    ended_here = [one for message in told for one in msgspec.json.decode(message.payload, type=InFlight).ended]
    assert ended_here == [PlaceCounts("tiny", "", 1, 0, 8, 0, 0.0)]


async def test_without_a_bus_what_ended_is_not_told_later_as_if_it_were_new(world: World) -> None:
    world.bus.is_connected = False
    count(world)
    await world.counts.step()
    world.bus.is_connected = True
    await world.counts.step()
    assert not [one for one in world.bus.take() if b"ended" in one.payload]


async def test_an_event_has_only_nodes_whose_figures_changed_and_the_first_one_of_a_stream_all(
    world: World, time: Time, watcher: Watcher
) -> None:
    first, second = await world.join_many("first", "second")
    await world.join("pending", approve=False)
    figures = await beat(world, time, watcher)
    assert figures["nodes"].keys() == {first.id, second.id}
    assert (await beat(world, time, watcher))["nodes"] == {}
    said = node_api.HeartbeatRequest(
        available_ram=3 * GIB, available_disk=5, total_disk=9, total_vram=8, available_vram=0, used_cores=1.5
    )
    await world.reports.heartbeat(second.id, said)
    changed = (await beat(world, time, watcher))["nodes"]
    heard_at = changed[second.id].pop("heard_at")
    assert abs(heard_at - await world.now()) < 60
    assert changed == {
        second.id: {
            "available_ram": 3 * GIB,
            "available_vram": 0,
            "available_disk": 5,
            "used_cores": 1.5,
            "in_flight": 0,
            "requests_per_second": 0.0,
        }
    }
    whole = json.loads(await world.pulse.beginning())
    assert whole["nodes"].keys() == {first.id, second.id}
    assert whole["nodes"][first.id]["used_cores"] is None
    assert whole["nodes"][first.id]["available_vram"] is None
    assert (await beat(world, time, watcher))["nodes"] == {}


async def test_a_change_that_a_new_watcher_saw_is_told_to_the_others_too(world: World, time: Time) -> None:
    node = await world.join("first")
    with world.events.watch() as watcher:
        await beat(world, time, watcher)
        await world.reports.heartbeat(node.id, node_api.HeartbeatRequest(used_cores=1.0))
        time.passed += PULSE_SECONDS
        assert json.loads(await world.pulse.beginning())["nodes"][node.id]["used_cores"] == 1.0
        await world.reports.heartbeat(node.id, node_api.HeartbeatRequest())
        assert (await beat(world, time, watcher))["nodes"][node.id]["used_cores"] is None


async def test_a_removed_node_is_in_no_event_any_more(world: World, time: Time, watcher: Watcher) -> None:
    node = await world.join("first")
    await beat(world, time, watcher)
    await world.cancellation.remove_node(node.id, "someone")
    await beat(world, time, watcher)
    assert json.loads(await world.pulse.beginning())["nodes"] == {}
    assert json.loads(await world.pulse.past.encoded(None))["nodes"] == {}


async def test_a_stream_that_begins_before_anything_was_counted_has_rates_that_are_unknown(world: World) -> None:
    node = await world.join("first")
    figures = json.loads(await world.pulse.beginning())
    assert figures["traffic"]["requests_per_second"] is None
    assert figures["traffic"]["in_flight"] == 0
    assert figures["nodes"][node.id]["requests_per_second"] is None


async def test_without_a_watcher_the_store_is_asked_once_per_step_of_the_past_and_nothing_is_published(
    world: World, time: Time, monkeypatch: pytest.MonkeyPatch
) -> None:
    await world.join("first")
    looks = []
    really = world.store.look

    async def noted(work: Any) -> Any:
        looks.append(time.passed)
        return await really(work)

    monkeypatch.setattr(world.store, "look", noted)
    for _ in range(12):
        time.passed += PULSE_SECONDS
        await world.pulse.step()
    assert looks == [10.0, 20.0, 30.0, 40.0, 50.0, 60.0]
    assert world.events.end == 0
    with world.events.watch():
        for _ in range(50):
            await world.pulse.beginning()
    assert len(looks) == 6, "what is known is new enough"


async def test_a_node_that_is_away_is_unknown_in_the_past_and_its_last_figures_stay_in_the_pulse(
    world: World, time: Time
) -> None:
    node = await world.join("first")
    said = node_api.HeartbeatRequest(used_cores=1.0, available_ram=1)
    await world.reports.heartbeat(node.id, said)
    time.passed += 10.0
    await world.pulse.step()
    await world.set_health(node.id, "offline")
    time.passed += 10.0
    await world.pulse.step()
    assert json.loads(await world.pulse.past.encoded(None))["nodes"][node.id]["used_cores"][-2:] == [1.0, None]
    assert json.loads(await world.pulse.beginning())["nodes"][node.id]["used_cores"] == 1.0


async def test_a_silent_node_is_unknown_before_it_is_found_to_be_away(
    world: World, time: Time, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = await world.join("first")
    await world.reports.heartbeat(node.id, node_api.HeartbeatRequest(used_cores=1.0))
    monkeypatch.setattr(world.pulse, "_stale_seconds", 0.0)
    time.passed += 10.0
    await world.pulse.step()
    monkeypatch.setattr(world.pulse, "_stale_seconds", STALE_SECONDS)
    time.passed += 10.0
    await world.pulse.step()
    used = json.loads(await world.pulse.past.encoded(None))["nodes"][node.id]["used_cores"]
    assert used[-2:] == [None, 1.0]


async def test_while_the_store_is_away_requests_are_shown_and_nodes_stay_as_they_were(
    world: World, time: Time, watcher: Watcher
) -> None:
    node = await world.join("first")
    await beat(world, time, watcher)
    world.store.is_away = True
    count(world)
    figures = await beat(world, time, watcher)
    assert figures["traffic"]["requests_per_second"] == 0.2
    assert figures["nodes"] == {}
    assert json.loads(await world.pulse.beginning())["nodes"].keys() == {node.id}
    past = json.loads(await world.pulse.past.encoded(None))
    assert past["series"]["requests_per_second"][-1] == 0.1
    assert past["nodes"] == {}, "nothing was known of it at the end of a step"


async def test_a_step_that_comes_too_soon_counts_with_the_next_one(world: World, time: Time, watcher: Watcher) -> None:
    await beat(world, time, watcher)
    count(world)
    time.passed += 0.1
    await world.pulse.step()
    assert watcher.take() == []
    time.passed += 4.9
    await world.pulse.step()
    (figures,) = read(watcher.take())
    assert figures["traffic"]["requests_per_second"] == 0.2
