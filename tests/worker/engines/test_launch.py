"""What an engine is told and may read: the context size of its model's file, and files on shared storage."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import msgspec
import pytest
from tests.core.gguf_files import gguf
from tests.engine.localai import stub_backend
from tests.worker.engines.kinds import start_of, write_engine
from tests.worker.engines.test_localai_engines import ask as ask_grpc
from tests.worker.world import World, ask, running_world, silent

from enginehouse.core.model import ModelFile, ModelOptions
from enginehouse.core.model_definition import MAX_CONTEXT
from enginehouse.host import disk
from enginehouse.worker.engines.process_table import StartRequest


def on_storage(world: World, storage: Path, content: bytes, context_size: int = 0) -> StartRequest:
    """A start of a model whose file lies on storage that the worker may read."""
    storage.mkdir(parents=True, exist_ok=True)
    path = storage / "m.gguf"
    path.write_bytes(content)
    fetcher = world.models._fetcher
    fetcher._sources = msgspec.structs.replace(fetcher._sources, directories=(storage,))
    file = ModelFile("m.gguf", f"file://{path}", disk.sha256_of(path), len(content))
    asked = start_of("stub", "echo_load")
    made = msgspec.structs.replace(asked.model, files=(file,), options=ModelOptions(context_size=context_size))
    return msgspec.structs.replace(asked, model=made)


async def test_a_confined_engine_reads_its_file_on_shared_storage_and_nothing_beside_it(tmp_path: Path) -> None:
    storage = tmp_path / "nas"
    async with running_world(tmp_path / "data") as world:
        if not world.place.installing.confinement.protects_trees:
            pytest.skip("engines are not confined on this machine")
        asked = on_storage(world, storage, b"the bytes of a model")
        secret, key = storage / "secret", world.place.directory / "node.key"
        for path in (secret, key):
            path.write_text("a secret")
        write_engine(world.place.backends / "stub", "openai-http", reads=[str(secret), str(key)])
        await world.models.pull(asked.model, 1, silent)
        started = await world.supervisor.start(asked)
        told = json.loads(await asyncio.to_thread(ask, started.address, "what can you read?"))
        assert told["read"] == len(b"the bytes of a model")
        assert told["others"] == [-1, -1]


@pytest.mark.parametrize(("trained_on", "expected"), [(2048, 2048), (131_072, MAX_CONTEXT)])
async def test_the_context_size_of_a_file_is_used_where_nobody_chose_one(
    tmp_path: Path, trained_on: int, expected: int
) -> None:
    content = gguf({"general.architecture": "llama", "llama.context_length": trained_on})
    async with running_world(tmp_path / "data") as world:
        asked = on_storage(world, tmp_path / "nas", content)
        write_engine(world.place.backends / "stub", "openai-http", reads=["/nowhere"])
        await world.models.pull(asked.model, 1, silent)
        started = await world.supervisor.start(asked)
        assert json.loads(await asyncio.to_thread(ask, started.address, "how much?"))["context"] == expected
        await world.supervisor.stop(asked.process_key)
        stub_backend.write_tree(world.place.backends / "grpc")
        over_grpc = msgspec.structs.replace(asked, directory="grpc")
        started = await world.supervisor.start(over_grpc)
        answer = msgspec.json.decode(await ask_grpc(world.engine, started.address, over_grpc.model))
        assert json.loads(answer["choices"][0]["message"]["content"])["ContextSize"] == expected


async def test_a_chosen_context_size_and_a_file_that_is_none_are_left_alone(tmp_path: Path) -> None:
    async with running_world(tmp_path / "data") as world:
        asked = on_storage(world, tmp_path / "nas", b"GGUF and then nothing that makes sense")
        write_engine(world.place.backends / "stub", "openai-http", reads=["/nowhere"])
        await world.models.pull(asked.model, 1, silent)
        started = await world.supervisor.start(asked)
        assert json.loads(await asyncio.to_thread(ask, started.address, "how much?"))["context"] == 0
        content = gguf({"general.architecture": "llama", "llama.context_length": 2048})
        chosen = on_storage(world, tmp_path / "nas", content, context_size=512)
        await world.models.pull(chosen.model, 2, silent)
        started = await world.supervisor.start(chosen)
        assert json.loads(await asyncio.to_thread(ask, started.address, "how much?"))["context"] == 512
