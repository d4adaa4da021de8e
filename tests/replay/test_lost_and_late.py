"""Recorded misfortunes: a worker without a bus, answers that come late, a request that nobody wants any more. LocalAI
calls each of them completed, or flips from cancelled to failed; here an end is an end, and there is none before.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from tests.replay.frontends import OPEN, Frontends, RunningFrontend, open_frontends, rows_of, until
from tests.replay.go_worker import SPEED, Answer, Pair, recorded
from tests.replay.lab import Lab
from tests.replay.recordings import FIRST_NODE, SECOND_NODE, exchanges, listing, needs_recordings

from enginehouse.core import subjects
from enginehouse.core.operation import OLDER_AT_WORK, STILL_RUNNING
from enginehouse.frontend.localai.poller import LOST_AFTER_BUDGETS

STALL_SECONDS = 0.3
BUDGET_SECONDS = 1.0


@pytest.fixture
async def frontends(postgres: Callable[[], str], bus_url: str, lab: Lab, tmp_path: Path) -> AsyncIterator[Frontends]:
    """On PostgreSQL, where they really write side by side."""
    await lab.move_tag(lab.old)
    async with open_frontends(postgres(), bus_url, lab, tmp_path) as made:
        yield made


@needs_recordings
@pytest.mark.parametrize("is_beating", [False, True], ids=["silent", "with heartbeats"])
async def test_a_request_waits_for_a_worker_that_lost_the_bus_and_is_done_when_it_is_back(
    frontends: Frontends, pair: Pair, is_beating: bool
) -> None:
    """23, S59."""
    recording = "23-nats-lost"
    (exchange,) = exchanges(recording, subjects.INSTALL, node_id=SECOND_NODE)
    pair.second.will(subjects.INSTALL, recorded(exchange))
    pair.first.will(subjects.INSTALL, recorded(exchange))
    await pair.first.lose_bus(is_beating=is_beating)
    operation_id = (await frontends.first.post("/backends/apply", {"id": "other"}))["id"]
    await frontends.first.shows(operation_id, "worker-2", status="success")
    await frontends.first.shows(operation_id, "worker-1", status="queued", state="waiting", reason="node_away")
    for frontend in frontends.both:
        view = await frontend.operation(operation_id)
        assert view["status"] in OPEN
        job = await frontend.get(f"/backends/jobs/{operation_id}")
        assert (job["processed"], job["message"] != "completed", job["progress"] < 100) == (False, True, True)
        assert (await frontend.get("/api/operations/history"))["operations"] == []
    if not is_beating:
        await frontends.first.sees("worker-1", "unhealthy")
    assert pair.first.heard == []

    await pair.first.find_bus()
    ended = await frontends.second.ended(operation_id)
    assert ended["status"] == "succeeded", ended
    (request,) = pair.first.requests(subjects.INSTALL)
    assert request["op_id"] == operation_id, "LocalAI's reconciler sends it without"
    (failures,) = await frontends.first.run_sql("select sum(failures) from intents")
    assert failures == (0,), "being away is no failure"


@pytest.fixture
async def impatient(
    postgres: Callable[[], str], bus_url: str, lab: Lab, tmp_path: Path
) -> AsyncIterator[tuple[Frontends, Pair]]:
    """Frontends that wait a moment for a worker where others wait fifteen minutes."""
    times = {"stall_seconds": STALL_SECONDS, "backend_install_timeout_seconds": BUDGET_SECONDS}
    await lab.move_tag(lab.old)
    async with open_frontends(postgres(), bus_url, lab, tmp_path, **times) as frontends:
        async with Pair.opened(frontends, lab) as pair:
            yield frontends, pair


@needs_recordings
async def test_no_answer_in_time_is_not_the_end_and_the_late_answer_is(impatient: tuple[Frontends, Pair]) -> None:
    """30, S17."""
    frontends, pair = impatient
    gate = asyncio.Event()
    (exchange,) = exchanges("30-install-timeout", subjects.INSTALL, node_id=FIRST_NODE)
    begun = [event for event in exchange.progress if event[0] < 1.0]
    assert begun
    assert exchange.reply == {"success": True, "address": "127.0.0.1:20103"}
    pair.first.will(subjects.INSTALL, Answer(reply=exchange.reply, progress=begun, gate=gate))
    pair.second.will(subjects.INSTALL, Answer(reply={"success": True}, gate=gate))
    operation_id = (await frontends.first.post("/backends/apply", {"id": "lab@other"}))["id"]
    for name in ("worker-1", "worker-2"):
        row = await frontends.first.shows(operation_id, name, status="running_on_worker")
        assert row["state"] == "running"
        assert "it may still be running there" in row["error"]
    for frontend in frontends.both:
        job = await frontend.get(f"/backends/jobs/{operation_id}")
        assert job["processed"] is False
        assert (await frontend.get("/api/operations/history"))["operations"] == []
        assert [one["jobID"] for one in (await frontend.get("/api/operations"))["operations"]] == [operation_id]
    gate.set()
    ended = await frontends.second.ended(operation_id)
    assert ended["status"] == "succeeded", ended
    (kept,) = (await frontends.second.get("/api/operations/history"))["operations"]
    assert (kept["outcome"], kept["jobID"]) == ("completed", operation_id)


@needs_recordings
async def test_a_worker_that_tells_of_its_work_is_not_told_again_however_long_it_takes(
    impatient: tuple[Frontends, Pair],
) -> None:
    """30: LocalAI's own frontend sends it again for ever, and an upgrade that comes twice is done twice."""
    frontends, pair = impatient
    (exchange,) = exchanges("30-install-timeout", subjects.INSTALL, node_id=FIRST_NODE)
    lasts = 1.3 * LOST_AFTER_BUDGETS * BUDGET_SECONDS * SPEED
    # The recording is thinned: between two events that it kept, the first is told again and again, as it was.
    told = [(at, exchange.progress[0][1]) for at in range(1, int(lasts))]
    pair.first.will(subjects.INSTALL, Answer(reply=exchange.reply, progress=told, seconds=lasts))
    route = f"/api/nodes/{pair.first.node_id}/backends/install"
    accepted = await frontends.first.post(route, {"backend": "other"})
    ended = await frontends.first.ended(accepted["jobID"])
    assert (ended["status"], ended["nodes"][0]["attempt"]) == ("succeeded", 1)
    assert len(pair.first.requests(subjects.INSTALL)) == 1


