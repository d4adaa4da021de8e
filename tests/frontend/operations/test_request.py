"""Requests to many nodes: who gets them, how many at once, under which key, and which version."""

from __future__ import annotations

import asyncio

import pytest
from sqlalchemy import event
from tests.frontend.world import GALLERY, UNREAD, Time, World, installed, registration

from enginehouse.core import wire
from enginehouse.core.action import InstallBackend, StopReplica
from enginehouse.core.artifact import Artifact
from enginehouse.core.backend import InstalledBackend, Resolved
from enginehouse.core.errors import Conflict, Invalid, NotFound, Unavailable
from enginehouse.core.ids import IntentId, NodeId, OperationId
from enginehouse.core.intent import Outcome
from enginehouse.core.node import Node
from enginehouse.core.operation import BackendRequest, Operation
from enginehouse.core.views import NodeRow, OperationView
from enginehouse.frontend.acceptance import Requester
from enginehouse.frontend.operations.versions import Versions
from enginehouse.store import operations
from enginehouse.store.db import Connection
from enginehouse.store.supersession import add_intent

ME = Requester(author="me")
IMAGE = "registry.example/image:latest"


def rows(view: OperationView) -> list[NodeRow]:
    assert isinstance(view.nodes, list)
    return view.nodes


def request(kind: str, name: str, **fields: object) -> BackendRequest:
    return BackendRequest(kind=kind, name=name, **fields)  # type: ignore[arg-type]


async def having(world: World, *names: str, backend: str = "image", digest: str = "sha256:old") -> list[Node]:
    found = await world.join_many(*names)
    for node in found:
        await world.report(node.id, backends=(installed(backend, digest),))
    return found


# Lanes -------------------------------------------------------------------------------------------


async def test_an_upgrade_runs_on_a_quarter_of_the_fleet_at_a_time(world: World) -> None:
    world.registry.digests[IMAGE] = "sha256:new"
    await having(world, *(f"node-{number}" for number in range(8)))
    view = await world.request("upgrade", name="image")
    sent: list[str] = []
    for _ in range(4):
        await world.dispatcher.step()
        await world.dispatcher.step()
        now = [one.subject.split(".")[1] for one in world.bus.take()]
        assert len(now) == 2
        sent += now
        for position, row in enumerate(rows(view)):
            if row.node_id in now:
                await world.reply(await world.intent(view, position), Outcome(digest="sha256:new"))
    assert len(set(sent)) == 8
    assert (await world.board.view(view.jobID)).status == "succeeded"


async def test_an_install_goes_to_all_at_once_unless_somebody_says_how_many(world: World) -> None:
    await world.join_many(*(f"node-{number}" for number in range(6)))
    await world.install()
    await world.dispatcher.step()
    assert len(world.bus.take()) == 6
    await world.operations.request(request("install", "other", max_parallel=2), ME)
    await world.dispatcher.step()
    assert len(world.bus.take()) == 2


async def test_a_node_that_is_away_holds_no_place_in_the_lane(world: World) -> None:
    world.registry.digests[IMAGE] = "sha256:new"
    first, *_ = await having(world, "first", "second", "third", "fourth")
    await world.set_health(first.id, "offline")
    view = await world.request("upgrade", name="image")
    await world.dispatcher.step()
    (sent,) = world.bus.take()
    second_id = sent.subject.split(".")[1]
    assert second_id != first.id
    await world.set_health(NodeId(second_id), "offline")
    await world.dispatcher.step()
    assert len(world.bus.take()) == 1, "what runs on a node that is gone lets the next one in"
    assert view.status == "queued"


# Keys --------------------------------------------------------------------------------------------


async def test_the_same_key_is_the_same_operation(world: World) -> None:
    await world.join("first")
    asked = request("install", "llama-cpp")
    made = [await world.operations.request(asked, Requester(author="me", key="key-1")) for _ in range(3)]
    assert len(set(made)) == 1
    assert await world.operations.request(asked, Requester(author="me", key="key-2")) not in made
    assert len(await world.board.page(9)) == 2


