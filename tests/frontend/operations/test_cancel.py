"""Changing one's mind: cancelling, trying again, dismissing, and what becomes of requests whose node is gone."""

from __future__ import annotations

import msgspec
import pytest
from sqlalchemy import update
from tests.frontend.world import World, installed

from enginehouse.core import subjects, wire
from enginehouse.core.action import InstallBackend, RemoveModel
from enginehouse.core.backend import Resolved
from enginehouse.core.errors import Conflict, Invalid, NotFound
from enginehouse.core.ids import IntentId, OperationId
from enginehouse.core.intent import Outcome
from enginehouse.core.model import HeldModel
from enginehouse.core.replica import Replica
from enginehouse.core.report import Report
from enginehouse.core.views import NodeRow, OperationView
from enginehouse.frontend.acceptance import Requester
from enginehouse.store import nodes, replicas, schema
from enginehouse.store.db import Connection
from enginehouse.store.supersession import add_intent

ME = Requester(author="me")
FAILED = Outcome(code="not_found", message="no such thing")


def rows(view: OperationView) -> list[NodeRow]:
    assert isinstance(view.nodes, list)
    return view.nodes


async def test_what_runs_is_cancelled_and_its_worker_told(world: World) -> None:
    first, _ = await world.join_many("first", "second")
    view = await world.install()
    await world.dispatcher.step()
    world.bus.take()
    await world.cancellation.cancel(view.jobID, None, "me")
    after = await world.board.view(view.jobID)
    assert after.status == "cancelled"
    assert {row.status for row in rows(after)} == {"cancelled"}
    assert rows(after)[0].error == "cancelled by me"
    told = world.bus.take()
    assert {one.subject for one in told} == {subjects.node_subject(row.node_id, subjects.CANCEL) for row in rows(after)}
    named = {wire.decode(one.payload, wire.CancelRequest, "it").intent for one in told}
    assert named == {row.intent for row in rows(after)}
    assert first.id in {row.node_id for row in rows(after)}


async def test_a_late_answer_does_not_undo_a_cancel(world: World) -> None:
    await world.join("first")
    view = await world.install()
    await world.dispatcher.step()
    intent = await world.intent(view)
    await world.cancellation.cancel(view.jobID, None, "me")
    await world.reply(intent, Outcome())
    assert (await world.intent(view)).state == "cancelled"


async def test_what_was_never_sent_is_never_sent(world: World) -> None:
    node = await world.join("first")
    await world.set_health(node.id, "offline")
    view = await world.install()
    await world.cancellation.cancel(view.jobID, None, "me")
    assert world.bus.take() == []
    await world.set_health(node.id, "healthy")
    await world.dispatcher.step()
    assert world.bus.take() == []


async def test_one_node_is_cancelled_and_the_other_goes_on(world: World) -> None:
    await world.join_many("first", "second")
    view = await world.install()
    await world.dispatcher.step()
    await world.cancellation.cancel(view.jobID, "second", "me")
    after = await world.board.view(view.jobID)
    assert [(row.node_name, row.state) for row in rows(after)] == [("first", "running"), ("second", "cancelled")]
    await world.reply(await world.intent(view), Outcome())
    assert (await world.board.view(view.jobID)).status == "partial"


async def test_a_request_that_somebody_else_has_too_goes_on_for_them(world: World) -> None:
    await world.join("first")
    mine, theirs = await world.install(), await world.install()
    assert rows(mine)[0].intent == rows(theirs)[0].intent
    await world.dispatcher.step()
    world.bus.take()
    await world.cancellation.cancel(mine.jobID, None, "me")
    assert world.bus.take() == []
    assert (await world.board.view(mine.jobID)).status == "cancelled"
    assert (await world.board.view(theirs.jobID)).status == "running"
    intent = await world.intent(theirs)
    assert intent.state == "running"
    await world.reply(intent, Outcome())
    assert (await world.board.view(theirs.jobID)).status == "succeeded"
    assert (await world.board.view(mine.jobID)).status == "cancelled", "what was cancelled stays so"


async def test_the_last_who_wants_it_cancels_it(world: World) -> None:
    await world.join("first")
    mine, theirs = await world.install(), await world.install()
    await world.dispatcher.step()
    for view in (mine, theirs):
        await world.cancellation.cancel(view.jobID, None, "me")
    assert (await world.intent(theirs)).state == "cancelled"


