"""Workers that answer with LocalAI's recorded words, driven by frontends of ours: what was asked for ends right, also
where it did not for LocalAI.
"""

from __future__ import annotations

import json

import pytest
from tests.replay.frontends import Frontends, rows_of
from tests.replay.go_worker import VERBS, Pair, recorded
from tests.replay.lab import Lab
from tests.replay.recordings import (
    FIRST_NODE,
    NEW_DIGEST,
    OLD_DIGEST,
    SECOND_NODE,
    calls,
    exchanges,
    filled_in,
    listing,
    needs_recordings,
    subscriptions,
)

from enginehouse.core import subjects
from enginehouse.core.intent import MAX_FAILURES


@needs_recordings
def test_the_scripted_worker_listens_to_what_the_recorded_one_did() -> None:
    assert subscriptions("worker-1") == list(VERBS)


@needs_recordings
async def test_an_install_on_both_goes_out_at_once_under_the_plain_name_and_ends_green(
    frontends: Frontends, pair: Pair, lab: Lab
) -> None:
    """04."""
    recording = "04-install-both-nodes"
    for worker, node_id in ((pair.first, FIRST_NODE), (pair.second, SECOND_NODE)):
        (exchange,) = exchanges(recording, subjects.INSTALL, node_id=node_id)
        worker.will(subjects.INSTALL, recorded(exchange, then=listing(recording, node_id)))
    accepted = await frontends.first.post("/backends/apply", {"id": "lab@mock"})
    assert set(accepted) == {"id", "status_url"}
    for worker in (pair.first, pair.second):
        (request,) = await worker.hears(subjects.INSTALL)
        asked = exchanges(recording, subjects.INSTALL)[0].request
        # S56: LocalAI sends `lab@mock`, and its worker makes a directory of it.
        assert (request["backend"], request["op_id"]) == ("mock", accepted["id"])
        assert json.loads(request["backend_galleries"]) == json.loads(lab.galleries)
        assert set(request) - set(asked) <= {"command", "resolved", "rolling"}
    ended = await frontends.first.ended(accepted["id"])
    assert (ended["status"], ended["progress"]) == ("succeeded", 100)
    assert {name: row["status"] for name, row in rows_of(ended).items()} == {
        "worker-1": "success",
        "worker-2": "success",
    }
    job = await frontends.second.get(f"/backends/jobs/{accepted['id']}")
    assert set(calls(recording, f"/backends/jobs/{_job(recording)}")[0]["response"]) <= set(job)
    assert (job["processed"], job["message"], job["progress"]) == (True, "completed", 100)


def _job(recording: str) -> str:
    return str(exchanges(recording, subjects.INSTALL)[0].request["op_id"])


@needs_recordings
async def test_what_workers_list_is_shown_with_the_recorded_keys_and_values(
    frontends: Frontends, pair: Pair, lab: Lab
) -> None:
    """08, 16."""
    for worker, node_id in ((pair.first, FIRST_NODE), (pair.second, SECOND_NODE)):
        worker.has(listing("08-listings", node_id))
        await frontends.first.lists(worker.name, "cpu-mock", "lab@mock")
    (call,) = calls("08-listings", "/backends")
    shown = {one["Name"]: one for one in await frontends.second.get("/backends")}
    assert set(shown) == {row["Name"] for row in call["response"]}
    for row in filled_in(call["response"], lab.replacements):
        ours = shown[row["Name"]]
        assert (ours["IsMeta"], ours["IsSystem"]) == (row["IsMeta"], row["IsSystem"])
        assert {**ours["Metadata"], **row["Metadata"]} == ours["Metadata"]
        for node, mine in zip(row["nodes"], ours["nodes"], strict=True):
            told = {key: value for key, value in node.items() if key != "node_id"}
            assert {**mine, **told} == mine
    replicas = (await frontends.first.node("worker-1"))["replicas"]
    assert [(one["model_id"], one["address"]) for one in replicas] == [("mock-b", "127.0.0.1:20105")]
    assert "lab@mock#0" in pair.first.stopped, "what an install left running is no model"