async def test_two_that_ask_at_once_under_one_key_get_one_operation(world: World) -> None:
    await world.join("first")
    async with asyncio.TaskGroup() as group:
        asked = [
            group.create_task(
                world.operations.request(request("install", "llama-cpp"), Requester(author="me", key="key-1"))
            )
            for _ in range(10)
        ]
    assert len({task.result() for task in asked}) == 1
    assert len(await world.board.page(9)) == 1


async def test_a_key_is_for_one_request_and_one_caller(world: World) -> None:
    await world.join("first")
    mine = await world.operations.request(request("install", "llama-cpp"), Requester(author="me", key="key-1"))
    with pytest.raises(Invalid) as refused:
        await world.operations.request(request("install", "other"), Requester(author="me", key="key-1"))
    assert refused.value.code == "idempotency_mismatch"
    other = Requester(author="somebody else", key="key-1")
    assert await world.operations.request(request("install", "llama-cpp"), other) != mine
    with pytest.raises(Invalid):
        await world.operations.request(request("install", "llama-cpp"), Requester(author="me", key="k" * 256))


async def test_a_key_is_forgotten_after_a_day(world: World) -> None:
    await world.join("first")
    before = await world.operations.request(request("install", "llama-cpp"), Requester(author="me", key="key-1"))
    world.time.passed += 24 * 3600 + 1
    assert (
        await world.operations.request(request("install", "llama-cpp"), Requester(author="me", key="key-1")) != before
    )


async def test_a_retry_under_a_key_is_one_retry(world: World) -> None:
    await world.join("first")
    view = await world.install()
    await world.cancellation.cancel(view.jobID, None, "me")
    under_key = Requester(author="me", key="again")
    assert await world.cancellation.retry(view.jobID, None, under_key) == await world.cancellation.retry(
        view.jobID, None, under_key
    )


# Targets -----------------------------------------------------------------------------------------


async def test_those_left_out_are_named_with_the_reason(world: World) -> None:
    await world.join("first")
    await world.join("pending", approve=False)
    agent = await world.nodes.register(registration("helper", node_type="agent", capability=""))
    await world.nodes.approve(agent.node.id)
    arm = await world.nodes.register(registration("small", platform="linux/arm64"))
    await world.nodes.approve(arm.node.id)
    view = await world.install(name="other")
    assert [row.node_name for row in rows(view)] == ["first"]
    reasons = {one.node_name: one.reason for one in view.excluded}
    assert reasons["pending"] == "it waits for approval"
    assert reasons["helper"] == "an agent node takes no backends"
    assert "linux/arm64" in reasons["small"]


async def test_an_upgrade_goes_only_where_the_backend_is(world: World) -> None:
    world.registry.digests[IMAGE] = "sha256:new"
    await having(world, "has-it")
    await world.join("has-it-not")
    view = await world.request("upgrade", name="image")
    assert [row.node_name for row in rows(view)] == ["has-it"]
    assert {one.node_name: one.reason for one in view.excluded} == {"has-it-not": "image is not installed there"}
    for unknown in ("other", "nobody-knows-it"):
        with pytest.raises(NotFound):
            await world.request("upgrade", name=unknown)
    assert len(await world.board.page(9)) == 1


@pytest.mark.parametrize("kind", ["install", "upgrade", "delete"])
async def test_a_frontend_that_has_not_read_a_gallery_yet_asks_for_patience_instead_of_denying(
    world: World, time: Time, kind: str
) -> None:
    world.registry.digests[IMAGE] = "sha256:new"
    await world.join("has-it-not")
    await having(world, "has-it")
    new = World(world.store, time, owner="new", galleries=(GALLERY, UNREAD))
    with pytest.raises(Unavailable) as caught:
        await new.request(kind, name="image")
    assert (caught.value.code, caught.value.retry_after_seconds) == ("gallery_loading", 2.0)
    with pytest.raises(NotFound):
        await new.request(kind, name="builtin@nothing")
    assert await world.board.page(9) == []


