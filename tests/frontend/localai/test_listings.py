"""What LocalAI's workers have, as it is now: asked again when something ended, and before anything is decided by it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from tests.bus.memory import Published
from tests.frontend.localai.go_workers import NOBODY, answer_polls, joined, listed, pointing
from tests.frontend.world import World

from enginehouse.core import subjects, wire
from enginehouse.core.errors import NotFound, Unavailable
from enginehouse.core.intent import Outcome
from enginehouse.core.operation import BackendRequest
from enginehouse.core.replica import RunningReplica
from enginehouse.core.report import Report
from enginehouse.frontend.acceptance import Requester
from enginehouse.frontend.localai import listings as listings_file
from enginehouse.frontend.operations.request import Requests
from enginehouse.frontend.operations.targets import UNKNOWN
from enginehouse.ports import Message

IMAGE = "registry.example/image:latest"
ME = Requester(author="me")
Says = Callable[[str], wire.BackendListReply | None]


def asking(world: World) -> Requests:
    """Requests as a frontend in earnest takes them: what LocalAI's workers have is asked first."""
    return Requests(world.acceptance, world.targets, world.listings.freshen)


def answering(world: World, monkeypatch: pytest.MonkeyPatch, says: Says, running: bytes = b'{"models":[]}') -> None:
    """Workers that answer at once; None: this one says nothing."""
    publish = world.bus.publish

    async def publish_and_hear(subject: str, payload: bytes, reply: str = "") -> None:
        await publish(subject, payload, reply)
        if not reply.startswith(subjects.POLLS):
            return
        listing = says(subject.split(".")[1])
        if listing is not None:
            is_list = subject.endswith(subjects.LIST)
            world.bus.deliver(Message(reply, wire.encode(listing) if is_list else running))

    monkeypatch.setattr(world.bus, "publish", publish_and_hear)


def request(kind: str, name: str, *nodes: str) -> BackendRequest:
    return BackendRequest(kind=kind, name=name, nodes=nodes or None)  # type: ignore[arg-type]


