"""Our worker under a LocalAI frontend: a process by `backend.install`, files by PUT, the model by gRPC, and every
message about it, with real engines and a real gRPC client. The frontend's messages are those that were recorded.
"""

from __future__ import annotations

import hashlib
import importlib.resources
import io
import sys
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import msgspec
import pytest
from tests.engine.localai.stub_backend import write_tree
from tests.replay.recordings import entries, exchanges, needs_recordings
from tests.worker.whole_worker import WholeWorker, working
from tests.worker.world import until

from enginehouse.core import subjects
from enginehouse.core.gallery import resolve
from enginehouse.core.ids import NodeId
from enginehouse.engine.localai import backend_pb2 as pb
from enginehouse.fetch.galleries.sources import load_builtin
from enginehouse.host import hardware
from enginehouse.worker.backends.installer import Installer, InstallRequest

TOKEN = "join"  # of `WholeWorker`
SECONDS = 30.0
TINY = (importlib.resources.files("enginehouse") / "gallery" / "tiny-chat-2m-q8_0.gguf").read_bytes()


class LocalaiFrontend:
    """Does to a worker what LocalAI's frontend does."""

    def __init__(self, worker: WholeWorker) -> None:
        self.worker = worker

    async def ask(self, verb: str, payload: object) -> dict[str, Any]:
        answer = await self.worker.bus.ask(
            subjects.node_subject(NodeId("node-1"), verb), msgspec.json.encode(payload), "r"
        )
        reply: dict[str, Any] = msgspec.json.decode(answer)
        reply.pop("outcome", None)  # additive
        return reply

    async def tell(self, verb: str, payload: bytes) -> None:
        await self.worker.bus.publish(subjects.node_subject(NodeId("node-1"), verb), payload)

    async def put(self, key: str, content: bytes) -> str:
        url = f"http://{self.worker.link.registrations[-1].http_address}/v1/files/{key}"
        headers = {
            "Authorization": f"Bearer {TOKEN}",
            "Content-Range": f"bytes 0-{len(content) - 1}/{len(content)}",
            "X-Content-SHA256": hashlib.sha256(content).hexdigest(),
        }
        async with aiohttp.ClientSession() as session:
            async with session.put(url, data=io.BytesIO(content), headers=headers) as answer:
                assert answer.status == 200, await answer.text()
                placed = (await answer.json())["local_path"]
            async with session.head(url, headers={"Authorization": f"Bearer {TOKEN}"}) as answer:
                assert answer.headers["X-Local-Path"] == placed
                assert answer.headers["X-Content-Sha256"] == headers["X-Content-SHA256"]
        return str(placed)

    async def call(self, address: str, method: str, request: Any, kind: Any, token: str = TOKEN) -> Any:
        async with grpc.aio.insecure_channel(address) as channel:
            call = channel.unary_unary(
                f"/backend.Backend/{method}",
                request_serializer=lambda message: message.SerializeToString(),
                response_deserializer=kind.FromString,
            )
            return await call(request, metadata=(("authorization", f"Bearer {token}"),), timeout=SECONDS)

    async def running(self) -> list[dict[str, Any]]:
        reply = await self.ask(subjects.RUNNING, {})
        assert set(reply) == {"models"}
        return [{key: one[key] for key in ("model_id", "replica_index", "address")} for one in reply["models"]]


@pytest.fixture
async def go(tmp_path: Path) -> AsyncIterator[LocalaiFrontend]:
    worker = WholeWorker(tmp_path / "data")
    worker.link.node_token = ""
    worker.place.make_directories()
    async with working(worker):
        await until(lambda: bool(worker.buses))
        yield LocalaiFrontend(worker)


