"""Progress as LocalAI's workers tell it, without numbers of its own and beginning anew when they unpack: what people
see of it only grows, and is the same on every frontend.
"""

from __future__ import annotations

import asyncio

import pytest
from tests.replay.frontends import Frontends, rows_of, until
from tests.replay.go_worker import Answer, Pair, recorded
from tests.replay.recordings import FIRST_NODE, SECOND_NODE, exchanges, listing, needs_recordings

from enginehouse.core import subjects


@needs_recordings
@pytest.mark.parametrize(
    ("recording", "node_id"),
    [
        ("04-install-both-nodes", SECOND_NODE),  # `Extracting` begins at 0.001 %
        ("10-external-install", FIRST_NODE),
        ("26-two-frontends", SECOND_NODE),
        ("36-concrete-guard", SECOND_NODE),
    ],
)
async def test_recorded_progress_never_makes_the_percentage_fall(
    frontends: Frontends, pair: Pair, recording: str, node_id: str
) -> None:
    said = exchanges(recording, subjects.INSTALL, node_id=node_id)[0].progress
    seen: list[tuple[float, float, str]] = []
    gate = asyncio.Event()

    async def look(operation_id: str) -> None:
        for frontend in frontends.both:
            view = await frontend.operation(operation_id)
            row = view["nodes"][0]
            seen.append((row["percentage"], view["progress"], row.get("phase", "")))

    pair.first.on_told = look
    pair.first.will(subjects.INSTALL, Answer(reply={"success": True}, progress=said, gate=gate))
    route = f"/api/nodes/{pair.first.node_id}/backends/install"
    accepted = await frontends.first.post(route, {"backend": "other"})
    await frontends.first.shows(accepted["jobID"], "worker-1", phase="extracting")
    await frontends.second.shows(accepted["jobID"], "worker-1", phase="extracting")
    gate.set()
    await frontends.first.ended(accepted["jobID"])
    for kept in (seen[::2], seen[1::2]):
        percentages = [percentage for percentage, _, _ in kept]
        assert percentages == sorted(percentages)
        assert [progress for _, progress, _ in kept] == sorted(progress for _, progress, _ in kept)
    assert max(percentage for percentage, _, _ in seen) > 50.0
    fell = [b < a for a, b in zip(pair.first.told, pair.first.told[1:], strict=False)]
    assert any(fell) is (recording == "04-install-both-nodes"), "what LocalAI's worker says does fall"


@needs_recordings
async def test_both_frontends_tell_the_same_of_an_operation_while_it_runs_and_after(
    frontends: Frontends, pair: Pair
) -> None:
    """26, S18."""
    recording = "26-two-frontends"
    gate = asyncio.Event()
    for worker, node_id in ((pair.first, FIRST_NODE), (pair.second, SECOND_NODE)):
        (exchange,) = exchanges(recording, subjects.INSTALL, node_id=node_id)
        worker.will(subjects.INSTALL, recorded(exchange, then=listing(recording, node_id), gate=gate))
    operation_id = (await frontends.first.post("/backends/apply", {"id": "lab@other"}))["id"]
    for name in ("worker-1", "worker-2"):
        for frontend in frontends.both:
            await frontend.shows(operation_id, name, phase="extracting")

    async def agree() -> bool:
        views = [rows_of(await frontend.operation(operation_id)) for frontend in frontends.both]
        shown = [
            {name: (row["status"], row["percentage"], row["current_bytes"]) for name, row in rows.items()}
            for rows in views
        ]
        return shown[0] == shown[1]

    await until(agree, "both frontends to show the same progress")
    gate.set()
    for frontend in frontends.both:
        ended = await frontend.ended(operation_id)
        assert (ended["status"], ended["progress"]) == ("succeeded", 100)
        (kept,) = (await frontend.get("/api/operations/history"))["operations"]
        assert kept["outcome"] == "completed"