async def test_what_has_ended_cannot_be_cancelled(world: World) -> None:
    await world.join("first")
    view = await world.install()
    await world.cancellation.cancel(view.jobID, None, "me")
    with pytest.raises(Conflict) as refused:
        await world.cancellation.cancel(view.jobID, None, "me")
    assert refused.value.code == "already_terminal"
    with pytest.raises(NotFound):
        await world.cancellation.cancel(OperationId("nope"), None, "me")


async def test_a_load_is_cancelled_with_its_steps(world: World) -> None:
    await world.join("first")
    load = await world.loader.request("tiny", None, "me")
    assert isinstance(load, str)
    await world.loader.step()
    await world.cancellation.cancel(load, None, "me")
    view = await world.board.view(load)
    assert view.status == "cancelled"
    await world.loader.step()
    assert (await world.board.view(load)).status == "cancelled"


async def test_a_worker_that_did_not_hear_of_it_is_told_with_its_heartbeat(world: World) -> None:
    node = await world.join("first")
    view = await world.install()
    await world.dispatcher.step()
    intent = await world.intent(view)
    await world.cancellation.cancel(view.jobID, None, "me")
    newer = await world.request("delete")
    running = (intent.id, rows(newer)[0].intent, IntentId("unknown"))
    done = await world.reports.report(node.id, _report(await world.now(), running))
    assert done == (intent.id,), "only what ended, and never what is not known here"


def _report(mark: float, running: tuple[IntentId, ...]) -> Report:
    return Report(boot_id="b", sequence=1, mark=mark, boot_mark=1.0, running=running)


async def test_what_failed_is_done_again_from_the_first_attempt(world: World) -> None:
    await world.join_many("first", "second")
    view = await world.request("install", name="other")
    await world.dispatcher.step()
    for position, outcome in enumerate((FAILED, Outcome())):
        await world.reply(await world.intent(view, position), outcome)
    assert (await world.board.view(view.jobID)).status == "partial"
    again = await world.board.view(await world.cancellation.retry(view.jobID, None, ME))
    assert [(row.node_name, row.attempt) for row in rows(again)] == [("first", 0)]
    assert (again.retryOf, again.author, again.kind) == (view.jobID, "me", "install")
    before, after = await world.intent(view), await world.intent(again)
    assert before.state == "failed", "an ended intent stays as it is"
    assert after.action == before.action
    assert after.failures == 0
    listed = [one.jobID for one in await world.board.unfinished(9)]
    assert listed == [again.jobID], "a failure that is being tried again has been seen"


async def test_one_node_is_tried_again(world: World) -> None:
    await world.join_many("first", "second")
    view = await world.install()
    await world.cancellation.cancel(view.jobID, None, "me")
    again = await world.board.view(await world.cancellation.retry(view.jobID, "second", ME))
    assert [row.node_name for row in rows(again)] == ["second"]
    with pytest.raises(NotFound):
        await world.cancellation.retry(view.jobID, "nobody", ME)


async def test_a_failure_stays_on_the_list_until_all_of_it_is_done_again(world: World) -> None:
    await world.join_many("first", "second")
    view = await world.install()
    await world.dispatcher.step()
    for row in range(2):
        await world.reply(await world.intent(view, row), FAILED)
    one = await world.cancellation.retry(view.jobID, "second", ME)
    assert {listed.jobID for listed in await world.board.unfinished(9)} == {view.jobID, one}
    both = await world.cancellation.retry(view.jobID, None, ME)
    assert {listed.jobID for listed in await world.board.unfinished(9)} == {one, both}


async def test_what_did_not_fail_is_not_done_again(world: World) -> None:
    await world.join("first")
    view = await world.install()
    with pytest.raises(Conflict):
        await world.cancellation.retry(view.jobID, None, ME)
    load = await world.loader.request("tiny", None, "me")
    assert isinstance(load, str)
    with pytest.raises(Invalid):
        await world.cancellation.retry(load, None, ME)


async def test_a_failure_that_was_seen_is_off_the_list_and_in_the_history(world: World) -> None:
    await world.join("first")
    view = await world.install()
    with pytest.raises(Conflict):
        await world.cancellation.dismiss(view.jobID)
    await world.dispatcher.step()
    await world.reply(await world.intent(view), FAILED)
    assert [one.jobID for one in await world.board.unfinished(9)] == [view.jobID]
    await world.cancellation.dismiss(view.jobID)
    assert await world.board.unfinished(9) == []
    assert [one.jobID for one in await world.board.page(9, is_ended=True)] == [view.jobID]