async def test_a_request_for_an_address_keeps_all_of_it(world: World) -> None:
    await world.join("first")
    asked = request("install", "mine", uri="registry.example/mine:1", alias="short", sha256="")
    operation_id = await world.operations.request(asked, ME)
    view = await world.board.view(operation_id)
    assert (view.asked.uri, view.asked.alias) == ("registry.example/mine:1", "short")
    await world.dispatcher.step()
    (sent,) = world.bus.take()
    message = wire.decode(sent.payload, wire.BackendInstallRequest, "it")
    # LocalAI's workers look for a backend called `backend` after they have installed `name`.
    assert (message.backend, message.name, message.uri, message.alias) == (
        "mine",
        "mine",
        "registry.example/mine:1",
        "short",
    )
    assert message.resolved is not None
    assert message.resolved.directory == "mine"


@pytest.mark.parametrize(
    "asked",
    [
        request("install", "mine", uri="file:///etc"),
        request("install", "mine", uri="/some/where"),
        request("install", "gallery@mine", uri="registry.example/mine:1"),
        request("upgrade", "mine", uri="registry.example/mine:1"),
        request("install", "../mine", uri="registry.example/mine:1"),
        request("install", "mine", uri="registry.example/" + "m" * 3000),
        request("install", "mine", alias="short"),
        request("install", "mine", max_parallel=-1),
    ],
)
async def test_an_address_that_is_none_is_refused_before_anything_is_stored(
    world: World, asked: BackendRequest
) -> None:
    await world.join("first")
    with pytest.raises(Invalid):
        await world.operations.request(asked, ME)
    assert await world.board.page(9) == []


# Versions ----------------------------------------------------------------------------------------


async def test_a_fleet_gets_one_version_however_the_tag_moves(world: World) -> None:
    world.registry.digests[IMAGE] = "sha256:one"
    await world.join_many("first", "second")
    view = await world.install(name="image")
    assert world.registry.asked == [(IMAGE, "linux/amd64")], "asked once for all nodes of a kind"
    world.registry.digests[IMAGE] = "sha256:two"
    for position in range(2):
        action = (await world.intent(view, position)).action
        assert isinstance(action, InstallBackend)
        assert action.resolved.digest == "sha256:one"


async def test_a_registry_that_does_not_answer_leaves_it_to_the_workers(world: World) -> None:
    await world.join("first")
    view = await world.install(name="image")
    action = (await world.intent(view)).action
    assert isinstance(action, InstallBackend)
    assert action.resolved.digest == ""


async def test_a_registry_that_does_not_answer_is_not_waited_for_by_everybody(world: World) -> None:
    await world.join("first")
    for _ in range(3):
        await world.install(name="image")
    assert len(world.registry.asked) == 1
    world.time.passed += 16
    world.registry.digests[IMAGE] = "sha256:new"
    view = await world.install(name="image", force=True)
    action = (await world.intent(view)).action
    assert isinstance(action, InstallBackend)
    assert action.resolved.digest == "sha256:new"
    await world.upgrades.check()


async def test_to_install_what_is_there_changes_nothing(world: World) -> None:
    world.registry.digests[IMAGE] = "sha256:new"
    (node,) = await having(world, "first")
    view = await world.install(name="image")
    await world.report(node.id, sequence=2, backends=(installed("image", "sha256:old"),))
    assert (await world.intent(view)).state == "succeeded"
    forced = await world.install(name="image", force=True)
    action = (await world.intent(forced)).action
    assert isinstance(action, InstallBackend)
    assert action.resolved.digest == "sha256:new"


async def test_an_upgrade_means_what_is_there_now_however_short_ago_somebody_asked(world: World) -> None:
    world.registry.digests[IMAGE] = "sha256:one"
    await world.join("empty")
    await world.install("empty", name="image")
    await having(world, "first", digest="sha256:one")
    world.registry.digests[IMAGE] = "sha256:two"
    view = await world.request("upgrade", name="image")
    action = (await world.intent(view)).action
    assert isinstance(action, InstallBackend)
    assert action.resolved.digest == "sha256:two"


