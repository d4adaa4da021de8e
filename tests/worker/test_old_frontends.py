"""Messages of Go frontends, which know names and no intents: what is there costs nothing, one backend is one lock."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from tests.worker.house import House, working
from tests.worker.shelf import Shelf, launcher, said_by, write_backend, write_metadata
from tests.worker.world import link_tree, until

from enginehouse.core import wire
from enginehouse.core.installation import HOUSE

NODE = "node-1"


@pytest.fixture
async def house(one: Shelf, tmp_path: Path) -> AsyncIterator[House]:
    await one.publish("engine:1", [{"run.sh": launcher("one")}])
    async with working(House(tmp_path / "worker", allowed_hosts=("127.0.0.1",))) as made:
        yield made


def names(house: House) -> set[str]:
    return set(os.listdir(house.place.backends)) - {HOUSE}


def external(one: Shelf, **fields: object) -> wire.BackendInstallRequest:
    """As the node route of a Go frontend sends it: the name is not in `backend`."""
    wanted = wire.BackendInstallRequest(
        backend="", uri=one.proxy.reference(one.named("engine:1")), name="engine", alias="motor"
    )
    return msgspec.structs.replace(wanted, **fields)


async def test_an_external_install_with_its_name_beside_works_and_what_is_there_costs_no_traffic(
    house: House, one: Shelf
) -> None:
    reply = await house.tell(wire.INSTALL, external(one))
    assert (reply.success, reply.error) == (True, "")
    assert names(house) == {"engine"}
    asked, inode = len(one.proxy.requests), house.place.backends.joinpath("engine").stat().st_ino
    for name in ("engine", "motor", "lab@engine"):
        began = time.monotonic()
        assert (await house.tell(wire.INSTALL, wire.BackendInstallRequest(backend=name))).success
        assert time.monotonic() - began < 1.0
    assert (await house.tell(wire.INSTALL, external(one))).success
    assert len(one.proxy.requests) == asked
    assert house.place.backends.joinpath("engine").stat().st_ino == inode
    assert names(house) == {"engine"}


async def test_force_installs_again_and_an_upgrade_by_name_takes_what_the_source_has_now(
    house: House, one: Shelf
) -> None:
    assert (await house.tell(wire.INSTALL, external(one))).success
    before = house.place.backends.joinpath("engine").stat().st_ino
    assert (await house.tell(wire.INSTALL, wire.BackendInstallRequest(backend="motor", force=True))).success
    again = house.place.backends.joinpath("engine").stat().st_ino
    assert again != before
    same = await house.tell(wire.UPGRADE, wire.BackendUpgradeRequest(backend="engine"))
    assert same.success
    assert house.place.backends.joinpath("engine").stat().st_ino == again
    await one.publish("engine:1", [{"run.sh": launcher("two")}])
    assert (await house.tell(wire.UPGRADE, wire.BackendUpgradeRequest(backend="engine"))).success
    assert said_by(house.place.backends / "engine") == "two"
    # The alias is kept, though no gallery and no request named it.
    assert (await house.tell(wire.DELETE, wire.BackendDeleteRequest(backend="motor"))).success
    assert names(house) == set()


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"name": ""}, "without a name: say in `name` what the backend is to be called"),
        ({"uri": "", "name": ""}, "cannot install: the request names neither a backend nor a uri"),
        ({"name": "../outside"}, "cannot use '../outside' as a backend name"),
        ({"uri": "ocifile:///etc"}, "files of this machine"),
    ],
)
async def test_what_cannot_be_installed_is_refused_in_plain_words(
    house: House, one: Shelf, fields: dict[str, object], said: str
) -> None:
    reply = await house.tell(wire.INSTALL, external(one, **fields))
    assert reply.success is False
    assert reply.error.startswith("cannot ")
    assert said in reply.error
    assert names(house) == set()


async def test_deletes_go_by_directory_meta_name_or_alias_and_an_unknown_one_is_an_error(
    house: House, one: Shelf
) -> None:
    for name in ("engine", "motor", "pointer", "lab@pointer", "lab@engine"):
        assert (await house.tell(wire.INSTALL, external(one))).success
        write_metadata(house.place.backends / "pointer", meta_backend_for="engine")
        reply = await house.tell(wire.DELETE, wire.BackendDeleteRequest(backend=name))
        assert (name, reply.success, reply.error) == (name, True, "")
        assert names(house) == set()
    for name in ("engine", "motor", "../engine", ""):
        answer = await house.bus.ask(
            wire.node_subject(NODE, wire.DELETE), wire.encode(wire.BackendDeleteRequest(backend=name)), "r"
        )
        unknown = wire.decode(answer, wire.BackendDeleteReply, "the reply")
        assert not unknown.success
        assert unknown.error.startswith("cannot find a backend named ")
        assert unknown.reports_stopped_processes


async def test_pointers_that_lead_nowhere_and_those_that_go_workers_made_disappear(house: House) -> None:
    for name in ("pointer", "lab@pointer"):
        write_metadata(house.place.backends / name, meta_backend_for="gone")
    assert (await house.tell(wire.DELETE, wire.BackendDeleteRequest(backend="lab@pointer"))).success
    assert names(house) == set()


async def test_an_alias_of_two_backends_means_neither(house: House) -> None:
    for name in ("left", "right"):
        write_backend(house.place.backends / name, name, alias="motor")
    reply = await house.tell(wire.DELETE, wire.BackendDeleteRequest(backend="motor"))
    assert "left, right have that alias" in reply.error
    assert names(house) == {"left", "right"}


async def test_a_name_of_a_gallery_never_becomes_a_directory(tmp_path: Path, installed_tree: Path) -> None:
    house = House(tmp_path)
    house.place.make_directories()
    link_tree(installed_tree, house.place.backends / "xllamacpp")
    async with working(house):
        for verb, message in (
            (wire.INSTALL, wire.BackendInstallRequest(backend="lab@llama-cpp", force=True)),
            (wire.UPGRADE, wire.BackendUpgradeRequest(backend="lab@llama-cpp")),
        ):
            assert (await house.tell(verb, message)).success
            assert names(house) == {"llama-cpp", "xllamacpp"}
        assert (await house.tell(wire.DELETE, wire.BackendDeleteRequest(backend="lab@llama-cpp"))).success
        assert names(house) == set()


async def test_alias_meta_name_and_directory_share_one_lock_and_what_vanished_meanwhile_is_looked_up_again(
    house: House, one: Shelf
) -> None:
    assert (await house.tell(wire.INSTALL, external(one))).success
    write_metadata(house.place.backends / "pointer", meta_backend_for="engine")
    locks = house.agent._actions._locks
    async with asyncio.TaskGroup() as group:
        async with locks.hold("backend:engine"):
            deleting = group.create_task(house.tell(wire.DELETE, wire.BackendDeleteRequest(backend="engine"), "d"))
            await until(lambda: len(locks._locks["backend:engine"].waiting) == 1)
            asking = [
                group.create_task(house.tell(wire.INSTALL, wire.BackendInstallRequest(backend=name), name))
                for name in ("motor", "pointer", "engine")
            ]
            await until(lambda: len(locks._locks["backend:engine"].waiting) == 4)
            assert not deleting.done()
    assert deleting.result().success
    for task in asking:
        # It was there when it was asked for, and no gallery has it.
        assert "cannot find a backend named" in task.result().error
    assert names(house) == set()