async def test_the_built_in_engine_serves_a_model_whose_file_was_uploaded(go: LocalaiFrontend) -> None:
    installer = go.worker.agent._parts.installer
    assert isinstance(installer, Installer)
    build = resolve((load_builtin(),), "llama-cpp-grpc", "default", hardware.platform())

    async def swapped() -> None:
        pass

    await installer.install(InstallRequest(resolved=build, generation=1), lambda *_: None, swapped)
    reply = await go.ask(subjects.INSTALL, {"backend": "llama-cpp-grpc", "model_id": "org/tiny"})
    assert (reply["success"], set(reply)) == (True, {"success", "address"})
    again = await go.ask(subjects.INSTALL, {"backend": "llama-cpp-grpc", "model_id": "org/tiny"})
    assert again == reply, "a live process is used again"
    placed = await go.put("models/org/tiny/tiny.gguf", TINY)
    options = pb.ModelOptions(
        Model="tiny.gguf", ModelFile=placed, ModelPath=str(Path(placed).parent), ContextSize=256, Threads=1
    )
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await go.call(reply["address"], "LoadModel", options, pb.Result, token="wrong")
    assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED
    loaded = await go.call(reply["address"], "LoadModel", options, pb.Result)
    assert loaded.success, loaded.message
    asked = pb.PredictOptions(Prompt="What is the capital of France?", Tokens=16, Temperature=0)
    assert (await go.call(reply["address"], "Predict", asked, pb.Reply)).message
    assert await go.running() == [{"model_id": "org/tiny", "replica_index": 0, "address": reply["address"]}]
    stop = {"model_name": "org/tiny", "process_key": "org/tiny#0", "expected_address": reply["address"]}
    stopped = await go.ask(subjects.STOP_MODEL, stop)
    assert (stopped["matched"], stopped["terminated"], stopped["address"]) == (True, True, reply["address"])
    assert stopped["freed"] is True
    assert await go.running() == []
    assert await go.ask(subjects.DELETE_MODEL, {"model_name": "org/tiny"}) == {"success": True}
    assert not Path(placed).exists()
    deleted = await go.ask(subjects.DELETE, {"backend": "llama-cpp-grpc"})
    assert deleted == {"success": True, "reports_stopped_processes": True}


@needs_recordings
@pytest.mark.parametrize(
    "recording",
    [
        *("13-chat-cold", "16-models-running", "17-cold-load-503", "18-replicas", "19-unload"),
        "20-config-edit-model-stop",
        *("21-shutdown-and-model-delete", "22-drain-resume"),
    ],
)
async def test_what_was_recorded_about_models_has_the_replies_that_localai_gives(
    go: LocalaiFrontend, recording: str
) -> None:
    """Both recorded workers are this one: addresses are its own, and every reply has LocalAI's keys and meaning."""
    write_tree(go.worker.place.backends / "mock")
    addresses: dict[str, str] = {}
    for exchange in exchanges(recording):
        request = dict(exchange.request)
        if "expected_address" in request:
            key = request["process_key"]
            if key not in addresses:
                started = await go.ask(subjects.INSTALL, {"backend": "mock", "model_id": request["model_name"]})
                addresses[key] = started["address"]
            request["expected_address"] = addresses[key]
        reply = await go.ask(exchange.verb, request)
        assert exchange.reply is not None
        if exchange.verb == subjects.INSTALL:
            assert set(reply) == set(exchange.reply) == {"success", "address"}
            assert reply["success"] is True
            addresses[f"{request['model_id']}#{request.get('replica_index', 0)}"] = reply["address"]
        elif exchange.verb == subjects.RUNNING:
            assert reply == {"models": []}
        elif exchange.verb == subjects.LIST:
            assert [set(one) >= {"name", "is_system", "is_meta"} for one in reply["backends"]] == [True]
        elif exchange.verb == subjects.UNLOAD:
            assert reply == exchange.reply == {"success": True}
        elif exchange.verb == subjects.STOP_MODEL:
            # LocalAI refused the address that it had advertised itself (S1); here it is the process's own.
            key = request["process_key"]
            is_first = addresses.pop(key) and True
            assert reply == {
                "matched": is_first,
                "freed": is_first,
                "terminated": True,
                "process_key": key,
                "address": request["expected_address"],
            }
            assert {"matched", "freed", "terminated", "process_key"} <= set(exchange.reply)
    running = {f"{one['model_id']}#{one['replica_index']}": one["address"] for one in await go.running()}
    assert running == addresses


@needs_recordings
@pytest.mark.parametrize("recording", ["13-chat-cold", "17-cold-load-503", "20-config-edit-model-stop"])
async def test_files_that_were_recorded_are_taken_with_localai_s_statuses_and_headers(
    go: LocalaiFrontend, recording: str
) -> None:
    calls = [one for one in entries(recording) if "file server" in str(one.get("direction"))]
    assert calls
    content: dict[str, bytes] = {}
    address = go.worker.link.registrations[-1].http_address
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {TOKEN}"}) as session:
        for call in calls:
            if call["status"] == 200 and call["method"] == "HEAD" and call["path"] not in content:
                continue  # put there in an earlier recording
            headers, body = {}, b""
            if call["method"] == "PUT":
                body = content[call["path"]] = bytes(call["payload"]["_len"])
                headers = {key: call["headers"][key] for key in ("Content-Range", "Content-Type")}
                headers["X-Content-Sha256"] = hashlib.sha256(body).hexdigest()
            url = f"http://{address}{call['path']}"
            async with session.request(call["method"], url, headers=headers, data=io.BytesIO(body)) as answer:
                assert answer.status == call["status"]
                assert set(call["response_headers"]) <= {*answer.headers, "Content-Type"}
                if call["method"] == "PUT":
                    assert set(await answer.json()) == set(call["response"])