async def test_every_request_means_what_its_tag_means_now(world: World) -> None:
    """Between two of them somebody may have deleted the backend and pushed a new version, and nobody here knows."""
    world.registry.digests[IMAGE] = "sha256:one"
    await world.join_many("first", "second")
    assert (await wanted(world, await world.install("first", name="image"))).resolved.digest == "sha256:one"
    world.registry.digests[IMAGE] = "sha256:two"
    assert (await wanted(world, await world.install("second", name="image"))).resolved.digest == "sha256:two"


async def test_of_two_questions_under_way_the_later_one_counts() -> None:
    """An answer that was long on its way is not the newest."""
    answers: list[asyncio.Future[str]] = []
    is_asked = asyncio.Event()

    async def ask(uri: str, platform: str, _sha256: str) -> Artifact:
        answers.append(asyncio.get_running_loop().create_future())
        is_asked.set()
        return Artifact(uri=uri, digest=await answers[-1], platform=platform, layers=())

    time = Time()
    versions = Versions(ask, time)
    build = Resolved(directory="image", uri=IMAGE, digest="", platform="linux/amd64")
    async with asyncio.timeout(10), asyncio.TaskGroup() as group:
        first = group.create_task(versions.resolve([build]))
        await is_asked.wait()
        is_asked.clear()
        time.passed += 1
        second = group.create_task(versions.resolve([build]))
        await is_asked.wait()
        answers[1].set_result("sha256:new")
        await second
        answers[0].set_result("sha256:old")
        await first
    assert versions.pinned(build).digest == "sha256:new"


async def test_an_upgrade_closes_only_on_the_wanted_digest(world: World) -> None:
    world.registry.digests[IMAGE] = "sha256:new"
    (node,) = await having(world, "first")
    view = await world.request("upgrade", name="image")
    await world.report(node.id, sequence=2, backends=(installed("image", "sha256:old"),))
    assert (await world.intent(view)).is_open
    await world.report(node.id, sequence=3, backends=(installed("image", "sha256:new"),))
    assert (await world.intent(view)).state == "succeeded"


async def test_what_can_be_upgraded_is_told_per_node_and_is_nothing_afterwards(world: World) -> None:
    world.registry.digests[IMAGE] = "sha256:new"
    first, second = await having(world, "first", "second")
    await world.report(second.id, sequence=2, backends=(installed("image", "sha256:new"),))
    found = await world.upgrades.check()
    assert [(row.node_name, row.installed_digest, row.available_digest) for row in found["image"].nodes] == [
        ("first", "sha256:old", "sha256:new")
    ]
    assert isinstance(found["image"].node_drift, list)
    assert len(found["image"].node_drift) == 1
    await world.report(first.id, sequence=2, backends=(installed("image", "sha256:new"),))
    assert await world.upgrades.known() == {}
    assert await world.upgrades.check() == {}


async def test_drift_alone_is_no_upgrade(world: World) -> None:
    first, second, third = await having(world, "first", "second", "third")
    await world.report(third.id, sequence=2, backends=(installed("image", "sha256:odd"),))
    assert await world.upgrades.check() == {}, "nobody knows which one is newer"
    assert first.id != second.id


async def test_a_plan_says_what_each_node_would_do_and_does_nothing(world: World) -> None:
    world.registry.digests[IMAGE] = "sha256:new"
    await having(world, "old")
    await having(world, "current", digest="sha256:new")
    await world.join("none")
    planned = await world.planner.plan(request("upgrade", "image"))
    assert [(row.node_name, row.does) for row in planned.nodes] == [("current", "nothing"), ("old", "upgrade")]
    assert planned.nodes[1].download_bytes == 1000
    assert [one.node_name for one in planned.excluded] == ["none"]
    installs = await world.planner.plan(request("install", "image"))
    assert [(row.node_name, row.does) for row in installs.nodes] == [
        ("current", "nothing"),
        ("none", "install"),
        ("old", "nothing"),
    ]
    assert await world.board.page(9) == []
    with pytest.raises(NotFound):
        await world.planner.plan(request("install", "nobody-knows-it"))


