"""Ending a command before its end: cancelled, or overtaken by a newer request; and from where on it is too late."""

from __future__ import annotations

import asyncio
import asyncio.subprocess
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path

import msgspec
import pytest
from tests.fetch.images import Image
from tests.worker.shelf import DIRECTORY, Shelf, launcher, noise, said_by
from tests.worker.world import KEY, World, link_tree, running_world, silent, tiny_chat, until, xllamacpp

from enginehouse.core.action import Action, InstallBackend, PullModel, RemoveBackend, StartReplica
from enginehouse.core.ids import IntentId
from enginehouse.core.intent import Outcome
from enginehouse.core.model import ModelFile, holds
from enginehouse.core.peer import FilePeer
from enginehouse.core.progress import ReportProgress
from enginehouse.core.wire import Command
from enginehouse.host import processes
from enginehouse.worker.backends.installer import Installed, Installer, InstallRequest, Swapped
from enginehouse.worker.commands.work import Work
from enginehouse.worker.models import files as pull
from enginehouse.worker.models.fetching import FetchedFile

LAYERS = [{"run.sh": launcher("one"), "lib/a.so": noise(500_000, 1)}, {"lib/b.so": noise(300_000, 2)}]
SLOW = 100_000  # bytes a second: some seconds for an image


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[World]:
    world = World(tmp_path / "worker", allowed_hosts=("127.0.0.1",))
    async with world.supervisor:
        yield world
    await world.engine.close()
    await world.made.close()


@pytest.fixture
async def image(one: Shelf) -> Image:
    await one.publish("engine:0", [{"run.sh": launcher("zero")}])
    return await one.publish("engine:1", LAYERS)


def work(action: Action, intent: str, generation: int = 1, attempt: int = 1) -> Work:
    return Work(
        action=action, command=Command(intent=IntentId(intent), generation=generation, attempt=attempt, fence=attempt)
    )


def install(one: Shelf, name: str) -> InstallBackend:
    return InstallBackend(backend="engine", resolved=one.resolved(name), upgrade=True)


async def begin(node: World, one: Shelf, image: Image, group: asyncio.TaskGroup) -> asyncio.Task[Outcome]:
    """The old version in place, and the new one in the middle of its bytes."""
    assert (await node.actions.perform(work(install(one, "engine:0"), "old"), silent)).succeeded
    one.proxy.bytes_per_second = SLOW
    task = group.create_task(node.actions.perform(work(install(one, "engine:1"), "new", 2), silent))
    await until(lambda: one.proxy.bytes_sent(image.layers[0].digest) > 0)
    return task


def staging(node: World) -> list[str]:
    return os.listdir(node.trees.private / "staging")


async def test_a_cancelled_install_closes_its_sockets_and_leaves_the_old_version(
    node: World, one: Shelf, image: Image
) -> None:
    async with asyncio.TaskGroup() as group:
        task = await begin(node, one, image, group)
        await until(lambda: one.proxy.bytes_sent(image.layers[1].digest) > 0)
        busy = len(one.proxy._open)
        assert staging(node) == [DIRECTORY]
        node.actions.cancel(IntentId("new"))
        await until(task.done, limit_seconds=1.0)
        await until(lambda: len(one.proxy._open) <= busy - len(LAYERS), limit_seconds=1.0)
    outcome = task.result()
    assert (outcome.code, outcome.can_heal) == ("cancelled", False)
    assert outcome.message == "cannot upgrade engine: it was cancelled"
    assert said_by(node.place.backends / DIRECTORY) == "zero"
    assert staging(node) == []
    assert node.actions.running() == ()
    assert not node.actions._locks._locks
    assert [(result.intent, result.outcome.code) for result in node.journal.results()] == [
        ("old", ""),
        ("new", "cancelled"),
    ]
    assert await node.actions.perform(work(install(one, "engine:1"), "new", 2), silent) == outcome, "a second copy"
    one.proxy.bytes_per_second = None
    again = await node.actions.perform(work(install(one, "engine:1"), "new", 2, attempt=2), silent)
    assert again.succeeded
    assert said_by(node.place.backends / DIRECTORY) == "one"


async def test_cancelling_ends_every_attempt_that_waits_for_the_same_end(node: World, one: Shelf, image: Image) -> None:
    told: list[int] = []
    async with asyncio.TaskGroup() as group:
        task = await begin(node, one, image, group)
        repeat = work(install(one, "engine:1"), "new", 2, attempt=2)
        joined = group.create_task(node.actions.perform(repeat, lambda phase, file, done, total: told.append(done)))
        await until(lambda: bool(told))  # whoever joins hears of the progress from then on
        node.actions.cancel(IntentId("new"))
        await until(lambda: task.done() and joined.done(), limit_seconds=1.0)
    assert task.result() == joined.result()
    assert task.result().code == "cancelled"


