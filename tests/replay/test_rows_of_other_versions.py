"""One database under two versions of the program: rows as the version before writes them, past everything that this
one knows, are read, sent and ended; rows of a later version are shown and left alone. (F-121, G29)
"""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tests.replay.frontends import Frontends, open_frontends
from tests.replay.go_worker import Answer, GoWorker, go_worker
from tests.replay.lab import Lab

from enginehouse.core import subjects
from enginehouse.core.ids import IntentId

# The columns of migration 0002, as they were then. This list never changes.
OPERATION = (
    *("id", "kind", "name", "author", "created_at", "targets", "excluded", "is_steered"),
    *("error_code", "error_message"),
)
INTENT = (
    *("id", "node_id", "subject", "generation", "action", "state", "created_at", "updated_at", "due_at"),
    *("attempt", "failures", "fence", "owner", "lease_until", "dispatched_at", "reason", "message"),
    *("progress", "outcome", "version"),
)
LINK = ("operation_id", "intent_id", "position")
SUBJECT = ("node_id", "subject", "generation")
LONG_SECONDS = 1000.0
TELEPORT = json.dumps({"type": "teleport", "to": "moon"})


class Cluster:
    """Frontends of this version, and one of the version before that only writes."""

    def __init__(self, frontends: Frontends, worker: GoWorker, lab: Lab) -> None:
        self.frontends = frontends
        self.worker = worker
        self._lab = lab

    async def now(self) -> float:
        """The clock of the database."""
        (node,) = await self.sql("select heard_at from node_liveness")
        return float(node[0])

    async def sql(self, statement: str, **values: object) -> list[Any]:
        return await self.frontends.first.run_sql(statement, **values)

    def install_of(self, directory: str) -> str:
        """An install as the version before wrote it: without galleries, and without a word on where it is from."""
        resolved = {"directory": directory, "uri": self._lab.reference(), "digest": ""}
        return json.dumps({"type": "install_backend", "backend": directory, "resolved": resolved})

    async def write(self, directory: str, action: str, **fields: object) -> tuple[str, str]:
        """An operation with one intent; their ids."""
        operation_id, intent_id, now = str(uuid.uuid4()), str(uuid.uuid4()), await self.now()
        node_id, subject = self.worker.node_id, f"backend:{directory}"
        operation: dict[str, object] = {
            **{"id": operation_id, "kind": "install", "name": directory, "author": "before", "created_at": now},
            **{"targets": json.dumps([node_id]), "excluded": "[]", "is_steered": False},
            **{"error_code": "", "error_message": ""},
        }
        intent: dict[str, object] = {
            **{"id": intent_id, "node_id": node_id, "subject": subject, "generation": 1, "action": action},
            **{"state": "accepted", "created_at": now, "updated_at": now, "due_at": now, "attempt": 0},
            **{"failures": 0, "fence": 0, "owner": "", "lease_until": 0.0, "dispatched_at": 0.0},
            **{"reason": "", "message": "", "progress": None, "outcome": None, "version": 0},
        }
        later = tuple(name for name in fields if name not in INTENT)
        link: dict[str, object] = {"operation_id": operation_id, "intent_id": intent_id, "position": 0}
        # In one transaction, as it was then: nobody sees a part of it.
        await self.frontends.first.run_all(
            _insert("subjects", SUBJECT, {"node_id": node_id, "subject": subject, "generation": 1}),
            _insert("operations", OPERATION, operation),
            _insert("intents", (*INTENT, *later), intent | fields),
            _insert("operation_intents", LINK, link),
        )
        return operation_id, intent_id

    async def state_of(self, intent_id: str) -> tuple[str, int]:
        (row,) = await self.sql("select state, attempt from intents where id = :id", id=intent_id)
        return str(row[0]), int(row[1])


def _insert(table: str, columns: tuple[str, ...], values: dict[str, object]) -> tuple[str, dict[str, object]]:
    assert set(values) == set(columns)
    return f"insert into {table} ({', '.join(columns)}) values ({', '.join(':' + one for one in columns)})", values


@pytest.fixture
async def cluster(database_url: str, bus_url: str, lab: Lab, tmp_path: Path) -> AsyncIterator[Cluster]:
    await lab.move_tag(lab.old)
    async with open_frontends(database_url, bus_url, lab, tmp_path / "frontends") as frontends:
        async with go_worker(frontends.first, bus_url, lab, "worker") as worker:
            yield Cluster(frontends, worker, lab)


async def test_a_row_of_the_version_before_is_read_sent_and_finished(cluster: Cluster) -> None:
    cluster.worker.will(subjects.INSTALL, Answer(reply={"success": True}))
    operation_id, intent_id = await cluster.write("cpu-mock", cluster.install_of("cpu-mock"))
    for frontend in cluster.frontends.both:
        ended = await frontend.ended(operation_id)
        assert (ended["status"], ended["author"], ended["nodes"][0]["attempt"]) == ("succeeded", "before", 1)
        (kept,) = (await frontend.get("/api/operations/history"))["operations"]
        assert (kept["jobID"], kept["outcome"]) == (operation_id, "completed")
    assert await cluster.state_of(intent_id) == ("succeeded", 1)
    (request,) = cluster.worker.requests(subjects.INSTALL)
    assert (request["backend"], request["op_id"]) == ("cpu-mock", operation_id)


