"""The inference routes over engines of LocalAI's protocol that fail: real processes that die, refuse, or lost their
model. What looks complete is complete (F-062), and what no engine has begun moves on (F-060).
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tests.api.inference import Client, Routing, Seen
from tests.engine.localai.stub_backend import SENTENCE, write_tree
from tests.ports import free_port
from tests.worker.world import until

from enginehouse.api.openai import OpenAI
from enginehouse.core.ids import NodeId
from enginehouse.core.load_options import ModelPaths
from enginehouse.core.model import Model, ModelFile, ServedModel, load_options, served_config
from enginehouse.core.replica import LOCALAI_GRPC
from enginehouse.core.routing import Route
from enginehouse.engine.engines import Engines
from enginehouse.ports import EngineTarget

KEY = "key-of-the-replica"
CHAT = {"model": "m", "messages": [{"role": "user", "content": "What is the capital of France?"}]}
SECONDS = 20.0


class Stubs:
    """Real processes of the stub, and the routes to them."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._processes: list[subprocess.Popen[bytes]] = []
        self.engine = Engines()
        self.routing = Routing()
        self.seen = Seen()
        self.api = OpenAI(self.routing, self.engine, self.seen, head_seconds=SECONDS)

    async def add(self, *options: str, is_loaded: bool = True) -> Path:
        """One more replica; returns its log."""
        number = len(self._processes)
        tree = write_tree(self._directory / f"stub-{number}")
        address, log = f"127.0.0.1:{free_port()}", self._directory / f"{number}.log"
        self._start(tree, address, log)
        target = EngineTarget(address=address, key=KEY, protocol=LOCALAI_GRPC)
        for _ in range(1000):
            if await self.engine.is_ready(target):
                break
            await asyncio.sleep(0.02)
        model = Model(
            name="m",
            backend="stub",
            files=(ModelFile("m.gguf", "builtin:m.gguf", ""),),
            config={"options": [f"stub.{one}" for one in options]},
        )
        if is_loaded:
            loaded = load_options(model, ModelPaths(directory="/models", threads=1))
            await self.engine.load(target, loaded, limit_seconds=SECONDS)
        config = served_config(model)
        self.routing.routes.append(
            Route(
                model="m",
                slot=number,
                node_id=NodeId(f"n-{number}"),
                node_name=f"node-{number}",
                address=address,
                key=KEY,
                revision="r",
                nonce="x",
                protocol=LOCALAI_GRPC,
                served=ServedModel(name="m", identity=config.parameters.model, config=config),
            )
        )
        return log

    def _start(self, tree: Path, address: str, log: Path) -> None:
        with log.open("wb") as output:
            command = [sys.executable, str(tree / "run.sh"), "--addr", address]
            environment = {"LOCALAI_GRPC_AUTH_TOKEN": KEY}
            self._processes.append(subprocess.Popen(command, env=environment, stdout=output, stderr=output))

    async def ask(self, path: str = "/v1/chat/completions", **fields: object) -> Client:
        client = Client(json.dumps({**CHAT, **fields}).encode())
        await self.answer(client, path)
        return client

    async def answer(self, client: Client, path: str = "/v1/chat/completions") -> None:
        async with asyncio.timeout(SECONDS):
            await self.api.at(path)(client.scope, client.receive, client.send)
        assert self.routing.held == 0

    async def close(self) -> None:
        await self.engine.close()
        for process in self._processes:
            process.kill()
            process.wait(SECONDS)


@asynccontextmanager
async def stubs(directory: Path) -> AsyncIterator[Stubs]:
    made = Stubs(directory)
    try:
        yield made
    finally:
        await made.close()


def content(body: bytes) -> str:
    events = [json.loads(event[6:]) for event in body.split(b"\n\n") if event.startswith(b"data: {")]
    return "".join(one["choices"][0]["delta"].get("content") or "" for one in events if one.get("choices"))


