"""What workers say: replies, progress and reports, and what each of them may change."""

from __future__ import annotations

import msgspec
import pytest
from tests.frontend.world import MODEL, Time, World, installed, pointer, running

from enginehouse.core import subjects, wire
from enginehouse.core.action import InstallBackend, StartReplica
from enginehouse.core.address import Endpoint
from enginehouse.core.ids import NodeId, OperationId
from enginehouse.core.intent import MAX_FAILURES, Intent, Outcome
from enginehouse.core.operation import Operation
from enginehouse.core.progress import Progress
from enginehouse.core.report import CommandResult
from enginehouse.core.views import OperationView
from enginehouse.frontend.acceptance import insert_operation
from enginehouse.frontend.fleet.nodes import AddressRules
from enginehouse.ports import Message
from enginehouse.store import db, replicas
from enginehouse.store.db import Connection

HEALABLE = Outcome(code="upstream_error", message="cannot fetch", can_heal=True)


async def sent(world: World, kind: str = "install") -> tuple[OperationView, Intent]:
    await world.join("first")
    view = await world.request(kind)
    await world.dispatcher.step()
    world.bus.take()
    return view, await world.intent(view)


async def test_an_error_that_may_heal_is_tried_again_after_a_growing_wait(world: World, time: Time) -> None:
    view, intent = await sent(world)
    waits = []
    for attempt in range(1, 4):
        await world.reply(intent, HEALABLE)
        waiting = await world.intent(view)
        assert (waiting.state, waiting.reason, waiting.failures) == ("waiting", "upstream_error", attempt)
        waits.append(round(waiting.due_at - waiting.updated_at))
        await world.dispatcher.step()
        assert world.bus.take() == []
        time.passed += waits[-1] + 1
        await world.dispatcher.step()
        assert len(world.bus.take()) == 1
        intent = await world.intent(view)
        assert intent.attempt == attempt + 1
    assert waits == [1, 2, 4]


async def test_after_the_last_attempt_it_has_failed_and_says_why(world: World, time: Time) -> None:
    view, intent = await sent(world)
    for _ in range(MAX_FAILURES):
        await world.reply(intent, HEALABLE)
        time.passed += 1000
        await world.dispatcher.step()
        intent = await world.intent(view)
    assert (intent.state, intent.message) == ("failed", "cannot fetch")
    assert (await world.board.view(view.jobID)).status == "failed"


async def test_an_error_that_cannot_heal_fails_at_once(world: World) -> None:
    view, intent = await sent(world)
    await world.reply(intent, Outcome(code="digest_mismatch", message="cannot trust it"))
    shown = await world.board.view(view.jobID)
    assert (shown.status, shown.error) == ("failed", "first: cannot trust it")


async def test_words_that_belong_to_nothing_change_nothing(world: World) -> None:
    view, intent = await sent(world)
    await world.reply(intent, Outcome(), attempt=0)
    await world.reply(msgspec.structs.replace(intent, id="nobody"), Outcome())
    assert (await world.intent(view)) == intent
    for subject, payload in [
        (subjects.reply_subject(intent.node_id, intent.id, 1), b"not json"),
        (subjects.reply_subject(intent.node_id, intent.id, 1), b'{"outcome": 5}'),
        (
            subjects.reply_subject(intent.node_id, intent.id, 1),
            b'{"success": true, "error": "' + b"x" * wire.MAX_REPLY_BYTES + b'"}',
        ),
        (f"{subjects.INBOX}.{intent.node_id}.{intent.id}.{'9' * 5000}", b"{}"),
        (f"{subjects.INBOX}.{intent.node_id}.{intent.id}", b"{}"),
        (f"{subjects.INBOX}.{intent.node_id}.{intent.id}.one", b"{}"),
    ]:
        world.bus.deliver(Message(subject, payload))
    assert world.collector._replies.empty()
    assert (await world.intent(view)) == intent


