"""Requests for the same directory and the same build are the same work, whatever name each used; every name that was
asked for gets its pointer.
"""

from __future__ import annotations

import msgspec
import pytest
from tests.frontend.world import MODEL, World, installed, pointer

from enginehouse.core import wire
from enginehouse.core.action import InstallBackend, PullModel, RemoveBackend, StartReplica
from enginehouse.core.intent import Intent, Outcome
from enginehouse.core.node import Node
from enginehouse.core.views import OperationView
from enginehouse.store import models, operations

META, BUILD = "llama-cpp", "engine"
DONE = Outcome(digest="sha256:1")


async def sent(world: World, node: Node) -> Intent:
    """Send what is due, and what is then open on the node."""
    await world.dispatcher.step()
    (intent,) = [one for one in await world.open_intents(node.id) if isinstance(one.action, InstallBackend)]
    return intent


async def status(world: World, view: OperationView) -> str:
    return (await world.board.view(view.jobID)).status


def names(intent: Intent) -> tuple[str, str]:
    assert isinstance(intent.action, InstallBackend)
    return intent.action.resolved.directory, intent.action.resolved.meta


@pytest.mark.parametrize("is_sent", [False, True])
async def test_the_concrete_name_joins_an_open_install_of_the_meta_name(world: World, is_sent: bool) -> None:
    node = await world.join("first")
    first = await world.install(name=META)
    if is_sent:
        await world.dispatcher.step()
    second = await world.install(name=BUILD)
    assert (await world.intent(second)).id == (await world.intent(first)).id
    install = await sent(world, node)
    await world.reply(install, DONE)
    assert await world.open_intents(node.id) == []
    assert [await status(world, one) for one in (first, second)] == ["succeeded", "succeeded"]


@pytest.mark.parametrize("is_sent", [False, True])
async def test_the_meta_name_joins_an_open_install_of_the_concrete_one_and_gets_its_pointer(
    world: World, is_sent: bool
) -> None:
    node = await world.join("first")
    first = await world.install(name=BUILD)
    if is_sent:
        await world.dispatcher.step()
    second, third = [await world.install(name=META) for _ in range(2)]
    install = await sent(world, node)
    assert names(install) == (BUILD, "")
    await world.reply(install, DONE)
    # Whoever asked for the build alone is done; the others are when their name leads to it.
    assert [await status(world, one) for one in (first, second, third)] == ["succeeded", "queued", "queued"]
    follow = await sent(world, node)
    assert names(follow) == (BUILD, META)
    assert follow.generation > install.generation
    await world.reply(follow, DONE)
    assert [await status(world, one) for one in (first, second, third)] == ["succeeded"] * 3
    assert await world.open_intents(node.id) == []


@pytest.mark.parametrize("by_report", [False, True])
async def test_no_watcher_is_told_of_the_end_before_the_pointer_is_there(world: World, by_report: bool) -> None:
    node = await world.join("first")
    await world.install(name=BUILD)
    second = await world.install(name=META)
    install = await sent(world, node)
    world.time.passed += 1
    with world.events.watch() as watcher:
        if by_report:
            digest = install.action.resolved.digest  # type: ignore[union-attr]
            await world.report(node.id, backends=(installed(BUILD, digest),))
        else:
            await world.reply(install, DONE)
        await world.board.step()
        told = [msgspec.json.decode(one.body) for one in watcher.take() if one.id == second.jobID]
        assert told
        assert {one["status"] for one in told} <= {"queued", "running"}
        world.time.passed += 1
        await world.reply(await sent(world, node), DONE)
        await world.board.step()
        told = [msgspec.json.decode(one.body) for one in watcher.take() if one.id == second.jobID]
        assert told[-1]["status"] == "succeeded"


async def test_a_pointer_is_brought_also_where_the_reply_was_lost_and_only_a_report_tells(world: World) -> None:
    node = await world.join("first")
    await world.install(name=BUILD)
    second = await world.install(name=META)
    install = await sent(world, node)
    digest = install.action.resolved.digest  # type: ignore[union-attr]
    await world.report(node.id, backends=(installed(BUILD, digest),))
    follow = await sent(world, node)
    assert names(follow) == (BUILD, META)
    await world.report(node.id, sequence=2, backends=(installed(BUILD, digest),))
    assert (await world.intent_now(follow)).is_open, "the build alone does not prove it"
    await world.report(node.id, sequence=3, backends=(installed(BUILD, digest), pointer(META, BUILD)))
    assert await status(world, second) == "succeeded"
    # From now on the meta name can be upgraded.
    upgrade = await world.request("upgrade", name=META)
    assert await status(world, upgrade) == "queued"