@needs_recordings
async def test_installing_what_is_there_ends_at_once_and_force_is_forwarded(frontends: Frontends, pair: Pair) -> None:
    """05, S22."""
    recording = "05-install-already-installed"
    for worker, node_id in ((pair.first, FIRST_NODE), (pair.second, SECOND_NODE)):
        worker.has(listing(recording, node_id))
        worker.will(
            subjects.INSTALL, *(recorded(one) for one in exchanges(recording, subjects.INSTALL, node_id=node_id))
        )
        await frontends.first.lists(worker.name, "cpu-mock", "lab@mock")
    plain = await frontends.first.post("/backends/apply", {"id": "mock"})
    assert (await frontends.first.ended(plain["id"]))["status"] == "succeeded"
    seen = len(pair.first.requests(subjects.INSTALL))
    forced = await frontends.first.post("/backends/apply", {"id": "lab@mock", "force": True})
    assert (await frontends.first.ended(forced["id"]))["status"] == "succeeded"
    assert (await pair.first.hears(subjects.INSTALL, seen + 1))[-1]["force"] is True


@needs_recordings
async def test_a_name_that_no_gallery_has_is_refused_before_anything_is_sent(frontends: Frontends, pair: Pair) -> None:
    """06, 11, 28: LocalAI accepts each of them and lets every worker say no."""
    for path, body in (
        ("/backends/apply", {"id": "nope"}),
        ("/backends/upgrade/nope", None),
        ("/backends/delete/never-there", None),
    ):
        answer = await frontends.first.ask("POST", path, body)
        assert answer.status == 404, answer.body
        assert answer.error["code"] == "not_found"
    assert (await frontends.first.get("/api/operations"))["operations"] == []
    assert pair.heard == []


@needs_recordings
async def test_failures_that_may_heal_are_tried_a_counted_number_of_times_and_then_shown(
    frontends: Frontends, pair: Pair
) -> None:
    """06, 07: LocalAI tries for ever in the background, beside an operation that has failed long ago."""
    for worker, node_id in ((pair.first, FIRST_NODE), (pair.second, SECOND_NODE)):
        said = [one for one in exchanges("07-reconciler-retries", subjects.INSTALL, node_id=node_id)]
        worker.will(subjects.INSTALL, *(recorded(one) for one in said if one.request["backend"] == "lab@broken"))
    operation_id = (await frontends.first.post("/backends/apply", {"id": "lab@broken"}))["id"]
    for attempt in range(1, MAX_FAILURES):
        row = await frontends.first.shows(operation_id, "worker-1", attempt=attempt, state="waiting")
        assert "MANIFEST_UNKNOWN" in row["error"]
        assert row["due_in_seconds"] > 0
        await frontends.first.shows(operation_id, "worker-2", attempt=attempt, state="waiting")
        await frontends.first.hurry()
    ended = await frontends.first.ended(operation_id)
    assert ended["status"] == "failed"
    assert {row["attempt"] for row in ended["nodes"]} == {MAX_FAILURES}
    assert "worker-1: installing backend from gallery: failed to download" in ended["error"]
    requests = pair.first.requests(subjects.INSTALL)
    assert len(requests) == MAX_FAILURES
    assert {request["op_id"] for request in requests} == {operation_id}, "S25: the retries are the operation's own"
    await frontends.first.post(f"/api/operations/{operation_id}/dismiss")
    assert (await frontends.second.get("/api/operations"))["operations"] == []
    (kept,) = (await frontends.second.get("/api/operations/history"))["operations"]
    assert kept["outcome"] == "failed"