async def test_one_that_waits_for_its_turn_ends_at_once_and_has_begun_nothing(world: World) -> None:
    removed = RemoveBackend(backend="x", directory="xllamacpp")
    async with asyncio.TaskGroup() as group:
        async with world.actions._locks.hold("backend:xllamacpp"):
            task = group.create_task(world.actions.perform(work(removed, "late"), silent))
            await until(lambda: bool(world.actions._locks._locks["backend:xllamacpp"].waiting))
            world.actions.cancel(IntentId("late"))
            await until(task.done, limit_seconds=1.0)
    assert task.result().code == "cancelled"
    assert [backend.name for backend in world.trees.list_installed()] == ["xllamacpp"]
    assert [result.outcome.code for result in world.journal.results()] == ["cancelled"]


async def test_a_cancel_that_overtakes_its_command_counts(world: World) -> None:
    removed = RemoveBackend(backend="x", directory="xllamacpp")
    world.actions.cancel(IntentId("early"))
    assert (await world.actions.perform(work(removed, "early"), silent)).code == "cancelled"
    assert [backend.name for backend in world.trees.list_installed()] == ["xllamacpp"]


async def test_cancelling_what_is_unknown_or_finished_changes_nothing(world: World) -> None:
    world.actions.cancel(IntentId("never-heard-of"))
    pull = work(PullModel(model=tiny_chat()), "pull")
    outcome = await world.actions.perform(pull, silent)
    world.actions.cancel(IntentId("pull"))
    assert await world.actions.perform(pull, silent) == outcome == Outcome()


async def test_a_start_that_is_cancelled_leaves_no_process(world: World) -> None:
    start = StartReplica(model=tiny_chat(), slot=0, directory="xllamacpp", key=KEY)
    async with asyncio.TaskGroup() as group:
        task = group.create_task(world.actions.perform(work(start, "start"), silent))
        await until(lambda: bool(world.supervisor._running))
        (current,) = world.supervisor._running.values()
        world.actions.cancel(IntentId("start"))
        await until(task.done)
    assert task.result().code == "cancelled"
    await until(lambda: not list(processes.processes_with_nonce(current.nonce)))
    assert world.supervisor.find("tiny-chat#0") is None


async def test_a_newer_request_stops_an_older_one_that_is_running(node: World, one: Shelf, image: Image) -> None:
    async with asyncio.TaskGroup() as group:
        older = await begin(node, one, image, group)
        newer = group.create_task(
            node.actions.perform(work(RemoveBackend(backend="engine", directory=DIRECTORY), "delete", 3), silent)
        )
        await until(lambda: older.done() and newer.done(), limit_seconds=2.0)
    assert (older.result().code, older.result().can_heal) == ("superseded", False)
    assert newer.result().succeeded
    assert node.trees.list_installed() == ()
    # Nor does a repeat of the older one begin now.
    repeat = await node.actions.perform(work(install(one, "engine:1"), "new", 2, attempt=2), silent)
    assert repeat.code == "conflict"
    assert node.trees.list_installed() == ()


async def test_a_request_for_another_subject_stops_nothing(node: World, one: Shelf, image: Image) -> None:
    async with asyncio.TaskGroup() as group:
        task = await begin(node, one, image, group)
        other = work(RemoveBackend(backend="other", directory="other"), "other", generation=9)
        assert (await node.actions.perform(other, silent)).message == "already_absent"
        assert not task.done()
        one.proxy.bytes_per_second = None
    assert task.result().succeeded


class Hooked:
    """The real installer, with something that happens right after the swap or right after its end."""

    def __init__(self, installer: Installer, *, in_switch: Callable[[], None], then: Callable[[], None]) -> None:
        self._installer = installer
        self._in_switch = in_switch
        self._then = then

    async def install(self, request: InstallRequest, report: ReportProgress, swapped: Swapped) -> Installed:
        async def told() -> None:
            self._in_switch()
            await swapped()
            self._then()
            await asyncio.sleep(0)

        return await self._installer.install(request, report, told)

    def remove(self, directory: str) -> Awaitable[None]:
        return self._installer.remove(directory)


