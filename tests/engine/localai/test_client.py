"""The adapter against a real gRPC server: every path, errors before the first byte, and cancelled streams."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from openai.types import CreateEmbeddingResponse
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from tests.engine.localai.test_chat import context

from enginehouse.core.errors import EnginehouseError, Invalid, NotFound, Unavailable, Upstream
from enginehouse.core.model import ServedModel
from enginehouse.core.replica import LOCALAI_GRPC
from enginehouse.engine.localai import backend_pb2
from enginehouse.engine.localai.client import LocalaiEngine
from enginehouse.ports import EngineCall, EngineResponse, EngineTarget

KEY = "secret"
SECONDS = 20.0
WORDS = ["Hello", " there", ", Grü", "ße!"]
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
PICTURE = {"type": "image_url", "image_url": "http://example.com/a.png"}


class StubBackend(grpc.GenericRpcHandler):  # type: ignore[misc]
    """A backend that follows the last message of a chat, or the prompt."""

    def __init__(self) -> None:
        self.cancelled = threading.Event()

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        name = details.method.removeprefix("/backend.Backend/")
        if ("authorization", f"Bearer {KEY}") not in (details.invocation_metadata or ()):
            return grpc.unary_unary_rpc_method_handler(_refuse)
        streams = {"PredictStream": self._predict_stream}
        if name in streams:
            return grpc.unary_stream_rpc_method_handler(streams[name])
        unary = {
            "Health": lambda _, __: backend_pb2.Reply(message=b"OK").SerializeToString(),
            "Predict": self._predict,
            "Embedding": self._embedding,
            "TokenizeString": lambda _, __: backend_pb2.TokenizationResponse(tokens=[1, 2]).SerializeToString(),
        }
        return grpc.unary_unary_rpc_method_handler(unary[name]) if name in unary else None

    def _predict(self, message: bytes, rpc: grpc.ServicerContext) -> bytes:
        _obey(_said(message), rpc)
        return backend_pb2.Reply(message="".join(WORDS).encode(), tokens=4, prompt_tokens=2).SerializeToString()

    def _predict_stream(self, message: bytes, rpc: grpc.ServicerContext) -> Iterator[bytes]:
        said = _said(message)
        _obey(said, rpc)
        if said == "for ever" and not rpc.add_callback(self.cancelled.set):
            self.cancelled.set()  # the call ended before it began
        for word in WORDS:
            yield backend_pb2.Reply(message=word.encode()).SerializeToString()
        if said == "for ever":
            self.cancelled.wait(2 * SECONDS)  # longer than a test waits, so that only a cancelled call ends in time
        if said == "break":
            rpc.abort(grpc.StatusCode.INTERNAL, "out of memory")
        yield backend_pb2.Reply(tokens=4, prompt_tokens=2).SerializeToString()

    def _embedding(self, message: bytes, rpc: grpc.ServicerContext) -> bytes:
        number = float(backend_pb2.PredictOptions.FromString(message).Embeddings)
        return backend_pb2.EmbeddingResult(embeddings=[number, 1.0], prompt_tokens=1).SerializeToString()


def _refuse(_: bytes, rpc: grpc.ServicerContext) -> bytes:
    rpc.abort(grpc.StatusCode.UNAUTHENTICATED, "wrong token")
    return b""


def _said(message: bytes) -> str:
    options = backend_pb2.PredictOptions.FromString(message)
    return options.Messages[-1].content if options.Messages else options.Prompt


def _obey(said: str, rpc: grpc.ServicerContext) -> None:
    refusals = {
        "mismatch": (grpc.StatusCode.NOT_FOUND, "stub: model identity mismatch"),
        "unloaded": (grpc.StatusCode.FAILED_PRECONDITION, "model not loaded"),
        "refuse": (grpc.StatusCode.INVALID_ARGUMENT, "no such thing"),
    }
    if said in refusals:
        rpc.abort(*refusals[said])


@pytest.fixture
def backend() -> Iterator[tuple[StubBackend, str]]:
    stub = StubBackend()
    server = grpc.server(ThreadPoolExecutor(8), handlers=[stub])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield stub, f"127.0.0.1:{port}"
    stub.cancelled.set()
    assert server.stop(0).wait(SECONDS)


def engine_call(address: str, path: str, body: dict[str, Any], key: str = KEY) -> EngineCall:
    config = context().config
    return EngineCall(
        address=address,
        key=key,
        method="POST",
        path=path,
        body=json.dumps(body).encode(),
        protocol=LOCALAI_GRPC,
        served=ServedModel(name="asked", identity="m.gguf", config=config),
    )


async def ask(engine: LocalaiEngine, address: str, path: str, body: dict[str, Any], key: str = KEY) -> bytes:
    response = await engine.send(engine_call(address, path, body, key), connect_seconds=SECONDS, head_seconds=SECONDS)
    try:
        return b"".join([chunk async for chunk in response.chunks()])
    finally:
        await response.close()


async def _read(response: EngineResponse, pieces: list[bytes]) -> None:
    async for chunk in response.chunks():
        pieces.append(chunk)  # noqa: PERF401 what came before an error counts


def written(stream: bytes, index: int) -> str:
    """The text of one choice; each event is what OpenAI's own client accepts."""
    *pieces, done, _ = stream.split(b"\n\n")
    assert done == b"data: [DONE]"
    chunks = [ChatCompletionChunk.model_validate_json(piece.removeprefix(b"data: ")) for piece in pieces]
    choices = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
    return "".join(choice.delta.content or "" for choice in choices)


