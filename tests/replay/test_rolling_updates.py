"""Versions side by side while a fleet is updated: a frontend of today with the oldest workers, workers of today with
the oldest frontends. Nothing here needs recordings.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.fetch.images import write_image, write_index
from tests.replay.frontends import Frontends
from tests.replay.go_worker import Answer, GoWorker, go_worker
from tests.replay.lab import Lab
from tests.replay.recordings import Payload
from tests.replay.workers import FIRST, GoFrontend
from tests.worker.shelf import said_by

from enginehouse.core import subjects

OLDEST = (
    subjects.INSTALL,
    subjects.STOP,
    subjects.DELETE,
    subjects.LIST,
)  # before upgrades and before what runs could be asked
DONE: Payload = {"success": True}
NOTHING: Payload = {"backends": None}


def listed(*backends: tuple[str, str]) -> Payload:
    rows = [{"name": name, "is_system": False, "is_meta": False, "digest": digest} for name, digest in backends]
    return {"backends": rows or None}


@pytest.fixture
async def oldest(frontends: Frontends, lab: Lab) -> AsyncIterator[GoWorker]:
    async with go_worker(frontends.first, frontends.bus_url, lab, "oldest", verbs=OLDEST) as made:
        yield made


# A frontend of today, the oldest workers (F-119) ---------------------------------------------------


async def test_the_oldest_worker_installs_and_unknown_progress_is_not_shown_as_a_number(
    frontends: Frontends, oldest: GoWorker, lab: Lab
) -> None:
    gate = asyncio.Event()
    oldest.will(subjects.INSTALL, Answer(reply=DONE, gate=gate, then=listed(("cpu-mock", lab.old.digest))))
    operation_id = (await frontends.first.post("/backends/apply", {"id": "mock"}))["id"]
    await oldest.hears(subjects.INSTALL)
    row = await frontends.first.shows(operation_id, "oldest", state="running")
    assert not {"phase", "current", "total", "current_bytes", "total_bytes", "file_name"} & set(row)
    gate.set()
    ended = await frontends.first.ended(operation_id)
    assert (ended["status"], ended["nodes"][0]["attempt"]) == ("succeeded", 1)
    await frontends.first.lists("oldest", "cpu-mock")


async def test_the_oldest_worker_is_upgraded_by_a_forced_install(
    frontends: Frontends, oldest: GoWorker, lab: Lab
) -> None:
    oldest.has(listed(("cpu-mock", lab.old.digest)))
    await frontends.first.lists("oldest", "cpu-mock")
    await lab.move_tag(lab.new)
    oldest.will(subjects.INSTALL, Answer(reply=DONE, then=listed(("cpu-mock", lab.new.digest))))
    operation_id = (await frontends.first.post("/backends/upgrade/cpu-mock"))["id"]
    assert (await frontends.first.ended(operation_id))["status"] == "succeeded"
    (request,) = oldest.requests(subjects.INSTALL)
    assert (request["force"], request["op_id"]) == (True, operation_id)
    assert (await frontends.first.node("oldest"))["status"] == "healthy"


async def test_the_oldest_worker_deletes_and_need_not_name_what_it_stopped(
    frontends: Frontends, oldest: GoWorker, lab: Lab
) -> None:
    oldest.has(listed(("cpu-mock", lab.old.digest)))
    await frontends.first.lists("oldest", "cpu-mock")
    oldest.will(subjects.DELETE, Answer(reply=DONE, then=NOTHING))
    operation_id = (await frontends.first.post("/backends/delete/cpu-mock"))["id"]
    assert (await frontends.first.ended(operation_id))["status"] == "succeeded"
    assert oldest.requests(subjects.DELETE)[0]["backend"] == "cpu-mock"
    await frontends.first.lists("oldest")


async def test_an_answer_with_more_in_it_than_today_s_frontend_knows_counts(
    frontends: Frontends, oldest: GoWorker, lab: Lab
) -> None:
    later = {**DONE, "warmth": 7, "parts": [{"a": None}]}
    oldest.will(subjects.INSTALL, Answer(reply=later, then={**listed(("cpu-mock", lab.old.digest)), "of": "today"}))
    operation_id = (await frontends.first.post("/backends/apply", {"id": "mock"}))["id"]
    assert (await frontends.first.ended(operation_id))["status"] == "succeeded"
    await frontends.first.lists("oldest", "cpu-mock")


async def test_a_worker_that_tells_no_platform_gets_images_that_have_one_build_per_platform(
    frontends: Frontends, oldest: GoWorker, lab: Lab, tmp_path: Path
) -> None:
    """No version can be requested for then: the worker chooses, and its word is the end."""
    layout = tmp_path / "layout"
    images = [write_image(layout, [{"run.sh": b""}], platform=one) for one in ("linux/amd64", "linux/arm64")]
    write_index(layout, images)
    await lab.registry.push(layout, "lab/two:latest")
    oldest.will(subjects.INSTALL, Answer(reply=DONE))
    body = {"uri": lab.registry.reference("lab/two:latest"), "name": "two"}
    accepted = await frontends.first.post(f"/api/nodes/{oldest.node_id}/backends/install", body)
    assert (await frontends.first.ended(accepted["jobID"]))["status"] == "succeeded"
    (request,) = oldest.requests(subjects.INSTALL)
    assert (request["uri"], request["resolved"]["digest"]) == (body["uri"], "")


# Workers of today, the oldest frontends (F-120) ----------------------------------------------------


async def test_a_forced_install_of_the_oldest_frontend_is_an_upgrade(go: GoFrontend, lab: Lab) -> None:
    await go.install(FIRST, "cpu-mock")
    await lab.move_tag(lab.new)
    await go.install(FIRST, "cpu-mock", force=True)
    assert said_by(go.backends(FIRST) / "cpu-mock") == "new"
    assert (await go.listed(FIRST))["cpu-mock"]["digest"] == lab.new.digest
    assert go.events == []


@pytest.mark.parametrize("verb", [subjects.INSTALL, subjects.UPGRADE, subjects.DELETE])
async def test_a_worker_does_what_it_understands_of_a_message_with_unknown_fields(
    go: GoFrontend, lab: Lab, verb: str
) -> None:
    if verb != subjects.INSTALL:
        await go.install(FIRST, "mock")
    request = {"backend": "mock", "backend_galleries": lab.galleries, "priority": 7, "nested": {"a": [1, None]}}
    reply = await go.ask(FIRST, verb, request)
    assert reply["success"] is True, reply
    assert go.directories(FIRST) == (set() if verb == subjects.DELETE else {"mock", "cpu-mock"})


@pytest.mark.parametrize(
    "verb", [subjects.INSTALL, subjects.UPGRADE, subjects.DELETE, subjects.STOP_MODEL, subjects.DELETE_MODEL]
)
async def test_a_message_that_cannot_be_read_is_answered_and_harms_nobody(go: GoFrontend, verb: str) -> None:
    unreadable: tuple[object, ...] = ({}, None, [], "text", {"backend": 7})
    for payload in unreadable:
        reply = await go.ask(FIRST, verb, payload)
        assert reply.get("success", reply.get("terminated")) is False, payload
        assert reply["error"].startswith("cannot read "), payload
    assert go.directories(FIRST) == set()


@pytest.mark.parametrize("op_id", ["a\rb", "a\x0bb", "\u00a0", "x" * 5000], ids=["return", "tab", "space", "long"])
async def test_an_operation_that_no_subject_can_hold_is_done_in_silence(go: GoFrontend, lab: Lab, op_id: str) -> None:
    await go.install(FIRST, "mock", op_id=op_id)
    assert go.events == []
    assert set(await go.listed(FIRST)) == {"mock", "cpu-mock"}


async def test_a_command_of_a_later_frontend_with_more_in_it_is_done_and_answered(go: GoFrontend, lab: Lab) -> None:
    command = {"intent": "later", "generation": 1, "attempt": 1, "fence": 1, "priority": 9}
    resolved = {"directory": "later", "uri": lab.reference(), "digest": lab.old.digest, "signed_by": "somebody"}
    request = {"backend": "later", "op_id": "op", "command": command, "resolved": resolved, "window": [1, 2]}
    reply = await go.ask(FIRST, subjects.INSTALL, request)
    assert (reply["success"], reply["outcome"]["digest"]) == (True, lab.old.digest)
    assert go.directories(FIRST) == {"later"}