# Draining ----------------------------------------------------------------------------------------


async def test_a_drained_node_gets_nothing_new_until_it_is_resumed(world: World) -> None:
    node = await world.join("first")
    drain = await world.board.view(await world.operations.request_drain("first", ME))
    assert (drain.kind, drain.status) == ("drain", "succeeded"), "nothing ran there"
    view = await world.install()
    await world.dispatcher.step()
    assert world.bus.take() == []
    (row,) = rows(await world.board.view(view.jobID))
    assert (row.status, row.reason) == ("queued", "draining")
    assert (await world.nodes.get("first"))[0].status == "draining"
    await world.nodes.resume("first")
    await world.dispatcher.step()
    assert len(world.bus.take()) == 1
    assert node.id == row.node_id


async def test_a_drained_node_gets_stops(world: World) -> None:
    node = await world.join("first")
    await world.operations.request_drain("first", ME)
    made = Operation(id=OperationId("stop"), kind="unload", name="m", author="me", created_at=1.0, targets=(node.id,))

    def add(connection: Connection) -> None:
        operations.insert(connection, made)
        add_intent(connection, made.id, node.id, StopReplica(model="m", slot=0), IntentId("i"), 1.0)

    await world.store.transaction(add)
    await world.dispatcher.step()
    assert [message.subject for message in world.bus.take()] == [f"nodes.{node.id}.model.stop"]


async def test_draining_survives_going_away_and_coming_back(world: World) -> None:
    node = await world.join("first")
    await world.operations.request_drain("first", ME)
    await world.set_health(node.id, "offline")
    await world.join("first", approve=False)
    assert (await world.nodes.get("first"))[0].status == "draining"


async def test_no_node_can_take_it_names_every_reason(world: World) -> None:
    await world.join("first")
    with pytest.raises(Conflict) as refused:
        await world.install(name="cuda-only")
    assert "first" in refused.value.message


# What intents have changed since a report ----------------------------------------------------------


async def ended(world: World, view: OperationView, outcome: Outcome) -> None:
    """Send what is due, and have the first node of an operation answer."""
    await world.dispatcher.step()
    await world.reply(await world.intent(view), outcome)


async def wanted(world: World, view: OperationView) -> InstallBackend:
    action = (await world.intent(view)).action
    assert isinstance(action, InstallBackend)
    return action


@pytest.mark.parametrize("is_done", [False, True])
async def test_an_install_after_a_delete_brings_what_the_tag_means_now(world: World, is_done: bool) -> None:
    world.registry.digests[IMAGE] = "sha256:old"
    await having(world, "first")
    await world.install(name="image")  # so that this frontend has asked a moment ago
    world.registry.digests[IMAGE] = "sha256:new"
    deleted = await world.request("delete", name="image")
    if is_done:
        await ended(world, deleted, Outcome())
    action = await wanted(world, await world.install(name="image"))
    assert (action.resolved.digest, action.keep) == ("sha256:new", False)


async def test_a_rollback_on_a_node_that_is_away_is_not_undone_by_an_install(world: World) -> None:
    """The report is from before: the node has another version than it says, and the one it says may be gone."""
    world.registry.digests[IMAGE] = "sha256:three"
    (node,) = await having(world, "first", digest="sha256:two")
    await world.set_health(node.id, "offline")
    view = await world.install(name="image")
    action = await wanted(world, view)
    assert (action.keep, action.resolved.digest) == (True, "sha256:three")
    await world.report(node.id, sequence=2, backends=(installed("image", "sha256:one"),))
    assert (await world.intent(view)).state == "succeeded"


