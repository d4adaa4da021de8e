"""Ports rest after use, longer where an engine answers whoever asks, and over a restart of the worker."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest
from tests.worker.probes import Targets, write_probe
from tests.worker.world import KEY, World, link_tree, running_world, silent, tiny_chat

from enginehouse.core.errors import Unavailable
from enginehouse.worker.engines.ports import PORTS, USUAL, Ports
from enginehouse.worker.engines.process_table import StartRequest


def is_free(_port: int) -> bool:
    return True


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("checks_key", "rest_seconds"), [(True, USUAL.rest_seconds), (False, USUAL.unchecked_rest_seconds)]
)
def test_a_port_rests_and_is_then_its_last_holders(checks_key: bool, rest_seconds: float) -> None:
    clock = Clock()
    ports = Ports(5000, clock)
    assert ports.take("a#0", is_free) == 5000
    ports.note(5000, checks_key=checks_key)
    ports.release("a#0", 5000)
    clock.now += rest_seconds - 0.1
    assert ports.take("b#0", is_free) == 5001
    clock.now += 0.2
    assert ports.take("a#0", is_free) == 5000


@pytest.mark.parametrize("checks_key", [True, False])
@pytest.mark.parametrize("was_killed", [True, False])
def test_a_rest_survives_the_worker(tmp_path: Path, checks_key: bool, was_killed: bool) -> None:
    clock, file = Clock(), tmp_path / "ports.json"
    ports = Ports(5000, clock, file)
    assert ports.take("a#0", is_free) == 5000
    ports.save()
    ports.note(5000, checks_key=checks_key)
    ports.save()
    if not was_killed:
        ports.release("a#0", 5000)
        ports.save()
    later = Clock()
    later.now = 0.0  # of another run of the machine
    again = Ports(5000, later, file)
    again.load()
    assert again.take("b#0", is_free) == 5001
    later.now += USUAL.rest_seconds + 0.1
    assert again.take("c#0", is_free) == (5000 if checks_key else 5002)


def test_a_port_that_nobody_learned_of_is_free_at_once() -> None:
    ports = Ports(5000, Clock())
    ports.release("a#0", ports.take("a#0", is_free), used=False)
    assert ports.take("b#0", is_free) == 5000


def test_what_rests_is_not_forgotten_by_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "ports.json").write_text("{5000:")
    ports = Ports(5000, Clock(), tmp_path / "ports.json")
    ports.load()
    assert ports.take("a#0", is_free) == 5000 + PORTS // 10


def test_where_every_port_rests_the_reason_is_told() -> None:
    ports = Ports(65535, Clock())
    ports.release("a#0", ports.take("a#0", is_free))
    with pytest.raises(Unavailable, match="cannot find a free port from 65535 up: of 1, engines use 0, 1 rest"):
        ports.take("b#0", is_free)


def request(model: str, directory: str) -> StartRequest:
    made = msgspec.structs.replace(tiny_chat(), name=model, backend=directory)
    return StartRequest(model=made, slot=0, directory=directory, key=KEY)


async def made_ready(world: World, model: str) -> None:
    await world.models.pull(msgspec.structs.replace(tiny_chat(), name=model), 1, silent)


async def test_an_engine_is_asked_whether_it_checks_its_key_and_is_marked(world: World) -> None:
    write_probe(world.place.backends / "probe", Targets())
    await made_ready(world, "open")
    await made_ready(world, "closed")
    opened = await world.supervisor.start(request("open", "probe"))
    closed = await world.supervisor.start(request("closed", "xllamacpp"))
    assert (opened.checks_key, closed.checks_key) == (False, True)
    marked = {one.model_id: one.checks_key for one in world.supervisor.running()}
    assert marked == {"open": False, "closed": True}
    assert (await world.supervisor.start(request("open", "probe"))) == opened


async def test_no_other_model_gets_the_port_of_an_unchecked_engine_after_a_restart_of_the_worker(
    tmp_path: Path, installed_tree: Path
) -> None:
    async def start(model: str, directory: str) -> str:
        async with running_world(tmp_path) as world:
            if not (world.place.backends / "probe").exists():
                write_probe(world.place.backends / "probe", Targets())
                link_tree(installed_tree, world.place.backends / "xllamacpp")
            await made_ready(world, model)
            return (await world.supervisor.start(request(model, directory))).address

    first = await start("one", "probe")
    others = [await start("two", "probe"), await start("three", "xllamacpp")]
    assert first not in others
    assert len({first, *others}) == 3
    await asyncio.to_thread((tmp_path / "ports.json").unlink)
    assert await start("four", "xllamacpp") == first
