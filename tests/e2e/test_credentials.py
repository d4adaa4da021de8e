"""Credentials in the wrong hands, with real processes and the embedded server of the bus."""

from __future__ import annotations

import asyncio
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.asking import ask, error_of, token_of
from tests.e2e.conftest import Cluster

from enginehouse.bus.nats import BusOptions, NatsBus
from enginehouse.core import subjects
from enginehouse.core.errors import Denied
from enginehouse.core.ids import IntentId
from enginehouse.core.node_api import RegisterRequest
from enginehouse.worker.identity import Identity, load_identity


def register(cluster: Cluster, identity: Identity, name: str, **more: Any) -> Any:
    """What a worker with this key would be answered."""
    token = token_of(cluster, "join")
    _, given = ask(cluster, "POST", "/api/node/challenge", token=token)
    asked = RegisterRequest(name=name, platform="linux/amd64", challenge=given["challenge"], **more)
    signed = identity.signed(asked)
    fields = {field: getattr(signed, field) for field in RegisterRequest.__struct_fields__}
    return fields, ask(cluster, "POST", "/api/node/register", fields, token=token)


async def connected(answer: dict[str, Any]) -> NatsBus:
    options = BusOptions(url=answer["nats_url"], name="stolen", jwt=answer["nats_jwt"], seed=answer["nats_user_seed"])
    return await NatsBus.connect(options, limit_seconds=5)


async def until(holds: Callable[[], bool], limit_seconds: float) -> None:
    async with asyncio.timeout(limit_seconds):
        while not holds():  # noqa: ASYNC110  # the server tells nobody
            await asyncio.sleep(0.05)


@pytest.fixture
def stranger(cluster: Cluster, tmp_path: Path) -> tuple[Identity, dict[str, Any]]:
    """An approved node that turned bad, with its credential for the bus."""
    identity = load_identity(tmp_path / "node.key")
    _, (status, _) = register(cluster, identity, "bad", address="127.0.0.1:50900")
    assert status == 201
    cluster.cli("nodes", "approve", "bad", "--no-wait")  # no worker joins under this name
    _, (_, answer) = register(cluster, identity, "bad", address="127.0.0.1:50900")
    assert answer["nats_jwt"]
    return identity, answer


async def test_a_removed_node_is_cut_off_the_bus_within_five_seconds(
    cluster: Cluster, stranger: tuple[Identity, dict[str, Any]]
) -> None:
    _, answer = stranger
    bus = await connected(answer)
    assert bus.is_connected
    began = time.monotonic()
    cluster.cli("nodes", "remove", "bad")
    await until(lambda: not bus.is_connected, 5)
    assert time.monotonic() - began < 6
    await bus.close()
    with pytest.raises(Denied):
        await connected(answer)
    # And its token counts for nothing: it is refused at once, and unknown within a second.
    path = f"/api/node/{answer['id']}/heartbeat"
    assert ask(cluster, "POST", path, {}, token=answer["node_token"])[0] in (401, 404)
    await until(lambda: ask(cluster, "POST", path, {}, token=answer["node_token"])[0] == 401, 3)
    refused = ask(cluster, "POST", path, {}, token=answer["node_token"])
    assert error_of(refused, 401)["code"] == "unauthenticated"


async def test_an_approved_worker_neither_reads_nor_forges_the_replies_of_others(
    cluster: Cluster, stranger: tuple[Identity, dict[str, Any]]
) -> None:
    _, answer = stranger
    bus = await connected(answer)
    try:
        for subject in ("_INBOX.>", "_INBOX.eh.>", "nodes.*.backend.install", ">", "$SYS.>"):
            with pytest.raises(Denied):
                await bus.subscribe(subject, lambda _: None)
        (first,) = [node for node in cluster.json("nodes", "list") if node["name"] == "first"]
        before = cluster.operations()
        await bus.publish(
            subjects.reply_subject(first["id"], IntentId("00000000-0000-0000-0000-000000000000"), 1), b"{}"
        )
        await bus.publish(subjects.node_subject(first["id"], subjects.STOP_NODE), b"{}")
        await until(lambda: violations(cluster) >= 2, 15)
        assert cluster.operations() == before
        assert [node["status"] for node in cluster.json("nodes", "list") if node["name"] == "first"] == ["healthy"]
    finally:
        await bus.close()
        cluster.cli("nodes", "remove", "bad")


def violations(cluster: Cluster) -> float:
    request = urllib.request.Request(f"{cluster.url}/metrics")
    request.add_header("authorization", f"Bearer {token_of(cluster, 'admin')}")
    with urllib.request.urlopen(request, timeout=10) as answer:
        text = answer.read().decode()
    found = [line for line in text.splitlines() if line.startswith('enginehouse_bus_violations_total{kind="publish"}')]
    return float(found[0].split()[-1])


def test_a_recorded_registration_is_worth_nothing(cluster: Cluster, tmp_path: Path) -> None:
    identity = load_identity(tmp_path / "node.key")
    recorded, (status, answer) = register(cluster, identity, "recorded", address="127.0.0.1:50900")
    assert status == 201
    token = token_of(cluster, "join")
    for changed in ({}, {"address": "127.0.0.1:50901"}, {"challenge": ""}):
        status, said = ask(cluster, "POST", "/api/node/register", {**recorded, **changed}, token=token)
        assert status in (403, 409), said
    assert ask(cluster, "POST", f"/api/node/{answer['id']}/heartbeat", {}, token=answer["node_token"])[0] == 200
    cluster.cli("nodes", "remove", "recorded")


def test_a_revoked_token_counts_for_nothing_within_a_second(cluster: Cluster) -> None:
    made = cluster.cli("keys", "create", "--name", "app").stdout.strip()
    assert ask(cluster, "GET", "/v1/models", token=made)[0] == 200
    cluster.cli("keys", "revoke", "app")
    assert ask(cluster, "GET", "/v1/models", token=made)[0] == 401


def test_a_passworded_address_is_refused_before_it_is_kept(cluster: Cluster) -> None:
    body = {
        "kind": "install",
        "name": "secret",
        "uri": "https://user:hunter2@host.example/x.tar.gz",
        "sha256": "0" * 64,
    }
    said = error_of(ask(cluster, "POST", "/api/operations", body), 422)
    assert said["code"] == "uri_not_allowed"
    assert "hunter2" not in said["message"]
    for path in cluster.data.rglob("enginehouse.db*"):
        assert b"hunter2" not in path.read_bytes()
