"""The subjects that end things: four meanings of a stop, unloading, the files of a model, the node itself."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import msgspec
import pytest
from tests.worker.shelf import Shelf, launcher, noise, write_metadata
from tests.worker.whole_worker import WholeWorker, command, start, working
from tests.worker.world import KEY, World, link_tree, silent, tiny_chat, until

from enginehouse.core import subjects, wire
from enginehouse.core.action import PullModel, RemoveModel, StartReplica
from enginehouse.core.ids import IntentId, NodeId
from enginehouse.core.installation import METADATA_FILE
from enginehouse.core.intent import Outcome
from enginehouse.core.model import Model
from enginehouse.core.replica import process_key
from enginehouse.core.wire import Command
from enginehouse.worker.commands.work import Work
from enginehouse.worker.engines.process_table import StartRequest
from enginehouse.worker.protocol.stops import stop_backend, unload

ALL = {"tiny-chat#0", "tiny-chat#1", "second#0"}


def second() -> Model:
    return msgspec.structs.replace(tiny_chat(), name="second")


async def start_all(world: World) -> None:
    await world.models.pull(second(), 1, silent)
    for model, slot in ((tiny_chat(), 0), (tiny_chat(), 1), (second(), 0)):
        await world.supervisor.start(StartRequest(model=model, slot=slot, directory="xllamacpp", key=KEY))


def keys(world: World) -> set[str]:
    return {process_key(one.model_id, one.replica_index) for one in world.supervisor.running()}


@pytest.mark.parametrize(
    ("payload", "left"),
    [
        (b"", set()),
        (b"null", set()),
        (b'{"backend": "", "force": true}', set()),
        (b'{"backend": "tiny-chat#1"}', {"tiny-chat#0", "second#0"}),
        (b'{"backend": "tiny-chat", "unknown": 1}', {"second#0"}),
        (b'{"backend": "xllamacpp"}', set()),
        (b'{"backend": "named"}', set()),
        (b'{"backend": "gallery@pointer"}', set()),
        (b'{"backend": "tiny-chat#7"}', ALL),
        (b'{"backend": "../xllamacpp"}', ALL),
    ],
)
async def test_a_stop_means_everything_a_process_a_backend_or_a_model(
    world: World, payload: bytes, left: set[str]
) -> None:
    metadata = world.place.backends / "xllamacpp" / METADATA_FILE
    known = msgspec.json.decode(metadata.read_bytes())
    metadata.unlink()  # linked with other tests' trees
    metadata.write_bytes(msgspec.json.encode(known | {"alias": "named"}))
    write_metadata(world.place.backends / "pointer", meta_backend_for="xllamacpp")
    await start_all(world)
    await stop_backend(world.parts, payload)
    assert keys(world) == left


@pytest.mark.parametrize("payload", [b'{"backend": 3}', b"{", b"[]", b"\xff"])
async def test_a_stop_that_says_nothing_is_dropped_and_counted(
    tmp_path: Path, payload: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async with working(WholeWorker(tmp_path)) as worker:
        await worker.bus.publish(subjects.node_subject(NodeId("node-1"), subjects.STOP), payload, "r")
        await until(lambda: "worker.dropped verb=backend.stop" in caplog.text)
        assert (
            await worker.bus.ask(subjects.node_subject(NodeId("node-1"), subjects.LIST), b"{}", "list")
        ) == b'{"backends":[]}'
        assert worker.bus.replies("r") == []


async def test_an_unload_ends_a_model_or_the_one_at_an_address_and_nothing_to_do_is_success(world: World) -> None:
    await start_all(world)
    running = {process_key(one.model_id, one.replica_index): one.address for one in world.supervisor.running()}
    port = running["tiny-chat#1"].rpartition(":")[2]
    for request, left in (
        (wire.ModelUnloadRequest(model_name="nobody"), ALL),
        (wire.ModelUnloadRequest(model_name="second", address=running["tiny-chat#1"]), ALL),
        (wire.ModelUnloadRequest(model_name="tiny-chat", address="127.0.0.1:1"), ALL),
        (wire.ModelUnloadRequest(model_name="tiny-chat", address=f"localhost:{port}"), ALL - {"tiny-chat#1"}),
        (wire.ModelUnloadRequest(model_name="tiny-chat"), {"second#0"}),
        (wire.ModelUnloadRequest(model_name="tiny-chat"), {"second#0"}),
    ):
        assert (await unload(world.parts, wire.encode(request))).succeeded
        assert keys(world) == left
    assert (await unload(world.parts, b"{}")).code == "invalid_json"


def remove(model: str, intent: str, generation: int) -> Work:
    return Work(
        action=RemoveModel(model=model),
        command=Command(intent=IntentId(intent), generation=generation, attempt=1, fence=1),
    )


async def test_the_files_of_a_model_go_after_its_processes_and_again_is_success(world: World) -> None:
    await start_all(world)
    outcome = await world.actions.perform(remove("tiny-chat", "one", 2), silent)
    assert outcome == Outcome(stopped=("tiny-chat#0", "tiny-chat#1"))
    assert [model.name for model in world.models.held_models()] == ["second"]
    assert os.listdir(world.place.models) == ["second"]
    assert keys(world) == {"second#0"}
    again = await world.actions.perform(remove("tiny-chat", "two", 3), silent)
    assert again == Outcome(message="already_absent")
    older = await world.actions.perform(remove("tiny-chat", "old", 1), silent)
    assert older.code == "conflict"


async def test_a_model_that_is_being_started_is_stopped_before_its_files_go(world: World) -> None:
    action = StartReplica(model=tiny_chat(), slot=0, directory="xllamacpp", key=KEY)
    begun = Work(action=action, command=Command(intent=IntentId("start"), generation=1, attempt=1, fence=1))
    async with asyncio.TaskGroup() as group:
        starting = group.create_task(world.actions.perform(begun, silent))
        await until(lambda: bool(world.supervisor._coming))
        outcome = await world.actions.perform(remove("tiny-chat", "remove", 2), silent)
    assert starting.result().code == "superseded"
    assert outcome.succeeded
    assert keys(world) == set()
    assert os.listdir(world.place.models) == []


async def test_a_start_that_comes_after_the_removal_it_does_not_know_of_brings_nothing_back(world: World) -> None:
    """Late on the bus, or sent again because nobody heard of the first: the newer request wins."""
    assert (await world.actions.perform(remove("tiny-chat", "remove", 2), silent)).succeeded
    world.journal.load()  # as after a restart
    for generation, files, code in ((1, 1, "superseded"), (2, 2, ""), (3, None, "")):
        action = StartReplica(model=tiny_chat(), slot=0, directory="xllamacpp", key=KEY, files=files)
        command = Command(intent=IntentId(f"start {files}"), generation=generation, attempt=1, fence=1)
        outcome = await world.actions.perform(Work(action=action, command=command), silent)
        assert outcome.code == code, outcome
        assert (keys(world) == set()) == bool(code)
        assert (os.listdir(world.place.models) == []) == bool(code)


async def test_a_pull_and_a_removal_of_one_model_take_turns(world: World) -> None:
    pull = Work(
        action=PullModel(model=tiny_chat()), command=Command(intent=IntentId("pull"), generation=2, attempt=1, fence=1)
    )
    async with asyncio.TaskGroup() as group:
        async with world.actions._locks.hold("model:tiny-chat"):
            removing = group.create_task(world.actions.perform(remove("tiny-chat", "remove", 1), silent))
            await until(lambda: bool(world.actions._locks._locks["model:tiny-chat"].waiting))
            assert [model.name for model in world.models.held_models()] == ["tiny-chat"]
            pulling = group.create_task(world.actions.perform(pull, silent))
            await until(removing.done)
    assert removing.result().code == "superseded"
    assert pulling.result().succeeded
    assert [model.generation for model in world.models.held_models()] == [2]


def test_what_a_killed_worker_was_removing_is_gone_after_its_restart(tmp_path: Path) -> None:
    world = World(tmp_path)
    (world.place.models / ".tiny-chat").mkdir()
    (world.place.models / ".tiny-chat" / "model.json").write_text('{"name": "tiny-chat", "files": []}')
    world.models.recover()
    assert os.listdir(world.place.models) == []


async def test_a_go_frontend_deletes_a_model_and_names_that_lead_out_are_refused(tmp_path: Path) -> None:
    async with working(WholeWorker(tmp_path)) as worker:
        pull = wire.ModelPullRequest(model=tiny_chat(), op_id="op", command=command("pull"))
        assert (await worker.tell(subjects.PULL_MODEL, pull)).success
        for name in ("../models/tiny-chat", "/tiny-chat", "a/../../x", "..", "", "a\\..\\..\\b"):
            refused = await worker.tell(subjects.DELETE_MODEL, wire.ModelDeleteRequest(model_name=name))
            assert refused.success is False
            assert refused.error.startswith("cannot use ")
        assert os.listdir(worker.place.models) == ["tiny-chat"]
        for _ in range(2):
            done = await worker.tell(subjects.DELETE_MODEL, wire.ModelDeleteRequest(model_name="tiny-chat"))
            assert done.success
            assert os.listdir(worker.place.models) == []


@pytest.mark.parametrize("verb", [subjects.UNLOAD, subjects.DELETE_MODEL])
@pytest.mark.parametrize("payload", [b"", b"{", b"null", b'{"model_name": 3}', b"\xff"])
async def test_a_malformed_message_is_answered_in_the_shape_of_its_verb(
    tmp_path: Path, verb: str, payload: bytes
) -> None:
    async with working(WholeWorker(tmp_path)) as worker:
        answer = await worker.bus.ask(subjects.node_subject(NodeId("node-1"), verb), payload, "r")
        reply = msgspec.json.decode(answer)
        assert reply["success"] is False
        assert reply["error"].startswith("cannot read ")


@pytest.mark.parametrize("payload", [b"", b"null", b"{}"])
async def test_the_nodes_own_stop_leaves_in_order(tmp_path: Path, installed_tree: Path, payload: bytes) -> None:
    worker = WholeWorker(tmp_path)
    worker.place.make_directories()
    link_tree(installed_tree, worker.place.backends / "xllamacpp")
    async with asyncio.TaskGroup() as group:
        task = group.create_task(worker.agent.run())
        await until(lambda: bool(worker.link.heartbeats))
        pull = wire.ModelPullRequest(model=tiny_chat(), op_id="op", command=command("pull"))
        await worker.tell(subjects.PULL_MODEL, pull)
        assert (await worker.tell(subjects.INSTALL, start())).success
        await worker.bus.publish(subjects.node_subject(NodeId("node-1"), subjects.STOP_NODE), payload)
        await until(task.done)
    assert worker.link.deregistered == ["node-1"]
    assert os.listdir(worker.place.processes) == []
    await worker.engine.close()


@pytest.mark.parametrize("way", ["bus", "heartbeat"])
async def test_an_intent_is_cancelled_over_the_bus_or_by_the_answer_to_a_heartbeat(
    one: Shelf, tmp_path: Path, way: str
) -> None:
    await one.publish("engine:1", [{"run.sh": launcher("one"), "lib.so": noise(500_000)}])
    one.proxy.bytes_per_second = 50_000
    async with working(WholeWorker(tmp_path / "worker", allowed_hosts=("127.0.0.1",))) as worker:
        install = wire.BackendInstallRequest(
            backend="engine", command=command("install"), resolved=one.resolved("engine:1")
        )
        await worker.bus.publish(subjects.node_subject(NodeId("node-1"), subjects.CANCEL), b'{"intent": 1}')
        await worker.bus.publish(subjects.node_subject(NodeId("node-1"), subjects.INSTALL), wire.encode(install), "r")
        await until(lambda: (worker.place.backends / ".enginehouse" / "staging" / "engine").exists())
        if way == "bus":
            cancel = wire.CancelRequest(intent=IntentId("install"))
            await worker.bus.publish(subjects.node_subject(NodeId("node-1"), subjects.CANCEL), wire.encode(cancel))
        else:
            worker.link.cancels = (IntentId("install"), IntentId("unknown"))
        await until(lambda: bool(worker.bus.replies("r")))
        (reply,) = worker.bus.replies("r")
        assert reply.outcome is not None
        assert (reply.success, reply.outcome.code, reply.outcome.can_heal) == (False, "cancelled", False)
        # An earlier report is without it, too.
        await until(lambda: [result.outcome.code for result in worker.report.results] == ["cancelled"])
        await until(lambda: worker.report.running == ())
        assert worker.report.backends == ()
    assert [path.name for path in worker.place.backends.iterdir()] == [".enginehouse"]
