"""Loads and routes: one load however many ask, and the right replica for the next request."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from tests.frontend.world import MODEL, UNREAD, Time, World, installed, plain_parts, running

from enginehouse.core import subjects
from enginehouse.core.action import InstallBackend, PullModel, RemoveModel, StartReplica
from enginehouse.core.errors import EnginehouseError, NotFound, Unavailable
from enginehouse.core.intent import Change, Intent, Outcome
from enginehouse.core.model import Model, PinnedFile
from enginehouse.core.node import Node
from enginehouse.core.replica import Replica
from enginehouse.core.routing import Route
from enginehouse.frontend.acceptance import Requester
from enginehouse.frontend.serving.router import Router
from enginehouse.frontend.watching.events import Event, Watcher
from enginehouse.store import db, models, operations, replicas, supersession
from enginehouse.store.db import Connection

GONE = Outcome(code="backend_exited", message="cannot start: it exited")


async def add_model(world: World, model: Model = MODEL) -> None:
    await world.store.transaction(lambda c: models.insert(c, model, 1.0))


async def put_replica(world: World, node: Node, nonce: str) -> Replica:
    replica = Replica(node_id=node.id, model="tiny", slot=0, revision="r", address="h:1", nonce=nonce, backend="engine")
    await world.store.transaction(lambda c: replicas.put(c, replica, db.now(c)))
    return replica


async def begun(world: World) -> None:
    """Wait until a load is under way."""
    async with asyncio.timeout(10):
        while not await world.store.transaction(operations.steered):
            pass


async def drive(world: World, *answers: Outcome) -> list[Intent]:
    """Take the steps of the loads under way, each answered in turn; the intents in their order."""
    answered = []
    for answer in answers:
        await world.loader.step()
        await world.dispatcher.step()
        for node in (await world.nodes.every())[0]:
            for intent in await world.open_intents(node.id):
                await world.reply(intent, answer)
                answered.append(intent)
    await world.loader.step()
    return answered


async def test_many_requests_at_once_cause_one_load(world: World, time: Time) -> None:
    """F-067."""
    await add_model(world)
    await world.join("first")
    other = World(world.store, time, owner="other")
    async with asyncio.TaskGroup() as group:
        asked = [group.create_task(one.loader.ensure("tiny", ())) for one in (world, other) * 20]
    assert len({task.result() for task in asked}) == 1
    await world.loader.step()
    await other.loader.step()
    await world.dispatcher.step()
    assert len(world.bus.take()) == 1


async def test_a_load_installs_places_and_starts_and_then_there_is_a_route(world: World) -> None:
    await world.join("first")
    operation_id = await world.loader.request("tiny", None, "someone")
    assert isinstance(operation_id, str)
    done = await drive(world, Outcome(), Outcome(), Outcome(address="h:9", nonce="n"))
    assert [type(one.action).__name__ for one in done] == ["InstallBackend", "PullModel", "StartReplica"]
    assert (await world.board.view(operation_id)).status == "succeeded"
    await world.router.step()
    assert [route.address for route in world.router.routes()] == ["h:9"]
    assert isinstance(await world.loader.request("tiny", None, "someone"), list)
    assert await world.loader.ensure("tiny", ()) == ""


async def test_a_load_is_not_ended_by_a_frontend_that_has_not_read_its_gallery_yet(world: World, time: Time) -> None:
    await world.join("first")
    operation_id = await world.loader.request("tiny", None, "someone")
    assert isinstance(operation_id, str)
    await World(world.store, time, galleries=(UNREAD,)).loader.step()
    assert (await world.board.view(operation_id)).status == "queued"
    await drive(world, Outcome(), Outcome(), Outcome(address="h:9", nonce="n"))
    assert (await world.board.view(operation_id)).status == "succeeded"


async def test_a_failure_on_one_node_goes_on_to_another(world: World) -> None:
    await world.join_many("first", "second")
    operation_id = await world.loader.request("tiny", None, "someone")
    assert isinstance(operation_id, str)
    done = await drive(world, GONE, Outcome(), Outcome(), Outcome(address="h:9", nonce="n"))
    assert len({one.node_id for one in done}) == 2
    assert (await world.board.view(operation_id)).status == "succeeded"


async def test_after_a_failed_load_its_error_is_repeated_for_a_while(world: World, time: Time) -> None:
    """F-070."""
    await add_model(world)
    await world.join("first")
    first = await world.loader.ensure("tiny", ())
    await world.loader.step()
    await world.dispatcher.step()
    # Longer than the pause that follows: what counts is when it failed, not when it began.
    time.passed += 60
    await world.dispatcher.renew_step()
    await drive(world, GONE)
    for _ in range(3):
        with pytest.raises(EnginehouseError) as caught:
            await world.loader.ensure("tiny", ())
        assert (caught.value.code, caught.value.retry_after_seconds) == ("backend_exited", 10.0)
    assert len(await world.store.transaction(lambda c: operations.recent(c, 9))) == 1
    time.passed += 11
    assert await world.loader.ensure("tiny", ()) not in ("", first)


async def test_a_cancelled_load_is_told_to_those_who_wait_and_the_next_request_begins_another(world: World) -> None:
    await add_model(world)
    await world.join("first")
    first = await world.loader.ensure("tiny", ())
    await world.loader.step()
    await world.cancellation.cancel(first, None, "me")
    with pytest.raises(Unavailable) as caught:
        await world.loader.ensure("tiny", (), first)
    assert (caught.value.code, caught.value.retry_after_seconds) == ("cancelled", 1.0)
    assert caught.value.message.startswith("cannot ")
    assert await world.loader.ensure("tiny", ()) not in ("", first)


async def test_a_superseded_load_is_told_to_those_who_wait_and_the_next_request_begins_another(world: World) -> None:
    await add_model(world)
    await world.join("first")
    first = await world.loader.ensure("tiny", ())
    await world.loader.step()
    await world.request("delete", name="llama-cpp")
    await world.dispatcher.step()
    (removal,) = await world.open_intents((await world.nodes.get("first"))[0].id)
    await world.reply(removal, Outcome())
    await world.loader.step()
    with pytest.raises(Unavailable) as caught:
        await world.loader.ensure("tiny", (), first)
    assert caught.value.code == "superseded"
    assert await world.loader.ensure("tiny", ()) not in ("", first)


async def test_requests_that_wait_for_a_load_hear_that_it_was_cancelled(world: World) -> None:
    await add_model(world)
    await world.join("first")
    async with asyncio.TaskGroup() as group:
        waiting = [group.create_task(outcome_of(world)) for _ in range(3)]
        first = await world.loader.ensure("tiny", ())
        async with asyncio.timeout(5):
            while [(one.operation_id, one.waiters) for one in world.router._pending.values()] != [(first, 3)]:
                await world.now()
        await world.cancellation.cancel(first, None, "me")
        await world.router.step()
    heard = [task.result() for task in waiting]
    assert [(type(one), getattr(one, "code", "")) for one in heard] == [(Unavailable, "cancelled")] * 3


async def outcome_of(world: World) -> object:
    try:
        return await world.router.acquire("tiny")
    except EnginehouseError as error:
        return error


async def test_what_a_worker_calls_healing_is_no_500_when_it_has_not_healed(world: World) -> None:
    await add_model(world)
    await world.join("first")
    await world.loader.ensure("tiny", ())
    full = Outcome(code="insufficient_disk", message="cannot install engine: the disk is full", can_heal=True)
    await world.loader.step()
    (node,) = (await world.nodes.every())[0]
    (install,) = await world.open_intents(node.id)
    ended = Change(kind="fail", now=0.0, reason=full.code, message=full.message, outcome=full)

    def fail(connection: Connection) -> None:
        now = db.now(connection)
        claimed = operations.apply(connection, install, Change(kind="claim", now=now, owner="o", lease_until=now))
        operations.apply(connection, claimed, msgspec.structs.replace(ended, now=now))

    await world.store.transaction(fail)
    await world.loader.step()
    with pytest.raises(Unavailable) as caught:
        await world.loader.ensure("tiny", ())
    assert caught.value.code == "insufficient_disk"


async def test_an_engine_that_was_deleted_since_the_last_report_is_installed_again(world: World) -> None:
    await add_model(world)
    node = await world.join("first")
    await world.report(node.id, backends=(installed("engine", "sha256:1"),))
    await world.request("delete", name="engine")
    await world.dispatcher.step()
    (removal,) = await world.open_intents(node.id)
    await world.loader.ensure("tiny", ())
    await world.loader.step()
    assert [one.id for one in await world.open_intents(node.id)] == [removal.id]  # it waits for that to end
    await world.reply(removal, Outcome())
    await world.loader.step()
    (install,) = await world.open_intents(node.id)
    assert isinstance(install.action, InstallBackend)


async def test_a_failed_load_on_a_named_node_is_no_reason_to_refuse_others(world: World) -> None:
    await add_model(world)
    await world.join_many("first", "second")
    await world.loader.request("tiny", "second", "someone")
    await drive(world, GONE)
    assert await world.loader.ensure("tiny", ())


async def test_a_load_for_a_named_node_goes_there_even_while_another_is_under_way(world: World) -> None:
    await world.join_many("first", "second")
    anywhere = await world.loader.request("tiny", None, "someone")
    there = await world.loader.request("tiny", "second", "someone")
    assert anywhere != there
    assert await world.loader.request("tiny", "second", "someone") == there
    await world.loader.step()
    assert isinstance(there, str)
    intents = await world.store.transaction(lambda c: operations.intents_of(c, [there]))
    second, _ = await world.nodes.get("second")
    assert [one.node_id for one in intents[there]] == [second.id]


async def test_a_load_that_finds_what_another_has_started_starts_nothing(world: World) -> None:
    await world.join("first")
    anywhere = await world.loader.request("tiny", None, "someone")
    there = await world.loader.request("tiny", "first", "someone")
    done = await drive(world, *[Outcome(address="h:9", nonce="n")] * 5)
    assert [type(one.action).__name__ for one in done].count("StartReplica") == 1
    for operation_id in (anywhere, there):
        assert isinstance(operation_id, str)
        assert (await world.board.view(operation_id)).status == "succeeded"


async def test_an_engine_is_not_installed_any_more_for_a_model_that_was_deleted(world: World) -> None:
    """Otherwise the step would wait for ever on a node that is drained afterwards."""
    await add_model(world)
    await add_model(world, msgspec.structs.replace(MODEL, name="other"))
    node = await world.join("first")
    for name in ("tiny", "other"):
        await world.loader.ensure(name, ())
    await world.loader.step()
    await world.dispatcher.step()
    (install,) = [one for one in await world.open_intents(node.id) if isinstance(one.action, InstallBackend)]
    await world.operations.request_model_delete("tiny", Requester(author="someone"))
    await world.loader.step()
    assert (await world.intent_now(install)).is_open, "the other model needs it too"
    await world.operations.request_model_delete("other", Requester(author="someone"))
    await world.loader.step()
    ended = await world.intent_now(install)
    assert (ended.state, ended.reason) == ("cancelled", "model_deleted")


async def test_what_is_deleted_while_it_is_loaded_is_not_started_any_more(world: World) -> None:
    node = await world.join("first")
    operation_id = await world.loader.request("tiny", None, "someone")
    assert isinstance(operation_id, str)
    await drive(world, Outcome(), Outcome())
    await world.dispatcher.step()
    world.bus.take()
    (start,) = await world.open_intents(node.id)
    assert isinstance(start.action, StartReplica)
    pulled = await world.store.transaction(lambda c: supersession.generation_at(c, node.id, "model:tiny"))
    assert start.action.files == pulled > 0
    await world.operations.request_model_delete("tiny", Requester(author="someone"))
    (removal,) = await world.open_intents(node.id)
    assert isinstance(removal.action, RemoveModel)
    assert removal.generation > pulled
    await world.loader.step()
    await world.dispatcher.step()
    assert [one.subject for one in world.bus.take()] == [subjects.node_subject(node.id, subjects.DELETE_MODEL)]
    view = await world.board.view(operation_id)
    assert isinstance(view.nodes, list)
    assert (view.status, view.nodes[-1].reason) == ("failed", "model_deleted")


async def test_a_model_goes_to_none_of_localais_workers(world: World) -> None:
    await world.join("go", is_localai=True)
    await world.loader.request("tiny", None, "someone")
    await world.loader.step()
    (last,) = await world.store.transaction(lambda c: operations.recent(c, 9))
    assert (last.error_code, last.is_steered) == ("insufficient_capacity", False)
    assert "go has a LocalAI worker" in last.error_message


def drain(watcher: Watcher) -> list[Event]:
    return watcher.take()


async def test_a_replica_on_a_node_that_is_offline_is_not_ready(world: World) -> None:
    node = await world.join("first")
    await add_model(world)
    await put_replica(world, node, "n")
    await world.set_health(node.id, "offline")
    assert isinstance(await world.loader.request("tiny", None, "someone"), str)
    [view] = await world.models.every()
    assert (view.state, view.replicas) == ("loading", ())


async def test_watchers_are_told_when_a_model_comes_and_goes(world: World) -> None:
    node = await world.join("first")
    await add_model(world)
    with world.events.watch() as watcher:
        await world.models.step()  # from here on changes are news
        await put_replica(world, node, "n")
        await world.models.step()
        await world.models.step()
        await world.set_health(node.id, "offline")
        await world.models.step()
        told = [event for event in drain(watcher) if event.kind == "model"]
    states = [(event.id, msgspec.json.decode(event.body)["state"]) for event in told]
    assert states == [("tiny", "loaded"), ("tiny", "added")]


async def test_with_no_node_the_load_says_what_to_do(world: World) -> None:
    operation_id = await world.loader.request("tiny", None, "someone")
    await world.loader.step()
    assert isinstance(operation_id, str)
    shown = await world.board.view(operation_id)
    assert shown.status == "failed"
    assert "enginehouse nodes add" in str(shown.error)
    with pytest.raises(Unavailable):
        await world.loader.ensure("tiny", ())


async def test_a_model_that_nobody_knows_is_not_found(world: World) -> None:
    with pytest.raises(NotFound):
        await world.loader.request("nobody", None, "someone")
    with pytest.raises(NotFound) as caught:
        await world.router.acquire("x" * 10_000)
    assert caught.value.code == "model_not_found"
    assert len(caught.value.message) < 300


# Routes ------------------------------------------------------------------------------------------


async def two_routes(world: World) -> tuple[Node, Node]:
    await add_model(world)
    first, second = await world.join_many("first", "second")
    await put_replica(world, first, "one")
    await put_replica(world, second, "two")
    await world.router.step()
    return first, second


async def test_the_least_busy_replica_is_chosen_and_equals_take_turns(world: World) -> None:
    await two_routes(world)
    taken = [await world.router.acquire("tiny") for _ in range(6)]
    assert sorted(route.node_name for route in taken) == ["first"] * 3 + ["second"] * 3
    busy = taken[0].node_name
    for route in taken:
        if route.node_name != busy:
            world.router.release(route)
    assert {(await world.router.acquire("tiny")).node_name for _ in range(3)} == {"first", "second"} - {busy}
    assert world.router.in_flight == 6


async def test_a_database_that_is_away_is_no_reason_to_load_what_serves(world: World) -> None:
    """S14."""
    await add_model(world)
    await put_replica(world, await world.join("first"), "n")
    await world.router.step()
    world.store.is_away = True
    assert (await world.router.acquire("tiny")).address == "h:1"
    with pytest.raises(Unavailable):
        await world.router.step()
    assert (await world.router.acquire("tiny")).address == "h:1", "what could not be read is not gone"
    world.store.is_away = False
    assert await world.store.transaction(lambda c: operations.recent(c, 9)) == []


async def test_counts_never_go_below_nothing(world: World) -> None:
    """F-050."""
    await two_routes(world)
    route = await world.router.acquire("tiny")
    for _ in range(3):
        world.router.release(route)
    assert world.router.in_flight == 0


async def drop_first(world: World) -> Route:
    route = next(one for one in world.router.routes() if one.node_name == "first")
    world.router.drop(route)
    return route


async def test_a_dropped_route_is_not_chosen_until_another_process_has_its_slot(world: World) -> None:
    first, _ = await two_routes(world)
    await drop_first(world)
    assert [route.node_name for route in world.router.routes()] == ["second"]
    await world.router.step()
    await world.router.step()
    assert [route.node_name for route in world.router.routes()] == ["second"]
    await put_replica(world, first, "three")
    await world.router.step()
    assert {route.nonce for route in world.router.routes()} == {"two", "three"}


async def test_a_dropped_route_comes_back_when_its_node_still_shows_the_process(world: World, time: Time) -> None:
    first, _ = await two_routes(world)
    await world.report(first.id, replicas=(running("one"),))
    await drop_first(world)
    await world.router.step()
    assert len(world.router.routes()) == 1
    time.passed += 10
    await world.report(first.id, sequence=2, replicas=(running("one"),))
    await world.router.step()
    assert len(world.router.routes()) == 2


async def test_a_replica_known_to_be_dead_does_not_keep_a_load_from_beginning(world: World) -> None:
    await add_model(world)
    node = await world.join("first")
    await put_replica(world, node, "one")
    assert await world.loader.ensure("tiny", {"another"}) == ""
    assert await world.loader.ensure("tiny", {"one"}) != ""


async def test_those_who_wait_get_the_route_when_it_is_there(world: World) -> None:
    await add_model(world)
    await world.join("first")
    async with asyncio.TaskGroup() as group:
        asked = [group.create_task(world.router.acquire("tiny")) for _ in range(10)]
        await begun(world)
        await drive(world, Outcome(), Outcome(), Outcome(address="h:9", nonce="n"))
        await world.router.step()
    assert {task.result().address for task in asked} == {"h:9"}
    assert len(await world.store.transaction(lambda c: operations.recent(c, 9))) == 1
    assert world.router._pending == {}


async def test_all_who_wait_get_the_same_error(world: World) -> None:
    """F-070."""
    await add_model(world)
    await world.join("first")
    codes: list[str] = []

    async def ask() -> None:
        with pytest.raises(EnginehouseError) as caught:
            await world.router.acquire("tiny")
        codes.append(caught.value.code)

    async with asyncio.TaskGroup() as group:
        for _ in range(5):
            group.create_task(ask())
        await begun(world)
        await drive(world, GONE)
    assert codes == ["backend_exited"] * 5
    assert world.router._pending == {}


async def test_a_request_that_waited_long_enough_is_told_how_far_the_load_is(world: World) -> None:
    """F-073."""
    await add_model(world)
    await world.join("first")
    router = Router(world.store, world.loader, wait_seconds=0.2, parts=plain_parts())
    with pytest.raises(Unavailable) as caught:
        await router.acquire("tiny")
    error = caught.value
    assert (error.code, error.retry_after_seconds) == ("model_loading", 5.0)
    loading = error.details["loading"]
    assert isinstance(loading, dict)
    assert (loading["model"], loading["state"]) == ("tiny", "pending")
    assert not [field for field in loading if "eta" in field], "nobody knows when"


async def test_a_wait_that_ends_before_the_store_answers_is_an_answer_too(world: World) -> None:
    await add_model(world)
    await world.join("first")
    with pytest.raises(Unavailable) as caught:
        await Router(world.store, world.loader, wait_seconds=0.0, parts=plain_parts()).acquire("tiny")
    assert (caught.value.code, "loading" in caught.value.details) == ("model_loading", True)


async def test_a_wait_without_an_end_is_no_number(world: World) -> None:
    await add_model(world)
    node = await world.join("first")
    router = Router(world.store, world.loader, wait_seconds=None, parts=plain_parts())
    async with asyncio.TaskGroup() as group:
        asked = group.create_task(router.acquire("tiny"))
        await begun(world)
        await put_replica(world, node, "n")
        await router.step()
    assert asked.result().nonce == "n"


def unpinned() -> Model:
    first = msgspec.structs.replace(MODEL.files[0], sha256="", size_bytes=0, uri="https://somewhere/tiny.gguf")
    return msgspec.structs.replace(MODEL, files=(first,))


async def test_a_digest_that_a_worker_found_is_in_the_row_before_the_model_starts(world: World) -> None:
    await world.store.transaction(lambda c: models.insert(c, unpinned(), 1.0))
    await world.join_many("first", "second")
    await world.loader.request("tiny", "first", "someone")
    found = Outcome(pinned=(PinnedFile("tiny.gguf", "c" * 64, 5), PinnedFile("other", "d" * 64, 1)))
    done = await drive(world, Outcome(), found, Outcome(address="h:9", nonce="n"))
    assert isinstance(done[-1].action, StartReplica)
    stored = await world.store.transaction(lambda c: models.get(c, "tiny"))
    assert stored is not None
    assert [(file.sha256, file.size_bytes) for file in stored.files] == [("c" * 64, 5)]
    assert done[-1].action.model == stored
    operation_id = await world.loader.request("tiny", "second", "someone")
    assert isinstance(operation_id, str)
    done = await drive(world, Outcome(), Outcome(), Outcome(address="h:10", nonce="m"))
    assert isinstance(done[1].action, PullModel)
    assert done[1].action.model == stored, "later nodes must find the same bytes"
    assert (await world.board.view(operation_id)).status == "succeeded"


@pytest.mark.parametrize("replies", ["one after the other", "together"])
async def test_a_source_that_gives_two_nodes_different_bytes_is_an_error_that_says_so(
    world: World, replies: str
) -> None:
    await world.store.transaction(lambda c: models.insert(c, unpinned(), 1.0))
    await world.join_many("first", "second")
    operations_of = [await world.loader.request("tiny", name, "someone") for name in ("first", "second")]
    await drive(world, Outcome())
    await world.dispatcher.step()
    first, second = [intent for node in (await world.nodes.every())[0] for intent in await world.open_intents(node.id)]
    assert isinstance(first.action, PullModel)
    assert isinstance(second.action, PullModel)
    for intent, digest in ((first, "c" * 64), (second, "d" * 64)):
        world.bus.deliver(world.reply_to(intent, Outcome(pinned=(PinnedFile("tiny.gguf", digest, 5),))))
        if replies == "one after the other":
            await world.collector.replies_step()
    if replies == "together":
        await world.collector.replies_step()
    ended = await world.intent_now(second)
    assert (ended.state, ended.reason) == ("failed", "digest_mismatch")
    assert "was changed there" in ended.message
    stored = await world.store.transaction(lambda c: models.get(c, "tiny"))
    assert stored is not None
    assert stored.files[0].sha256 == "c" * 64
    assert all(isinstance(one, str) for one in operations_of)
