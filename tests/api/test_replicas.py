"""`GET /api/replicas`: every replica with its state, what it holds, and whether it is to be replaced."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from tests.api.whole_frontend import Site, site

from enginehouse.core.ids import NodeId
from enginehouse.core.model import Model
from enginehouse.core.replica import Replica, RunningReplica
from enginehouse.core.report import Report
from enginehouse.store import db, models, nodes, replicas
from enginehouse.store.db import Connection

GIB = 1024**3


@pytest.fixture
async def here(tmp_path: Path) -> AsyncIterator[Site]:
    async with site(tmp_path) as made:
        await made.ask("POST", "/api/nodes/old/approve", token=made.tokens["admin"])
        yield made


async def change(here: Site, *changes: Any) -> None:
    def work(connection: Connection) -> None:
        for one in changes:
            one(connection)

    await here.store.transaction(work)


def placed(here: Site, slot: int = 0, *, age_seconds: float = 60, **fields: Any) -> Any:
    """Put a replica that became ready a minute ago."""
    plain: dict[str, Any] = {"model": "tiny", "slot": slot, "revision": model_of("tiny").revision}
    plain |= {"address": "h:1", "nonce": f"n{slot}", "backend": "b"}
    replica = Replica(node_id=NodeId(here.tokens["node id"]), **(plain | fields))
    return lambda connection: replicas.put(connection, replica, db.now(connection) - age_seconds)


def model_of(name: str) -> Model:
    return Model(name=name, backend="b", files=())


def known(name: str) -> Any:
    return lambda connection: models.insert(connection, model_of(name), db.now(connection))


async def listed(here: Site) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = (await here.ask("GET", "/api/replicas", token=here.tokens["admin"])).json
    return found


async def test_a_replica_has_its_place_age_and_no_made_up_figures(here: Site) -> None:
    await change(here, known("tiny"), placed(here))
    (one,) = await listed(here)
    assert 60 <= one.pop("age_seconds") < 90
    assert one == {
        "model": "tiny",
        "node_id": here.tokens["node id"],
        "node_name": "old",
        "slot": 0,
        "state": one["state"],
        "backend": "b",
        "revision": model_of("tiny").revision,
        "outdated": "",
        "in_flight": 0,
        "unused_seconds": None,
        "use_unknown": True,  # it is older than this frontend
        "memory_bytes": None,
    }


async def test_only_a_replica_that_came_after_this_frontend_is_known_to_be_unused(here: Site) -> None:
    await change(here, known("tiny"), placed(here), placed(here, 1, age_seconds=0))
    assert [one["use_unknown"] for one in await listed(here)] == [True, False]


async def test_a_use_is_shown_before_it_is_stored_and_stored_when_the_frontend_stops(here: Site) -> None:
    node_id = NodeId(here.tokens["node id"])
    await here.ask("POST", f"/api/node/{node_id}/heartbeat", {"available_ram": 3000}, token=here.tokens["node"])
    await change(here, known("tiny"), placed(here))
    await here.frontend.router.step()
    here.frontend.router.release(await here.frontend.router.acquire("tiny"))
    (shown,) = await listed(here)
    assert (shown["unused_seconds"], shown["use_unknown"]) == (0.0, False)
    await here.frontend.reconciler.finish()
    (stored,) = await here.frontend.store.transaction(replicas.every_with_use)
    assert stored.last_used > stored.created_at


async def test_memory_and_the_mark_of_an_old_engine_come_from_the_report_of_that_process(here: Site) -> None:
    running = RunningReplica(model_id="tiny", replica_index=0, nonce="n0", memory_bytes=2 * GIB, outdated=True)
    other = replace(running, replica_index=1, nonce="another process", memory_bytes=GIB)
    node_id = NodeId(here.tokens["node id"])
    report = Report(replicas=(running, other))
    await change(
        here,
        known("tiny"),
        placed(here),
        placed(here, 1),
        lambda connection: nodes.set_report(connection, node_id, report, None),
    )
    first, second = await listed(here)
    assert (first["memory_bytes"], first["outdated"]) == (2 * GIB, "its backend was upgraded")
    assert (second["memory_bytes"], second["outdated"]) == (None, "")


async def test_a_changed_and_a_deleted_model_leave_outdated_replicas(here: Site) -> None:
    await change(here, known("tiny"), placed(here, revision="older"), placed(here, 1, model="gone"))
    assert {one["model"]: one["outdated"] for one in await listed(here)} == {
        "gone": "the model was deleted",
        "tiny": "the model was changed",
    }


async def test_requests_in_flight_and_the_last_use_are_shown(here: Site) -> None:
    node_id = NodeId(here.tokens["node id"])
    await here.ask("POST", f"/api/node/{node_id}/heartbeat", {"available_ram": 3000}, token=here.tokens["node"])
    await change(here, known("tiny"), placed(here))
    await here.frontend.router.step()
    route = await here.frontend.router.acquire("tiny")
    await here.frontend.reconciler.uses_step()
    (one,) = await listed(here)
    assert (one["in_flight"], one["state"]) == (1, "ready")
    assert 0 <= one["unused_seconds"] < 30
    here.frontend.router.release(route)
    (one,) = await listed(here)
    assert one["in_flight"] == 0


async def test_a_replica_that_is_about_to_stop_or_whose_node_is_gone_says_so(here: Site) -> None:
    node_id = NodeId(here.tokens["node id"])
    await here.ask("POST", f"/api/node/{node_id}/heartbeat", {"available_ram": 3000}, token=here.tokens["node"])
    await change(
        here,
        known("tiny"),
        placed(here),
        lambda connection: replicas.set_leaving(connection, node_id, "tiny", 0, True),
    )
    assert [one["state"] for one in await listed(here)] == ["leaving"]
    await change(here, lambda connection: nodes.set_health(connection, node_id, "offline", db.now(connection)))
    assert [one["state"] for one in await listed(here)] == ["unreachable"]
