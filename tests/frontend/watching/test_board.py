"""What watchers are told: events, several frontends, keys, and how long the past is kept."""

from __future__ import annotations

import json
from collections.abc import Sequence
from time import process_time
from typing import Any

import msgspec
import pytest
from sqlalchemy import select
from tests.frontend.serving_rows import a_replica
from tests.frontend.world import MODEL, Time, WatchedStore, World, registration

from enginehouse.core.action import RemoveBackend
from enginehouse.core.errors import Conflict, Invalid
from enginehouse.core.ids import IntentId, NodeId, OperationId
from enginehouse.core.intent import Intent, Outcome
from enginehouse.core.node_api import HeartbeatRequest
from enginehouse.core.operation import Operation
from enginehouse.core.progress import Progress
from enginehouse.core.views import OperationView
from enginehouse.frontend.acceptance import Requester
from enginehouse.frontend.watching import board, events, snapshots
from enginehouse.frontend.watching.events import Events, Watcher
from enginehouse.frontend.watching.snapshots import Snapshot
from enginehouse.frontend.watching.views import MAX_ERRORS, SilenceLimits
from enginehouse.store import operations, replicas, schema
from enginehouse.store.db import Connection
from enginehouse.store.limits import StoreLimits
from enginehouse.store.supersession import add_intent


def told(watcher: Watcher) -> list[tuple[str, str, dict[str, object]]]:
    return [(event.kind, event.id, json.loads(event.body)) for event in watcher.take()]


async def test_every_watcher_gets_every_change_in_order() -> None:
    made = Events()
    with made.watch() as first, made.watch() as second:
        made.publish("node", "a", b"{}")
        made.publish("operation", "b", b"{}")
        assert [one[1] for one in told(first)] == [one[1] for one in told(second)] == ["a", "b"]
    assert not made.is_watched


async def test_a_watcher_that_does_not_keep_up_is_told_to_look_again() -> None:
    made = Events()
    with made.watch() as slow:
        for _ in range(events.LOG_LENGTH):
            made.publish("node", "a", b"{}")
        had_overflowed = slow.overflowed
        made.publish("node", "a", b"{}")
        assert (had_overflowed, slow.overflowed) == (False, True)
        assert len(slow.take()) == events.LOG_LENGTH


async def test_the_log_is_bounded_in_bytes_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "LOG_BYTES", 1000)
    made = Events()
    with made.watch() as slow, made.watch() as quick:
        for _ in range(20):
            made.publish("node", "a", b"x" * 100)
            quick.take()
        assert slow.overflowed
        assert not quick.overflowed
        assert len(slow.take()) == 10


async def test_what_many_read_is_put_together_once() -> None:
    made = Events()
    rendered: list[str] = []

    def render(event: events.Event) -> bytes:
        rendered.append(event.id)
        return event.id.encode()

    with made.watch() as first, made.watch() as second:
        made.publish("node", "a", b"{}")
        made.publish("node", "b", b"{}")
        assert first.take_chunk(render) == second.take_chunk(render) == b"ab"
        assert rendered == ["a", "b"]
        made.publish("node", "c", b"{}")
        assert first.take_chunk(render) == b"c"


async def test_closing_tells_every_watcher_goodbye() -> None:
    made = Events()
    with made.watch() as watcher:
        made.close()
        assert [one[0] for one in told(watcher)] == ["bye"]


async def test_progress_is_told_at_the_pace_of_steps_not_of_events(world: World) -> None:
    await world.join("first")
    view = await world.install()
    await world.dispatcher.step()
    await world.board.step()
    intent = await world.intent(view)
    with world.events.watch() as watcher:
        for sequence in range(1, 20):
            world.progress(intent, Progress("downloading", "f", sequence, 100, 1, sequence))
        await world.board.step()
        await world.board.step()
        [(kind, operation_id, body)] = told(watcher)
    assert (kind, operation_id, body["currentBytes"]) == ("operation", view.jobID, 19)


