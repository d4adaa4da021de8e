"""What LocalAI's workers have done or still do although nobody heard of it: listings without a digest, and commands
that cannot be stopped.
"""

from __future__ import annotations

import pytest
from tests.frontend.localai.go_workers import answer_polls, joined, listed
from tests.frontend.world import LEASE_SECONDS, PATIENCE, World

from enginehouse.core import node_api, subjects, wire
from enginehouse.core.intent import Intent
from enginehouse.core.node import Node
from enginehouse.core.operation import OLDER_AT_WORK, STILL_RUNNING
from enginehouse.core.views import NodeRow, OperationView
from enginehouse.frontend.localai.poller import LOST_AFTER_BUDGETS
from enginehouse.frontend.watching.views import render_time
from enginehouse.ports import Message

IMAGE = "registry.example/image:latest"
LONG_AGO, LATER = "2020-01-01T00:00:00Z", "2020-01-01T00:05:00Z"  # of a clock that is years behind


async def row_of(world: World, view: OperationView) -> NodeRow:
    shown = await world.board.view(view.jobID)
    assert isinstance(shown.nodes, list)
    return shown.nodes[0]


async def sent(world: World, verb: str) -> list[str]:
    world.bus.take()
    await world.dispatcher.step()
    return [one.subject for one in world.bus.take() if one.subject.endswith(verb)]


async def says(world: World, intent: Intent, payload: bytes) -> None:
    world.bus.deliver(Message(subjects.reply_subject(intent.node_id, intent.id, intent.attempt), payload))
    await world.collector.replies_step()


async def pass_time(world: World, node: Node, seconds: float) -> None:
    world.time.passed += seconds
    await world.set_health(node.id, "healthy")


# Listings without a digest -------------------------------------------------------------------------


async def test_an_install_whose_reply_was_lost_ends_with_a_listing_without_a_digest(world: World) -> None:
    """S64."""
    world.registry.digests[IMAGE] = "sha256:new"
    await joined(world)
    await answer_polls(world, listed())
    view = await world.install(name="image")
    await world.dispatcher.step()
    await answer_polls(world, listed(("image", "")))
    assert (await world.intent(view)).state == "running", "it is there, and not known to be complete"
    await answer_polls(world, listed(("image", ""), at=LONG_AGO))
    assert (await world.intent(view)).state == "succeeded"


@pytest.mark.parametrize("kind", ["upgrade", "force"])
async def test_an_upgrade_ends_when_what_is_listed_was_put_in_place_since(world: World, kind: str) -> None:
    world.registry.digests[IMAGE] = "sha256:new"
    await joined(world)
    await answer_polls(world, listed(("image", ""), at=LONG_AGO))
    if kind == "upgrade":
        view = await world.request("upgrade", name="image")
    else:
        view = await world.install(name="image", force=True)
    await answer_polls(world, listed(("image", ""), at=LATER))
    assert (await world.intent(view)).state == "accepted", "it was not sent yet, so somebody else did that"
    await world.dispatcher.step()
    await answer_polls(world, listed(("image", ""), at=LONG_AGO))
    assert (await world.intent(view)).state == "running"
    await answer_polls(world, listed(("image", ""), at=LATER))
    assert (await world.intent(view)).state == "succeeded"


async def test_another_digest_is_another_version_whenever_it_came(world: World) -> None:
    world.registry.digests[IMAGE] = "sha256:new"
    await joined(world)
    await answer_polls(world, listed(("image", "sha256:old"), at=LONG_AGO))
    view = await world.request("upgrade", name="image")
    await world.dispatcher.step()
    await answer_polls(world, listed(("image", "sha256:odd"), at=LATER))
    assert (await world.intent(view)).state == "running"


async def test_without_a_listing_from_before_the_time_decides(world: World) -> None:
    world.registry.digests[IMAGE] = "sha256:new"
    await joined(world)
    view = await world.install(name="image")
    await world.dispatcher.step()
    at = (await world.intent(view)).dispatched_at
    await answer_polls(world, listed(("image", ""), at=render_time(at - 60)))
    assert (await world.intent(view)).state == "running"
    await answer_polls(world, listed(("image", ""), at=render_time(at + 60)))
    assert (await world.intent(view)).state == "succeeded"