@needs_recordings
async def test_an_external_install_is_what_the_listing_shows_though_the_worker_says_failure(
    frontends: Frontends, pair: Pair, lab: Lab
) -> None:
    """10, S57: the wanted digest is there under the wanted name, so it is installed."""
    recording = "10-external-install"
    (call,) = calls(recording, f"/api/nodes/{FIRST_NODE}/backends/install")
    external = exchanges(recording, subjects.INSTALL, node_id=FIRST_NODE)[0]
    assert external.reply is not None
    assert external.reply["success"] is False
    pair.first.will(subjects.INSTALL, recorded(external, then=listing(recording, FIRST_NODE)))
    body = filled_in(call["payload"], lab.replacements)
    accepted = await frontends.first.post(f"/api/nodes/{pair.first.node_id}/backends/install", body)
    ended = await frontends.first.ended(accepted["jobID"])
    assert (ended["status"], ended["nodes"][0]["attempt"]) == ("succeeded", 1)
    (request,) = pair.first.requests(subjects.INSTALL)
    # The name in both places: with it in `backend`, LocalAI's worker finds what it has installed.
    assert (request["backend"], request["name"], request["alias"]) == ("ext-mock", "ext-mock", "extm")
    assert request["uri"] == body["uri"]
    assert pair.second.heard == []


@needs_recordings
async def test_another_version_under_the_wanted_name_proves_nothing(frontends: Frontends, pair: Pair, lab: Lab) -> None:
    """10, where the files that arrived are not those that were asked for."""
    recording = "10-external-install"
    external = exchanges(recording, subjects.INSTALL, node_id=FIRST_NODE)[0]
    listed = filled_in(listing(recording, FIRST_NODE), {NEW_DIGEST: OLD_DIGEST})
    pair.first.will(subjects.INSTALL, recorded(external, then=listed))
    body = {"uri": lab.reference("v2"), "name": "ext-mock"}
    accepted = await frontends.first.post(f"/api/nodes/{pair.first.node_id}/backends/install", body)
    await frontends.first.lists("worker-1", "cpu-mock", "ext-mock", "lab@mock")
    row = await frontends.first.shows(accepted["jobID"], "worker-1", attempt=1, state="waiting")
    assert 'backend "" not found' in row["error"]


@needs_recordings
async def test_an_external_install_without_a_name_is_refused_before_anything_is_sent(
    frontends: Frontends, pair: Pair, lab: Lab
) -> None:
    """10."""
    (call,) = calls("10-external-install", "/api/backends/install-external")
    body = filled_in(call["payload"], lab.replacements)
    answer = await frontends.first.ask("POST", f"/api/nodes/{pair.first.node_id}/backends/install", body)
    assert (answer.status, answer.error["code"]) == (422, "invalid_name")
    assert pair.heard == []


@needs_recordings
async def test_a_build_for_one_kind_of_hardware_is_refused_once_and_nothing_is_sent(
    frontends: Frontends, pair: Pair
) -> None:
    """36, S55."""
    (call,) = calls("36-concrete-guard", "/backends/apply")
    assert call["response"].count('"code"') == 1
    answer = await frontends.first.ask("POST", "/backends/apply", call["payload"])
    assert answer.status == call["status"] == 409
    assert answer.error["code"] == "concrete_backend_requires_target"
    assert answer.json["meta_alternative"] == "mock"
    assert answer.body.count(b'"error"') == 1
    assert (await frontends.first.get("/api/operations?all=true"))["operations"] == []
    # What is sent is sent by the next step of the dispatcher; a listing comes after it.
    pair.first.has(listing("08-listings", FIRST_NODE))
    await frontends.first.lists("worker-1", "cpu-mock", "lab@mock")
    assert pair.heard == []


@needs_recordings
async def test_one_node_gets_what_was_asked_for_it_alone_and_a_second_delete_is_no_failure(
    frontends: Frontends, pair: Pair
) -> None:
    """09: what is to be absent and is absent is done, whatever the worker thinks of being asked."""
    recording = "09-node-scoped-install-delete"
    (install,) = exchanges(recording, subjects.INSTALL)
    pair.first.will(subjects.INSTALL, recorded(install, then=listing(recording, FIRST_NODE)))
    route = f"/api/nodes/{pair.first.node_id}/backends"
    accepted = await frontends.first.post(f"{route}/install", {"backend": "other"})
    ended = await frontends.second.ended(accepted["jobID"])
    assert (ended["status"], ended["nodeID"]) == ("succeeded", pair.first.node_id)
    await frontends.first.lists("worker-1", "cpu-mock", "cpu-other", "lab@mock")

    first, again = exchanges(recording, subjects.DELETE)
    without = listing("08-listings", FIRST_NODE)
    pair.first.will(subjects.DELETE, recorded(first, then=without), recorded(again))
    for _ in range(2):
        accepted = await frontends.first.post(f"{route}/delete", {"backend": "other"})
        assert (await frontends.first.ended(accepted["jobID"]))["status"] == "succeeded"
    # As LocalAI sent it, which removes the hidden pointer too.
    assert pair.first.requests(subjects.DELETE)[0]["backend"] == first.request["backend"] == "other"
    assert pair.second.heard == []