def saying(text: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], **fields}


async def test_every_path_is_translated(backend: tuple[StubBackend, str]) -> None:
    engine = LocalaiEngine()
    try:
        whole = ChatCompletion.model_validate_json(await ask(engine, backend[1], "/v1/chat/completions", CHAT))
        assert whole.choices[0].message.content == "Hello there, Grüße!"
        chunks = await ask(engine, backend[1], "/v1/chat/completions", {**CHAT, "stream": True, "n": 2})
        assert written(chunks, 0) == written(chunks, 1) == "Hello there, Grüße!"
        text = json.loads(await ask(engine, backend[1], "/v1/completions", {"prompt": "x"}))
        assert text["choices"][0]["text"] == "Hello there, Grüße!"
        vectors = await ask(engine, backend[1], "/v1/embeddings", {"input": [str(n) for n in range(100)]})
        answer = CreateEmbeddingResponse.model_validate_json(vectors)
        assert [one.embedding[0] for one in answer.data] == list(range(100))
        assert json.loads(await ask(engine, backend[1], "/v1/tokenize", {"content": "x"})) == {"tokens": [1, 2]}
    finally:
        await engine.close()


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(
    ("said", "kind", "code"),
    [
        ("mismatch", Unavailable, "replica_unreachable"),
        ("unloaded", Unavailable, "replica_unreachable"),
        ("refuse", EnginehouseError, "invalid_request"),
    ],
)
async def test_a_refusal_is_an_error_before_the_first_byte(
    backend: tuple[StubBackend, str], said: str, kind: type[EnginehouseError], code: str, streams: bool
) -> None:
    engine = LocalaiEngine()
    try:
        with pytest.raises(kind) as caught:
            await ask(engine, backend[1], "/v1/chat/completions", saying(said, stream=streams))
        assert caught.value.code == code
    finally:
        await engine.close()


async def test_what_an_engine_does_not_have_is_said_plainly(backend: tuple[StubBackend, str]) -> None:
    engine = LocalaiEngine()
    try:
        with pytest.raises(Invalid, match="cannot rank documents with asked: its engine does not support it"):
            await ask(engine, backend[1], "/v1/rerank", {"query": "q", "documents": ["a"]})
        with pytest.raises(NotFound):
            await ask(engine, backend[1], "/v1/audio/speech", {})
        body = {"messages": [{"role": "user", "content": [PICTURE]}]}
        with pytest.raises(Invalid, match="data:"):
            await ask(engine, backend[1], "/v1/chat/completions", body)
    finally:
        await engine.close()