# What cannot be stopped ----------------------------------------------------------------------------


async def test_a_delete_waits_for_an_older_install_that_goes_on(world: World) -> None:
    """The worker would answer at once, and the backend would appear afterwards."""
    await joined(world)
    await answer_polls(world, listed())
    install = await world.install(name="other")
    await world.dispatcher.step()
    older = await world.intent(install)
    delete = await world.request("delete", name="other")
    assert await sent(world, subjects.DELETE) == []
    await answer_polls(world, listed())
    waiting = await world.intent(delete)
    assert (waiting.state, waiting.reason) == ("accepted", OLDER_AT_WORK), "absence proves nothing yet"
    assert STILL_RUNNING in (await world.intent_now(older)).message
    await says(world, older, b'{"success":true,"address":"h:1"}')
    ended = await world.intent_now(older)
    assert (ended.state, STILL_RUNNING in ended.message, "it succeeded" in ended.message) == ("superseded", False, True)
    assert len(await sent(world, subjects.DELETE)) == 1
    await answer_polls(world, listed())
    assert (await world.intent(delete)).state == "succeeded"


async def test_a_listing_from_before_the_end_of_the_older_install_proves_no_delete(world: World) -> None:
    """It was asked before, and its answer is taken after: the backend is there by then."""
    await joined(world)
    await answer_polls(world, listed())
    install = await world.install(name="other")
    await world.dispatcher.step()
    older = await world.intent(install)
    delete = await world.request("delete", name="other")
    await world.poller.step()
    asked = [one for one in world.bus.take() if one.reply.startswith(subjects.POLLS)]
    assert asked
    world.time.passed += 1
    await says(world, older, b'{"success":true,"address":"h:1"}')
    for one in asked:
        payload = wire.encode(listed()) if one.subject.endswith(subjects.LIST) else b'{"models":[]}'
        world.bus.deliver(Message(one.reply, payload))
    await world.poller.step()
    assert (await world.intent(delete)).is_open, "its absence was seen before the install had ended"
    await world.dispatcher.step()
    assert [one for one in world.bus.take() if one.subject.endswith(subjects.DELETE)]


async def test_an_upgrade_over_a_delete_and_back_is_sent_in_order(world: World) -> None:
    world.registry.digests[IMAGE] = "sha256:new"
    await joined(world)
    await answer_polls(world, listed(("image", "sha256:old")))
    upgrade = await world.request("upgrade", name="image")
    assert len(await sent(world, subjects.UPGRADE)) == 1
    older = await world.intent(upgrade)
    await world.request("delete", name="image")
    view = await world.request("install", name="image")
    assert await sent(world, subjects.INSTALL) == []
    await says(world, older, b'{"success":false,"error":"no space"}')
    assert "failed: no space" in (await world.intent_now(older)).message
    assert len(await sent(world, subjects.INSTALL)) == 1
    assert (await world.intent(view)).reason == ""


async def test_cancel_says_that_the_worker_goes_on_and_follows_it_to_its_end(world: World) -> None:
    await joined(world)
    view = await world.install(name="other")
    await world.dispatcher.step()
    intent = await world.intent(view)
    await world.cancellation.cancel(view.jobID, None, "me")
    row = await row_of(world, view)
    assert (row.status, row.error) == ("cancelled", f"cancelled by me; {STILL_RUNNING}")
    again = await world.install(name="other")
    assert await sent(world, subjects.INSTALL) == []
    await says(world, intent, b'{"success":true,"address":"h:1"}')
    row = await row_of(world, view)
    assert row.status == "cancelled"
    assert isinstance(row.error, str)
    assert row.error.endswith("continued it, and it succeeded")
    assert len(await sent(world, subjects.INSTALL)) == 1
    assert (await world.intent(again)).state == "running"