async def test_what_another_frontend_did_is_told_here_once(world: World, time: Time) -> None:
    other = World(world.store, time, owner="other")
    await other.start()
    with other.events.watch() as watcher:
        await world.join("first")
        view = await world.install()
        await world.dispatcher.step()
        await other.board.catch_up_step()
        assert {(kind, body.get("status")) for kind, _, body in told(watcher)} == {
            ("operation", "running"),
            ("node", "healthy"),
        }
        await other.board.catch_up_step()
        assert told(watcher) == []
        other.progress(await world.intent(view), Progress("downloading", "f", 5, 10, 1, 1))
        await other.board.step()
        assert [body["currentBytes"] for _, _, body in told(watcher)] == [5]
        await world.reply(await world.intent(view), Outcome())
        await other.board.catch_up_step()
        assert [body.get("status") for _, _, body in told(watcher)] == ["succeeded"]


async def test_a_load_that_another_frontend_gave_up_is_told_here(world: World, time: Time) -> None:
    other = World(world.store, time, owner="other")
    await other.start()
    await world.loader.request("tiny", None, "someone")
    with other.events.watch() as watcher:
        await other.board.catch_up_step()
        await world.loader.step()
        time.passed += 60
        await other.board.catch_up_step()
        assert [body["status"] for _, _, body in told(watcher)] == ["queued", "failed"]


async def test_what_was_read_earlier_is_never_told_after_what_was_read_later(world: World) -> None:
    await world.join("first")
    view = await world.install()
    early = await world.store.transaction(lambda c: world.board._read(c, [view.jobID]))
    await world.dispatcher.step()
    await world.board.step()
    with world.events.watch() as watcher:
        world.board._keep(early)
        assert told(watcher) == []
    assert (await world.board.view(view.jobID)).status == "running"


async def test_an_operation_shows_at_once_that_its_node_went_away(world: World) -> None:
    node = await world.join("first")
    await world.set_health(node.id, "unhealthy")
    await world.board.node_changed(node.id)
    await world.install()
    with world.events.watch() as watcher:
        await world.reports.heartbeat(node.id, HeartbeatRequest())
        await world.board.step()
        await world.nodes.set_health(node.id, "offline")
        await world.board.step()
        parked = [body["isParked"] for kind, _, body in told(watcher) if kind == "operation"]
    assert parked == [False, True]


async def test_a_restarted_frontend_knows_what_is_under_way(world: World, time: Time) -> None:
    await world.join("first")
    view = await world.install()
    await world.dispatcher.step()
    again = World(world.store, time)
    await again.start()
    again.progress(await world.intent(view), Progress("downloading", "f", 7, 10, 1, 1))
    assert (await again.board.view(view.jobID)).currentBytes == 7


async def test_what_is_known_here_is_forgotten_when_it_ends_elsewhere(world: World, time: Time) -> None:
    await world.join("first")
    view = await world.install()
    await world.dispatcher.step()
    other = World(world.store, time, owner="other")
    await other.start()
    other.progress(await world.intent(view), Progress("downloading", "f", 7, 10, 1, 1))
    await world.reply(await world.intent(view), Outcome())
    await other.board.catch_up_step()
    assert (other.board._signs, other.board._tracked, other.board._open) == ({}, {}, {})


async def test_ten_thousand_waiting_operations_are_restored_within_the_time_to_start(
    sqlite_url: str, time: Time
) -> None:
    count = 10_000
    made = Operation(id=OperationId("o"), kind="delete", name="x", author="a", created_at=1.0, targets=())
    action = RemoveBackend(backend="x", directory="x")

    def fill(connection: Connection) -> None:
        operations.insert(connection, made)
        add_intent(connection, OperationId("o"), NodeId("n"), action, IntentId("i"), 1.0)
        for table, own, also in (
            (schema.operations, "id", ()),
            (schema.intents, "id", ("generation",)),
            (schema.operation_intents, "operation_id", ("intent_id",)),
        ):
            [row] = connection.execute(select(table)).mappings().all()
            rows = [{**row, own: f"{row[own]}{number}"} for number in range(count)]
            for number, one in enumerate(rows, start=2):
                one.update({key: number if key == "generation" else f"i{number - 2}" for key in also})
            connection.execute(table.insert(), rows)

    # What other programs take of the cores meanwhile does not count.
    store = await WatchedStore.open(sqlite_url, StoreLimits(answer_seconds=60.0))
    assert isinstance(store, WatchedStore)
    await store.transaction(fill)
    restored = World(store, time).board
    began = process_time()
    await restored.restore()
    await restored.catch_up_step()
    assert process_time() - began < 3.0
    assert len(restored._open) == count + 1
    store.close()


# Lists and the past ------------------------------------------------------------------------------