async def test_a_reply_is_written_by_the_owner_while_its_lease_lasts(world: World, time: Time) -> None:
    view, intent = await sent(world)
    other = World(world.store, time, owner="other")
    await other.start()
    await other.reply(intent, Outcome())
    assert (await world.intent(view)).state == "running"
    time.passed += 31
    await other.reply(intent, Outcome())
    assert (await world.intent(view)).state == "succeeded"


@pytest.mark.parametrize(
    "outcome",
    [
        Outcome(code="x" * 300, message="m" * 200_000),
        Outcome(code="Bad code!", message="nul \0 in it"),
        Outcome(address="h" * 300),
        Outcome(nonce="n" * 65),
        Outcome(address="h:1\n"),
    ],
)
async def test_an_outcome_out_of_bounds_is_a_failure_within_them(world: World, outcome: Outcome) -> None:
    view, intent = await sent(world)
    await world.reply(intent, outcome)
    failed = await world.intent(view)
    assert (failed.state, failed.reason) == ("failed", "upstream_error")
    assert len(failed.message) <= 4096
    assert "\0" not in failed.message


# Progress ----------------------------------------------------------------------------------------


async def shown_bytes(world: World, view: OperationView) -> object:
    shown = await world.board.view(view.jobID)
    assert isinstance(shown.nodes, list)
    return shown.nodes[0].current_bytes


async def test_progress_never_goes_back_within_an_attempt(world: World) -> None:
    view, intent = await sent(world)
    for sequence, done in [(2, 200), (1, 100), (2, 150), (3, 300)]:
        world.progress(intent, Progress("downloading", "f", done, 1000, 1, sequence))
    assert await shown_bytes(world, view) == 300
    world.progress(intent, Progress("downloading", "f", 999, 1000, 0, 9))
    assert await shown_bytes(world, view) == 300


async def test_many_events_are_one_write_of_the_row(world: World) -> None:
    view, intent = await sent(world)
    for sequence in range(1, 50):
        world.progress(intent, Progress("downloading", "f", sequence, 100, 1, sequence))
    assert (await world.intent(view)).progress is None
    await world.collector.write_progress_step()
    written = await world.intent(view)
    assert written.progress is not None
    assert (written.progress.done_bytes, written.version) == (49, intent.version)


async def test_progress_of_an_attempt_that_is_over_is_not_written(world: World, time: Time) -> None:
    view, intent = await sent(world)
    world.progress(intent, Progress("downloading", "f", 50, 100, 1, 1))
    await world.reply(intent, HEALABLE)
    time.passed += 5
    await world.dispatcher.step()
    fresh = World(world.store, time)
    await fresh.start()
    fresh.progress(intent, Progress("downloading", "f", 60, 100, 1, 2))
    await fresh.collector.write_progress_step()
    assert (await world.intent(view)).progress is None


async def test_a_node_cannot_tell_of_anothers_progress(world: World) -> None:
    view, intent = await sent(world)
    other = await world.join("second")
    world.progress(intent, Progress("downloading", "lie", 99, 100, 1, 5), node_id=other.id)
    assert await shown_bytes(world, view) is None


async def test_numbers_that_no_disk_has_break_nothing(world: World) -> None:
    view, intent = await sent(world)
    payload = wire.encode(wire.progress_event("op", intent.node_id, "x", intent.id, Progress(attempt=1, sequence=1)))
    lies = payload.replace(b'"attempt":1', b'"attempt":1,"done_bytes":1%s,"total_bytes":1' % (b"0" * 400))
    assert lies != payload
    world.bus.deliver(Message(subjects.progress_subject(intent.node_id, "op"), lies))
    for done, total in [(-5, 10), (5, -10), (2**80, 2**70)]:
        world.progress(intent, Progress("downloading", "f" * 5000, done, total, 1, 10 + done % 7))
    await world.collector.write_progress_step()
    shown = await world.board.view(view.jobID)
    assert isinstance(shown.nodes, list)
    assert 0 <= shown.nodes[0].percentage <= 100
    assert len(str(shown.nodes[0].file_name)) <= 255
    world.bus.deliver(Message(subjects.progress_subject(intent.node_id, "op"), b"{"))