async def test_what_the_version_before_left_running_ends_with_what_the_worker_has(cluster: Cluster) -> None:
    now = await cluster.now()
    running = {"state": "running", "attempt": 1, "fence": 1, "owner": "before", "lease_until": now - 1.0}
    operation_id, _ = await cluster.write(
        "cpu-mock", cluster.install_of("cpu-mock"), **running, dispatched_at=now - 2.0, version=1
    )
    cluster.worker.has({"backends": [{"name": "cpu-mock", "is_system": False, "is_meta": False}]})
    ended = await cluster.frontends.second.ended(operation_id)
    assert (ended["status"], ended["nodes"][0]["attempt"]) == ("succeeded", 1)


async def test_an_end_that_the_version_before_wrote_is_an_end_here(cluster: Cluster) -> None:
    now = await cluster.now()
    running = {"state": "running", "attempt": 1, "fence": 1, "owner": "before", "lease_until": now + LONG_SECONDS}
    operation_id, intent_id = await cluster.write(
        "cpu-mock", cluster.install_of("cpu-mock"), **running, dispatched_at=now, version=1
    )
    for frontend in cluster.frontends.both:
        assert (await frontend.operation(operation_id))["status"] == "running"
    await cluster.sql(
        "update intents set state = 'succeeded', owner = '', lease_until = 0, updated_at = :now, version = version + 1 "
        "where id = :id",
        now=await cluster.now(),
        id=intent_id,
    )
    for frontend in cluster.frontends.both:
        assert (await frontend.operation(operation_id))["status"] == "succeeded"
        assert (await frontend.get("/api/operations"))["operations"] == []
    await cluster.frontends.first.objects.cancellation.prune_step()
    (kept,) = (await cluster.frontends.second.get("/api/operations/history"))["operations"]
    assert (kept["jobID"], kept["outcome"]) == (operation_id, "completed")
    assert cluster.worker.heard == []


async def test_a_request_of_this_version_joins_an_open_row_of_the_version_before(cluster: Cluster) -> None:
    now = await cluster.now()
    running = {"state": "running", "attempt": 1, "fence": 1, "owner": "before", "lease_until": now + LONG_SECONDS}
    _, intent_id = await cluster.write(
        "cpu-mock", cluster.install_of("cpu-mock"), **running, dispatched_at=now, version=1
    )
    route = f"/api/nodes/{cluster.worker.node_id}/backends/install"
    accepted = await cluster.frontends.first.post(route, {"backend": "cpu-mock"})
    (row,) = (await cluster.frontends.first.operation(accepted["jobID"]))["nodes"]
    assert (row["intent"], row["state"]) == (intent_id, "running")


@pytest.mark.parametrize("kind", ["teleport", ""])
async def test_an_action_of_a_later_version_is_listed_and_neither_run_nor_removed(cluster: Cluster, kind: str) -> None:
    """G29. A later version writes the name of its action into `kind`; one that did not would do no harm either."""
    operation_id, intent_id = await cluster.write("moon", TELEPORT, kind=kind, due_at=0.0)
    cluster.worker.will(subjects.INSTALL, Answer(reply={"success": True}))
    other, _ = await cluster.write("cpu-mock", cluster.install_of("cpu-mock"))
    assert (await cluster.frontends.first.ended(other))["status"] == "succeeded", "it is in nobody's way"
    ours = cluster.frontends.first.objects
    for step in (ours.cancellation.hopeless_step, ours.cancellation.prune_step, ours.dispatcher.step, ours.poller.step):
        await step()
    listed = {one["jobID"]: one for one in (await cluster.frontends.second.get("/api/operations"))["operations"]}
    (row,) = listed[operation_id]["nodes"]
    assert "an unknown action of a newer version" in row["action"]
    assert (listed[operation_id]["status"], row["attempt"]) == ("queued", 0)
    assert await cluster.state_of(intent_id) == ("accepted", 0)
    ((action,),) = await cluster.sql("select action from intents where id = :id", id=intent_id)
    assert action == TELEPORT
    assert [request["backend"] for request in cluster.worker.requests(subjects.INSTALL)] == ["cpu-mock"]


async def test_an_operator_can_cancel_what_a_later_version_asked_for(cluster: Cluster) -> None:
    operation_id, intent_id = await cluster.write("moon", TELEPORT, kind="teleport")
    await cluster.frontends.first.post(f"/api/operations/{operation_id}/cancel")
    assert await cluster.state_of(intent_id) == ("cancelled", 0)
    ((action, kind),) = await cluster.sql("select action, kind from intents where id = :id", id=intent_id)
    assert (action, kind) == (TELEPORT, "teleport")


async def test_an_answer_to_what_a_later_version_sent_takes_no_other_answer_along(cluster: Cluster) -> None:
    now = await cluster.now()
    running = {"state": "running", "attempt": 1, "fence": 1, "owner": "later", "lease_until": now - 1.0}
    _, moon = await cluster.write("moon", TELEPORT, kind="teleport", **running, dispatched_at=now, version=1)
    mine, intent_id = await cluster.write(
        "cpu-mock", cluster.install_of("cpu-mock"), **running, dispatched_at=now, version=1
    )
    # One after the other on one connection: they are taken together.
    for one in (moon, intent_id):
        await cluster.worker.bus.publish(
            subjects.reply_subject(cluster.worker.node_id, IntentId(one), 1), b'{"success":true}'
        )
    assert (await cluster.frontends.first.ended(mine))["nodes"][0]["attempt"] == 1
    ((action,),) = await cluster.sql("select action from intents where id = :id", id=moon)
    assert action == TELEPORT