async def test_a_pointer_that_cannot_be_written_is_the_failure_of_who_asked_for_it(world: World) -> None:
    node = await world.join("first")
    first = await world.install(name=BUILD)
    second = await world.install(name=META)
    await world.reply(await sent(world, node), DONE)
    await world.reply(await sent(world, node), Outcome(code="conflict", message="a backend of that name is installed"))
    assert [await status(world, one) for one in (first, second)] == ["succeeded", "partial"]


async def test_who_has_cancelled_gets_no_pointer(world: World) -> None:
    node = await world.join("first")
    await world.install(name=BUILD)
    second = await world.install(name=META)
    await world.cancellation.cancel(second.jobID, None, "me")
    await world.reply(await sent(world, node), DONE)
    assert await world.open_intents(node.id) == []
    assert await status(world, second) == "cancelled"


async def test_a_forced_install_that_was_joined_is_not_forced_again_for_a_name(world: World) -> None:
    node = await world.join("first")
    await world.install(name=BUILD, force=True)
    await world.install(name=META)
    await world.reply(await sent(world, node), DONE)
    follow = await sent(world, node)
    assert isinstance(follow.action, InstallBackend)
    assert not follow.action.force
    # Who insists on a new tree does not join one that is only kept.
    forced = await world.install(name=META, force=True)
    assert (await world.intent(forced)).id != follow.id


async def test_a_load_that_waits_for_the_meta_name_goes_on_when_somebody_asks_for_the_concrete_one(
    world: World,
) -> None:
    await world.store.transaction(lambda c: models.insert(c, MODEL, 1.0))
    node = await world.join("first")
    load = await world.loader.ensure("tiny", ())
    await world.loader.step()
    install = await sent(world, node)
    assert names(install) == (BUILD, META)
    other = await world.install(name=BUILD)
    assert (await world.intent(other)).id == install.id
    await world.reply(install, DONE)
    for _ in range(2):
        await world.loader.step()
        await world.dispatcher.step()
        for intent in await world.open_intents(node.id):
            assert isinstance(intent.action, PullModel | StartReplica)
            await world.reply(intent, Outcome(address="h:9", nonce="n"))
    await world.loader.step()
    assert (await world.board.view(load)).status == "succeeded"


async def test_a_delete_joins_an_open_delete_of_the_same_directory(world: World) -> None:
    node = await world.join("first")
    await world.report(node.id, backends=(installed(BUILD, "sha256:1"), pointer(META, BUILD)))
    first = await world.request("delete", name=META)
    second = await world.request("delete", name=BUILD)
    assert (await world.intent(first)).id == (await world.intent(second)).id
    assert isinstance((await world.intent(first)).action, RemoveBackend)


async def test_one_of_localais_workers_is_asked_for_the_second_name_by_a_message_of_its_own(world: World) -> None:
    node = await world.join("go", is_localai=True)
    await world.install(name=BUILD)
    second = await world.install(name=META)
    install = await sent(world, node)
    world.bus.take()
    await world.reply(install, Outcome())
    follow = await sent(world, node)
    (message,) = world.bus.take()
    request = msgspec.json.decode(message.payload, type=wire.BackendInstallRequest)
    assert (request.backend, request.force) == (META, False)
    await world.reply(follow, Outcome())
    assert await status(world, second) == "succeeded"


async def test_the_pointer_is_added_with_the_end_of_the_install_and_not_after_it(world: World) -> None:
    """Nobody sees the operation done before its name leads anywhere."""
    node = await world.join("first")
    await world.install(name=BUILD)
    second = await world.install(name=META)
    install = await sent(world, node)
    seen: list[str] = []

    def look(connection: object) -> None:
        found = operations.get(connection, second.jobID)  # type: ignore[arg-type]
        assert found is not None
        rows = operations.intents_of(connection, [second.jobID])[second.jobID]  # type: ignore[arg-type]
        seen.append(" ".join(one.state for one in rows))

    world.store.after = look
    await world.reply(install, DONE)
    world.store.after = None
    assert "succeeded" not in seen
    assert "succeeded accepted" in seen