async def test_an_upgrade_reaches_what_was_installed_a_moment_ago(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By somebody else: no intent of ours tells of it."""
    world.registry.digests[IMAGE] = "sha256:new"
    await joined(world)
    await answer_polls(world, listed())
    answering(world, monkeypatch, lambda _: listed(("image", "sha256:old")))
    view = await world.board.view(await asking(world).request(request("upgrade", "image"), ME))
    assert isinstance(view.nodes, list)
    assert [row.node_name for row in view.nodes] == ["go"]


async def test_a_delete_takes_a_pointer_along_that_has_just_come(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    await joined(world)
    await answer_polls(world, listed())
    answering(world, monkeypatch, lambda _: pointing("stranger", ("mine", "sha256:x")))
    view = await world.board.view(await asking(world).request(request("delete", "stranger"), ME))
    await world.dispatcher.step()
    (sent,) = [one for one in world.bus.take() if one.subject.endswith(subjects.DELETE)]
    assert wire.decode(sent.payload, wire.BackendDeleteRequest, "it").backend == "stranger"
    assert view.status == "queued"


async def test_a_worker_that_does_not_answer_is_left_out_as_unknown_and_holds_nobody_up(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listings_file, "FRESH_SECONDS", 0.05)
    world.registry.digests[IMAGE] = "sha256:new"
    first, second = [await world.join(name, is_localai=True) for name in ("go", "silent")]
    answering(world, monkeypatch, lambda node: listed(("image", "sha256:old")) if node == first.id else None)
    async with asyncio.timeout(5):
        view = await world.board.view(await asking(world).request(request("upgrade", "image"), ME))
    assert view.targets == (first.id,)
    assert [(one.node_id, one.code) for one in view.excluded] == [(second.id, UNKNOWN)]
    with pytest.raises(Unavailable, match="it is unknown which nodes have it"):
        await asking(world).request(request("upgrade", "image", "silent"), ME)


@pytest.mark.parametrize("kind", ["upgrade", "delete"])
async def test_a_name_that_only_a_silent_worker_may_know_is_no_mistake(
    world: World, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(listings_file, "FRESH_SECONDS", 0.05)
    await joined(world)
    with pytest.raises(Unavailable, match="it is unknown which nodes have it"):
        await asking(world).request(request(kind, "installed-by-uri"), ME)
    with pytest.raises(NotFound):
        await asking(world).request(request("install", "installed-by-uri"), ME)
    answering(world, monkeypatch, lambda _: listed())
    with pytest.raises(NotFound):
        await asking(world).request(request(kind, "installed-by-uri"), ME)


async def test_of_a_worker_that_is_away_the_last_listing_counts(world: World) -> None:
    node = await joined(world)
    await world.set_health(node.id, "offline")
    assert await world.listings.freshen() == frozenset()
    assert world.bus.take() == []


async def test_without_a_bus_nobody_knows(world: World) -> None:
    node = await joined(world)
    world.bus.is_connected = False
    assert await world.listings.freshen() == {node.id}


async def test_only_those_that_are_meant_are_asked(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    first = await world.join("go", is_localai=True)
    await world.join("other-go", is_localai=True)
    await world.join("ours")
    answering(world, monkeypatch, lambda _: listed(("other", "sha256:x")))
    assert await world.listings.freshen(("go",)) == frozenset()
    assert {one.subject.split(".")[1] for one in world.bus.take()} == {first.id}


async def test_a_node_is_asked_as_soon_as_something_has_ended_there(world: World) -> None:
    await joined(world)
    await answer_polls(world, listed())
    view = await world.install(name="other")
    await world.dispatcher.step()
    world.bus.take()
    woken: list[bool] = []
    world.poller.on_due(lambda: woken.append(True))
    await world.reply(await world.intent(view), Outcome())
    assert woken
    await world.poller.answers_step()
    assert [one.subject.split(".", 2)[2] for one in polls(world.bus.take())] == [subjects.LIST, subjects.RUNNING]


async def test_an_answer_to_an_older_question_does_not_replace_a_newer_one(world: World) -> None:
    node = await joined(world)
    now = await world.now()
    newer, older = (
        Report(mark=now - age, backends=listed((name, "")).backends or ()) for age, name in ((1, "b"), (2, "a"))
    )
    for report in (newer, older):
        await world.reports.report(node.id, report)
    assert [one.name for one in (await world.nodes.get(node.id))[0].report.backends] == ["b"]


def polls(published: list[Published]) -> list[Published]:
    return [one for one in published if one.reply.startswith(subjects.POLLS)]


# The idle process of an install ----------------------------------------------------------------------


def running(*models: str) -> bytes:
    found = tuple(RunningReplica(model_id=model, replica_index=0) for model in models)
    return wire.encode(wire.ModelsRunningReply(models=found))


async def stops(world: World, listing: wire.BackendListReply, processes: bytes) -> list[str]:
    """Which keys are stopped after a round of questions."""
    await world.poller.step()
    for one in polls(world.bus.take()):
        is_list = one.subject.endswith(subjects.LIST)
        world.bus.deliver(Message(one.reply, wire.encode(listing) if is_list else processes))
    await world.poller.answers_step()
    found = [one for one in world.bus.take() if one.subject.endswith(subjects.STOP)]
    return [wire.decode(one.payload, wire.BackendStopRequest, "it").backend for one in found]


async def test_what_an_install_left_running_is_stopped_by_its_key_and_is_no_model(world: World) -> None:
    node = await joined(world)
    view = await world.install(name="other")
    await world.dispatcher.step()
    there = listed(("other", ""))
    assert await stops(world, there, running("other", "a-model")) == [], "its install would fail for want of it"
    await world.reply(await world.intent(view), Outcome())
    world.bus.take()
    assert await stops(world, there, running("other", "a-model")) == ["other#0"]
    report = (await world.nodes.get(node.id))[0].report
    assert [one.model_id for one in report.replicas] == ["a-model"]


async def test_so_is_one_under_the_name_of_a_pointer_that_no_listing_has(world: World) -> None:
    await joined(world)
    assert await stops(world, listed(("engine", "")), running("llama-cpp", "unheard-of")) == ["llama-cpp#0"]


async def test_a_drain_takes_it_along(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    await joined(world)
    answering(world, monkeypatch, lambda _: listed(("other", "")), running("other"))
    await asking(world).request_drain("go", Requester(author="me"))
    assert [one.payload for one in world.bus.take() if one.subject.endswith(subjects.STOP)] == [
        b'{"backend":"other#0"}'
    ]


async def test_an_answer_that_nobody_gives_is_not_waited_for_by_name(world: World) -> None:
    """One that hears nothing at all answers at once that nobody listens."""
    node = await joined(world)
    publish = world.bus.publish

    async def unheard(subject: str, payload: bytes, reply: str = "") -> None:
        await publish(subject, payload, reply)
        world.bus.deliver(Message(reply, NOBODY, no_responders=True))

    world.bus.publish = unheard  # type: ignore[method-assign]
    async with asyncio.timeout(1):
        assert await world.listings.freshen() == {node.id}
