"""Metrics: what each counts, and that the dashboard and the manual speak of exactly those that exist."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from tests.api.whole_frontend import Site, site

from enginehouse.api.openai import Finished
from enginehouse.core.fair_queue import FairQueue
from enginehouse.core.ids import NodeId
from enginehouse.core.model import Model
from enginehouse.core.replica import Replica
from enginehouse.core.usage import Used
from enginehouse.frontend.serving.load_waits import Pending
from enginehouse.frontend.serving.queues import Waiter
from enginehouse.store import db, models, nodes, replicas
from enginehouse.store.db import Connection

DOCS = Path(__file__).parents[2] / "docs"
NAME = re.compile(r"enginehouse_[a-z_]+")
SELECTED = re.compile(r"(enginehouse_[a-z_]+)(?:\{([^}]*)\})?")


@pytest.fixture
async def here(tmp_path: Path) -> AsyncIterator[Site]:
    async with site(tmp_path) as made:
        yield made


def done(**changed: Any) -> Finished:
    fields: dict[str, Any] = {
        "caller": None,
        "model": "tiny",
        "node": "first",
        "path": "/v1/chat/completions",
        "status": 200,
        "seconds": 2.0,
        "first_byte_seconds": 0.02,
        "first_token_seconds": 0.5,
        "used": Used(7, 31),
    }
    return Finished(**(fields | changed))


async def everything(here: Site) -> dict[str, float]:
    """Every sample after one of each event."""
    metrics = here.frontend.metrics
    metrics.request_done(done())
    metrics.request_done(done(used=None, first_token_seconds=None))
    metrics.request_done(done(used=Used(0, 10, True), status=200))
    metrics.request_done(done(node="", status=503, used=None, first_token_seconds=None))
    metrics.load_ended("tiny", 3.0, "")
    metrics.load_ended("tiny", 3.0, "load_failed")
    metrics.rate_limited("app", "tokens")
    metrics.bus_reconnected()
    metrics.staged = {"old": 5}
    here.frontend.router.queues.refused["tiny", "full"] = 2
    here.frontend.router.prefixes.disturbances["tiny"] = 3
    await here.ask("GET", "/api/nodes")
    node_id = NodeId(here.tokens["node id"])
    await here.ask("POST", "/api/nodes/old/approve", token=here.tokens["admin"])
    resources = {"available_ram": 3000, "total_disk": 100, "available_disk": 40}
    resources |= {"total_vram": 50, "available_vram": 20}
    await here.ask("POST", f"/api/node/{node_id}/heartbeat", resources, token=here.tokens["node"])

    def fill(connection: Connection) -> None:
        for name in ("tiny", "second"):
            models.insert(connection, Model(name=name, backend="b", files=()), db.now(connection))
        for slot in range(2):
            replica = Replica(
                node_id=node_id,
                model="tiny",
                slot=slot,
                revision="",
                address="h:1",
                nonce=f"n{slot}",
                backend="b",
                key="k",
            )
            replicas.put(connection, replica, db.now(connection))
        replicas.set_leaving(connection, node_id, "tiny", 1, True)

    await here.store.transaction(fill)
    await here.ask("POST", "/api/models/second/load", {}, token=here.tokens["admin"])
    await here.frontend.router.step()
    route = await here.frontend.router.acquire("tiny")
    try:
        return await samples(here)
    finally:
        here.frontend.router.release(route)


async def samples(here: Site) -> dict[str, float]:
    text = (await here.ask("GET", "/metrics", token=here.tokens["admin"])).body.decode()
    return {
        sample.name + "".join(f" {key}={value}" for key, value in sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def test_every_event_is_counted_where_it_belongs(here: Site) -> None:
    found = await everything(here)
    path = "path=/v1/chat/completions"
    assert found[f"enginehouse_requests_total model=tiny node=first {path} status=200"] == 3
    assert found[f"enginehouse_requests_total model=tiny node= {path} status=503"] == 1
    assert found[f"enginehouse_request_seconds_count model=tiny {path}"] == 4
    assert found[f"enginehouse_request_seconds_sum model=tiny {path}"] == 8
    assert found[f"enginehouse_request_seconds_bucket le=1.0 model=tiny {path}"] == 0
    assert found[f"enginehouse_request_seconds_bucket le=2.5 model=tiny {path}"] == 4
    assert found[f"enginehouse_request_seconds_bucket le=+Inf model=tiny {path}"] == 4
    assert found[f"enginehouse_first_byte_seconds_bucket le=0.025 model=tiny {path}"] == 4
    assert found["enginehouse_first_token_seconds_count model=tiny"] == 2
    assert found["enginehouse_first_token_seconds_bucket le=0.5 model=tiny"] == 2, "a bound belongs to its bucket"
    assert found["enginehouse_stream_tokens_per_second_sum model=tiny"] == pytest.approx(30 / 1.5 + 9 / 1.5)
    assert found["enginehouse_tokens_total kind=prompt model=tiny"] == 7
    assert found["enginehouse_tokens_total kind=completion model=tiny"] == 31
    assert found["enginehouse_usage_unreported_total model=tiny"] == 2
    assert found["enginehouse_load_seconds_count model=tiny"] == 1
    assert found["enginehouse_load_failures_total code=load_failed model=tiny"] == 1
    assert found["enginehouse_rate_limited_total limit=tokens token=app"] == 1
    assert found["enginehouse_denied_total code=unauthenticated"] == 1


async def test_gauges_show_the_cluster_as_it_is(here: Site) -> None:
    found = await everything(here)
    assert found["enginehouse_nodes health=healthy"] == found["enginehouse_node_up node=old"] == 1
    assert found["enginehouse_node_drained node=old"] == found["enginehouse_node_bus_away node=old"] == 0
    assert 0 <= found["enginehouse_node_heartbeat_age_seconds node=old"] < 30
    for resource, size in {"ram": 3000, "vram": 20, "disk": 40}.items():
        assert found[f"enginehouse_node_available_bytes node=old resource={resource}"] == size
    assert found["enginehouse_node_total_bytes node=old resource=disk"] == 100
    assert "enginehouse_node_total_bytes node=old resource=ram" not in found, "it was not reported"
    for state, count in {"ready": 1, "leaving": 1, "loading": 0, "unreachable": 0}.items():
        assert found[f"enginehouse_model_replicas model=tiny state={state}"] == count
    assert found["enginehouse_replicas model=tiny node=old"] == 1
    assert found["enginehouse_model_in_flight model=tiny node=old"] == found["enginehouse_in_flight"] == 1
    # A replica on a drained node goes on until another one has taken its place.
    assert (await here.ask("POST", "/api/nodes/old/drain", token=here.tokens["admin"])).status == 202
    later = await samples(here)
    assert later["enginehouse_node_drained node=old"] == 1
    assert later["enginehouse_model_replicas model=tiny state=ready"] == 1
    node_id = NodeId(here.tokens["node id"])
    await here.store.transaction(lambda one: nodes.set_health(one, node_id, "offline", db.now(one)))
    gone = await samples(here)
    assert gone["enginehouse_model_replicas model=tiny state=unreachable"] == 2
    assert (await here.ask("DELETE", "/api/nodes/old?force=true", token=here.tokens["admin"])).status == 200
    assert not [name for name in await samples(here) if name.startswith("enginehouse_node_")]


async def test_operations_are_counted_by_kind_and_outcome(here: Site) -> None:
    found = await everything(here)
    assert found["enginehouse_operations kind=load outcome=open"] == 1


async def test_what_others_count_is_shown_as_they_count_it(here: Site) -> None:
    await everything(here)
    for _ in range(2):
        found = await samples(here)
        assert found["enginehouse_staged_bytes_total node=old"] == 5
        assert found["enginehouse_bus_reconnects_total"] == 1
        assert found["enginehouse_queue_refusals_total model=tiny reason=full"] == 2
        assert found["enginehouse_prefix_disturbed_total model=tiny"] == 3


async def test_requests_that_wait_for_a_load_are_shown(here: Site) -> None:
    waiting = Pending()
    waiting.waiters = 3
    here.frontend.router._pending["tiny"] = waiting
    assert (await samples(here))["enginehouse_model_waiting model=tiny"] == 3


async def test_a_load_that_ends_is_counted_by_the_frontend_that_ended_it(here: Site) -> None:
    def fill(connection: Connection) -> None:
        models.insert(connection, Model(name="tiny", backend="b", files=()), db.now(connection))

    await here.store.transaction(fill)
    answer = await here.ask("POST", "/api/models/tiny/load", {}, token=here.tokens["admin"])
    assert answer.status == 202, answer.body
    await here.store.transaction(lambda connection: models.remove(connection, "tiny"))
    for _ in range(2):
        await here.frontend.loader.step()
    found = await samples(here)
    assert found["enginehouse_load_failures_total code=model_not_found model=tiny"] == 1
    assert not [name for name in found if name.startswith("enginehouse_load_seconds_count")]


def expressions() -> list[str]:
    board = json.loads((DOCS / "grafana-dashboard.json").read_text())
    assert {"title", "panels", "schemaVersion", "templating", "uid"} <= set(board)
    ids = [panel["id"] for panel in board["panels"]]
    assert len(ids) == len(set(ids)) > 10
    found = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    return [*found, *(one["query"] for one in board["templating"]["list"] if one["type"] == "query")]


async def families(here: Site) -> dict[str, set[str]]:
    """The labels of each name that a query can use."""
    await everything(here)
    here.frontend.router._pending["tiny"] = Pending()
    queue: FairQueue[Waiter] = FairQueue()
    here.frontend.router.queues.by_model["tiny"] = queue
    text = (await here.ask("GET", "/metrics", token=here.tokens["admin"])).body.decode()
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def alerts() -> list[str]:
    groups = yaml.safe_load((DOCS / "alerts.yml").read_text())["groups"]
    return [rule["expr"] for group in groups for rule in group["rules"]]


@pytest.mark.parametrize("read", [expressions, alerts])
async def test_the_dashboard_and_the_alerts_ask_for_metrics_and_labels_that_exist(
    here: Site, read: Callable[[], list[str]]
) -> None:
    known = await families(here)
    for expression in read():
        assert expression.count("(") == expression.count(")"), expression
        used = SELECTED.findall(expression)
        assert used, expression
        labels: set[str] = set()
        for name, selector in used:
            assert name in known, f"{name} in {expression}"
            labels |= known[name]
            for label in re.findall(r"(\w+)\s*(?:=~|!=|!~|=)", selector):
                assert label in known[name], f"{label} in {expression}"
        for grouped in re.findall(r"by \(([^)]*)\)", expression):
            assert {one.strip() for one in grouped.split(",")} <= labels, expression


async def test_the_dashboard_and_the_manual_leave_none_out(here: Site) -> None:
    def plain(name: str) -> str:
        return re.sub(r"_(total|bucket|sum|count)$", "", name)

    known = {plain(name) for name in await families(here)}
    shown = {plain(name) for expression in expressions() for name in NAME.findall(expression)}
    assert known == shown
    manual = (DOCS / "operating.md").read_text().partition("### Metrics")[2].partition("\n## ")[0]
    assert {plain(name) for name in NAME.findall(manual)} == known