@pytest.mark.parametrize("moment", ["before the callback", "after it"])
async def test_past_the_swap_it_is_finished_and_is_a_success(tmp_path: Path, installed_tree: Path, moment: str) -> None:
    async with running_world(tmp_path) as world:
        link_tree(installed_tree, world.place.backends / "xllamacpp")
        await world.models.pull(tiny_chat(), 1, silent)
        start = StartReplica(model=tiny_chat(), slot=0, directory="xllamacpp", key=KEY)
        assert (await world.actions.perform(work(start, "start"), silent)).succeeded

        def cancel() -> None:
            world.actions.cancel(IntentId("upgrade"))

        hooked = Hooked(
            world.installer,
            in_switch=cancel if moment == "before the callback" else silent,
            then=cancel if moment == "after it" else silent,
        )
        world.actions._acting._parts = msgspec.structs.replace(world.parts, installer=hooked)
        upgrade = InstallBackend(backend="llama-cpp", resolved=xllamacpp("2"), upgrade=True)
        outcome = await world.actions.perform(work(upgrade, "upgrade", 2), silent)
        unsaid = msgspec.structs.replace(outcome, message="")
        assert unsaid == Outcome(digest=xllamacpp("2").digest, stopped=("tiny-chat#0",))
        assert world.journal.result_of(IntentId("upgrade"), 1) == outcome
        assert world.supervisor.running() == ()


async def test_a_delete_that_has_begun_to_stop_processes_is_finished(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = StartReplica(model=tiny_chat(), slot=0, directory="xllamacpp", key=KEY)
    assert (await world.actions.perform(work(start, "start"), silent)).succeeded
    stop_group = processes.stop_group

    async def stop(process: asyncio.subprocess.Process, grace_seconds: float) -> None:
        world.actions.cancel(IntentId("delete"))
        await stop_group(process, grace_seconds)

    monkeypatch.setattr(processes, "stop_group", stop)
    removed = RemoveBackend(backend="x", directory="xllamacpp")
    outcome = await world.actions.perform(work(removed, "delete", 2), silent)
    assert outcome == Outcome(stopped=("tiny-chat#0",))
    assert world.trees.list_installed() == ()


@pytest.mark.parametrize("is_too_late", [False, True])
async def test_a_cancelled_pull_leaves_all_of_the_version_before_or_all_of_the_new_one(
    node: World, monkeypatch: pytest.MonkeyPatch, is_too_late: bool
) -> None:
    await node.models.pull(tiny_chat(), 1, silent)
    before = sorted(os.listdir(node.place.models / "tiny-chat"))
    (file,) = tiny_chat().files
    added = [msgspec.structs.replace(file, name=name) for name in ("second.gguf", "third.gguf")]
    wider = msgspec.structs.replace(tiny_chat(), files=(file, *added))
    loop = asyncio.get_running_loop()
    obtain, put = node.models._obtain, pull._put

    def cancel_when(is_time: bool) -> None:
        if is_time:
            loop.call_soon_threadsafe(node.actions.cancel, IntentId("wide"))

    async def obtaining(
        file: ModelFile, target: Path, report: Callable[[int, int], None], peers: Sequence[FilePeer], owner: str
    ) -> FetchedFile:
        found = await obtain(file, target, report, peers, owner)
        cancel_when(not is_too_late and file.name == "third.gguf")
        await asyncio.sleep(0)  # the cancellation arrives before the next step
        return found

    def putting(directory: Path, name: str, incoming: Path, found: FetchedFile, uri: str) -> pull.HeldFile:
        cancel_when(is_too_late)
        return put(directory, name, incoming, found, uri)

    monkeypatch.setattr(node.models, "_obtain", obtaining)
    monkeypatch.setattr(pull, "_put", putting)
    outcome = await node.actions.perform(work(PullModel(model=wider), "wide", 2), silent)
    assert outcome.code == ("" if is_too_late else "cancelled")
    assert holds(node.models.held_models(), wider if is_too_late else tiny_chat())
    after = sorted([*before, "second.gguf", "third.gguf"]) if is_too_late else before
    assert sorted(os.listdir(node.place.models / "tiny-chat")) == after


async def test_a_version_that_cannot_be_had_leaves_the_one_before(node: World) -> None:
    await node.models.pull(tiny_chat(), 1, silent)
    (file,) = tiny_chat().files
    wrong = msgspec.structs.replace(file, name="second.gguf", sha256="0" * 64)
    newer = msgspec.structs.replace(tiny_chat(), files=(msgspec.structs.replace(file, name="first.gguf"), wrong))
    outcome = await node.actions.perform(work(PullModel(model=newer), "pull", 2), silent)
    assert outcome.code == "digest_mismatch"
    assert sorted(os.listdir(node.place.models / "tiny-chat")) == ["model.json", file.name]
