"""Messages of Go frontends, which know names and no intents: what is there costs nothing, one backend is one lock."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from tests.link.test_client import plain, serving
from tests.worker.shelf import Shelf, launcher, said_by, write_backend, write_metadata
from tests.worker.whole_worker import WholeWorker, working
from tests.worker.world import link_tree, until

from enginehouse.build_worker import make_parts
from enginehouse.core import subjects, wire
from enginehouse.core.errors import TooLarge
from enginehouse.core.ids import NodeId
from enginehouse.core.installation import PRIVATE
from enginehouse.link.worker import WorkerLink
from enginehouse.worker.agent import Agent

NODE = NodeId("node-1")


@pytest.fixture
async def worker(one: Shelf, tmp_path: Path) -> AsyncIterator[WholeWorker]:
    await one.publish("engine:1", [{"run.sh": launcher("one")}])
    async with working(WholeWorker(tmp_path / "worker", allowed_hosts=("127.0.0.1",))) as made:
        yield made


def names(worker: WholeWorker) -> set[str]:
    return set(os.listdir(worker.place.backends)) - {PRIVATE}


def external(one: Shelf, **fields: object) -> wire.BackendInstallRequest:
    """As the node route of a Go frontend sends it: the name is not in `backend`."""
    wanted = wire.BackendInstallRequest(
        backend="", uri=one.proxy.reference(one.named("engine:1")), name="engine", alias="motor"
    )
    return msgspec.structs.replace(wanted, **fields)


async def test_an_external_install_with_its_name_beside_works_and_what_is_there_costs_no_traffic(
    worker: WholeWorker, one: Shelf
) -> None:
    reply = await worker.tell(subjects.INSTALL, external(one))
    assert (reply.success, reply.error) == (True, "")
    assert names(worker) == {"engine"}
    asked, inode = len(one.proxy.requests), worker.place.backends.joinpath("engine").stat().st_ino
    for name in ("engine", "motor", "lab@engine"):
        began = time.monotonic()
        assert (await worker.tell(subjects.INSTALL, wire.BackendInstallRequest(backend=name))).success
        assert time.monotonic() - began < 1.0
    assert (await worker.tell(subjects.INSTALL, external(one))).success
    assert len(one.proxy.requests) == asked
    assert worker.place.backends.joinpath("engine").stat().st_ino == inode
    assert names(worker) == {"engine"}


async def test_force_installs_again_and_an_upgrade_by_name_takes_what_the_source_has_now(
    worker: WholeWorker, one: Shelf
) -> None:
    assert (await worker.tell(subjects.INSTALL, external(one))).success
    before = worker.place.backends.joinpath("engine").stat().st_ino
    assert (await worker.tell(subjects.INSTALL, wire.BackendInstallRequest(backend="motor", force=True))).success
    again = worker.place.backends.joinpath("engine").stat().st_ino
    assert again != before
    same = await worker.tell(subjects.UPGRADE, wire.BackendUpgradeRequest(backend="engine"))
    assert same.success
    assert worker.place.backends.joinpath("engine").stat().st_ino == again
    await one.publish("engine:1", [{"run.sh": launcher("two")}])
    assert (await worker.tell(subjects.UPGRADE, wire.BackendUpgradeRequest(backend="engine"))).success
    assert said_by(worker.place.backends / "engine") == "two"
    # The alias is kept, though no gallery and no request named it.
    assert (await worker.tell(subjects.DELETE, wire.BackendDeleteRequest(backend="motor"))).success
    assert names(worker) == set()


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"name": ""}, "without a name; set `name` to the name of the backend"),
        ({"uri": "", "name": ""}, "cannot install: the request names neither a backend nor a uri"),
        ({"name": "../outside"}, "cannot use '../outside' as a backend name"),
        ({"uri": "ocifile:///etc"}, "files of this machine"),
    ],
)
async def test_what_cannot_be_installed_is_refused_in_plain_words(
    worker: WholeWorker, one: Shelf, fields: dict[str, object], said: str
) -> None:
    reply = await worker.tell(subjects.INSTALL, external(one, **fields))
    assert reply.success is False
    assert reply.error.startswith("cannot ")
    assert said in reply.error
    assert names(worker) == set()


async def test_deletes_go_by_directory_meta_name_or_alias_and_an_unknown_one_is_an_error(
    worker: WholeWorker, one: Shelf
) -> None:
    for name in ("engine", "motor", "pointer", "lab@pointer", "lab@engine"):
        assert (await worker.tell(subjects.INSTALL, external(one))).success
        write_metadata(worker.place.backends / "pointer", meta_backend_for="engine")
        reply = await worker.tell(subjects.DELETE, wire.BackendDeleteRequest(backend=name))
        assert (name, reply.success, reply.error) == (name, True, "")
        assert names(worker) == set()
    for name in ("engine", "motor", "../engine", ""):
        answer = await worker.bus.ask(
            subjects.node_subject(NODE, subjects.DELETE), wire.encode(wire.BackendDeleteRequest(backend=name)), "r"
        )
        unknown = wire.decode(answer, wire.BackendUpgradeReply, "the reply")
        assert not unknown.success
        assert unknown.error.startswith("cannot find a backend named ")
        assert unknown.reports_stopped_processes


async def test_pointers_that_lead_nowhere_and_those_that_go_workers_made_disappear(worker: WholeWorker) -> None:
    for name in ("pointer", "lab@pointer"):
        write_metadata(worker.place.backends / name, meta_backend_for="gone")
    assert (await worker.tell(subjects.DELETE, wire.BackendDeleteRequest(backend="lab@pointer"))).success
    assert names(worker) == set()


async def test_an_answer_that_the_bus_does_not_take_harms_no_other(
    worker: WholeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish, refused = worker.bus.publish, []

    async def bounded(subject: str, payload: bytes, reply: str = "") -> None:
        if subject == "long":
            refused.append(subject)
            raise TooLarge("cannot send so much")
        await publish(subject, payload, reply)

    monkeypatch.setattr(worker.bus, "publish", bounded)
    await worker.bus.publish(subjects.node_subject(NODE, subjects.LIST), b"{}", "long")
    await until(lambda: bool(refused))
    assert (await worker.bus.ask(subjects.node_subject(NODE, subjects.LIST), b"{}", "r")) == b'{"backends":[]}'


async def test_an_alias_of_two_backends_means_neither(worker: WholeWorker) -> None:
    for name in ("left", "right"):
        write_backend(worker.place.backends / name, name, alias="motor")
    reply = await worker.tell(subjects.DELETE, wire.BackendDeleteRequest(backend="motor"))
    assert "left, right have that alias" in reply.error
    assert names(worker) == {"left", "right"}


async def test_a_name_of_a_gallery_never_becomes_a_directory(tmp_path: Path, installed_tree: Path) -> None:
    worker = WholeWorker(tmp_path)
    worker.place.make_directories()
    link_tree(installed_tree, worker.place.backends / "xllamacpp")
    async with working(worker):
        for verb, message in (
            (subjects.INSTALL, wire.BackendInstallRequest(backend="lab@llama-cpp", force=True)),
            (subjects.UPGRADE, wire.BackendUpgradeRequest(backend="lab@llama-cpp")),
        ):
            assert (await worker.tell(verb, message)).success
            assert names(worker) == {"llama-cpp", "xllamacpp"}
        assert (await worker.tell(subjects.DELETE, wire.BackendDeleteRequest(backend="lab@llama-cpp"))).success
        assert names(worker) == set()


async def test_alias_meta_name_and_directory_share_one_lock_and_what_vanished_meanwhile_is_looked_up_again(
    worker: WholeWorker, one: Shelf
) -> None:
    assert (await worker.tell(subjects.INSTALL, external(one))).success
    write_metadata(worker.place.backends / "pointer", meta_backend_for="engine")
    locks = worker.agent._parts.executor._locks
    async with asyncio.TaskGroup() as group:
        async with locks.hold("backend:engine"):
            deleting = group.create_task(worker.tell(subjects.DELETE, wire.BackendDeleteRequest(backend="engine"), "d"))
            await until(lambda: len(locks._locks["backend:engine"].waiting) == 1)
            asking = [
                group.create_task(worker.tell(subjects.INSTALL, wire.BackendInstallRequest(backend=name), name))
                for name in ("motor", "pointer", "engine")
            ]
            await until(lambda: len(locks._locks["backend:engine"].waiting) == 4)
            assert not deleting.done()
    assert deleting.result().success
    for task in asking:
        # It was there when it was asked for, and no gallery has it.
        assert "cannot find a backend named" in task.result().error
    assert names(worker) == set()


async def test_a_go_frontend_that_forgot_a_worker_gets_it_back(tmp_path: Path) -> None:
    """Over HTTP, in the words of sample 01 and 03: one token for everything, and errors in a Go frontend's shapes."""
    asked: list[str] = []

    def answer(peer: socket.socket, request: bytes) -> bool:
        path = request.split(b" ")[1].decode()
        if path == "/api/node/challenge":
            return plain("404 Not Found", b'{"message":"Not Found"}')(peer, request)
        asked.append(path)
        if b"Authorization: Bearer secret\r\n" not in request:
            return plain("401 Unauthorized", b'{"error":"missing or invalid Authorization header"}')(peer, request)
        if asked[-1].endswith("register") and b'"address":' not in request:
            refusal = b'{"error":{"code":400,"message":"address is required for backend workers","type":"node_error"}}'
            return plain("400 Bad Request", refusal)(peer, request)
        if asked[-1].endswith("register"):
            body = {"id": NODE, "name": "a", "node_type": "backend", "status": "healthy", "created_at": "0001-01-01"}
            return plain("201 Created", msgspec.json.encode(body))(peer, request)
        if len(asked) == 5:
            gone = b'{"error":{"code":404,"message":"node not found","type":"node_error"}}'
            return plain("404 Not Found", gone)(peer, request)
        return plain("200 OK", b'{"message":"heartbeat received"}')(peer, request)

    worker = WholeWorker(tmp_path)
    place = msgspec.structs.replace(worker.place, heartbeat_seconds=0.1)
    with serving(answer) as (client, _):
        agent = Agent(place, make_parts(place, worker.engine, os.environ), WorkerLink(client), worker._open)
        async with asyncio.TaskGroup() as group:
            task = group.create_task(agent.run())
            await until(lambda: task.done() or len(asked) >= 8)
            agent.stop()
    await worker.engine.close()
    register, heartbeat = "/api/node/register", f"/api/node/{NODE}/heartbeat"
    # What its own address is, a worker has learned from the connection on which it asked for a challenge in vain.
    assert asked[:8] == [register, *[heartbeat] * 4, register, heartbeat, heartbeat]
    assert asked[-1] == f"/api/node/{NODE}/deregister"
