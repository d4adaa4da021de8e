"""Engines that speak LocalAI's protocol under the supervisor: found out, loaded, refused, replaced and stopped."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import psutil
import pytest
from tests.engine.localai.stub_backend import write_tree
from tests.worker.engines.test_supervisor import pid_of
from tests.worker.world import KEY, World, nothing, running_world, silent, tiny_chat, until

from enginehouse.core.errors import EnginehouseError, Hopeless
from enginehouse.core.gallery import resolve
from enginehouse.core.model import Model, served_config
from enginehouse.core.model import ServedModel as Served
from enginehouse.core.replica import LOCALAI_GRPC
from enginehouse.engine.engines import Engines
from enginehouse.fetch.galleries.sources import load_builtin
from enginehouse.host import hardware
from enginehouse.ports import EngineCall
from enginehouse.worker.backends.installer import InstallRequest
from enginehouse.worker.engines.process_table import StartRequest

QUESTION = (
    b'{"model": "m", "temperature": 0, "messages": [{"role": "user", "content": "What is the capital of France?"}]}'
)


@pytest.fixture
async def stubs(tmp_path: Path) -> AsyncIterator[World]:
    """A worker whose engines are stubs; `write_tree` makes them."""
    async with running_world(tmp_path / "data") as world:
        await world.models.pull(tiny_chat(), 1, silent)
        yield world


def model(*options: str) -> Model:
    config = {"options": [f"stub.{one}" for one in options]}
    return msgspec.structs.replace(tiny_chat(), backend="stub", config=config)


def request(*options: str, key: str = KEY, process_only: bool = False) -> StartRequest:
    return StartRequest(
        model=model(*options), slot=0, directory="stub", key=key, generation=1, process_only=process_only
    )


async def ask(engine: Engines, address: str, asked: Model, path: str = "/v1/chat/completions") -> bytes:
    config = served_config(asked)
    call = EngineCall(
        address=address,
        key=KEY,
        method="POST",
        path=path,
        body=QUESTION,
        protocol=LOCALAI_GRPC,
        served=Served(name=asked.name, identity=config.parameters.model, config=config),
    )
    response = await engine.send(call, connect_seconds=5, head_seconds=20)
    try:
        return b"".join([chunk async for chunk in response.chunks()])
    finally:
        await response.close()


async def test_the_protocol_of_an_image_is_found_out_and_its_model_loaded(stubs: World) -> None:
    write_tree(stubs.place.backends / "stub")
    phases: list[str] = []
    started = await stubs.supervisor.start(request(), lambda phase, *_: phases.append(phase))
    assert (started.protocol, started.checks_key) == (LOCALAI_GRPC, True)
    assert phases == ["loading"]
    (replica,) = stubs.supervisor.running()
    assert replica.protocol == LOCALAI_GRPC
    answer = msgspec.json.decode(await ask(stubs.engine, started.address, model()))
    assert answer["choices"][0]["message"]["content"] == "The capital of France is Paris."


async def test_the_model_is_loaded_from_its_place_with_the_worker_s_threads(stubs: World) -> None:
    write_tree(stubs.place.backends / "stub")
    started = await stubs.supervisor.start(request("echo_load"))
    answer = msgspec.json.decode(await ask(stubs.engine, started.address, model("echo_load")))
    told = msgspec.json.decode(answer["choices"][0]["message"]["content"])
    name = tiny_chat().files[0].name
    assert told["Model"] == name
    assert Path(told["ModelFile"]) == stubs.place.models / "tiny-chat" / name
    assert told["Threads"] >= 1


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("fail_load:the file has an unknown architecture", "unknown architecture. Its engine logged: a line about"),
        ("refuse_load:not enough memory", "not enough memory"),
        ("die_on_load", "ended with code 3: out of memory while loading"),
    ],
)
async def test_a_failed_load_has_the_engine_s_own_words_and_leaves_no_process(
    stubs: World, option: str, said: str
) -> None:
    write_tree(stubs.place.backends / "stub")
    with pytest.raises(Hopeless) as caught:
        await stubs.supervisor.start(request(option))
    assert said in caught.value.message
    assert stubs.supervisor.running() == ()


@pytest.mark.parametrize(
    "says",
    [
        "panic: listen tcp 127.0.0.1:50051: bind: address already in use",
        "OSError: [Errno 98] Address already in use\nand a line more",
    ],
)
async def test_an_engine_that_finds_its_port_taken_gets_another_one_however_it_says_so(stubs: World, says: str) -> None:
    first = stubs.place.base_port
    write_tree(stubs.place.backends / "stub", ends=says, ends_on=first)
    started = await stubs.supervisor.start(request())
    assert int(started.address.rpartition(":")[2]) > first


async def test_an_engine_that_ends_before_it_is_ready_is_told_with_its_last_line(stubs: World) -> None:
    write_tree(stubs.place.backends / "stub", ends="cannot find libcuda.so.1")
    with pytest.raises(Hopeless, match=r"libcuda\.so\.1"):
        await stubs.supervisor.start(request())


async def test_an_engine_that_never_gets_ready_is_given_up(tmp_path: Path) -> None:
    """F-071."""
    async with running_world(tmp_path / "data") as world:
        await world.models.pull(tiny_chat(), 1, silent)
        write_tree(world.place.backends / "stub", never_ready=True)
        impatient = msgspec.structs.replace(world.place.installing, stall_seconds=0.5)
        world.supervisor._starter._options = msgspec.structs.replace(world.place, installing=impatient)
        with pytest.raises(EnginehouseError) as caught:
            await world.supervisor.start(request())
        assert caught.value.code == "stalled"
        assert world.supervisor.running() == ()


async def test_an_engine_that_ignores_its_key_is_marked(stubs: World) -> None:
    write_tree(stubs.place.backends / "stub", ignores_key=True)
    started = await stubs.supervisor.start(request())
    assert started.checks_key is False


async def test_a_process_without_a_model_starts_at_once_and_has_the_token_of_the_cluster(tmp_path: Path) -> None:
    async with running_world(tmp_path / "data") as world:
        write_tree(world.place.backends / "stub")
        world.supervisor._options = msgspec.structs.replace(world.place, join_token="join-token-of-the-cluster")
        first = await world.supervisor.start(request(key="", process_only=True))
        assert first.checks_key is True
        assert await world.supervisor.start(request(key="", process_only=True)) == first
        with pytest.raises(EnginehouseError) as caught:
            await ask(world.engine, first.address, model())
        assert caught.value.code == "replica_unreachable"  # another key


async def test_the_engine_may_release_its_model_before_it_is_stopped(stubs: World) -> None:
    write_tree(stubs.place.backends / "stub")
    await stubs.supervisor.start(request("free_marker:now"))
    log = next(stubs.place.engine_logs.glob("*.log"))
    assert await stubs.supervisor.stop("tiny-chat#0")
    assert "freed now" in log.read_text()


async def test_an_engine_is_idle_when_nobody_else_is_connected_to_it(stubs: World) -> None:
    write_tree(stubs.place.backends / "stub")
    started = await stubs.supervisor.start(request())
    key = request().process_key
    engine = Engines()
    try:
        await ask(engine, started.address, model())
        assert not await stubs.supervisor.until_idle(key, 0.5), "a frontend is connected"
        engine.forget(started.address)
        assert await stubs.supervisor.until_idle(key, 5.0)
        await ask(engine, started.address, model())  # a new connection is opened when it is needed
    finally:
        await engine.close()


async def test_an_engine_that_is_busy_with_its_only_call_is_not_replaced(stubs: World) -> None:
    """F-049."""
    write_tree(stubs.place.backends / "stub", calls_at_once=1)
    first = await stubs.supervisor.start(request("answer_seconds:4"))
    async with asyncio.TaskGroup() as group:
        asking = group.create_task(ask(stubs.engine, first.address, model("answer_seconds:4")))
        log = next(stubs.place.engine_logs.glob("*.log"))
        await until(lambda: "asked" in log.read_text())
        assert await stubs.supervisor.start(request("answer_seconds:4")) == first
    assert b"Paris" in asking.result()


async def test_a_suspended_engine_is_replaced(stubs: World) -> None:
    write_tree(stubs.place.backends / "stub")
    first = await stubs.supervisor.start(request())
    suspended = psutil.Process(pid_of(stubs))
    suspended.suspend()
    await until(lambda: suspended.status() == psutil.STATUS_STOPPED)
    assert (await stubs.supervisor.start(request())).nonce != first.nonce


async def test_the_built_in_engine_answers_in_this_protocol(tmp_path: Path) -> None:
    async with running_world(tmp_path / "data") as world:
        build = resolve((load_builtin(),), "llama-cpp-grpc", "default", hardware.platform())
        await world.installer.install(InstallRequest(resolved=build, generation=1), silent, nothing)
        await world.models.pull(tiny_chat(), 1, silent)
        wanted = StartRequest(model=tiny_chat(), slot=0, directory="llama-cpp-grpc", key=KEY, generation=1)
        started = await world.supervisor.start(wanted)
        assert (started.protocol, started.checks_key) == (LOCALAI_GRPC, True)
        answers = [await ask(world.engine, started.address, tiny_chat()) for _ in range(2)]
        for answer in answers:
            choice = msgspec.json.decode(answer)["choices"][0]
            assert choice["message"]["content"] == "The capital of France is Paris."
        async with asyncio.timeout(10):
            assert await world.supervisor.stop("tiny-chat#0")


async def test_the_backend_of_the_documentation_works_in_sixty_lines(stubs: World) -> None:
    document = Path(__file__).parents[3] / "docs" / "engines.md"
    program = document.read_text().split("```python\n")[1].split("```")[0]
    assert len([line for line in program.splitlines() if line.strip()]) <= 60
    tree = write_tree(stubs.place.backends / "stub")
    (tree / "run.sh").write_text(program.replace("#!/usr/bin/env python3", f"#!{sys.executable}"))
    started = await stubs.supervisor.start(request())
    assert started.checks_key is True
    answer = msgspec.json.decode(await ask(stubs.engine, started.address, model()))
    assert answer["choices"][0]["message"]["content"] == "France? of capital the is What"