async def test_a_stream_that_breaks_is_an_error_after_its_beginning(backend: tuple[StubBackend, str]) -> None:
    engine = LocalaiEngine()
    try:
        call = engine_call(backend[1], "/v1/chat/completions", saying("break", stream=True))
        response = await engine.send(call, connect_seconds=SECONDS, head_seconds=SECONDS)
        pieces: list[bytes] = []
        with pytest.raises(Upstream, match="out of memory"):
            await _read(response, pieces)
        await response.close()
        assert b"Hello" in b"".join(pieces)
        assert b"[DONE]" not in b"".join(pieces)
    finally:
        await engine.close()


async def test_closing_a_response_stops_the_engine(backend: tuple[StubBackend, str]) -> None:
    stub, address = backend
    engine = LocalaiEngine()
    try:
        call = engine_call(address, "/v1/chat/completions", saying("for ever", stream=True))
        response = await engine.send(call, connect_seconds=SECONDS, head_seconds=SECONDS)
        async for _ in response.chunks():
            break
        assert not stub.cancelled.is_set()
        await response.close()
        assert await asyncio.to_thread(stub.cancelled.wait, SECONDS)
    finally:
        await engine.close()


async def test_media_are_fetched_by_the_callers_means(backend: tuple[StubBackend, str]) -> None:
    asked: list[str] = []

    async def fetch(url: str) -> bytes:
        asked.append(url)
        return b"picture"

    engine = LocalaiEngine(fetch)
    try:
        parts = [PICTURE, {"type": "text", "text": "what?"}]
        await ask(engine, backend[1], "/v1/chat/completions", {"messages": [{"role": "user", "content": parts}]})
        assert asked == ["http://example.com/a.png"]
    finally:
        await engine.close()


async def test_readiness_and_keys_are_seen(backend: tuple[StubBackend, str]) -> None:
    engine = LocalaiEngine()
    try:
        assert await engine.is_ready(EngineTarget(address=backend[1], key=KEY))
        assert not await engine.is_ready(EngineTarget(address=backend[1], key="other"))
        assert await engine.checks_key(EngineTarget(address=backend[1]))
        assert not await engine.is_ready(EngineTarget(address="127.0.0.1:1", key=KEY))
        assert not await engine.checks_key(EngineTarget(address="127.0.0.1:1"))
    finally:
        await engine.close()


async def test_any_call_can_be_made_with_its_message_as_json(backend: tuple[StubBackend, str]) -> None:
    engine = LocalaiEngine()
    try:
        answer = json.loads(await ask(engine, backend[1], "/localai/Predict", {"Prompt": "x"}))
        assert (answer["tokens"], answer["prompt_tokens"]) == (4, 2)
        streamed = await ask(engine, backend[1], "/localai/PredictStream", {"Prompt": "x"})
        assert streamed.count(b"data: ") == len(WORDS) + 2
        assert streamed.endswith(b"data: [DONE]\n\n")
        with pytest.raises(NotFound, match="Predict"):
            await ask(engine, backend[1], "/localai/Nothing", {})
        with pytest.raises(NotFound):  # a process has one model, which its worker loads
            await ask(engine, backend[1], "/localai/LoadModel", {})
        with pytest.raises(Invalid, match="Promt"):
            await ask(engine, backend[1], "/localai/Predict", {"Promt": "x"})
        with pytest.raises(Invalid, match="does not support it"):
            await ask(engine, backend[1], "/localai/TTS", {})
    finally:
        await engine.close()


async def test_a_process_with_another_key_is_another_process(backend: tuple[StubBackend, str]) -> None:
    engine = LocalaiEngine()
    try:
        with pytest.raises(Unavailable) as caught:
            await ask(engine, backend[1], "/v1/chat/completions", CHAT, key="of another process")
        assert caught.value.code == "replica_unreachable"
    finally:
        await engine.close()