async def test_cancel_of_a_worker_of_ours_says_nothing_of_the_kind(world: World) -> None:
    await world.join("ours")
    view = await world.install(name="other")
    await world.dispatcher.step()
    await world.cancellation.cancel(view.jobID, None, "me")
    assert (await row_of(world, view)).error == "cancelled by me"
    await world.install(name="other")
    assert len(await sent(world, subjects.INSTALL)) == 1


async def test_what_was_never_sent_keeps_nobody_waiting(world: World) -> None:
    node = await joined(world)
    await world.set_health(node.id, "offline")
    view = await world.install(name="other")
    await world.cancellation.cancel(view.jobID, None, "me")
    await world.request("delete", name="other")
    await world.reports.heartbeat(node.id, node_api.HeartbeatRequest())
    assert len(await sent(world, subjects.DELETE)) == 1


@pytest.mark.parametrize("end", ["restart", "silence", "removal"])
async def test_what_nobody_hears_of_any_more_does_not_hold_up_the_next_for_ever(world: World, end: str) -> None:
    node = await joined(world)
    view = await world.install(name="other")
    await world.dispatcher.step()
    older = await world.intent(view)
    delete = await world.request("delete", name="other")
    assert await sent(world, subjects.DELETE) == []
    if end == "restart":
        await world.reports.restarted(node.id)
    elif end == "silence":
        await pass_time(world, node, LEASE_SECONDS + 1)
        await answer_polls(world, listed())
        await pass_time(world, node, LOST_AFTER_BUDGETS * PATIENCE.install_seconds + 1)
        await world.poller.step()
    else:
        await world.cancellation.remove_node(node.id, "me")
        await joined(world)
        delete = await world.request("delete", name="other")
    assert len(await sent(world, subjects.DELETE)) == 1
    assert (await world.intent(delete)).state == "running"
    assert STILL_RUNNING not in (await world.intent_now(older)).message or end == "removal"


async def test_a_worker_that_was_frozen_may_begin_when_it_wakes_however_late_that_is(world: World) -> None:
    """The limit for its silence counts from when it is known to have the command."""
    node = await joined(world)
    view = await world.install(name="other")
    await world.dispatcher.step()
    await world.request("delete", name="other")
    for _ in range(2):  # nobody answers
        await pass_time(world, node, LOST_AFTER_BUDGETS * PATIENCE.install_seconds + 1)
        await world.poller.step()
    assert await sent(world, subjects.DELETE) == [], "it may have the install in its buffers"
    await answer_polls(world, listed())
    assert await sent(world, subjects.DELETE) == [], "it has just begun"
    await pass_time(world, node, LOST_AFTER_BUDGETS * PATIENCE.install_seconds / 2)
    await says(world, await world.intent(view), b'{"success":true,"address":"h:1"}')
    assert len(await sent(world, subjects.DELETE)) == 1


async def test_what_ran_on_a_worker_that_went_away_goes_on_there(world: World) -> None:
    """It may have lost the bus only: what is newer waits until it was asked again, or has answered."""
    node = await joined(world)
    view = await world.install(name="other")
    await world.dispatcher.step()
    older = await world.intent(view)
    await world.set_health(node.id, "offline")
    await world.dispatcher.step()
    assert (await world.intent_now(older)).reason == "node_away"
    await world.request("delete", name="other")
    await world.reports.heartbeat(node.id, node_api.HeartbeatRequest())
    assert await sent(world, subjects.DELETE) == []
    await says(world, older, b'{"success":true,"address":"h:1"}')
    assert len(await sent(world, subjects.DELETE)) == 1


async def test_the_same_intent_is_sent_again_to_a_worker_that_returns(world: World) -> None:
    node = await joined(world)
    view = await world.install(name="other")
    await world.dispatcher.step()
    await world.set_health(node.id, "offline")
    await world.dispatcher.step()
    await world.reports.heartbeat(node.id, node_api.HeartbeatRequest())
    await world.dispatcher.step()
    assert (await world.intent(view)).attempt == 2