async def test_an_install_joins_an_upgrade_that_is_under_way(world: World) -> None:
    world.registry.digests[IMAGE] = "sha256:new"
    await having(world, "first")
    upgrade = await world.request("upgrade", name="image")
    install = await world.install(name="image")
    assert (await world.intent(install)).id == (await world.intent(upgrade)).id


async def test_an_upgrade_behind_an_install_from_an_address_is_of_that_address(world: World) -> None:
    (node,) = await having(world, "first", backend="mine", digest="sha256:old")
    known = InstalledBackend(name="mine", is_system=False, is_meta=False, digest="sha256:old", uri="r.example/old:1")
    await world.report(node.id, sequence=2, backends=(known,))
    world.registry.digests |= {"r.example/old:1": "sha256:older", "r.example/new:1": "sha256:newer"}
    asked = request("install", "mine", uri="r.example/new:1")
    await world.operations.request(asked, ME)
    view = await world.request("upgrade", name="mine")
    action = await wanted(world, view)
    assert (action.resolved.uri, action.resolved.digest) == ("r.example/new:1", "sha256:newer")


async def test_what_was_deleted_cannot_be_upgraded_and_can_be_deleted_again(world: World) -> None:
    await having(world, "first")
    deleted = await world.request("delete", name="image")
    again = await world.request("delete", name="image")
    assert (await world.intent(again)).id == (await world.intent(deleted)).id
    await ended(world, deleted, Outcome())
    with pytest.raises(NotFound):
        await world.request("upgrade", name="image")
    assert (await world.board.view((await world.request("delete", name="image")).jobID)).status == "queued"


async def test_an_upgrade_replaces_a_delete_that_has_not_happened_yet(world: World) -> None:
    world.registry.digests[IMAGE] = "sha256:new"
    await having(world, "first")
    deleted = await world.request("delete", name="image")
    upgrade = await world.request("upgrade", name="image")
    assert (await world.intent(deleted)).state == "superseded"
    assert (await wanted(world, upgrade)).resolved.digest == "sha256:new"


async def test_a_retry_asks_anew_what_a_tag_means(world: World) -> None:
    world.registry.digests[IMAGE] = "sha256:gone"
    (node,) = await world.join_many("first")
    view = await world.install(name="image")
    await ended(world, view, Outcome(code="not_found", message="cannot find sha256:gone"))
    world.registry.digests[IMAGE] = "sha256:here"
    again = await world.board.view(await world.cancellation.retry(view.jobID, None, ME))
    action = await wanted(world, again)
    assert (action.resolved.digest, action.keep) == ("sha256:here", False)
    await ended(world, again, Outcome(code="not_found", message="cannot find it either"))
    # And what somebody has brought meanwhile is kept.
    await world.report(node.id, backends=(installed("image", "sha256:other"),))
    last = await world.board.view(await world.cancellation.retry(again.jobID, None, ME))
    assert (await wanted(world, last)).keep


async def test_a_retry_keeps_its_version_where_the_registry_does_not_answer(world: World) -> None:
    world.registry.digests[IMAGE] = "sha256:one"
    await world.join("first")
    view = await world.install(name="image")
    await ended(world, view, Outcome(code="not_found", message="cannot find it"))
    del world.registry.digests[IMAGE]
    again = await world.board.view(await world.cancellation.retry(view.jobID, None, ME))
    assert (await wanted(world, again)).resolved.digest == "sha256:one"


async def test_a_request_for_more_nodes_is_not_more_statements(world: World) -> None:
    statements: list[str] = []

    def note(_connection: object, _cursor: object, statement: str, *_: object) -> None:
        statements.append(statement)

    counts = []
    event.listen(world.store._engine, "before_cursor_execute", note)
    try:
        for name, size in (("engine", 5), ("other", 15)):
            await world.join_many(*(f"{name}-{number}" for number in range(size)))
            statements.clear()
            await world.install(name=name)
            counts.append(len(statements))
    finally:
        event.remove(world.store._engine, "before_cursor_execute", note)
    assert counts[0] == counts[1]
