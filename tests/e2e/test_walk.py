"""The walk of the README through the real commands, in its order: up, run, join, approve, install on both, chat, away
and back, down and up again. The tests of this file share one cluster and build on each other."""

from __future__ import annotations

import json
import re
import sqlite3
import stat
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import openai
import psutil
import pytest
from tests.e2e.conftest import PROGRAM, Cluster, wait_for

FRANCE = "What is the capital of France?"


@contextmanager
def client(cluster: Cluster) -> Iterator[openai.OpenAI]:
    """Closed at the end: a connection that is left to the collector is a warning, and warnings fail a run."""
    with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key=user_token(cluster), max_retries=0, timeout=60) as made:
        yield made


def user_token(cluster: Cluster) -> str:
    """Made once: a name is one token's."""
    kept = cluster.root / "user.token"
    if not kept.exists():
        kept.write_text(str(cluster.json("tokens", "create", "--role", "user", "--name", "tests")["token"]))
    return kept.read_text()


def figure(cluster: Cluster, name: str, **labels: str) -> float:
    """The sum of a metric over the lines that have these labels."""
    request = urllib.request.Request(f"{cluster.url}/metrics")
    request.add_header("authorization", "Bearer " + (cluster.data / "admin.token").read_text().strip())
    with urllib.request.urlopen(request, timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    wanted = [f'{key}="{value}"' for key, value in labels.items()]
    return sum(
        float(line.rpartition(" ")[2])
        for line in lines
        if line.startswith(name) and all(part in line for part in wanted)
    )


@pytest.fixture
def api(cluster: Cluster) -> Iterator[openai.OpenAI]:
    with client(cluster) as made:
        yield made


def ask(cluster: Cluster, question: str, model: str = "tiny-chat") -> str:
    with client(cluster) as api:
        answer = api.chat.completions.create(
            model=model, temperature=0, messages=[{"role": "user", "content": question}]
        )
    return answer.choices[0].message.content or ""


def test_up_names_the_address_the_token_the_join_line_and_what_to_try(cluster: Cluster) -> None:
    assert cluster.parent is not None
    said = cluster.parent.output()
    assert f"{cluster.url}/v1" in said
    assert str(cluster.data / "admin.token") in said
    token = (cluster.data / "join.token").read_text().strip()
    assert f"enginehouse join {cluster.url} --token @{cluster.data / 'join.token'} --name second" in said
    assert token not in said
    assert "run tiny-chat" in said


def test_the_secrets_are_for_their_owner_alone(cluster: Cluster) -> None:
    for name in ("admin.token", "join.token", "node.key", "bus/account.seed", "bus/operator.seed"):
        assert stat.S_IMODE((cluster.data / name).stat().st_mode) == 0o600, name


def test_the_local_node_is_approved_by_itself(cluster: Cluster) -> None:
    cluster.wait_for_status("first", "healthy")


def test_run_installs_the_engine_places_the_model_and_answers(cluster: Cluster) -> None:
    done = cluster.cli("run", "tiny-chat", "--prompt", FRANCE)
    assert done.stdout.strip() == "The capital of France is Paris."
    for step in ("install llama-cpp", "place the files of tiny-chat", "start tiny-chat"):
        assert f"✓ first: {step}" in done.stderr


def test_a_second_run_answers_without_any_step(cluster: Cluster) -> None:
    done = cluster.cli("run", "tiny-chat", "--prompt", FRANCE)
    assert done.stdout.strip() == "The capital of France is Paris."
    assert "install" not in done.stderr


def test_threads_are_never_more_than_cores(cluster: Cluster) -> None:
    assert cluster.parent is not None
    given = [int(one.environ().get("ENGINEHOUSE_THREADS", 0)) for one in cluster.parent.descendants()]
    assert 0 < sum(given) <= (psutil.cpu_count() or 1)


def test_a_second_machine_is_pending_until_it_is_approved(cluster: Cluster) -> None:
    cluster.join("second")
    cluster.wait_for_status("second", "pending")
    refused = cluster.cli("backends", "install", "llama-cpp", "--node", "second", code=1)
    assert "it waits for approval; approve it with `enginehouse nodes approve second`" in refused.stderr
    assert cluster.cli("nodes", "approve", "second").stdout == "approved second; it has joined\n"
    assert [node["status"] for node in cluster.json("nodes", "list")] == ["healthy", "healthy"]
    cluster.wait_for_status("second", "healthy")
    assert cluster.cli("nodes", "approve", "second").stdout == "= second is already approved\n"


def test_an_install_goes_to_both_nodes_and_ops_tell_the_same_story(cluster: Cluster) -> None:
    cluster.cli("backends", "install", "llama-cpp", "--all")
    newest = cluster.operations()[0]
    shown = cluster.json("ops", "show", newest["jobID"])
    assert (shown["kind"], shown["status"], shown["author"]) == ("install", "succeeded", "admin")
    assert [(row["node_name"], row["status"]) for row in shown["nodes"]] == [
        ("first", "success"),
        ("second", "success"),
    ]
    followed = cluster.cli("ops", "follow", newest["jobID"][:8])
    assert "✓ second: install llama-cpp" in followed.stderr + followed.stdout
    wait_for("the second node to report it", lambda: cluster.has_backend("second"))


def test_another_name_of_a_model_answers_and_ends_without_it(cluster: Cluster) -> None:
    cluster.cli("models", "add", "gpt-4o", "alias:tiny-chat", "--yes")
    assert "another name of" in cluster.cli("models", "show", "gpt-4o").stdout
    assert ask(cluster, FRANCE, "gpt-4o") == "The capital of France is Paris."
    cluster.cli("models", "delete", "gpt-4o")
    assert ask(cluster, FRANCE) == "The capital of France is Paris."


def test_the_official_client_chats_streams_and_completes(cluster: Cluster, api: openai.OpenAI) -> None:
    assert [model.id for model in api.models.list()] == ["tiny-chat"]
    assert api.models.retrieve("tiny-chat").id == "tiny-chat"
    assert ask(cluster, FRANCE) == "The capital of France is Paris."
    stream = api.chat.completions.create(
        model="tiny-chat",
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        messages=[{"role": "user", "content": FRANCE}],
    )
    chunks = list(stream)
    said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert said == "The capital of France is Paris."
    assert len([chunk for chunk in chunks if chunk.choices]) > 5, "it came in one piece"
    assert {chunk.model for chunk in chunks} == {"tiny-chat"}
    assert chunks[-1].usage is not None
    completed = api.completions.create(model="tiny-chat", prompt="Once upon a time", max_tokens=5, temperature=0)
    assert completed.choices[0].text
    assert completed.usage is not None
    assert completed.usage.completion_tokens == 5


def test_either_node_answers(cluster: Cluster) -> None:
    cluster.cli("models", "load", "tiny-chat", "--node", "second")
    # The same question would otherwise be answered by the same replica, which has it in its cache.
    cluster.cli("models", "schedule", "tiny-chat", "--policy", "round_robin")

    def both_answered() -> bool:
        assert ask(cluster, FRANCE) == "The capital of France is Paris."
        return all(figure(cluster, "enginehouse_requests_total", node=node) > 0 for node in ("first", "second"))

    wait_for("both to answer", both_answered)
    cluster.cli("models", "schedule", "tiny-chat", "--remove")
    shown = {
        one["node_name"]
        for one in next(m for m in cluster.json("models", "list") if m["name"] == "tiny-chat")["replicas"]
    }
    assert shown == {"first", "second"}


def test_a_warm_request_needs_no_database(cluster: Cluster, api: openai.OpenAI) -> None:
    """The database is locked by somebody else: whoever needs it waits for five seconds and then fails."""
    other = sqlite3.connect(cluster.data / "enginehouse.db", isolation_level=None)
    try:
        other.execute("begin immediate")
        began = time.monotonic()
        for _ in range(5):
            answer = api.chat.completions.create(
                model="tiny-chat", temperature=0, messages=[{"role": "user", "content": FRANCE}]
            )
            assert answer.choices[0].message.content == "The capital of France is Paris."
        assert time.monotonic() - began < 4
    finally:
        other.execute("rollback")
        other.close()


def test_a_client_error_of_the_engine_keeps_its_status_and_our_shape(api: openai.OpenAI) -> None:
    try:
        api.chat.completions.create(
            model="tiny-chat", messages=[{"role": "user", "content": "word " * 2000}], temperature=0
        )
    except openai.BadRequestError as error:
        body: Any = error.body
        assert body["code"]
        assert "context" in str(body["message"])
    else:
        raise AssertionError("a prompt of two thousand words fits into a context of 512")


def test_a_request_for_a_node_that_is_away_is_kept_and_happens_when_it_returns(cluster: Cluster) -> None:
    assert cluster.workers["second"].end() == 0
    cluster.wait_for_status("second", "offline")
    done = cluster.cli("backends", "delete", "llama-cpp", "--node", "second")
    assert "queued" in done.stderr + done.stdout
    operation = cluster.operations()[0]
    assert (operation["status"], operation["nodes"][0]["status"]) == ("queued", "queued")
    cluster.join("second")
    wait_for(
        "the delete to happen by itself",
        lambda: cluster.operation(operation["jobID"])["status"] == "succeeded",
    )
    wait_for("the node to report it", lambda: not cluster.has_backend("second"))
    assert not (cluster.root / "second" / "backends" / "xllamacpp").exists()
    assert not (cluster.root / "second" / "backends" / "llama-cpp").exists()


def test_a_chat_goes_on_where_the_other_node_is_gone(cluster: Cluster) -> None:
    """The second node's replica went with its worker; the first answers alone, without an error in between."""
    for _ in range(4):
        assert ask(cluster, FRANCE) == "The capital of France is Paris."


def test_unload_stops_the_process_and_the_next_request_loads_again(cluster: Cluster) -> None:
    cluster.cli("models", "unload", "tiny-chat")
    assert cluster.parent is not None
    parent = cluster.parent
    wait_for("no engine to run", lambda: not engines(parent.descendants()))
    assert ask(cluster, FRANCE) == "The capital of France is Paris."
    assert len(engines(parent.descendants())) == 1


def engines(processes: list[psutil.Process]) -> list[psutil.Process]:
    found = []
    for one in processes:
        try:
            if "ENGINEHOUSE_THREADS" in one.environ():
                found.append(one)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def test_one_load_however_many_ask_at_once(cluster: Cluster) -> None:
    cluster.cli("models", "unload", "tiny-chat")
    before = len(cluster.operations())
    body = json.dumps({"model": "tiny-chat", "temperature": 0, "messages": [{"role": "user", "content": FRANCE}]})
    asking = [
        subprocess.Popen(
            ["curl", "-s", "-m", "60", f"{cluster.url}/v1/chat/completions", "-d", body], stdout=subprocess.PIPE
        )
        for _ in range(12)
    ]
    answers = [one.communicate(timeout=60)[0].decode() for one in asking]
    assert all("Paris" in answer for answer in answers), answers
    assert len(cluster.operations()) == before + 1


def test_an_answer_says_which_request_it_belongs_to(cluster: Cluster) -> None:
    done = subprocess.run(
        ["curl", "-si", "-H", "x-request-id: my-own", f"{cluster.url}/v1/models"], capture_output=True, text=True
    )
    assert re.search(r"(?i)x-request-id: my-own", done.stdout)


def test_everything_ends_in_order_and_a_second_up_goes_on_where_it_was(cluster: Cluster) -> None:
    assert cluster.parent is not None
    left = cluster.parent.descendants() + cluster.workers["second"].descendants()
    assert cluster.workers["second"].end() == 0
    assert cluster.parent.end() == 0
    _, alive = psutil.wait_procs(left, timeout=10)
    assert not alive, alive
    before_names = {"first", "second"}
    cluster.up()
    assert {one["name"] for one in cluster.json("nodes", "list")} == before_names
    wait_for("the first node to report it", lambda: cluster.has_backend("first"))
    assert any(one["kind"] == "install" for one in cluster.operations())
    assert ask(cluster, FRANCE) == "The capital of France is Paris."
    version = subprocess.run([PROGRAM, "version"], capture_output=True, text=True)
    assert version.returncode == 0
