"""Requests become rows and messages: fan-out, joining, supersession, absence, take-over."""

from __future__ import annotations

import pytest
from tests.frontend.world import LEASE_SECONDS, Time, World

from enginehouse.core import node_api, subjects, wire
from enginehouse.core.action import InstallBackend
from enginehouse.core.errors import Conflict, EnginehouseError, Invalid, NotFound, TooLarge, Unavailable
from enginehouse.core.intent import Outcome
from enginehouse.store import nodes, operations
from enginehouse.store.db import Connection


async def test_an_install_goes_to_all_nodes_in_one_step_without_waiting_for_any(world: World) -> None:
    joined = await world.join_many(*(f"node-{number}" for number in range(20)))
    view = await world.install()
    assert world.woken
    await world.dispatcher.step()
    sent = world.bus.take()
    assert {one.subject for one in sent} == {subjects.node_subject(node.id, subjects.INSTALL) for node in joined}
    assert len(sent) == 20
    shown = await world.board.view(view.jobID)
    assert isinstance(shown.nodes, list)
    assert {row.state for row in shown.nodes} == {"running"}
    await world.dispatcher.step()
    assert world.bus.take() == []


async def test_the_whole_action_is_in_the_row_and_in_the_message(world: World) -> None:
    await world.join("first")
    intent = await world.intent(view := await world.install(force=True))
    assert isinstance(intent.action, InstallBackend)
    assert (intent.action.backend, intent.action.resolved.directory, intent.action.force) == (
        "llama-cpp",
        "engine",
        True,
    )
    await world.dispatcher.step()
    [sent] = world.bus.take()
    message = wire.decode(sent.payload, wire.BackendInstallRequest, "a request")
    assert message.resolved == intent.action.resolved
    assert (message.backend, message.force, message.op_id) == ("llama-cpp", True, view.jobID)
    assert message.command == wire.Command(intent=intent.id, generation=1, attempt=1, fence=1)
    assert sent.reply == subjects.reply_subject(intent.node_id, intent.id, 1)


async def test_an_equal_request_joins_the_one_that_is_open_and_is_sent_once(world: World) -> None:
    await world.join("first")
    first, second = await world.install(), await world.install()
    assert first.jobID != second.jobID
    assert (await world.intent(first)).id == (await world.intent(second)).id
    await world.dispatcher.step()
    [sent] = world.bus.take()
    assert wire.decode(sent.payload, wire.BackendInstallRequest, "a request").op_id == first.jobID
    await world.reply(await world.intent(first), Outcome())
    assert (await world.board.view(first.jobID)).status == "succeeded"
    assert (await world.board.view(second.jobID)).status == "succeeded"


async def test_a_newer_request_supersedes_the_older_one_even_while_it_runs(world: World) -> None:
    await world.join("first")
    install = await world.install()
    await world.dispatcher.step()
    older = await world.intent(install)
    delete = await world.request("delete")
    assert (await world.board.view(install.jobID)).status == "superseded"
    await world.reply(older, Outcome())
    assert (await world.intent(install)).state == "superseded"
    assert (await world.intent(delete)).generation == older.generation + 1


async def test_a_node_that_nobody_listens_on_is_waited_for_and_sent_to_when_it_returns(world: World) -> None:
    node = await world.join("first")
    view = await world.install()
    await world.dispatcher.step()
    await world.reply(await world.intent(view), None)
    waiting = await world.intent(view)
    assert (waiting.state, waiting.reason, waiting.failures) == ("waiting", "node_away", 0)
    assert await world.health(node.id) == "unhealthy"
    assert (await world.board.view(view.jobID)).isParked
    world.bus.take()
    await world.dispatcher.step()
    assert world.bus.take() == []
    await world.reports.heartbeat(node.id, node_api.HeartbeatRequest())
    await world.dispatcher.step()
    assert [one.reply for one in world.bus.take()] == [subjects.reply_subject(waiting.node_id, waiting.id, 2)]


async def test_a_node_is_never_healthy_again_by_the_reply_that_said_it_is_away(world: World) -> None:
    """The wait and the health are one fact: between two transactions the dispatcher would send again at once."""
    node = await world.join("first")
    view = await world.install()
    await world.dispatcher.step()
    intent = await world.intent(view)
    seen: list[tuple[str, str]] = []

    def look(connection: Connection) -> None:
        at, now = nodes.get(connection, node.id), operations.intent(connection, intent.id)
        assert at is not None
        assert now is not None
        seen.append((now.state, at.health))

    world.store.after = look
    await world.reply(intent, None)
    assert ("waiting", "healthy") not in seen
    assert seen[-1] == ("waiting", "unhealthy")


async def test_what_runs_on_a_node_that_went_offline_waits_for_it(world: World) -> None:
    node = await world.join("first")
    view = await world.install()
    await world.dispatcher.step()
    await world.nodes.set_health(node.id, "offline")
    await world.dispatcher.step()
    assert (await world.intent(view)).reason == "node_away"