@needs_recordings
@pytest.mark.parametrize("recording", ["15-chat-stale-revision", "19-unload", "21-shutdown-and-model-delete"])
async def test_a_recorded_stop_ends_the_process_of_its_model_and_no_other(go: LocalaiFrontend, recording: str) -> None:
    write_tree(go.worker.place.backends / "mock")
    stops = [one["payload"] for one in entries(recording) if str(one.get("subject")).endswith(".backend.stop")]
    assert stops
    for stop in stops:
        for model in (stop["backend"], "bystander"):
            assert (await go.ask(subjects.INSTALL, {"backend": "mock", "model_id": model}))["success"]
        await go.tell(subjects.STOP, msgspec.json.encode(stop))
        await until(partial(_is_gone, go, f"{stop['backend']}#0"))
        assert [one["model_id"] for one in await go.running()] == ["bystander"]


def _is_gone(go: LocalaiFrontend, process_key: str) -> bool:
    return go.worker.agent._parts.supervisor.find(process_key) is None


@pytest.mark.parametrize("lacks", [(), ("Free",)], ids=["frees", "has-no-free"])
async def test_a_stop_says_whether_the_engine_released_its_model(go: LocalaiFrontend, lacks: tuple[str, ...]) -> None:
    write_tree(go.worker.place.backends / "mock", lacks=lacks)
    address = (await go.ask(subjects.INSTALL, {"backend": "mock", "model_id": "m"}))["address"]
    reply = await go.ask(
        subjects.STOP_MODEL, {"model_name": "m", "process_key": "m#0", "expected_address": address, "force": False}
    )
    assert (reply["matched"], reply["terminated"], reply["freed"]) == (True, True, not lacks)
    assert ("error" in reply) is bool(lacks), "LocalAI names the failure although the process ended"


async def test_a_process_is_refused_under_another_address_and_stopped_by_any_of_its_names(go: LocalaiFrontend) -> None:
    write_tree(go.worker.place.backends / "mock")
    for payload in (b"", b"null", b'{"backend":""}', b'{"backend":"m"}', b'{"backend":"m#0"}', b'{"backend":"mock"}'):
        reply = await go.ask(subjects.INSTALL, {"backend": "mock", "model_id": "m"})
        stop = {"model_name": "m", "process_key": "m#0", "expected_address": "127.0.0.2:1"}
        refused = await go.ask(subjects.STOP_MODEL, stop)
        assert (refused["matched"], refused["terminated"], bool(refused["error"])) == (True, False, True)
        assert [one["address"] for one in await go.running()] == [reply["address"]]
        await go.tell(subjects.STOP, payload)
        await until(lambda: go.worker.agent._parts.supervisor.find("m#0") is None)
    for _ in range(100):
        absent = await go.ask(subjects.STOP_MODEL, stop)
        if not absent["matched"]:
            break  # the stop by its backend's name has no reply, so its end is seen here
    assert absent == {"matched": False, "freed": False, "terminated": True, "process_key": "m#0"}


async def test_an_engine_writes_its_output_where_the_frontend_fetches_it_and_not_among_models(
    go: LocalaiFrontend,
) -> None:
    place = go.worker.place
    tree = write_tree(place.backends / "mock")
    (tree / "run.sh").rename(tree / "engine")
    (tree / "run.sh").write_text(
        f"#!{sys.executable}\n"
        "import os, pathlib, sys\n"
        f"given, staging = pathlib.Path({str(place.models / 'm' / 'input')!r}), pathlib.Path({str(place.staging)!r})\n"
        "(staging / 'output').write_bytes(given.read_bytes())\n"
        "try:\n    given.write_bytes(b'changed')\nexcept OSError:\n    pass\n"
        f"os.execv(sys.executable, [sys.executable, {str(tree / 'engine')!r}, *sys.argv[1:]])\n"
    )
    (tree / "run.sh").chmod(0o755)
    await go.put("models/m/input", b"a picture")
    assert (await go.ask(subjects.INSTALL, {"backend": "mock", "model_id": "m"}))["success"]
    url = f"http://{go.worker.link.registrations[-1].http_address}/v1/files/output"
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {TOKEN}"}) as session:
        async with session.get(url) as answer:
            assert await answer.read() == b"a picture"
    if place.installing.confinement.protects_trees:
        assert (place.models / "m" / "input").read_bytes() == b"a picture"


async def test_a_second_joining_replaces_nothing_that_is_uploaded(go: LocalaiFrontend) -> None:
    placed = Path(await go.put("models/m/m.bin", b"model"))
    go.worker.agent._parts.models.recover()
    assert placed.read_bytes() == b"model"
    assert await go.ask(subjects.DELETE_MODEL, {"model_name": "../data"}) != {"success": True}
    assert go.worker.place.data.is_dir()
