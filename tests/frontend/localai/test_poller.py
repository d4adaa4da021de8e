"""LocalAI's workers: no reports, no intents, no upgrades in the oldest; what they say still settles what was asked."""

from __future__ import annotations

import asyncio

import pytest
from tests.frontend.localai.go_workers import NOBODY, answer_polls, joined, listed
from tests.frontend.world import PATIENCE, Time, World

from enginehouse.core import node_api, subjects, wire
from enginehouse.core.ids import IntentId
from enginehouse.core.intent import Intent, Outcome
from enginehouse.core.node import Node
from enginehouse.core.progress import Progress
from enginehouse.core.replica import Replica
from enginehouse.core.views import OperationView
from enginehouse.frontend.localai.listings import Listings
from enginehouse.frontend.localai.poller import LOST_AFTER_BUDGETS, Poller
from enginehouse.ports import Message
from enginehouse.store import db, replicas

IMAGE = "registry.example/image:latest"


async def upgrade(world: World) -> tuple[Node, OperationView, Intent]:
    world.registry.digests[IMAGE] = "sha256:new"
    node = await world.join("go", is_localai=True)
    await answer_polls(world, listed(("image", "sha256:old")))
    view = await world.request("upgrade", name="image")
    await world.dispatcher.step()
    return node, view, await world.intent(view)


async def test_a_worker_that_knows_no_upgrades_gets_a_forced_install(world: World) -> None:
    node, view, intent = await upgrade(world)
    (sent,) = world.bus.take()
    assert sent.subject == subjects.node_subject(node.id, subjects.UPGRADE)
    world.bus.deliver(Message(sent.reply, NOBODY, no_responders=True))
    await world.collector.replies_step()
    (again,) = world.bus.take()
    assert again.subject == subjects.node_subject(node.id, subjects.INSTALL)
    message = wire.decode(again.payload, wire.BackendInstallRequest, "it")
    assert (message.force, message.backend, message.op_id) == (True, "image", view.jobID)
    after = await world.intent(view)
    assert (after.state, after.attempt, after.failures) == ("running", intent.attempt, 0), "the same attempt"
    assert (await world.nodes.get(node.id))[0].health == "healthy"
    world.bus.deliver(Message(again.reply, b'{"success":true}'))
    await world.collector.replies_step()
    assert (await world.intent(view)).state == "succeeded"


async def test_a_worker_that_hears_neither_is_away(world: World) -> None:
    node, view, _ = await upgrade(world)
    for _ in range(2):
        (sent,) = world.bus.take()
        world.bus.deliver(Message(sent.reply, NOBODY, no_responders=True))
        await world.collector.replies_step()
    assert (await world.nodes.get(node.id))[0].health == "unhealthy"
    assert (await world.intent(view)).reason == "node_away"


async def test_a_listing_that_shows_it_ends_an_install(world: World) -> None:
    await joined(world)
    view = await world.install(name="other")
    await world.dispatcher.step()
    asked = await answer_polls(world, listed())
    assert sorted(asked) == sorted([subjects.LIST, subjects.RUNNING])
    assert (await world.intent(view)).state == "running", "silence of a listing is no failure"
    action = (await world.intent(view)).action
    await answer_polls(world, listed(("other", action.resolved.digest)))  # type: ignore[union-attr]
    assert (await world.intent(view)).state == "succeeded"