@needs_recordings
async def test_a_cancelled_operation_is_cancelled_at_once_everywhere_and_for_good(
    frontends: Frontends, pair: Pair
) -> None:
    """31, S21: LocalAI's worker went on for twelve seconds, the next one waited for it, and the status flipped."""
    recording = "31-cancel"
    gate = asyncio.Event()
    (exchange,) = exchanges(recording, subjects.INSTALL, node_id=FIRST_NODE)
    late = listing("26-two-frontends", FIRST_NODE)
    # Until somebody has looked, no more than the beginning of what was recorded.
    begun = [event for event in exchange.progress if event[0] < 1.0]
    pair.first.will(subjects.INSTALL, Answer(reply=exchange.reply, progress=begun, then=late, gate=gate))
    failing = exchanges(recording, subjects.INSTALL)[-1]
    assert failing.request["backend"] == "broken"
    assert failing.reply is not None
    pair.second.will(subjects.INSTALL, recorded(exchange, gate=gate), recorded(failing))
    operation_id = (await frontends.first.post("/backends/apply", {"id": "lab@other"}))["id"]
    await frontends.first.shows(operation_id, "worker-1", phase="downloading")
    await pair.second.hears(subjects.INSTALL)

    second = await frontends.first.post(f"/api/nodes/{pair.second.node_id}/backends/install", {"backend": "broken"})
    row = await frontends.first.shows(second["jobID"], "worker-2", attempt=1, state="waiting")
    assert "MANIFEST_UNKNOWN" in row["error"], "it did not wait for the first, which is still under way"
    assert (await frontends.first.operation(operation_id))["status"] == "running"

    answer = await frontends.first.ask("POST", f"/api/operations/{operation_id}/cancel")
    assert (answer.status, answer.json["success"]) == (200, True)
    for frontend in frontends.both:
        await _is_cancelled(frontend, operation_id)
    again = await frontends.second.ask("POST", f"/api/operations/{operation_id}/cancel")
    assert (again.status, again.error["code"]) == (409, "already_terminal")
    rows = (await frontends.second.operation(operation_id))["nodes"]
    assert all(STILL_RUNNING in row["error"] for row in rows), "a worker of LocalAI's cannot be stopped"
    gate.set()
    for frontend in frontends.both:
        for name in ("worker-1", "worker-2"):
            await _says(frontend, operation_id, name, "LocalAI's worker continued it, and it succeeded")
    await frontends.first.lists("worker-1", *(one["name"] for one in late["backends"]))
    for frontend in frontends.both:
        await _is_cancelled(frontend, operation_id)
    await frontends.first.post(f"/api/operations/{second['jobID']}/cancel")