# Reports -----------------------------------------------------------------------------------------


async def test_a_report_settles_by_the_result_that_it_carries(world: World) -> None:
    view, intent = await sent(world)
    result = CommandResult(intent=intent.id, attempt=0, outcome=Outcome())
    await world.report(intent.node_id, results=(result,), running=(intent.id,))
    assert (await world.intent(view)).state == "running"
    result = CommandResult(intent=intent.id, attempt=1, outcome=HEALABLE)
    await world.report(intent.node_id, sequence=2, results=(result,))
    assert (await world.intent(view)).reason == "upstream_error"


async def test_a_report_settles_by_the_state_that_it_shows(world: World, time: Time) -> None:
    view, intent = await sent(world)
    assert isinstance(intent.action, InstallBackend)
    shown = (installed("engine", intent.action.resolved.digest), pointer("llama-cpp", "engine"))
    await world.report(intent.node_id, backends=shown, mark=intent.created_at - 1)
    assert (await world.intent(view)).state == "running"
    await world.report(intent.node_id, sequence=2, backends=(installed("engine", "sha256:other"),))
    assert (await world.intent(view)).state == "running"
    await world.report(intent.node_id, sequence=3, backends=shown)
    assert (await world.intent(view)).state == "succeeded"


async def test_a_mark_from_the_future_is_no_evidence(world: World, time: Time) -> None:
    first = await world.join("first")
    await world.report(first.id, mark=1e18, boot_mark=1e18)
    kept = (await world.nodes.get(first.id))[0].report
    assert kept.mark <= await world.now()
    assert kept.boot_mark <= await world.now()


async def test_a_command_that_the_worker_does_not_have_is_sent_again(world: World, time: Time) -> None:
    view, intent = await sent(world)
    await world.report(intent.node_id)
    assert (await world.intent(view)).state == "running"
    time.passed += 10
    await world.report(intent.node_id, sequence=2, running=(intent.id,))
    assert (await world.intent(view)).state == "running"
    await world.report(intent.node_id, sequence=3)
    lost = await world.intent(view)
    assert (lost.state, lost.reason) == ("waiting", "worker_restarted")
    time.passed += 5
    await world.dispatcher.step()
    assert len(world.bus.take()) == 1


async def test_an_older_report_of_the_same_run_is_ignored(world: World) -> None:
    first = await world.join("first")
    await world.report(first.id, sequence=5, version="5")
    await world.report(first.id, sequence=4, version="4")
    assert (await world.nodes.get(first.id))[0].report.version == "5"
    await world.report(first.id, boot_id="next", sequence=1, version="6")
    assert (await world.nodes.get(first.id))[0].report.version == "6"


async def test_absence_proves_no_delete_while_an_older_install_still_runs(world: World, time: Time) -> None:
    _, older = await sent(world)
    delete = await world.request("delete")
    time.passed += 1
    await world.report(older.node_id, running=(older.id,))
    assert (await world.intent(delete)).state == "accepted"
    await world.dispatcher.step()
    assert len(world.bus.take()) == 1
    await world.report(older.node_id, sequence=2, running=(older.id,))
    assert (await world.intent(delete)).state == "running"
    await world.report(older.node_id, sequence=3)
    assert (await world.intent(delete)).state == "running", "nothing says that the worker has seen it"
    await world.reply(await world.intent(delete), Outcome())
    assert (await world.intent(delete)).state == "succeeded"


async def test_absence_proves_no_delete_while_the_install_before_it_may_still_arrive(world: World, time: Time) -> None:
    """Else the late install would be the last word, with a newer delete that calls itself done."""
    _, older = await sent(world)
    delete = await world.request("delete")
    time.passed += 1
    await world.report(older.node_id)
    assert (await world.intent(delete)).state == "accepted"
    await world.dispatcher.step()
    assert len(world.bus.take()) == 1, "so it is sent, and the worker refuses whatever is older from then on"


