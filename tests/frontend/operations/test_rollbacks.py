"""Rollbacks: each node returns to the version that its worker has kept, and those without one are left out."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from tests.frontend.world import World, installed, pointer

from enginehouse.core import wire
from enginehouse.core.action import InstallBackend
from enginehouse.core.errors import Conflict, Invalid, NotFound
from enginehouse.core.intent import Outcome
from enginehouse.core.node import Node
from enginehouse.core.operation import BackendRequest
from enginehouse.core.views import OperationView

NEW, OLD = "sha256:new", "sha256:old"
IMAGE = "registry.example/image:latest"
UPGRADED = replace(installed("image", NEW), uri=IMAGE, version="2", previous_digest=OLD, previous_version="1")


async def having(world: World, name: str, *, previous: bool = True) -> Node:
    node = await world.join(name)
    one = UPGRADED if previous else replace(UPGRADED, previous_digest="", previous_version="")
    await world.report(node.id, backends=(one,))
    return node


def targets(view: OperationView) -> list[str]:
    return [row.node_name for row in view.nodes]


async def action_of(world: World, view: OperationView) -> InstallBackend:
    action = (await world.intent(view)).action
    assert isinstance(action, InstallBackend)
    return action


async def test_each_node_returns_to_its_own_previous_version(world: World) -> None:
    await having(world, "first")
    view = await world.request("rollback", name="image")
    action = await action_of(world, view)
    assert (action.returns, action.resolved.digest, action.resolved.version) == (True, OLD, "1")
    assert (action.resolved.directory, action.resolved.uri) == ("image", IMAGE)
    assert not action.upgrade
    assert (view.kind, view.nodes[0].action) == ("rollback", "return image to 1")
    await world.dispatcher.step()
    (sent,) = [one for one in world.bus.take() if ".backend." in one.subject]
    assert wire.decode(sent.payload, wire.BackendInstallRequest, "install").resolved == action.resolved
    await world.reply(await world.intent(view), Outcome(digest=OLD))
    assert (await world.board.view(view.jobID)).status == "succeeded"


async def test_a_second_rollback_before_the_next_report_undoes_the_first(world: World) -> None:
    await having(world, "first")
    view = await world.request("rollback", name="image")
    await world.dispatcher.step()
    await world.reply(await world.intent(view), Outcome(digest=OLD))
    again = await action_of(world, await world.request("rollback", name="image"))
    assert (again.resolved.digest, again.resolved.version) == (NEW, "2")


async def test_a_rollback_after_an_upgrade_that_no_report_shows_yet_returns_to_what_was_there(world: World) -> None:
    world.registry.digests[IMAGE] = "sha256:third"
    await having(world, "first")
    view = await world.request("upgrade", name="image")
    await world.dispatcher.step()
    await world.reply(await world.intent(view), Outcome(digest="sha256:third"))
    back = await action_of(world, await world.request("rollback", name="image"))
    assert (back.resolved.digest, back.resolved.version) == (NEW, "2")


async def test_nodes_that_cannot_return_are_left_out_with_the_reason(world: World) -> None:
    await having(world, "first")
    await having(world, "fresh", previous=False)
    await world.join("empty")
    go = await world.join("go", is_localai=True)
    await world.report(go.id, backends=(UPGRADED,))
    view = await world.request("rollback", name="image")
    assert targets(view) == ["first"]
    assert {one.node_name: one.reason for one in view.excluded} == {
        "fresh": "it has kept no previous version of image",
        "empty": "image is not installed there",
        "go": "LocalAI's workers keep no previous version",
    }


async def test_a_rollback_that_no_node_can_do_is_refused_and_stored_nowhere(world: World) -> None:
    await having(world, "fresh", previous=False)
    with pytest.raises(Conflict, match=r"cannot roll back image: .*fresh: it has kept no previous version of image"):
        await world.request("rollback", name="image")
    with pytest.raises(NotFound):
        await world.request("rollback", name="nobody-knows-it")
    with pytest.raises(Invalid, match="cannot roll back image by force"):
        await world.request("rollback", name="image", force=True)
    assert await world.board.page(9) == []


async def test_a_meta_name_returns_the_build_behind_it_and_keeps_its_pointer(world: World) -> None:
    node = await world.join("first")
    await world.report(node.id, backends=(UPGRADED, pointer("fast", "image")))
    action = await action_of(world, await world.request("rollback", name="fast"))
    assert (action.backend, action.resolved.directory, action.resolved.meta) == ("fast", "image", "fast")


async def test_a_retry_returns_to_the_same_version_although_the_tag_has_moved(world: World) -> None:
    await having(world, "first")
    view = await world.request("rollback", name="image")
    before = await action_of(world, view)
    world.registry.digests[IMAGE] = "sha256:third"
    again = await world.store.transaction(
        lambda connection: world.targets.again(connection, [(view.nodes[0].node_id, before)])
    )
    assert again == [(view.nodes[0].node_id, before)]


async def test_a_plan_says_that_nothing_is_downloaded(world: World) -> None:
    await having(world, "first")
    plan = await world.planner.plan(BackendRequest(kind="rollback", name="image"))
    (row,) = plan.nodes
    assert (row.does, row.version, row.installed_version) == ("roll back", "1", "2")
    assert plan.download_bytes == 0