async def _says(frontend: RunningFrontend, operation_id: str, node: str, end: str) -> None:
    async def probe() -> bool:
        return str(rows_of(await frontend.operation(operation_id))[node]["error"]).endswith(end)

    await until(probe, f"{node} to say {end!r}")


async def _is_cancelled(frontend: RunningFrontend, operation_id: str) -> None:
    view = await frontend.operation(operation_id)
    assert (view["status"], {row["state"] for row in view["nodes"]}) == ("cancelled", {"cancelled"})
    job = await frontend.get(f"/backends/jobs/{operation_id}")
    assert (job["cancelled"], job["processed"]) == (True, True)
    kept = (await frontend.get("/api/operations/history"))["operations"]
    assert [(one["jobID"], one["outcome"]) for one in kept] == [(operation_id, "cancelled")]


@needs_recordings
async def test_a_delete_waits_until_the_install_that_cannot_be_stopped_is_over(
    frontends: Frontends, pair: Pair
) -> None:
    """31, 28, S44: LocalAI's worker deletes at once, and its install then brings the backend back."""
    gate = asyncio.Event()
    (exchange,) = exchanges("31-cancel", subjects.INSTALL, node_id=FIRST_NODE)
    begun = [event for event in exchange.progress if event[0] < 1.0]
    there = listing("26-two-frontends", FIRST_NODE)
    pair.first.will(subjects.INSTALL, Answer(reply=exchange.reply, progress=begun, then=there, gate=gate))
    pair.first.will(subjects.DELETE, Answer(reply={"success": True}, then={"backends": None}))
    route = f"/api/nodes/{pair.first.node_id}/backends"
    install = await frontends.first.post(f"{route}/install", {"backend": "other"})
    await pair.first.hears(subjects.INSTALL)
    delete = await frontends.second.post(f"{route}/delete", {"backend": "other"})
    await frontends.first.shows(delete["jobID"], "worker-1", state="accepted", reason=OLDER_AT_WORK)
    assert (await frontends.first.operation(install["jobID"]))["status"] == "superseded"
    assert pair.first.requests(subjects.DELETE) == []
    gate.set()
    ended = await frontends.second.ended(delete["jobID"])
    assert ended["status"] == "succeeded", ended
    assert len(pair.first.requests(subjects.DELETE)) == 1

    async def is_gone() -> bool:
        return bool((await frontends.first.get(f"/api/nodes/{pair.first.node_id}/backends")) == [])

    # It is listed again after every command that ended.
    await until(is_gone, "the listing without it")
