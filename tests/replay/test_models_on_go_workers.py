"""What LocalAI's frontend did and answered about models, asked of frontends of ours: the same messages reach the
worker, and clients get the same answers, or right ones where LocalAI's were wrong (13 to 22).

The worker is the stand-in of `tests.standin`; only ids, addresses and digests differ from the recordings.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.e2e.conftest import wait_for
from tests.fleet.mixed import NODE, MixedFleet, noise, open_mixed
from tests.replay.recordings import calls, entries, exchanges, needs_recordings

from enginehouse.core import subjects

CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def running_mixed(tmp_path_factory: pytest.TempPathFactory, postgres: Callable[..., str]) -> Iterator[MixedFleet]:
    with open_mixed(tmp_path_factory.mktemp("mixed"), postgres(), ENGINEHOUSE_MODEL_LOAD_WAIT="2s") as made:
        yield made


@pytest.fixture
def mixed(running_mixed: MixedFleet) -> Iterator[MixedFleet]:
    running_mixed.mend()
    yield running_mixed
    assert running_mixed.control.requests("violation") == []


def post(mixed: MixedFleet, path: str, payload: object) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", mixed.fleet.first.port, timeout=60)
    headers = {"Authorization": f"Bearer {mixed.fleet.tokens['admin']}", "Content-Type": "application/json"}
    try:
        connection.request("POST", path, json.dumps(payload), headers)
        answer = connection.getresponse()
        return answer.status, {key.lower(): value for key, value in answer.getheaders()}, answer.read()
    finally:
        connection.close()


def add(mixed: MixedFleet, model: str, size: int, *options: str) -> None:
    mixed.add_model(model, mixed.publish(f"{model}.bin", noise(size)), options=options, backend="mock")


def shape(value: Any) -> Any:
    """The keys of an answer, and the kinds of what stands there."""
    if isinstance(value, dict):
        return {key: shape(one) for key, one in value.items()}
    return [shape(value[0])] if isinstance(value, list) and value else type(value).__name__


def has_shape(value: Any, wanted: Any) -> bool:
    if isinstance(wanted, dict):
        return isinstance(value, dict) and all(
            key in value and has_shape(value[key], one) for key, one in wanted.items()
        )
    if isinstance(wanted, list):
        return isinstance(value, list) and has_shape(value[0], wanted[0])
    return bool(value == wanted)


def sent(mixed: MixedFleet, verb: str) -> list[dict[str, Any]]:
    return [one["payload"] for one in mixed.control.requests("nats") if one["verb"] == verb]


@needs_recordings
def test_a_cold_chat_puts_the_recorded_messages_on_the_wire_and_gets_the_recorded_answer(mixed: MixedFleet) -> None:
    """13."""
    recording = "13-chat-cold"
    (call,) = calls(recording, CHAT)
    files = [one for one in entries(recording) if "file server" in str(one.get("direction"))]
    add(mixed, "mock-model", files[-1]["payload"]["_len"])
    found: dict[str, Any] = {}

    def answered() -> bool:
        status, _, body = post(mixed, CHAT, call["payload"])
        found.update(json.loads(body))
        return status == 200

    wait_for("an answer", answered)
    assert has_shape(shape(found), shape(call["response"])), found
    (install,) = exchanges(recording, subjects.INSTALL)
    start = next(one for one in sent(mixed, subjects.INSTALL) if one.get("model_id"))
    assert set(start) == set(install.request)
    assert (start["backend"], start["model_id"]) == ("cpu-mock", "mock-model"), "the build itself, which is what runs"
    ours = [(one["method"], one["path"], one["status"]) for one in mixed.control.requests("http")]
    theirs = [(one["method"], one["path"], one["status"]) for one in files]
    assert list(dict.fromkeys(theirs)) == ours[:2], "one question before the upload, not two"
    (put,) = mixed.puts()
    recorded = {key.lower(): value for key, value in files[-1]["headers"].items()}
    mine = {key.lower(): value for key, value in put["headers"].items()}
    assert set(recorded) <= set(mine)
    assert (mine["content-range"], mine["content-length"]) == (recorded["content-range"], recorded["content-length"])


@needs_recordings
def test_warm_chats_and_streams_have_the_recorded_form(mixed: MixedFleet) -> None:
    """14."""
    add(mixed, "mock-model", 1000)
    mixed.load("mock-model")
    mixed.control.forget()
    for call in calls("14-chat-warm-stream", CHAT):
        status, headers, body = post(mixed, CHAT, call["payload"])
        assert status == call["status"] == 200
        assert headers["content-type"].partition(";")[0] == call["response_headers"]["Content-Type"]
        if not call["payload"].get("stream"):
            assert has_shape(shape(json.loads(body)), shape(call["response"]))
            continue
        ours, theirs = (
            [line.removeprefix("data: ") for line in text.split("\n\n") if line]
            for text in (body.decode(), call["response"])
        )
        assert ours[-1] == theirs[-1] == "[DONE]"
        for mine, recorded in ((ours[0], theirs[0]), (ours[1], theirs[1])):
            wanted = shape(json.loads(recorded))
            wanted["choices"][0].pop("delta")
            assert has_shape(shape(json.loads(mine)), wanted)
        said = [json.loads(line) for line in ours[:-1]]
        assert [one["usage"]["total_tokens"] > 0 for one in said if one.get("usage")] == [True], "it was asked for"
    assert mixed.control.requests("nats") == mixed.control.requests("http") == [], "nothing per warm request"


@needs_recordings
def test_other_sampling_parameters_are_no_reason_to_refuse_or_to_stop_a_model(mixed: MixedFleet) -> None:
    """15, where LocalAI answers 500 and stops the model."""
    add(mixed, "mock-model", 1000)
    mixed.load("mock-model")
    mixed.control.forget()
    (call,) = calls("15-chat-stale-revision", CHAT)
    assert call["status"] == 500
    assert post(mixed, CHAT, call["payload"])[0] == 200
    assert sent(mixed, subjects.STOP) == []
    wait_for("one process", lambda: len(mixed.running()) == 1)  # those of the test before have ended, too


@needs_recordings
def test_a_request_during_a_push_gets_the_recorded_503_and_no_stream_of_errors(mixed: MixedFleet) -> None:
    """17, where LocalAI answers a stream with 200 and an error within."""
    cold, stream, _ = calls("17-cold-load-503", CHAT)[:3]
    add(mixed, "mock-c", 12_000_000)
    mixed.control.set(bytes_per_second=1_500_000)
    status, headers, body = post(mixed, CHAT, cold["payload"])
    assert status == cold["status"] == 503
    assert headers["retry-after"] == cold["response_headers"]["Retry-After"]
    answer = json.loads(body)
    assert answer["error"]["code"] == cold["response"]["error"]["code"] == "model_loading"
    assert has_shape(shape(answer["loading"]), shape(cold["response"]["loading"])), answer
    loading = answer["loading"]
    assert (loading["state"], loading["node"], loading["total_bytes"]) == ("staging", NODE, 12_000_000)
    assert 0 < loading["bytes_sent"] < 12_000_000
    assert post(mixed, CHAT, stream["payload"])[0] == 503, "decided before the first byte"
    mixed.control.set()
    wait_for("an answer", lambda: post(mixed, CHAT, cold["payload"])[0] == 200)
    assert sum(one["received"] for one in mixed.puts()) == 12_000_000


@needs_recordings
def test_an_unload_and_a_config_edit_reach_the_exact_process(mixed: MixedFleet) -> None:
    """18 to 22: `model.stop` as it was recorded, but with the address that such a worker compares (S1)."""
    (recorded, *_) = exchanges("20-config-edit-model-stop", subjects.STOP_MODEL)
    for model in ("mock-b", "mock-c"):
        add(mixed, model, 1000)
        mixed.load(model)
    ended = mixed.fleet.ended(mixed.fleet.first.post("/api/models/mock-b/unload"))
    assert ended["status"] == "succeeded"
    (stop,) = sent(mixed, subjects.STOP_MODEL)
    assert set(stop) == set(recorded.request) - {"config_revision"}
    assert (stop["model_name"], stop["process_key"]) == (
        recorded.request["model_name"],
        recorded.request["process_key"],
    )
    # 19 and 21 stop by the bare name, which would end a backend of that name, too.
    assert all("#" in one["backend"] for one in sent(mixed, subjects.STOP))
    wait_for("the listing", lambda: [one["model_id"] for one in mixed.fleet.node(NODE)["replicas"]] == ["mock-c"])
    wait_for("one process", lambda: len(mixed.running()) == 1)
    assert post(mixed, CHAT, {"model": "mock-c", "messages": [{"role": "user", "content": "x"}]})[0] == 200
    mixed.fleet.first.post(f"/api/nodes/{NODE}/drain")
    wait_for("no process", lambda: not mixed.running())
    mixed.fleet.first.post(f"/api/nodes/{NODE}/resume")
    wait_for(
        "an answer",
        lambda: post(mixed, CHAT, {"model": "mock-c", "messages": [{"role": "user", "content": "x"}]})[0] == 200,
    )
    assert len([one for one in mixed.puts() if "mock-c" in one["path"]]) == 1, "22: what is there is not sent again"