async def test_a_lease_that_ended_is_taken_over_without_sending_anything(world: World, time: Time) -> None:
    await world.join("first")
    view = await world.install()
    await world.dispatcher.step()
    other = World(world.store, time, owner="other")
    await other.start()
    await other.dispatcher.renew_step()
    assert (await world.intent(view)).owner == "me"
    time.passed += LEASE_SECONDS + 1
    await other.dispatcher.renew_step()
    await other.dispatcher.step()
    taken = await world.intent(view)
    assert (taken.owner, taken.attempt, taken.fence) == ("other", 1, 2)
    assert other.bus.take() == []
    await other.reply(taken, Outcome())
    assert (await world.intent(view)).state == "succeeded"


async def test_a_renewed_lease_is_not_taken(world: World, time: Time) -> None:
    await world.join("first")
    view = await world.install()
    await world.dispatcher.step()
    time.passed += LEASE_SECONDS - 1
    await world.dispatcher.renew_step()
    time.passed += LEASE_SECONDS - 1
    await World(world.store, time, owner="other").dispatcher.renew_step()
    assert (await world.intent(view)).owner == "me"


async def test_nothing_is_claimed_while_the_bus_is_away(world: World) -> None:
    await world.join("first")
    view = await world.install()
    world.bus.is_connected = False
    await world.dispatcher.step()
    assert (await world.intent(view)).attempt == 0


@pytest.mark.parametrize(
    ("error", "state"),
    [
        (Unavailable("cannot send: the bus went away", code="bus_unavailable"), "waiting"),
        (TooLarge("cannot send: too large"), "failed"),
        (Invalid("cannot send: not a subject"), "failed"),
    ],
)
async def test_what_the_bus_does_not_take_is_given_back_or_has_failed(
    world: World, error: EnginehouseError, state: str
) -> None:
    await world.join("first")
    view = await world.install()
    world.bus.error = error
    await world.dispatcher.step()
    intent = await world.intent(view)
    assert (intent.state, intent.reason) == (state, error.code)


async def test_more_than_a_step_takes_is_taken_by_the_next(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    await world.join_many("a", "b", "c")
    await world.install()
    monkeypatch.setattr("enginehouse.frontend.delivery.dispatcher.CLAIM_LIMIT", 2)
    more: list[None] = []
    world.dispatcher.on_more(lambda: more.append(None))
    await world.dispatcher.step()
    await world.dispatcher.step()
    assert (len(more), len(world.bus.take())) == (1, 3)


async def test_nodes_that_cannot_take_a_request_are_named_with_the_reason(world: World) -> None:
    await world.join("good")
    odd = await world.nodes.register(_odd_machine())
    await world.nodes.approve(odd.node.id)
    view = await world.install(name="other")
    assert [(one.node_name, "windows" in one.reason) for one in view.excluded] == [("odd", True)]


async def test_a_delete_is_not_stopped_by_a_node_that_has_no_build(world: World) -> None:
    await world.join("good")
    odd = await world.nodes.register(_odd_machine())
    await world.nodes.approve(odd.node.id)
    view = await world.request("delete", name="other")
    assert isinstance(view.nodes, list)
    assert [row.node_name for row in view.nodes] == ["good"]
    assert [one.node_name for one in view.excluded] == ["odd"]


def _odd_machine() -> node_api.RegisterRequest:
    return node_api.RegisterRequest(name="odd", platform="windows/amd64", capability="default")


@pytest.mark.parametrize("name", ["", "a b", "a/b", "x" * 129, "*", f"{'g' * 200}@llama-cpp", "a b@llama-cpp", "@x"])
async def test_a_name_that_cannot_be_one_is_refused_before_anything_is_stored(world: World, name: str) -> None:
    node = await world.join("first")
    await world.report(node.id, backends=())
    with pytest.raises(Invalid):
        await world.request("delete", name=name)
    assert await world.board.page(10) == []


async def test_a_request_needs_known_and_approved_nodes(world: World) -> None:
    with pytest.raises(Conflict) as nobody:
        await world.install()
    assert nobody.value.code == "node_not_approved"
    await world.join("pending", approve=False)
    with pytest.raises(Conflict):
        await world.install("pending")
    with pytest.raises(NotFound) as unknown:
        await world.install("x" * 100_000)
    assert len(unknown.value.message) < 300
    await world.join("first")
    with pytest.raises(NotFound):
        await world.install(name="nobody-knows-it")


async def test_a_database_that_is_away_costs_no_reply(world: World) -> None:
    await world.join("first")
    view = await world.install()
    await world.dispatcher.step()
    intent = await world.intent(view)
    world.store.is_away = True
    with pytest.raises(Unavailable):
        await world.reply(intent, Outcome())
    world.store.is_away = False
    await world.collector.replies_step()
    assert (await world.intent(view)).state == "succeeded"