async def test_an_applied_generation_proves_an_install_whatever_came_before_it(world: World, time: Time) -> None:
    _, older = await sent(world)
    await world.request("delete")
    newest = await world.install()
    intent = await world.intent(newest)
    time.passed += 1
    digest = intent.action.resolved.digest  # type: ignore[union-attr]
    name = pointer("llama-cpp", "engine")
    await world.report(older.node_id, backends=(installed("engine", digest, intent.generation - 1), name))
    assert (await world.intent(newest)).is_open
    await world.report(older.node_id, sequence=2, backends=(installed("engine", digest, intent.generation), name))
    assert (await world.intent(newest)).state == "succeeded"


# Replicas ----------------------------------------------------------------------------------------


async def started(world: World) -> str:
    """A replica that was just recorded by the reply to its start; the node's id."""
    node = await world.join("first")
    await world.report(node.id, backends=(installed("engine", "x"),), mark=1.0)
    assert isinstance(await world.loader.request("tiny", None, "someone"), str)
    for _ in range(3):
        await world.loader.step()
        await world.dispatcher.step()
        for intent in await world.open_intents(node.id):
            await world.reply(intent, Outcome(address="h:1", nonce="one"))
    assert len(await world.store.transaction(replicas.every)) == 1
    return node.id


async def test_a_report_taken_before_a_replica_was_recorded_does_not_remove_it(world: World, time: Time) -> None:
    node_id = await started(world)
    await world.report(NodeId(node_id), sequence=2, mark=await world.now() - 5)
    assert len(await world.store.transaction(replicas.every)) == 1


async def test_a_replica_goes_when_a_later_report_no_longer_shows_its_process(world: World, time: Time) -> None:
    node_id = await started(world)
    time.passed += 5
    await world.report(NodeId(node_id), sequence=2, replicas=(running("one"),))
    assert len(await world.store.transaction(replicas.every)) == 1
    woken: list[None] = []
    world.collector.on_settled(lambda: woken.append(None))
    await world.report(NodeId(node_id), sequence=3, replicas=(running("another process"),))
    assert await world.store.transaction(replicas.every) == []
    assert woken


async def test_a_result_is_taken_from_a_node_that_comes_back_though_its_report_is_older_than_the_request(
    world: World, time: Time
) -> None:
    """It was silent while it did what it was told, so its command waits for it; it must not be sent again."""
    view, intent = await sent(world)
    await world.set_health(intent.node_id, "offline")
    await world.dispatcher.step()
    assert (await world.intent(view)).reason == "node_away"
    world.bus.take()
    result = CommandResult(intent=intent.id, attempt=1, outcome=Outcome())
    await world.report(intent.node_id, mark=intent.created_at - 1, results=(result,))
    assert (await world.intent(view)).state == "succeeded"
    await world.set_health(intent.node_id, "healthy")
    await world.dispatcher.step()
    assert world.bus.take() == []