async def test_a_stream_is_complete_and_says_so(tmp_path: Path) -> None:
    async with stubs(tmp_path) as world:
        await world.add()
        client = await world.ask(stream=True)
        assert client.status == 200
        assert content(client.body) == "".join(SENTENCE)
        assert client.body.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("option", ["die_after:3", "fail_after:3"])
async def test_a_stream_that_breaks_ends_with_an_error_and_without_its_end_marker(tmp_path: Path, option: str) -> None:
    async with stubs(tmp_path) as world:
        await world.add(option)
        client = await world.ask(stream=True)
        assert client.status == 200
        assert content(client.body) == "".join(SENTENCE[:3])
        assert b"[DONE]" not in client.body
        last = json.loads(client.body.rstrip().rpartition(b"data: ")[2])
        assert last["error"]["code"] == "upstream_error"


async def test_an_engine_that_dies_before_its_answer_is_a_502_and_not_asked_again(tmp_path: Path) -> None:
    async with stubs(tmp_path) as world:
        await world.add("die_on_request")
        client = await world.ask()
        assert (client.status, client.error["code"]) == (502, "upstream_error")
        assert world.routing.acquired == 1  # it may have begun, so nobody else may


async def test_a_replica_that_lost_its_model_is_dropped_and_another_answers(tmp_path: Path) -> None:
    async with stubs(tmp_path) as world:
        await world.add(is_loaded=False)
        await world.add()
        client = await world.ask()
        assert client.status == 200
        assert [route.slot for route in world.routing.dropped] == [0]
        assert world.seen.requests[0]["node"] == "node-1"


async def test_a_client_that_leaves_stops_the_engine(tmp_path: Path) -> None:
    async with stubs(tmp_path) as world:
        log = await world.add("tokens:100000", "token_seconds:0.01")
        client = Client(json.dumps({**CHAT, "stream": True}).encode())
        async with asyncio.TaskGroup() as group:
            group.create_task(world.answer(client))
            async with asyncio.timeout(SECONDS):
                await client.got_bytes.wait()
            client.left.set()
        await until(lambda: b"call over" in log.read_bytes(), limit_seconds=5.0)
        assert world.routing.held == 0


async def test_embeddings_rankings_and_tokens_have_their_shapes(tmp_path: Path) -> None:
    async with stubs(tmp_path) as world:
        await world.add()
        vectors = json.loads((await world.ask("/v1/embeddings", input=["a", "bbb"])).body)
        assert [one["embedding"][0] for one in vectors["data"]] == [1.0, 3.0]
        assert vectors["usage"]["prompt_tokens"] == 4
        ranks = json.loads((await world.ask("/v1/rerank", query="fox", documents=["a cat", "a fox"], top_n=1)).body)
        assert [(one["index"], one["document"]["text"]) for one in ranks["results"]] == [(1, "a fox")]
        tokens = json.loads((await world.ask("/v1/tokenize", content="one three")).body)
        assert tokens == {"tokens": [3, 5]}


async def test_a_template_of_the_configuration_makes_the_prompt(tmp_path: Path) -> None:
    async with stubs(tmp_path) as world:
        await world.add("echo_prompt")
        route = world.routing.routes.pop()
        assert route.served is not None
        template = {"chat_message": "[{{.RoleName}}] {{.Content}}", "chat": "{{.Input}}\n[assistant]"}
        model = Model(
            name="m",
            backend="stub",
            files=(ModelFile("m.gguf", "builtin:m.gguf", ""),),
            config={"template": template},
        )
        served = ServedModel(name="m", identity=route.served.identity, config=served_config(model))
        world.routing.routes.append(
            Route(**{**{f: getattr(route, f) for f in route.__struct_fields__}, "served": served})
        )
        answer = json.loads((await world.ask()).body)
        assert answer["choices"][0]["message"]["content"] == "[user] What is the capital of France?\n[assistant]"