async def test_a_first_word_counts_although_somebody_had_looked_before_it_was_sent(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = await world.join("old", is_localai=True)
    view = await world.install()
    before = await world.store.transaction(lambda connection: world.board._read(connection, [view.jobID]))
    said = Progress(phase="downloading", done_bytes=5, total_bytes=9)
    event = wire.encode(wire.progress_event(view.jobID, node.id, "llama-cpp", IntentId(""), said))
    publish = world.bus.publish

    async def answered_at_once(subject: str, payload: bytes, reply: str = "") -> None:
        await publish(subject, payload, reply)
        world.board._keep(before)  # a look that took its time
        world.bus.deliver(Message(subjects.progress_subject(node.id, view.jobID), event))

    monkeypatch.setattr(world.bus, "publish", answered_at_once)
    await world.dispatcher.step()
    row = (await world.board.view(view.jobID)).nodes
    assert isinstance(row, list)
    assert [(one.phase, one.status) for one in row] == [("downloading", "downloading")]


async def test_a_listing_ends_an_upgrade_only_with_the_wanted_digest(world: World) -> None:
    _, view, _ = await upgrade(world)
    await answer_polls(world, listed(("image", "sha256:old")))
    assert (await world.intent(view)).state == "running"
    await answer_polls(world, listed(("image", "sha256:new")))
    assert (await world.intent(view)).state == "succeeded"


async def test_a_listing_ends_a_delete_only_by_absence(world: World) -> None:
    await joined(world)
    await answer_polls(world, listed(("other", "sha256:x")))
    view = await world.request("delete", name="other")
    await world.dispatcher.step()
    await answer_polls(world, listed(("other", "sha256:x")))
    assert (await world.intent(view)).state == "running"
    await answer_polls(world, listed())
    assert (await world.intent(view)).state == "succeeded"


async def test_an_answer_with_an_error_proves_nothing(world: World) -> None:
    await joined(world)
    await answer_polls(world, listed(("other", "sha256:x")))
    view = await world.request("delete", name="other")
    await world.dispatcher.step()
    await answer_polls(world, wire.BackendListReply(backends=None, error="disk"))
    assert (await world.intent(view)).state == "running"


@pytest.mark.parametrize(
    "running",
    [NOBODY, b'{"models":null,"error":"the supervisor is away"}', b'{"models":[],"error":"not all were asked"}', b"{"],
    ids=["no answer", "an error", "an empty list with an error", "half an answer"],
)
async def test_a_list_of_processes_that_is_missing_or_has_an_error_removes_no_replica(
    world: World, time: Time, running: bytes
) -> None:
    """F-051."""
    node = await joined(world)
    replica = Replica(node_id=node.id, model="m", slot=0, revision="r", address="h:1", nonce="n", backend="other")
    await world.store.transaction(lambda c: replicas.put(c, replica, db.now(c)))
    time.passed += 60.0
    await world.reports.heartbeat(node.id, node_api.HeartbeatRequest())
    for _ in range(3):
        await answer_polls(world, listed(("other", "sha256:x")), running)
    assert await world.store.transaction(replicas.every) == [replica]
    await answer_polls(world, listed(("other", "sha256:x")))
    assert await world.store.transaction(replicas.every) == [], "a whole list that does not have it is proof"


async def test_a_worker_too_old_to_say_what_runs_is_believed_about_the_rest(world: World) -> None:
    node = await joined(world)
    await answer_polls(world, listed(("other", "sha256:x")), running=NOBODY)
    assert [one.name for one in (await world.nodes.get(node.id))[0].report.backends] == ["other"]


async def test_a_worker_of_ours_is_never_asked(world: World) -> None:
    node = await world.join("ours")
    await world.report(node.id)
    assert await answer_polls(world, listed()) == []


async def test_one_frontend_at_a_time_asks(world: World) -> None:
    await joined(world)
    listings = Listings(world.store, world.reports, "another", lambda name: False)
    other = Poller(world.store, world.nodes, world.collector, listings, PATIENCE, owner="another", lease_seconds=30.0)
    await other.listen(world.bus)
    await world.poller.step()
    assert len(world.bus.take()) == 2
    await other.step()
    assert world.bus.take() == []


async def test_its_progress_counts_although_it_numbers_nothing(world: World) -> None:
    node = await joined(world)
    view = await world.install(name="other")
    await world.dispatcher.step()

    def tell(file: str, current: str, total: str) -> None:
        event = wire.ProgressEvent(
            op_id=view.jobID,
            node_id=node.id,
            backend="other",
            file_name=file,
            current=current,
            total=total,
            percentage=0.0,
            phase="downloading",
        )
        world.bus.deliver(Message(subjects.progress_subject(node.id, view.jobID), wire.encode(event)))

    seen = []
    for file, current, total in (
        ("Downloading 1/1 x", "1.0 MiB", "4.0 MiB"),
        ("Downloading 1/1 x", "3.0 MiB", "4.0 MiB"),
        ("Downloading 1/1 x", "2.0 MiB", "4.0 MiB"),
        ("Extracting x", "0.1 MiB", "5.0 MiB"),
    ):
        tell(file, current, total)
        shown = await world.board.view(view.jobID)
        assert isinstance(shown.nodes, list)
        seen.append((shown.nodes[0].phase, shown.nodes[0].current_bytes))
    mib = 1024 * 1024
    assert seen == [("downloading", mib), ("downloading", 3 * mib), ("downloading", 3 * mib), ("extracting", 3 * mib)]


async def test_a_silent_worker_is_shown_as_still_at_work_and_ends_green(world: World) -> None:
    await joined(world)
    view = await world.install(name="other")
    await world.dispatcher.step()
    intent = await world.intent(view)
    world.time.passed += PATIENCE.install_seconds + 1
    shown = await world.board.view(view.jobID)
    assert isinstance(shown.nodes, list)
    assert (shown.status, shown.nodes[0].status, shown.nodes[0].attempt) == ("running", "running_on_worker", 1)
    await world.dispatcher.step()
    assert [one for one in world.bus.take() if one.subject.endswith(subjects.INSTALL)][1:] == [], "no second command"
    await world.reply(intent, Outcome())
    assert (await world.board.view(view.jobID)).status == "succeeded"


async def test_a_command_that_may_never_have_been_sent_goes_out_again_at_last(world: World) -> None:
    node = await joined(world)
    view = await world.install(name="other")
    await world.dispatcher.step()
    world.bus.take()
    world.time.passed += LOST_AFTER_BUDGETS * PATIENCE.install_seconds + 1
    await world.set_health(node.id, "healthy")
    await world.poller.step()
    await world.dispatcher.step()
    assert [one for one in world.bus.take() if one.subject.endswith(subjects.INSTALL)]
    after = await world.intent(view)
    assert (after.attempt, after.failures) == (2, 0)


async def test_a_worker_that_registers_anew_gets_again_what_it_was_doing(world: World) -> None:
    node = await joined(world)
    view = await world.install(name="other")
    await world.dispatcher.step()
    await world.reports.restarted(node.id)
    assert (await world.intent(view)).reason == "worker_restarted"
    await world.dispatcher.step()
    assert (await world.intent(view)).attempt == 2


async def test_the_galleries_travel_with_the_name(world: World) -> None:
    await joined(world)
    await world.install(name="other")
    await world.dispatcher.step()
    message = wire.decode(world.bus.take()[-1].payload, wire.BackendInstallRequest, "it")
    assert (message.backend, message.uri) == ("other", "")


async def test_what_was_just_installed_can_be_upgraded_at_once(world: World) -> None:
    """A reply says that it was done, not what is there now: the node is looked at once more."""
    await joined(world)
    await answer_polls(world, listed())
    view = await world.request("install", name="image")
    await world.dispatcher.step()
    assert await answer_polls(world, listed())  # while it is under way
    await world.reply(await world.intent(view), Outcome())
    world.bus.take()
    assert await answer_polls(world, listed(("image", "sha256:old")))
    world.registry.digests[IMAGE] = "sha256:new"
    assert (await world.request("upgrade", name="image")).status == "queued"


async def test_its_first_word_counts_although_it_comes_before_the_row_was_looked_at_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = await joined(world)
    view = await world.install(name="other")
    publish = world.bus.publish

    async def publish_and_hear(subject: str, payload: bytes, reply: str = "") -> None:
        await publish(subject, payload, reply)
        event = wire.ProgressEvent(
            op_id=view.jobID,
            node_id=node.id,
            backend="other",
            file_name="Downloading 1/1 x",
            current="1.0 MiB",
            total="4.0 MiB",
            percentage=25.0,
            phase="downloading",
        )
        world.bus.deliver(Message(subjects.progress_subject(node.id, view.jobID), wire.encode(event)))

    monkeypatch.setattr(world.bus, "publish", publish_and_hear)
    await world.dispatcher.step()
    shown = await world.board.view(view.jobID)
    assert isinstance(shown.nodes, list)
    assert (shown.nodes[0].phase, shown.nodes[0].current_bytes) == ("downloading", 1024 * 1024)


async def test_null_in_an_answer_is_what_is_absent(world: World) -> None:
    await joined(world)
    view = await world.install(name="other")
    await world.dispatcher.step()
    intent = await world.intent(view)
    answer = b'{"success":true,"error":null,"address":null,"stopped_process_keys":null}'
    world.bus.deliver(Message(subjects.reply_subject(intent.node_id, intent.id, intent.attempt), answer))
    async with asyncio.timeout(5):  # what cannot be read is dropped, and waited for without an end
        await world.collector.replies_step()
    assert (await world.intent(view)).state == "succeeded"


async def test_a_worker_that_has_made_no_list_of_processes_runs_none(world: World) -> None:
    node = await joined(world)
    await answer_polls(world, listed(("other", "sha256:x")), running=b'{"models":null}')
    assert [one.name for one in (await world.nodes.get(node.id))[0].report.backends] == ["other"]


async def unheard_polls(world: World) -> None:
    """A round of questions that nobody hears, and what follows."""
    await world.poller.step()
    for one in world.bus.take():
        if one.reply.startswith(subjects.POLLS):
            world.bus.deliver(Message(one.reply, NOBODY, no_responders=True))
    await world.poller.step()


async def test_a_worker_that_hears_no_question_is_away_and_what_it_did_waits(world: World) -> None:
    node = await joined(world)
    view = await world.install(name="other")
    await world.dispatcher.step()
    await unheard_polls(world)
    assert await world.health(node.id) == "healthy", "a connection may be lost for a moment"
    await unheard_polls(world)
    assert await world.health(node.id) == "unhealthy"
    after = await world.intent(view)
    assert (after.state, after.reason, after.failures) == ("waiting", "node_away", 0)
    shown = await world.board.view(view.jobID)
    assert isinstance(shown.nodes, list)
    assert (shown.nodes[0].status, shown.isParked) == ("queued", True)
    await world.reports.heartbeat(node.id, node_api.HeartbeatRequest())
    await world.dispatcher.step()
    assert (await world.intent(view)).attempt == 2


async def test_one_question_that_is_heard_again_begins_the_counting_anew(world: World) -> None:
    node = await joined(world)
    await world.install(name="other")
    await world.dispatcher.step()
    for _ in range(3):
        await unheard_polls(world)
        await answer_polls(world, listed())
    assert await world.health(node.id) == "healthy"
