"""LocalAI's workers in a fleet of ours: names that lead elsewhere there, and what LocalAI's own frontends get wrong."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from msgspec import UNSET
from tests.frontend.localai.go_workers import answer_polls, joined, listed, pointing
from tests.frontend.world import World, registration

from enginehouse.core import node_api, subjects, wire
from enginehouse.core.backend import InstalledBackend
from enginehouse.core.gallery_entry import Gallery, GalleryEntry
from enginehouse.core.intent import Intent, Outcome
from enginehouse.core.operation import BackendRequest
from enginehouse.core.views import OperationView
from enginehouse.frontend.acceptance import Requester
from enginehouse.frontend.galleries import Galleries
from enginehouse.frontend.operations.plan import UNKNOWN_NOTE
from enginehouse.frontend.operations.upgrades import drift_of
from enginehouse.ports import Message

# Names that lead elsewhere -------------------------------------------------------------------------


async def deleted(world: World, name: str) -> tuple[OperationView, str]:
    """Ask for it; the name that went to the worker."""
    view = await world.request("delete", name=name)
    world.bus.take()
    await world.dispatcher.step()
    (sent,) = world.bus.take()
    return view, wire.decode(sent.payload, wire.BackendDeleteRequest, "it").backend


async def test_a_pointer_is_deleted_by_its_own_name_and_only_when_both_are_gone(world: World) -> None:
    await joined(world)
    engine = ("engine", "sha256:x")
    await answer_polls(world, pointing("llama-cpp", engine))
    view, name = await deleted(world, "llama-cpp")
    assert name == "llama-cpp", "the worker takes the build behind it along"
    assert (await world.intent(view)).subject == "backend:engine", "the same thing as an install of it"
    for left in (pointing("llama-cpp", engine), pointing("llama-cpp"), listed(engine)):
        await answer_polls(world, left)
        assert (await world.intent(view)).state == "running"
    await answer_polls(world, listed())
    assert (await world.intent(view)).state == "succeeded"


async def test_a_pointer_that_no_gallery_knows_is_deleted_all_the_same(world: World) -> None:
    await joined(world)
    await answer_polls(world, pointing("stranger"))
    view, name = await deleted(world, "stranger")
    assert name == "stranger"
    await answer_polls(world, listed())
    assert (await world.intent(view)).state == "succeeded"


@pytest.mark.parametrize(("others", "told"), [((), "voice"), ((("cuda-voice", "sha256:y"),), "cpu-voice")])
async def test_a_pointer_that_the_listing_hides_is_deleted_under_its_name_unless_that_could_mean_another(
    world: World, others: tuple[tuple[str, str], ...], told: str
) -> None:
    """LocalAI's workers list no pointer that is called as the alias of its build, and would leave it behind."""
    world.targets._galleries = aliased()
    await joined(world)
    await answer_polls(world, listed(("cpu-voice", "sha256:x"), *others))
    view, name = await deleted(world, "voice")
    assert (name, (await world.intent(view)).subject) == (told, "backend:cpu-voice")


def aliased() -> Galleries:
    return Galleries(
        (
            Gallery(
                name="voices",
                url="https://voices.example/index.yaml",
                backends=(
                    GalleryEntry(name="voice", capabilities={"default": "cpu-voice", "nvidia": "cuda-voice"}),
                    GalleryEntry(name="cpu-voice", alias="voice", uri="registry.example/voice:cpu"),
                    GalleryEntry(name="cuda-voice", alias="voice", uri="registry.example/voice:cuda"),
                ),
            ),
        )
    )


@pytest.mark.parametrize("is_listed", [True, False], ids=["pointer-listed", "pointer-hidden"])
async def test_an_upgrade_by_the_name_of_a_pointer_reaches_the_build_behind_it(world: World, is_listed: bool) -> None:
    await joined(world)
    engine = ("engine", "sha256:old")
    await answer_polls(world, pointing("llama-cpp", engine) if is_listed else listed(engine))
    view = await world.request("upgrade", name="llama-cpp")
    await world.dispatcher.step()
    message = wire.decode(world.bus.take()[-1].payload, wire.BackendUpgradeRequest, "it")
    assert message.backend == "engine"
    assert (await world.intent(view)).subject == "backend:engine"


# What nobody knows ---------------------------------------------------------------------------------


async def test_a_version_without_a_digest_is_unknown_and_upgraded_when_asked(world: World) -> None:
    """S64: such a worker records no digest for some images."""
    world.registry.digests["registry.example/image:latest"] = "sha256:new"
    for name in ("go", "other-go"):
        await world.join(name, is_localai=True)
    await answer_polls(world, listed(("image", "")))
    found = (await world.upgrades.check())["image"]
    assert [(row.node_name, row.unknown, row.installed_digest) for row in found.nodes] == [
        ("go", True, ""),
        ("other-go", True, ""),
    ]
    assert not found.is_certain
    assert isinstance(found.node_drift, list)
    assert [(row.node_name, row.unknown) for row in found.node_drift] == [("go", True), ("other-go", True)]
    request = BackendRequest(kind="upgrade", name="image")
    planned = await world.planner.plan(request)
    assert [(row.does, row.note) for row in planned.nodes] == [("upgrade", UNKNOWN_NOTE)] * 2
    view = await world.request("upgrade", name="image")
    assert isinstance(view.nodes, list)
    assert [row.node_name for row in view.nodes] == ["go", "other-go"]


