"""Models on LocalAI's workers: our frontends push their files, have their processes started, load them and answer with
them. Real frontends, bus, database and backends; the worker is a stand-in that was made from the fact sheet.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from functools import partial

import pytest
from tests.e2e.conftest import wait_for
from tests.engine.localai.stub_backend import SENTENCE
from tests.fleet.cluster import Frontend
from tests.fleet.mixed import BACKEND, NODE, MixedFleet, noise, open_mixed

SAYS = "".join(SENTENCE)
MEGABYTE = 1_000_000


@pytest.fixture(scope="module")
def running_mixed(tmp_path_factory: pytest.TempPathFactory, postgres: Callable[..., str]) -> Iterator[MixedFleet]:
    with open_mixed(tmp_path_factory.mktemp("mixed"), postgres()) as made:
        yield made


@pytest.fixture
def mixed(running_mixed: MixedFleet) -> Iterator[MixedFleet]:
    running_mixed.mend()
    yield running_mixed
    assert running_mixed.control.requests("violation") == []


def answers(mixed: MixedFleet, model: str, frontend: Frontend) -> bool:
    return mixed.chat(model, frontend)[0] == 200


def test_a_model_is_pushed_loaded_and_answers_on_every_frontend(mixed: MixedFleet) -> None:
    content = noise(3 * MEGABYTE)
    mixed.add_model("org/first", mixed.publish("first.gguf", content), options=("echo_load",))
    mixed.load("org/first")
    for frontend in mixed.fleet.frontends:
        wait_for("an answer", partial(answers, mixed, "org/first", frontend))
        loaded = json.loads(mixed.chat("org/first", frontend)[1])
        placed = mixed.placed("org%2Ffirst", "first.gguf")
        assert (loaded["Model"], loaded["ModelFile"]) == ("first.gguf", str(placed))
        assert placed.read_bytes() == content
    http = mixed.control.requests("http")
    assert [(one["method"], one["status"]) for one in http][:3] == [("HEAD", 404), ("PUT", 200), ("HEAD", 200)]
    (put,) = mixed.puts()
    headers = {key.lower(): value for key, value in put["headers"].items()}
    assert put["path"] == "/v1/files/models/org%252Ffirst/first.gguf", "its directory is one component on the worker"
    assert headers["content-range"] == f"bytes 0-{len(content) - 1}/{len(content)}"
    assert headers["x-content-sha256"] == hashlib.sha256(content).hexdigest()
    assert (headers["content-length"], headers["content-type"]) == (str(len(content)), "application/octet-stream")
    starts = [one["payload"] for one in mixed.control.requests("nats") if one["payload"].get("model_id")]
    assert [(one["backend"], one["model_id"], one.get("replica_index", 0)) for one in starts] == [
        (BACKEND, "org/first", 0)
    ]


def test_no_row_has_the_token_of_a_worker(mixed: MixedFleet) -> None:
    mixed.add_model("secretive", mixed.publish("secretive.gguf", noise(1000)))
    mixed.load("secretive")
    for table in ("nodes", "replicas", "intents", "tokens"):
        exists = mixed.fleet.rows("select 1 from information_schema.tables where table_name = %s", table)
        found = mixed.fleet.rows(f"select row_to_json(t)::text from {table} t") if exists else []
        assert not any(mixed.fleet.tokens["join"] in str(row) for row in found), table
    ((sealed,),) = mixed.fleet.rows("select sealed_token from nodes where name = %s", NODE)
    assert len(sealed) > 40


def test_a_file_that_is_there_is_not_sent_again(mixed: MixedFleet) -> None:
    mixed.add_model("kept", mixed.publish("kept.gguf", noise(MEGABYTE)))
    mixed.load("kept")
    mixed.fleet.ended(mixed.fleet.first.post("/api/models/kept/unload"))
    wait_for("its process to end", lambda: not mixed.running())
    mixed.control.forget()
    mixed.load("kept")
    assert mixed.puts() == []
    assert mixed.chat("kept") == (200, SAYS)


def test_a_file_of_which_nobody_knows_the_digest_is_pinned(mixed: MixedFleet) -> None:
    content = noise(2 * MEGABYTE)
    mixed.add_model("unknown", mixed.publish("unknown.gguf", content, has_digest=False))
    mixed.load("unknown")
    ((definition,),) = mixed.fleet.rows("select definition from models where name = 'unknown'")
    (file,) = json.loads(definition)["files"]
    assert (file["sha256"], file["size_bytes"]) == (hashlib.sha256(content).hexdigest(), len(content))
    assert mixed.placed("unknown", "unknown.gguf").read_bytes() == content


def test_a_push_goes_on_on_the_other_frontend_when_its_own_is_killed(mixed: MixedFleet) -> None:
    content = noise(6 * MEGABYTE)
    mixed.control.set(bytes_per_second=1.5 * MEGABYTE)
    mixed.add_model("moved", mixed.publish("moved.gguf", content))
    operation = mixed.begin("moved")
    carrier = mixed.carrier_of("moved", "pull_model")
    wait_for(
        "a part to be there",
        lambda: (
            mixed.placed("moved", "moved.gguf").exists()
            and mixed.placed("moved", "moved.gguf").stat().st_size > MEGABYTE
        ),
    )
    other = next(one for one in mixed.fleet.frontends if one is not carrier)
    shown = wait_for("progress on the other", lambda: mixed.row(operation, "pull_model", other).get("percentage", 0))
    assert 0 < shown < 100
    carrier.kill()
    ended = mixed.fleet.ended(operation, other)
    assert ended["status"] == "succeeded", ended
    assert mixed.placed("moved", "moved.gguf").read_bytes() == content
    assert mixed.chat("moved", other) == (200, SAYS)
    received = sum(one["received"] for one in mixed.puts())
    assert received <= len(content), "no byte was sent twice"
    assert len(mixed.puts()) == 2
    assert mixed.row(operation, "pull_model", other)["attempt"] == 1, "taken over, not begun again"


def test_a_load_goes_on_on_the_other_frontend_when_its_own_is_killed(mixed: MixedFleet) -> None:
    mixed.add_model("slow", mixed.publish("slow.gguf", noise(1000)), options=("load_seconds:4",))
    operation = mixed.begin("slow")
    wait_for("the load to be under way", lambda: mixed.row(operation, "start_replica").get("phase") == "loading")
    carrier = mixed.carrier_of("slow", "start_replica")
    other = next(one for one in mixed.fleet.frontends if one is not carrier)
    carrier.kill()
    ended = mixed.fleet.ended(operation, other)
    assert ended["status"] == "succeeded", ended
    assert mixed.chat("slow", other) == (200, SAYS)
    assert len(mixed.running()) == 1


@pytest.mark.parametrize("fault", [{"cut": True}, {"broken": 503}], ids=["unreachable", "out-of-order"])
def test_a_file_server_that_is_away_is_waited_for_and_named(mixed: MixedFleet, fault: dict[str, object]) -> None:
    mixed.control.set(**fault)
    mixed.add_model("patient", mixed.publish("patient.gguf", noise(1000)))
    operation = mixed.begin("patient")
    row = wait_for(
        "the failure to be shown",
        lambda: (one := mixed.row(operation, "pull_model")).get("state") == "waiting" and one,
    )
    assert NODE in row["error"]
    mixed.control.set()
    assert mixed.fleet.ended(operation)["status"] == "succeeded"
    assert mixed.chat("patient") == (200, SAYS)


def test_a_worker_with_another_token_is_named_and_nothing_is_repeated(mixed: MixedFleet) -> None:
    mixed.control.set(token="another")
    mixed.add_model("locked", mixed.publish("locked.gguf", noise(1000)))
    ended = mixed.fleet.ended(mixed.begin("locked"))
    assert ended["status"] == "failed"
    assert "refuses the token" in ended["error"]
    assert {one["status"] for one in mixed.control.requests("http")} == {401}
    assert len(mixed.control.requests("http")) == 1


def test_bytes_other_than_announced_are_refused_and_leave_nothing(mixed: MixedFleet) -> None:
    content = noise(100_000)
    mixed.add_model("spoilt", mixed.publish("spoilt.gguf", content, spoilt=noise(100_000, 2)))
    ended = mixed.fleet.ended(mixed.begin("spoilt"))
    assert ended["status"] == "failed"
    assert "other bytes" in ended["error"]
    assert mixed.row(ended, "pull_model")["reason"] == "digest_mismatch"
    assert not mixed.placed("spoilt", "spoilt.gguf").exists()


def test_a_source_that_is_gone_ends_the_load_with_its_words(mixed: MixedFleet) -> None:
    file = mixed.publish("gone.gguf", noise(1000))
    mixed.add_model("gone", file)
    del mixed.sources.server.files["/gone.gguf"]
    ended = mixed.fleet.ended(mixed.begin("gone"))
    assert ended["status"] == "failed"
    assert "gone.gguf" in ended["error"]
    assert mixed.row(ended, "pull_model")["attempt"] == 1


def test_a_source_that_is_cut_off_is_continued(mixed: MixedFleet) -> None:
    content = noise(4 * MEGABYTE)
    mixed.control.set(cut_after_bytes=MEGABYTE)
    mixed.add_model("cut", mixed.publish("cut.gguf", content))
    operation = mixed.begin("cut")
    wait_for("two cuts", lambda: len(mixed.puts()) >= 2)
    mixed.control.set()
    assert mixed.fleet.ended(operation)["status"] == "succeeded"
    assert mixed.placed("cut", "cut.gguf").read_bytes() == content


def test_a_full_disk_is_waited_for(mixed: MixedFleet) -> None:
    content = noise(2 * MEGABYTE)
    mixed.control.set(quota_bytes=MEGABYTE)
    mixed.add_model("large", mixed.publish("large.gguf", content))
    operation = mixed.begin("large")
    row = wait_for(
        "the failure to be shown",
        lambda: (one := mixed.row(operation, "pull_model")).get("state") == "waiting" and one,
    )
    assert (row["reason"], "disk is full" in row["error"]) == ("insufficient_disk", True)
    mixed.control.set()
    assert mixed.fleet.ended(operation)["status"] == "succeeded"
    assert sum(one["received"] for one in mixed.puts()) < 2 * len(content), "what was there was not sent again"
    assert mixed.placed("large", "large.gguf").read_bytes() == content


def test_an_engine_s_refusal_is_told_in_its_words_and_leaves_no_process(mixed: MixedFleet) -> None:
    mixed.add_model("refused", mixed.publish("refused.gguf", noise(1000)), options=("fail_load:out of cards",))
    ended = mixed.fleet.ended(mixed.begin("refused"))
    assert ended["status"] == "failed"
    assert "out of cards" in ended["error"]
    assert "a line about the cause" in ended["error"]
    wait_for("its process to end", lambda: not mixed.running())


def test_a_replica_whose_process_died_is_forgotten_and_loaded_again(mixed: MixedFleet) -> None:
    mixed.add_model("mortal", mixed.publish("mortal.gguf", noise(1000)), options=("die_on_request",))
    mixed.load("mortal")
    assert mixed.chat("mortal")[0] != 200
    wait_for("its row to go", lambda: not mixed.fleet.rows("select 1 from replicas where model = %s", "mortal"), 30)
    mixed.fleet.rows(
        "update models set definition = replace(definition, 'die_on_request', 'lives') where name = %s", "mortal"
    )
    assert wait_for("an answer", lambda: mixed.chat("mortal")[0] == 200)


def test_an_unload_ends_the_process_and_its_row(mixed: MixedFleet) -> None:
    mixed.add_model("done", mixed.publish("done.gguf", noise(1000)))
    mixed.load("done")
    ended = mixed.fleet.ended(mixed.fleet.second.post("/api/models/done/unload"))
    assert ended["status"] == "succeeded", ended
    assert not mixed.running()
    assert mixed.fleet.rows("select 1 from replicas where model = %s", "done") == []
    stops = [one["payload"] for one in mixed.control.requests("nats") if one["verb"] == "model.stop"]
    (stop,) = [one for one in stops if one["model_name"] == "done"]  # those of the test before may come late
    assert stop["process_key"] == "done#0"
    assert stop["expected_address"].startswith("127.0.0.1:"), "S1"


def test_a_drained_node_ends_its_replicas_and_gets_them_back_when_it_is_resumed(mixed: MixedFleet) -> None:
    mixed.add_model("drained", mixed.publish("drained.gguf", noise(1000)))
    mixed.load("drained")
    mixed.fleet.first.post(f"/api/nodes/{NODE}/drain")
    wait_for("its process to end", lambda: not mixed.running())
    assert mixed.fleet.node(NODE)["drained"]
    assert mixed.chat("drained")[0] == 503
    mixed.fleet.first.post(f"/api/nodes/{NODE}/resume")
    wait_for("an answer", lambda: mixed.chat("drained")[0] == 200)


def test_models_beside_each_other_have_processes_of_their_own(mixed: MixedFleet) -> None:
    names = ("left", "right")
    for name in names:
        mixed.add_model(name, mixed.publish(f"{name}.gguf", noise(1000)), options=("echo_load",))
    for operation in [mixed.begin(name) for name in names]:
        assert mixed.fleet.ended(operation)["status"] == "succeeded"
    for name in names:
        assert json.loads(mixed.chat(name)[1])["Model"] == f"{name}.gguf"
    assert len(started := mixed.running()) == 2, mixed.account(started)
    mixed.fleet.ended(mixed.fleet.first.post("/api/models/left/unload"))
    assert len(mixed.running()) == 1
    assert mixed.chat("right")[0] == 200


def test_a_deleted_model_leaves_neither_files_nor_processes(mixed: MixedFleet) -> None:
    mixed.add_model("a", mixed.publish("a.gguf", noise(1000)))
    mixed.add_model("a/b", mixed.publish("b.gguf", noise(1000, 2)))
    for name in ("a", "a/b"):
        mixed.load(name)
    mixed.forget_model("a")
    ended = mixed.fleet.ended(mixed.fleet.first.delete("/api/models/a"))
    assert ended["status"] == "succeeded", ended
    assert not mixed.placed("a", "a.gguf").exists()
    assert len(mixed.running()) == 1
    assert mixed.placed("a%2Fb", "b.gguf").exists()
    assert mixed.chat("a/b") == (200, SAYS)


def test_a_cancelled_push_ends_and_a_cancelled_load_leaves_no_process(mixed: MixedFleet) -> None:
    mixed.control.set(bytes_per_second=MEGABYTE)
    mixed.add_model("unwanted", mixed.publish("unwanted.gguf", noise(8 * MEGABYTE)))
    operation = mixed.begin("unwanted")
    wait_for("bytes", lambda: mixed.placed("unwanted", "unwanted.gguf").exists())
    mixed.fleet.first.post(f"/api/operations/{operation['jobID']}/cancel")
    wait_for("the push to end", lambda: mixed.puts(), 10)
    assert mixed.placed("unwanted", "unwanted.gguf").stat().st_size < 8 * MEGABYTE
    mixed.control.set()
    mixed.add_model("slowly", mixed.publish("slowly.gguf", noise(1000)), options=("load_seconds:30",))
    operation = mixed.begin("slowly")
    wait_for("the load to be under way", lambda: mixed.row(operation, "start_replica").get("phase") == "loading")
    mixed.fleet.first.post(f"/api/operations/{operation['jobID']}/cancel")
    wait_for("its process to end", lambda: not mixed.running())