@needs_recordings
async def test_a_delete_goes_out_as_it_was_recorded_and_ends_on_all_nodes(frontends: Frontends, pair: Pair) -> None:
    """28."""
    for worker, node_id in ((pair.first, FIRST_NODE), (pair.second, SECOND_NODE)):
        worker.has(listing("26-two-frontends", node_id))
        said = exchanges("28-backend-delete", subjects.DELETE, node_id=node_id)
        left = [listing("28-backend-delete", node_id), {"backends": None}]
        answers = [recorded(one, then=then) for one, then in zip(said, left, strict=False)]
        worker.will(subjects.DELETE, *answers)
        await frontends.first.lists(worker.name, "cpu-mock", "cpu-other", "lab@mock", "lab@other")
    for path, directory in (("/backends/delete/lab@other", "other"), ("/backends/delete/cpu-mock", "cpu-mock")):
        operation_id = (await frontends.first.post(path))["id"]
        ended = await frontends.first.ended(operation_id)
        assert (ended["status"], ended["isDeletion"], len(ended["nodes"])) == ("succeeded", True, 2)
        for worker in (pair.first, pair.second):
            assert worker.requests(subjects.DELETE)[-1]["backend"] == directory
    assert len(pair.first.requests(subjects.DELETE)) == 2


@needs_recordings
@pytest.mark.parametrize("is_old", [False, True], ids=["11-upgrade", "12-upgrade-old-worker"])
async def test_an_upgrade_reaches_workers_that_know_upgrades_and_those_that_do_not(
    frontends: Frontends, lab: Lab, is_old: bool
) -> None:
    recording = "12-upgrade-old-worker" if is_old else "11-upgrade"
    old, new = (NEW_DIGEST, OLD_DIGEST) if is_old else (OLD_DIGEST, NEW_DIGEST)
    await lab.move_tag(lab.old if is_old else lab.new)
    async with Pair.opened(frontends, lab, second_lacks=(subjects.UPGRADE,) if is_old else ()) as pair:
        for worker, node_id in ((pair.first, FIRST_NODE), (pair.second, SECOND_NODE)):
            before = listing(recording, node_id)
            worker.has(before)
            for exchange in exchanges(recording, subjects.UPGRADE, subjects.INSTALL, node_id=node_id):
                if not exchange.is_unheard:
                    worker.will(exchange.verb, recorded(exchange, then=filled_in(before, {old: new})))
            await frontends.first.lists(worker.name, "cpu-mock", "lab@mock")
        await frontends.first.post("/backends/upgrades/check")
        (known,) = (await frontends.first.get("/backends/upgrades")).values()
        assert (known["backend_name"], known["available_digest"]) == ("cpu-mock", filled_in(new, lab.replacements))
        operation_id = (await frontends.first.post("/backends/upgrade/cpu-mock"))["id"]
        ended = await frontends.first.ended(operation_id)
        assert ended["status"] == "succeeded", ended
        assert {row["attempt"] for row in ended["nodes"]} == {1}
        (request,) = pair.first.requests(subjects.UPGRADE)
        assert (request["backend"], request["op_id"]) == ("cpu-mock", operation_id)
        verb = subjects.INSTALL if is_old else subjects.UPGRADE
        (request,) = pair.second.requests(verb)
        assert (request["backend"], request["op_id"], request.get("force", False)) == ("cpu-mock", operation_id, is_old)
        assert (await frontends.first.node("worker-2"))["status"] == "healthy"