async def test_what_waits_for_a_removed_node_ends(world: World) -> None:
    node = await world.join("first")
    await world.set_health(node.id, "offline")
    view = await world.install()
    await world.cancellation.remove_node("first", "me")
    after = await world.board.view(view.jobID)
    assert (after.status, rows(after)[0].reason) == ("cancelled", "node_removed")
    assert (await world.nodes.every())[0] == []
    with pytest.raises(NotFound):
        await world.cancellation.remove_node("first", "me")


async def test_every_frontend_tells_of_a_node_that_was_removed(world: World) -> None:
    await world.join("first")
    other = World(world.store, world.time, owner="another")
    await other.start()
    with other.events.watch() as watcher:
        await other.board.catch_up_step()
        watcher.take()
        node, _ = await world.nodes.get("first")
        await world.cancellation.remove_node("first", "me")
        await other.board.catch_up_step()
        await other.board.catch_up_step()
        assert [(event.kind, event.id) for event in watcher.take()] == [("node-removed", node.id)]


async def test_what_can_never_run_is_ended_once_by_one_frontend(world: World) -> None:
    first, second = await world.join_many("first", "second")
    view = await world.install()
    nameless = InstallBackend(backend="", resolved=(await _resolved(world, view)))

    def spoil(connection: Connection) -> None:
        connection.execute(update(schema.nodes).where(schema.nodes.c.id == first.id).values(node_type="agent"))
        nodes.remove(connection, second.id)
        add_intent(connection, view.jobID, first.id, nameless, IntentId("nameless"), 1.0)

    await world.store.transaction(spoil)
    await world.cancellation.hopeless_step()
    after = await world.board.view(view.jobID)
    assert {row.reason for row in rows(after)} == {"unsupported", "node_removed"}
    assert after.status == "cancelled"


async def _resolved(world: World, view: OperationView) -> Resolved:
    action = (await world.intent(view)).action
    assert isinstance(action, InstallBackend)
    return msgspec.structs.replace(action.resolved, directory="")


async def test_a_delete_of_a_model_goes_wherever_there_is_anything_of_it(world: World) -> None:
    first, second, third = await world.join_many("first", "second", "third")
    await world.report(first.id, models=(HeldModel("tiny", ("ab",)),))
    await world.loader.request("tiny", "second", "me")
    for _ in range(2):
        await world.loader.step()
    view = await world.board.view(await world.operations.request_model_delete("tiny", ME))
    assert [row.node_name for row in rows(view)] == ["first", "second"]
    assert third.id not in view.targets
    await world.dispatcher.step()
    sent = [one for one in world.bus.take() if one.subject.endswith(subjects.DELETE_MODEL)]
    assert {wire.decode(one.payload, wire.ModelDeleteRequest, "it").model_name for one in sent} == {"tiny"}
    await world.report(first.id, sequence=2)
    assert (await world.intent(view)).state == "succeeded", "a report without the files proves it"
    assert second.id in view.targets
    with pytest.raises(NotFound):
        await world.operations.request_model_delete("nobody-has-it", ME)


async def test_an_upgrade_that_stopped_processes_takes_their_routes_away(world: World) -> None:
    node = await world.join("first")
    await world.report(node.id, backends=(installed("engine", "sha256:old"),))
    await world.loader.request("tiny", None, "me")
    await world.loader.step()
    await world.dispatcher.step()
    for intent in await world.open_intents(node.id):
        await world.reply(intent, Outcome(address="h:1", nonce="n"))
    await world.loader.step()
    await world.dispatcher.step()
    for intent in await world.open_intents(node.id):
        await world.reply(intent, Outcome(address="h:1", nonce="n"))
    await world.router.step()
    assert [route.model for route in world.router.routes()] == ["tiny"]
    await world.report(node.id, sequence=3, backends=(installed("engine", "sha256:old"),))
    view = await world.request("upgrade", name="engine")
    await world.dispatcher.step()
    await world.reply(await world.intent(view), Outcome(digest="d", stopped=("tiny#0",)))
    await world.router.step()
    assert world.router.routes() == []


async def test_nobody_is_answered_by_a_model_once_its_delete_is_accepted(world: World) -> None:
    node = await world.join("first")
    loaded = Replica(node_id=node.id, model="tiny", slot=0, revision="r", address="h:1", nonce="n", backend="b")
    await world.store.transaction(lambda connection: replicas.put(connection, loaded, 1.0))
    # No report has shown it yet.
    await world.operations.request_model_delete("tiny", Requester(author="someone"))
    await world.router.step()
    assert world.router.routes() == []
    (removal,) = await world.open_intents(node.id)
    assert isinstance(removal.action, RemoveModel)