async def test_an_open_operation_is_listed_however_many_came_after_it(world: World) -> None:
    away = await world.join("away")
    await world.set_health(away.id, "offline")
    await world.join("first")
    kept = await world.install("away")
    for _ in range(5):
        done = await world.install("first")
        await world.dispatcher.step()
        await world.reply(await world.intent(done), Outcome(code="digest_mismatch", message="no"))
    shown = await world.board.unfinished(3)
    assert len(shown) == 3
    assert shown[-1].jobID == kept.jobID
    assert kept.jobID not in {view.jobID for view in await world.board.page(3)}


async def test_the_past_is_forgotten_after_a_week_but_never_what_is_open(
    world: World, time: Time, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("enginehouse.frontend.operations.cancel.KEPT_OPERATIONS", 1)
    away = await world.join("away")
    await world.set_health(away.id, "offline")
    await world.join("first")
    waiting = await world.install("away")
    old = await world.install("first")
    await world.dispatcher.step()
    await world.reply(await world.intent(old), Outcome())
    newest = await world.install("away", name="other")
    await world.cancellation.prune_step()
    assert len(await world.board.page(9)) == 3
    time.passed += 8 * 24 * 3600
    await world.cancellation.prune_step()
    kept = [view.jobID for view in await world.board.page(9)]
    assert kept == [newest.jobID, waiting.jobID]
    assert await world.intent(waiting)
    with pytest.raises(AssertionError):
        await world.intent(old)


async def test_the_last_operations_are_kept_however_old_they_are(world: World, time: Time) -> None:
    await world.join("first")
    view = await world.install()
    await world.dispatcher.step()
    await world.reply(await world.intent(view), Outcome())
    time.passed += 100 * 24 * 3600
    await world.cancellation.prune_step()
    assert (await world.board.view(view.jobID)).status == "succeeded"


# Keys --------------------------------------------------------------------------------------------


async def test_a_token_stands_for_its_role_and_name(world: World) -> None:
    for role in ("admin", "user", "join"):
        made = await world.keys.create(role, "laptop")
        caller = world.keys.identify(made.token)
        assert caller is not None
        assert (caller.role, caller.name) == (role, "laptop")
    assert world.keys.identify("nonsense") is None
    assert made.token not in str(await world.keys.every())


async def test_a_node_has_a_token_of_its_own_and_only_the_last_one_counts(world: World) -> None:
    first = await world.nodes.register(registration("first"))
    again = await world.nodes.register(registration("first"))
    await world.keys.step()
    caller = world.keys.identify(again.token)
    assert caller is not None
    assert (caller.role, caller.node_id) == ("node", again.node.id)
    assert world.keys.identify(first.token) is None


@pytest.mark.parametrize(("role", "name"), [("root", "x"), ("admin", "a b"), ("user", ""), ("node", "x")])
async def test_a_role_or_name_that_is_none_is_refused(world: World, role: str, name: str) -> None:
    with pytest.raises(Invalid):
        await world.keys.create(role, name)


async def test_a_given_token_must_be_long_and_replaces_its_namesake(world: World) -> None:
    with pytest.raises(Invalid):
        await world.keys.create("admin", "up", "short")
    with pytest.raises(Invalid):
        await world.keys.create("admin", "up", "")
    await world.keys.create("admin", "up", "a" * 40)
    await world.keys.create("admin", "up", "b" * 40)
    await world.keys.create("admin", "up", "b" * 40)
    assert world.keys.identify("a" * 40) is None
    assert len(await world.keys.every()) == 1
    with pytest.raises(Conflict):
        await world.keys.create("join", "up", "b" * 40)


async def test_two_tokens_of_one_role_never_share_a_name(world: World) -> None:
    await world.keys.create("user", "laptop")
    with pytest.raises(Conflict):
        await world.keys.create("user", "laptop")
    names = {(await world.keys.create("user", None)).name for _ in range(3)}
    assert len(names) == 3


async def test_a_second_attempt_that_another_frontend_sent_never_shows_the_numbers_of_the_first(world: World) -> None:
    node = await world.join("first")
    view = await world.install()
    await world.dispatcher.step()
    intent = await world.intent(view)
    other = World(world.store, world.time, owner="another")
    await other.start()
    other.progress(intent, Progress("downloading", "x", 333, 1000, 1, 5))
    await world.reply(intent, Outcome(code="upstream_error", message="cut", can_heal=True))
    world.time.passed += 5
    await world.reports.heartbeat(node.id, HeartbeatRequest())
    await world.dispatcher.step()
    assert (await world.intent(view)).attempt == 2
    other.progress(intent, Progress("resolving", "", 0, 0, 2, 1))
    with other.events.watch() as watcher:
        await other.board.step()
        rows = [body["nodes"][0] for kind, _, body in told(watcher) if kind == "operation"]  # type: ignore[index]
    assert [(row["attempt"], row["state"], row["phase"]) for row in rows] == [(2, "running", "resolving")]


# Changes of a large operation ----------------------------------------------------------------------


async def started(world: World, count: int) -> tuple[OperationView, list[Intent]]:
    for number in range(count):
        await world.join(f"node-{number}")
    view = await world.install(*(f"node-{number}" for number in range(count)))
    await world.dispatcher.step()
    await world.board.step()
    return view, [await world.intent(view, row) for row in range(count)]


async def test_an_event_has_the_changed_rows_and_the_counts_of_all(world: World, time: Time) -> None:
    _, intents = await started(world, 5)
    with world.events.watch() as watcher:
        time.passed += 1
        await world.reply(intents[1], Outcome())
        [(_, _, first)] = told(watcher)
        assert [row["node_name"] for row in rows_of(first)] == ["node-1"]
        assert (first["partial"], first["counts"]) == (True, {"downloading": 4, "success": 1})
        assert (first["targets"], first["excluded"]) == ([], [])
        # Within the same moment, the others come together.
        for intent in (intents[0], intents[3]):
            await world.reply(intent, Outcome())
        assert told(watcher) == []
        await world.board.step()
        [(_, _, second)] = told(watcher)
        assert sorted(str(row["node_name"]) for row in rows_of(second)) == ["node-0", "node-3"]
        assert second["counts"] == {"downloading": 2, "success": 3}
        for intent in (intents[2], intents[4]):
            await world.reply(intent, Outcome())
        last = told(watcher)[-1][2]
        assert (last["status"], last["counts"]) == ("succeeded", {"success": 5}), "the end is told at once"
    assert (world.board._signs, world.board._tracked, world.board._open) == ({}, {}, {})


async def test_the_end_of_a_node_reads_nothing_of_the_others(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    view, intents = await started(world, 3)
    reads: list[Sequence[OperationId]] = []
    whole = snapshots.read_snapshots

    def counted(connection: Connection, ids: Sequence[OperationId], monotonic: float) -> list[Snapshot]:
        reads.append(ids)
        return whole(connection, ids, monotonic)

    monkeypatch.setattr(board, "read_snapshots", counted)
    with world.events.watch() as watcher:
        for intent in intents:
            await world.reply(intent, Outcome())
        assert told(watcher)[-1][2]["status"] == "succeeded"
    assert reads == [[view.jobID]], "once, for its end"
    monkeypatch.undo()
    assert (await world.board.view(view.jobID)).counts == {"success": 3}


async def test_a_watcher_that_merges_changes_has_what_a_reader_has(world: World, time: Time) -> None:
    view, intents = await started(world, 4)
    with world.events.watch() as watcher:
        merged = world.board.known(view.jobID)
        assert merged is not None
        for number, intent in enumerate(intents):
            world.progress(intent, Progress("downloading", "f", 10 * number, 100, 1, 1))
            await world.board.step()
            time.passed += 1
        await world.reply(intents[2], Outcome(code="digest_mismatch", message="no"))
        time.passed += 1
        await world.reply(intents[0], Outcome())
        for event in watcher.take():
            if event.kind == "operation":
                merged = merged.followed_by(msgspec.json.decode(event.body, type=OperationView))
    now = await world.board.view(view.jobID)
    assert merged.nodes == now.nodes
    assert (merged.counts, merged.error, merged.targets) == (now.counts, now.error, now.targets)


async def test_a_stop_on_another_frontend_makes_this_one_look_at_its_routes(world: World, time: Time) -> None:
    """The worker ends the engine as soon as nobody seems to use it: waiting for the next regular look is too long."""
    other = World(world.store, time, owner="other")
    looks: list[str] = []
    other.board.on_changes_elsewhere(nodes=lambda: looks.append("nodes"), replicas=lambda: looks.append("replicas"))
    await other.start()
    node = await world.join("first")
    running = msgspec.structs.replace(a_replica(0, MODEL), node_id=node.id)
    await world.store.transaction(lambda connection: replicas.put(connection, running, 0.0))
    await other.board.catch_up_step()
    await world.install()
    await other.board.catch_up_step()
    assert "replicas" not in looks
    await world.operations.request_unload(MODEL.name, None, Requester(author="someone"))
    await other.board.catch_up_step()
    assert "replicas" in looks


async def test_a_change_on_another_frontend_is_read_alone(world: World, time: Time) -> None:
    _, intents = await started(world, 3)
    other = World(world.store, time, owner="other")
    await other.start()
    time.passed += 1
    with other.events.watch() as watcher:
        await world.reply(intents[1], Outcome())
        await other.board.catch_up_step()
        [(_, _, body)] = [one for one in told(watcher) if one[0] == "operation"]
        assert [row["node_name"] for row in rows_of(body)] == ["node-1"]
        assert body["counts"] == {"downloading": 2, "success": 1}
        await other.board.catch_up_step()
        assert [one for one in told(watcher) if one[0] == "operation"] == [], "what overlaps is not told twice"


async def test_a_worker_that_falls_silent_is_told_without_a_message(world: World, time: Time) -> None:
    _, [intent] = await started(world, 1)
    with world.events.watch() as watcher:
        world.progress(intent, Progress("downloading", "f", 5, 10, 1, 1))
        await world.board.step()
        assert [rows_of(body)[0]["status"] for _, _, body in told(watcher)] == ["downloading"]
        time.passed += SilenceLimits().stall_seconds + 1
        await world.board.catch_up_step()
        await world.board.step()
        silent = [rows_of(body)[0]["status"] for kind, _, body in told(watcher) if kind == "operation"]
    assert silent == ["running_on_worker"]


def rows_of(body: dict[str, object]) -> list[dict[str, object]]:
    rows = body.get("nodes", [])
    assert isinstance(rows, list)
    return rows


async def test_many_errors_are_counted_not_repeated(world: World) -> None:
    _, intents = await started(world, MAX_ERRORS + 3)
    for intent in intents:
        await world.reply(intent, Outcome(code="digest_mismatch", message="no"))
    [view] = await world.board.page(1)
    assert view.error.endswith("; and 3 more")
    assert view.error.count(": no") == MAX_ERRORS


async def test_machines_that_come_back_together_are_told_together(world: World, time: Time) -> None:
    await world.join_many(*(f"node-{number}" for number in range(6)))
    await world.board.step()
    time.passed += 1
    with world.events.watch() as watcher:
        every, _ = await world.nodes.every()
        for node in every:
            await world.set_health(node.id, "unhealthy")
            await world.board.node_changed(node.id)
        assert [one[1] for one in told(watcher)] == [every[0].id], "the first at once"
        await world.board.step()
        assert sorted(one[1] for one in told(watcher)) == sorted(node.id for node in every[1:])
        await world.board.step()
        assert told(watcher) == []


async def test_an_end_is_not_told_before_what_another_frontend_cancelled_is_known(world: World, time: Time) -> None:
    await world.join("first")
    kept, cancelled = await world.install(), await world.install()
    await world.dispatcher.step()
    await world.board.step()
    other = World(world.store, time, owner="other")
    await other.start()
    await other.cancellation.cancel(cancelled.jobID, None, "me")
    with world.events.watch() as watcher:
        await world.reply(await world.intent(kept), Outcome())
        await world.board.step()
        ends = [(one[1], one[2]["status"]) for one in told(watcher) if one[0] == "operation"]
    assert sorted(ends) == sorted([(kept.jobID, "succeeded"), (cancelled.jobID, "cancelled")])


async def test_the_end_of_a_row_is_not_told_before_what_another_frontend_cancelled_is_known(
    world: World, time: Time
) -> None:
    await world.join_many("first", "second")
    kept, cancelled = await world.install(), await world.install()
    await world.dispatcher.step()
    await world.board.step()
    other = World(world.store, time, owner="other")
    await other.start()
    await other.cancellation.cancel(cancelled.jobID, None, "me")
    time.passed += 10.0  # long after the last event, so that the next one is published at once
    with world.events.watch() as watcher:
        await world.reply(await world.intent(kept), Outcome())
        await world.board.step()
        shown: list[Any] = [one[2].get("nodes", ()) for one in told(watcher) if one[1] == cancelled.jobID]
    assert "succeeded" not in [row["state"] for rows in shown for row in rows]
