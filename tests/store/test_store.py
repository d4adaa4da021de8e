"""The conformance suite of the store: every test on SQLite and on PostgreSQL."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import msgspec
import pytest

from enginehouse.core.action import Action, InstallBackend, RemoveBackend
from enginehouse.core.backend import Resolved
from enginehouse.core.capacity import Capacity
from enginehouse.core.errors import Conflict, Unavailable
from enginehouse.core.ids import IntentId, NodeId, OperationId
from enginehouse.core.intent import Change, Intent, Outcome
from enginehouse.core.model import Model, ModelFile
from enginehouse.core.node import Node
from enginehouse.core.operation import Excluded, Operation
from enginehouse.core.progress import Progress
from enginehouse.core.replica import Replica
from enginehouse.core.report import Report
from enginehouse.store import claims, db, intents, keys, leases, models, nodes, operations, replicas
from enginehouse.store.db import Connection, Store
from enginehouse.store.keys import TokenRow
from enginehouse.store.limits import StoreLimits
from enginehouse.store.supersession import add_intent

NODE = NodeId("id-of-first")
OPERATION = OperationId("op-1")
INTENT = IntentId("intent-1")

INSTALL = InstallBackend(
    backend="llama-cpp",
    resolved=Resolved(directory="x", uri="pypi:x==1", digest="sha256:1", requirements=("x==1 --hash=sha256:0",)),
)
REMOVE = RemoveBackend(backend="llama-cpp", directory="x")


def node(name: str = "first", **fields: object) -> Node:
    plain: dict[str, object] = {
        "id": f"id-of-{name}",
        "name": name,
        "node_type": "backend",
        "public_key": "key",
        "approved": True,
        "health": "healthy",
        "drained": False,
        "address": "127.0.0.1:50051",
        "http_address": "",
        "capability": "default",
        "platform": "linux/amd64",
        "labels": {"rack": "7"},
        "max_replicas_per_model": 1,
        "capacity": Capacity(cores=2, total_ram=2**40),
        "created_at": 1.0,
        "updated_at": 1.0,
        "last_heartbeat": 1.0,
        "report": Report(boot_id="b"),
    }
    return Node(**(plain | fields))  # type: ignore[arg-type]


def operation(number: int, **fields: object) -> Operation:
    plain: dict[str, object] = {
        "id": f"op-{number}",
        "kind": "install",
        "name": "llama-cpp",
        "author": "someone",
        "created_at": float(number),
        "targets": ("id-of-first",),
        "excluded": (Excluded(NodeId("n"), "name", "no build"),),
    }
    return Operation(**(plain | fields))  # type: ignore[arg-type]


async def request(store: Store, number: int, action: Action, node_id: NodeId = NODE) -> Intent:
    def work(connection: Connection) -> Intent:
        operations.insert(connection, operation(number))
        return add_intent(
            connection, OperationId(f"op-{number}"), node_id, action, IntentId(f"intent-{number}"), float(number)
        )

    return await store.transaction(work)


async def add_node(store: Store, one: Node) -> None:
    await store.transaction(lambda connection: nodes.insert(connection, one, "hash"))


async def claim(store: Store, owner: str = "me", limit: int = 100) -> list[Intent]:
    def work(connection: Connection) -> list[Intent]:
        now = db.now(connection)
        return claims.claim_due(connection, owner, now, now + 30, limit)

    return await store.transaction(work)


async def test_two_stores_that_open_an_empty_database_at_once_both_become_usable(database_url: str) -> None:
    async with asyncio.TaskGroup() as group:
        opening = [group.create_task(Store.open(database_url)) for _ in range(3)]
    for task in opening:
        assert await task.result().transaction(nodes.every) == []
        task.result().close()


async def test_work_that_raises_leaves_nothing_behind(store: Store) -> None:
    def work(connection: Connection) -> None:
        nodes.insert(connection, node(), "hash")
        raise Conflict("cannot go on")

    with pytest.raises(Conflict):
        await store.transaction(work)
    assert await store.transaction(nodes.every) == []


async def ended_by_the_server(store: Store, work: Callable[[Connection], None]) -> None:
    with pytest.raises(Unavailable):
        await store.transaction(work)


async def test_a_frontend_that_freezes_inside_a_transaction_holds_nobody_up(
    postgres: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, limits = postgres(), StoreLimits(answer_seconds=30.0)
    monkeypatch.setattr(StoreLimits, "idle_milliseconds", 500)
    frozen, other = await Store.open(url, limits), await Store.open(url, limits)
    is_held, is_awake = threading.Event(), threading.Event()

    def freeze(connection: Connection) -> None:
        assert nodes.set_health(connection, NODE, "unhealthy", 2.0)
        is_held.set()
        is_awake.wait(30)

    try:
        await add_node(other, node())
        async with asyncio.TaskGroup() as group:
            sleeping = group.create_task(ended_by_the_server(frozen, freeze))
            await asyncio.to_thread(is_held.wait, 30)
            async with asyncio.timeout(20):
                assert await other.transaction(lambda c: nodes.set_health(c, NODE, "offline", 3.0))
            assert not sleeping.done()
            is_awake.set()
        (row,) = await frozen.transaction(nodes.every)
        assert row.health == "offline", "what it had begun is undone, and it goes on with a new connection"
    finally:
        is_awake.set()
        frozen.close()
        other.close()


async def test_a_database_that_cannot_be_reached_is_an_error_with_a_code() -> None:
    with pytest.raises(Unavailable) as caught:
        await Store.open("postgresql://127.0.0.1:1/none")
    assert caught.value.code == "store_unavailable"
    assert "\n" not in caught.value.message


async def test_the_clock_moves_forwards_in_fractions_of_a_second(store: Store) -> None:
    first = await store.transaction(db.now)
    second = await store.transaction(db.now)
    assert 0 <= second - first < 5
    assert first > 1_700_000_000


async def test_a_node_is_read_as_it_was_written(store: Store) -> None:
    await add_node(store, node())
    assert await store.transaction(lambda connection: nodes.get(connection, NODE)) == node()
    assert await store.transaction(lambda connection: nodes.by_name(connection, "first")) == [node()]


async def test_the_same_name_with_another_key_is_another_node(store: Store) -> None:
    await add_node(store, node())
    await add_node(store, node(id="other", public_key="other"))
    assert len(await store.transaction(lambda connection: nodes.by_name(connection, "first"))) == 2
    with pytest.raises(Unavailable):
        await add_node(store, node(id="third"))


async def test_a_registration_does_not_touch_approval_drain_or_the_report(store: Store) -> None:
    await add_node(store, node(approved=True, drained=True))
    again = node(approved=False, drained=False, address="10.0.0.1:1", report=Report())
    await store.transaction(lambda connection: nodes.save(connection, again))
    kept = await store.transaction(lambda connection: nodes.get(connection, NODE))
    assert kept is not None
    assert (kept.approved, kept.drained, kept.report.boot_id, kept.address) == (True, True, "b", "10.0.0.1:1")


async def test_of_two_registrations_at_once_the_later_one_stays(store: Store) -> None:
    await store.transaction(lambda c: nodes.insert(c, node(registered_at=1.0), "hash"))

    async def take(at: float) -> bool:
        return await store.transaction(lambda c: nodes.take_registration(c, node().id, at))

    async with asyncio.TaskGroup() as group:
        newest, *_ = [group.create_task(take(at)) for at in (5.0, 4.0, 3.0, 2.0)]
    assert newest.result(), "nothing is later than it"
    assert [await take(at) for at in (2.0, 4.0, 5.0)] == [False, False, False]
    assert await take(6.0)


async def test_health_tells_whether_it_changed(store: Store) -> None:
    await add_node(store, node())
    assert await store.transaction(lambda c: nodes.set_health(c, NODE, "offline", 2.0))
    assert not await store.transaction(lambda c: nodes.set_health(c, NODE, "offline", 3.0))
    assert await store.transaction(nodes.count_by_health) == {"offline": 1}


async def test_a_request_is_stored_whole(store: Store) -> None:
    await add_node(store, node())
    made = await request(store, 1, INSTALL)
    assert made.action == INSTALL
    assert (await store.transaction(lambda c: operations.intent(c, INTENT))) == made
    assert (await store.transaction(lambda c: operations.get(c, OPERATION))) == operation(1)


async def test_an_equal_request_joins_the_open_intent_and_serves_both_operations(store: Store) -> None:
    await add_node(store, node())
    first = await request(store, 1, INSTALL)
    second = await request(store, 2, INSTALL)
    assert second.id == first.id
    served = await store.transaction(lambda c: operations.of_intents(c, [first.id]))
    assert {one.id for one in served} == {"op-1", "op-2"}


async def test_a_newer_request_supersedes_the_older_one_and_has_a_higher_generation(store: Store) -> None:
    await add_node(store, node())
    first = await request(store, 1, INSTALL)
    second = await request(store, 2, REMOVE)
    assert (first.generation, second.generation) == (1, 2)
    older = await store.transaction(lambda c: operations.intent(c, first.id))
    assert older is not None
    assert (older.state, older.reason) == ("superseded", "superseded")


async def test_generations_go_on_after_an_intent_has_ended(store: Store) -> None:
    await add_node(store, node())
    first = await request(store, 1, INSTALL)
    await store.transaction(lambda c: operations.apply(c, first, Change(kind="cancel", now=2.0)))
    assert (await request(store, 2, INSTALL)).generation == 2


async def test_of_many_equal_requests_at_once_one_intent_is_made(store: Store) -> None:
    await add_node(store, node())
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(request(store, number, INSTALL)) for number in range(1, 9)]
    assert len({task.result().id for task in tasks}) == 1


async def test_a_claim_takes_due_intents_of_healthy_approved_nodes_only(store: Store) -> None:
    await add_node(store, node())
    await add_node(store, node("away", health="offline"))
    await add_node(store, node("pending", approved=False))
    await request(store, 1, INSTALL)
    await request(store, 2, INSTALL, NodeId("id-of-away"))
    await request(store, 3, INSTALL, NodeId("id-of-pending"))
    claimed = await claim(store)
    assert [one.id for one in claimed] == ["intent-1"]
    assert (claimed[0].state, claimed[0].attempt, claimed[0].fence, claimed[0].owner) == ("running", 1, 1, "me")


async def test_an_intent_is_claimed_once_however_many_ask(store: Store) -> None:
    await add_node(store, node())
    for number in range(1, 11):
        name = f"backend-{number}"
        await request(store, number, RemoveBackend(backend=name, directory=name))
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(claim(store, f"owner-{number}", 4)) for number in range(6)]
    ids = [one.id for task in tasks for one in task.result()] + [one.id for one in await claim(store)]
    assert len(ids) == len(set(ids)) == 10


async def test_what_is_not_due_yet_waits(store: Store) -> None:
    await add_node(store, node())
    await request(store, 1, INSTALL)
    [running] = await claim(store)
    now = await store.transaction(db.now)
    waiting = Change(kind="wait", now=now, reason="upstream_error", due_at=now + 100)
    await store.transaction(lambda c: operations.apply(c, running, waiting))
    assert await claim(store) == []


async def test_of_two_changes_to_one_version_the_second_is_refused(store: Store) -> None:
    await add_node(store, node())
    made = await request(store, 1, INSTALL)
    await store.transaction(lambda c: operations.apply(c, made, Change(kind="cancel", now=2.0)))
    with pytest.raises(Conflict):
        await store.transaction(lambda c: operations.apply(c, made, Change(kind="claim", now=2.0)))


async def test_a_lease_that_ended_is_taken_over_with_the_same_attempt_and_a_new_fence(store: Store) -> None:
    await add_node(store, node())
    await request(store, 1, INSTALL)
    await claim(store, "dead")
    now = await store.transaction(db.now)
    assert await store.transaction(lambda c: claims.take_over(c, "me", now, now + 30)) == []
    await store.transaction(lambda c: claims.renew(c, "dead", now - 1))
    [taken] = await store.transaction(lambda c: claims.take_over(c, "me", now, now + 30))
    assert (taken.owner, taken.attempt, taken.fence, taken.state) == ("me", 1, 2, "running")


async def test_progress_is_kept_for_running_intents_only(store: Store) -> None:
    await add_node(store, node())
    await request(store, 1, INSTALL)
    seen = Progress(phase="downloading", done_bytes=5, total_bytes=9, attempt=1, sequence=2)
    await store.transaction(lambda c: intents.set_progress(c, {INTENT: seen}, "me", db.now(c)))
    assert (await store.transaction(lambda c: operations.intent(c, INTENT))).progress is None  # type: ignore[union-attr]
    [running] = await claim(store)
    await store.transaction(lambda c: intents.set_progress(c, {INTENT: seen}, "me", db.now(c)))
    kept = await store.transaction(lambda c: operations.intent(c, INTENT))
    assert kept is not None
    assert (kept.progress, kept.version) == (seen, running.version)


async def test_progress_is_written_by_the_frontend_that_holds_the_intent_or_by_any_when_nobody_does(
    store: Store,
) -> None:
    """Every frontend hears every event: with several of them each would write."""
    await add_node(store, node())
    await request(store, 1, INSTALL)
    await claim(store, "holder")

    async def written_by(owner: str, sequence: int) -> int:
        heard = {INTENT: Progress(phase="downloading", attempt=1, sequence=sequence)}
        await store.transaction(lambda c: intents.set_progress(c, heard, owner, db.now(c)))
        kept = await store.transaction(lambda c: operations.intent(c, INTENT))
        assert kept is not None
        return kept.progress.sequence if kept.progress else 0

    assert await written_by("other", 1) == 0
    assert await written_by("holder", 2) == 2
    assert await written_by("other", 3) == 2
    await store.transaction(lambda c: claims.renew(c, "holder", db.now(c) - 1))
    assert await written_by("other", 4) == 4


async def test_an_outcome_is_kept_with_the_intent(store: Store) -> None:
    await add_node(store, node())
    await request(store, 1, INSTALL)
    [running] = await claim(store)
    outcome = Outcome(address="h:1", nonce="n", stopped=("m#0",))
    await store.transaction(lambda c: operations.apply(c, running, Change(kind="succeed", now=9.0, outcome=outcome)))
    kept = await store.transaction(lambda c: operations.intent(c, INTENT))
    assert kept is not None
    assert (kept.state, kept.outcome, kept.owner) == ("succeeded", outcome, "")


async def test_operations_are_listed_newest_first_with_their_intents_in_order(store: Store) -> None:
    await add_node(store, node())
    for number in (1, 2, 3):
        await request(store, number, RemoveBackend(backend=str(number), directory=str(number)))
    assert [one.id for one in await store.transaction(lambda c: operations.recent(c, 2))] == ["op-3", "op-2"]

    def more(connection: Connection) -> list[str]:
        for number in (9, 8):
            action = RemoveBackend(backend=str(number), directory=str(number))
            add_intent(connection, OPERATION, NODE, action, IntentId(f"intent-{number}"), 1.0)
        return [one.id for one in operations.intents_of(connection, [OPERATION])[OPERATION]]

    assert await store.transaction(more) == ["intent-1", "intent-9", "intent-8"]


async def test_steering_ends_once_with_its_reason(store: Store) -> None:
    load = operation(1, kind="load", is_steered=True)
    await store.transaction(lambda c: operations.insert(c, load))
    assert await store.transaction(operations.steered) == [load]
    await store.transaction(lambda c: operations.end_steering(c, OPERATION, "backend_exited", "cannot start"))
    assert await store.transaction(operations.steered) == []
    last = await store.transaction(lambda c: operations.last_of(c, "load", "llama-cpp"))
    assert last == msgspec.structs.replace(
        load, is_steered=False, error_code="backend_exited", error_message="cannot start"
    )


async def test_a_lease_is_one_owners_until_it_ends_or_is_released(store: Store) -> None:
    async def acquire(owner: str, now: float) -> bool:
        return await store.transaction(lambda c: leases.acquire(c, "load:m#0", owner, now, now + 10))

    assert await acquire("a", 100)
    assert not await acquire("b", 105)
    assert await acquire("a", 105)
    assert not await acquire("b", 114)
    assert await acquire("b", 116)
    await store.transaction(lambda c: leases.release(c, "load:m#0", "a"))
    assert not await acquire("a", 117)
    await store.transaction(lambda c: leases.release(c, "load:m#0", "b"))
    assert await acquire("a", 117)


async def test_only_leases_that_expired_before_then_are_deleted(store: Store) -> None:
    assert await store.transaction(lambda c: leases.acquire(c, "load:old", "a", 50.0, 99.0))
    assert await store.transaction(lambda c: leases.acquire(c, "load:new", "a", 50.0, 101.0))
    await store.transaction(lambda c: leases.prune(c, 100.0))
    assert await store.transaction(lambda c: leases.acquire(c, "load:old", "b", 60.0, 200.0)), "nobody has it"
    assert not await store.transaction(lambda c: leases.acquire(c, "load:new", "b", 60.0, 200.0))


async def test_a_replica_takes_the_place_of_the_one_before_it(store: Store) -> None:
    first = Replica(
        node_id=NodeId("n"), model="m", slot=0, revision="r", address="h:1", nonce="1", backend="x", key="secret"
    )
    await store.transaction(lambda c: replicas.put(c, first, 1.0))
    second = msgspec.structs.replace(first, address="h:2", nonce="2")
    await store.transaction(lambda c: replicas.put(c, second, 2.0))
    assert await store.transaction(replicas.every) == [second]
    assert await store.transaction(lambda c: replicas.remove_all_on(c, NodeId("n"))) == 1
    assert await store.transaction(lambda c: replicas.of_model(c, "m")) == []


async def test_a_model_is_added_once_replaced_and_found_by_its_endpoint(store: Store) -> None:
    model = Model(name="a", backend="b", files=(), config={"x": {"endpoint": "no"}})
    far = Model(name="far", backend="", files=(), endpoint="10.0.0.1:80")
    assert await store.transaction(lambda c: models.add(c, model, 5.0))
    assert not await store.transaction(lambda c: models.add(c, Model(name="a", backend="other", files=()), 6.0))
    assert await store.transaction(lambda c: models.add(c, far, 7.0))
    assert await store.transaction(lambda c: models.get(c, "a")) == model
    assert await store.transaction(models.that_run_elsewhere) == [far]
    changed = Model(name="a", backend="c", files=())
    await store.transaction(lambda c: models.replace(c, changed))
    assert await store.transaction(lambda c: (models.get(c, "a"), models.created_at(c, "a"))) == (changed, 5.0)


async def test_models_and_tokens_are_read_as_they_were_written(store: Store) -> None:
    model = Model(name="a/b c#1", backend="llama-cpp", files=(ModelFile("f", "builtin:f", "ab", 3),))
    await store.transaction(lambda c: models.insert(c, model, 5.0))
    assert await store.transaction(lambda c: models.get(c, "a/b c#1", lock=True)) == model
    assert await store.transaction(models.every) == [(model, 5.0)]
    row = TokenRow("t", "admin", "up", "hash", 1.0)
    await store.transaction(lambda c: keys.insert(c, row))
    assert await store.transaction(keys.every) == [row]
    await store.transaction(lambda c: keys.remove_named(c, "admin", "up"))
    assert await store.transaction(keys.every) == []