async def test_one_that_is_known_and_one_that_is_not_are_told_apart(world: World) -> None:
    ours, unknown = await world.join("ours"), await world.join("go", is_localai=True)
    known = InstalledBackend(name="image", is_system=False, is_meta=False, digest="sha256:x", version="1")
    same, other = (msgspec.structs.replace(known, digest="", version=version) for version in ("", "2"))
    assert [(one.node_name, one.unknown) for one in drift_of([(ours, known), (unknown, same)])] == [("go", True)]
    (differs,) = drift_of([(ours, known), (unknown, other)])
    assert (differs.node_name, differs.unknown) == ("go", UNSET)
    meta = InstalledBackend(name="image", is_system=False, is_meta=True)
    assert drift_of([(ours, meta), (unknown, meta)]) == []


# What LocalAI's frontends get wrong ----------------------------------------------------------------


async def says(world: World, intent: Intent, payload: bytes) -> None:
    world.bus.deliver(Message(subjects.reply_subject(intent.node_id, intent.id, intent.attempt), payload))
    async with asyncio.timeout(5):  # what cannot be read is dropped, and waited for without an end
        await world.collector.replies_step()


async def test_a_delete_that_the_worker_refuses_is_not_done(world: World) -> None:
    """S11."""
    await joined(world)
    await answer_polls(world, listed(("other", "sha256:x")))
    view, _ = await deleted(world, "other")
    await says(world, await world.intent(view), b'{"success":false,"error":"busy","reports_stopped_processes":true}')
    after = await world.intent(view)
    assert (after.state, after.message, after.failures) == ("waiting", "busy", 1)


async def test_an_error_as_long_as_the_output_of_an_engine_is_an_error(world: World) -> None:
    await joined(world)
    view = await world.install(name="other")
    await world.dispatcher.step()
    await says(world, await world.intent(view), b'{"success":false,"error":"died: %s"}' % (b"x" * 500_000))
    after = await world.intent(view)
    assert (after.state, after.message[:8]) == ("waiting", "died: xx")
    assert len(after.message) < 10_000


async def test_what_is_sent_again_is_all_of_what_was_asked_for(world: World) -> None:
    """S12: LocalAI keeps neither address nor name, and sends an empty request instead."""
    await joined(world)
    request = BackendRequest(kind="install", name="mine", uri="registry.example/mine:1", alias="own", nodes=("go",))
    view = await world.board.view(await world.operations.request(request, Requester(author="me")))
    messages = []
    for _ in range(2):
        await world.dispatcher.step()
        (sent,) = [one for one in world.bus.take() if one.subject.endswith(subjects.INSTALL)]
        message = wire.decode(sent.payload, wire.BackendInstallRequest, "it")
        messages.append((message.backend, message.uri, message.name, message.alias, message.op_id))
        await says(world, await world.intent(view), b'{"success":false,"error":"no route"}')
        world.time.passed += 3600.0
    assert messages == [("mine", "registry.example/mine:1", "mine", "own", view.jobID)] * 2


async def test_workers_are_asked_all_at_once_and_one_that_does_not_answer_holds_up_no_other(world: World) -> None:
    """S19."""
    nodes = [await world.join(name, is_localai=True) for name in ("a", "b", "c")]
    await world.poller.step()
    asked = world.bus.take()
    assert {one.subject.split(".")[1] for one in asked} == {node.id for node in nodes}
    for one in asked:
        if nodes[0].id not in one.subject:
            is_list = one.subject.endswith(subjects.LIST)
            world.bus.deliver(Message(one.reply, wire.encode(listed(("x", "d"))) if is_list else b'{"models":[]}'))
    await world.poller.step()
    found = [len((await world.nodes.get(node.id))[0].report.backends) for node in nodes]
    assert found == [0, 1, 1]


async def test_the_same_backend_on_another_node_is_another_request(world: World) -> None:
    """S23: LocalAI takes it for the one that is under way elsewhere, and says that it is done."""
    for name in ("a", "b"):
        await world.join(name, is_localai=True)
    first = await world.install("a", name="other")
    await world.dispatcher.step()
    second = await world.install("b", name="other")
    await world.dispatcher.step()
    assert len({one.subject for one in world.bus.take() if one.subject.endswith(subjects.INSTALL)}) == 2
    await world.reply(await world.intent(first), Outcome())
    assert (await world.board.view(first.jobID)).status == "succeeded"
    assert (await world.board.view(second.jobID)).status == "running"


async def test_agents_are_never_asked_what_they_have_and_stay_healthy(world: World) -> None:
    """S24: they do not listen, and each question would call them unhealthy."""
    agent = (await world.nodes.register(registration("agent", node_type="agent"))).node
    await world.nodes.approve(agent.id)
    await world.reports.heartbeat(agent.id, node_api.HeartbeatRequest())
    for _ in range(2):
        await world.poller.step()
    assert world.bus.take() == []
    assert await world.health(agent.id) == "healthy"