async def test_absence_is_no_proof_while_a_command_that_was_taken_for_lost_may_still_come(
    world: World, time: Time, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("enginehouse.core.intent.MAX_FAILURES", 1)
    view, intent = await sent(world)
    time.passed += 10
    await world.report(intent.node_id, boot_mark=await world.now())
    given_up = await world.intent(view)
    assert (given_up.state, given_up.reason) == ("failed", "worker_restarted")
    delete = await world.request("delete", "first")
    await world.dispatcher.step()
    time.passed += 1
    await world.report(intent.node_id)
    assert (await world.intent(delete)).state == "running", "the install may come and undo it"
    await world.reply(await world.intent(delete), Outcome())
    assert (await world.intent(delete)).state == "succeeded"


async def test_an_answer_of_another_node_than_the_intents_changes_nothing_and_is_counted(world: World) -> None:
    (first, second) = await world.join_many("first", "second")
    intent = await world.intent(await world.install("first"))
    await world.dispatcher.step()
    forged = wire.encode(wire.AnyReply(outcome=Outcome(digest="sha256:bad")))
    world.bus.deliver(Message(subjects.reply_subject(second.id, intent.id, 1), forged))
    await world.collector.replies_step()
    assert (await world.intent_now(intent)).state == "running"
    assert world.collector.violations == {"reply": 1}
    await world.reply(await world.intent_now(intent), Outcome(digest="sha256:good"))
    assert (await world.intent_now(intent)).state == "succeeded"
    assert intent.node_id == first.id


async def test_a_worker_that_said_it_failed_is_not_contradicted_by_what_its_report_shows(
    world: World, time: Time
) -> None:
    """An upgrade whose disk refused may have left the new digest in place, with its generation."""
    view, intent = await sent(world)
    refused = Outcome(code="resource_exhausted", message="cannot install engine: Input/output error", can_heal=True)
    await world.reply(intent, refused)
    digest = intent.action.resolved.digest  # type: ignore[union-attr]
    shown = (installed("engine", digest, intent.generation), pointer("llama-cpp", "engine"))
    time.passed += 0.5
    await world.report(intent.node_id, backends=shown)
    assert (await world.intent(view)).state == "waiting"
    time.passed += 2
    await world.dispatcher.step()
    again = await world.intent(view)
    assert (again.state, again.attempt) == ("running", 2)
    time.passed += 0.5
    await world.report(intent.node_id, sequence=2, backends=shown)
    assert (await world.intent(view)).state == "running"
    result = CommandResult(intent=intent.id, attempt=2, outcome=Outcome(digest=digest))
    await world.report(intent.node_id, sequence=3, backends=shown, results=(result,))
    assert (await world.intent(view)).state == "succeeded"


async def test_absence_does_not_contradict_a_delete_that_failed_either(world: World, time: Time) -> None:
    node = await world.join("first")
    await world.report(node.id, backends=(installed("engine", "sha256:1"),))
    view = await world.request("delete", name="engine")
    await world.dispatcher.step()
    intent = await world.intent(view)
    await world.reply(intent, Outcome(code="resource_exhausted", message="cannot delete engine", can_heal=True))
    time.passed += 0.5
    await world.report(node.id, sequence=2)
    assert (await world.intent(view)).state == "waiting"
    time.passed += 2
    await world.dispatcher.step()
    await world.reply(await world.intent(view), Outcome())
    assert (await world.intent(view)).state == "succeeded"


@pytest.mark.parametrize("address", ["127.0.0.1:50051", "other:1", "h:500", "h:60000", ""])
async def test_a_start_that_names_a_place_of_its_own_choice_gets_no_prompts(
    world: World, time: Time, address: str
) -> None:
    cluster = World(world.store, time, addresses=AddressRules(taken=frozenset({Endpoint("h", 500)})))
    await cluster.start()
    node = await cluster.join("first")
    start = StartReplica(model=MODEL, slot=0, directory="engine", key="k")
    intent = await starting(cluster, node.id, start)
    await cluster.reply(intent, Outcome(address=address, nonce="n"))
    rows = await cluster.store.transaction(replicas.every)
    assert rows == []
    if address:
        after = await cluster.intent_now(intent)
        assert (after.state, after.reason) == ("failed", "address_refused")
        assert cluster.collector.violations["address"] == 1


async def test_a_report_cannot_name_a_place_of_its_own_choice_either(world: World) -> None:
    node = await world.join("first")
    intent = await starting(world, node.id, StartReplica(model=MODEL, slot=0, directory="engine", key="k"))
    result = CommandResult(intent=intent.id, attempt=intent.attempt, outcome=Outcome(address="other:1", nonce="n"))
    await world.report(node.id, results=(result,))
    assert await world.store.transaction(replicas.every) == []
    assert (await world.intent_now(intent)).reason == "address_refused"


async def starting(world: World, node_id: NodeId, action: StartReplica) -> Intent:
    """An intent under way on a node."""

    def work(connection: Connection) -> str:
        operation = Operation(
            id=OperationId("op"),
            kind="load",
            name="tiny",
            author="someone",
            created_at=db.now(connection),
            targets=(node_id,),
        )
        return insert_operation(connection, operation, [(node_id, action)], 0)

    await world.store.transaction(work)
    await world.dispatcher.step()
    (intent,) = await world.open_intents(node_id)
    return intent
