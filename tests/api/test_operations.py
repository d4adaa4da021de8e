"""Routes that ask for operations and change them: ours and LocalAI's, in their shapes, and the resumed stream."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tests.api.whole_frontend import LOCAL, Answer, Site, site

from enginehouse.api.events import EventRoutes
from enginehouse.core import subjects, wire
from enginehouse.core.backend import InstalledBackend
from enginehouse.core.ids import NodeId, OperationId
from enginehouse.core.intent import Outcome
from enginehouse.core.report import Report
from enginehouse.ports import Message

# Of an entry of LocalAI's `/api/operations`, and of its `nodes`.
OPERATION_KEYS = {
    *("id", "fullName", "name", "jobID", "progress", "taskType", "isDeletion", "isBackend", "isQueued", "cancellable"),
    "message",
}
NODE_KEYS = {"node_id", "node_name", "status", "percentage"}
JOB_KEYS = {
    *("deletion", "file_name", "processed", "message", "progress", "file_size", "downloaded_size"),
    *("gallery_element_name", "cancelled", "cancellable"),
}


@pytest.fixture
async def here(tmp_path: Path) -> AsyncIterator[Site]:
    async with site(tmp_path) as made:
        await admin(made, "POST", "/api/nodes/old/approve")
        await made.ask("POST", f"/api/node/{made.tokens['node id']}/heartbeat", {}, token=made.tokens["node"])
        yield made
        await made.frontend.galleries.close()


async def admin(here: Site, method: str, path: str, body: object = None, *, key: str = "") -> Answer:
    headers = (*LOCAL, ("idempotency-key", key)) if key else LOCAL
    return await here.ask(method, path, body, token=here.tokens["admin"], headers=headers)


async def install(here: Site, **more: object) -> dict[str, Any]:
    answer = await admin(here, "POST", "/api/operations", {"kind": "install", "name": "llama-cpp", **more})
    assert answer.status == 202, answer.body
    found: dict[str, Any] = answer.json
    return found


async def reply(here: Site, operation: dict[str, Any], outcome: Outcome) -> None:
    node = operation["nodes"][0]
    subject = subjects.reply_subject(node["node_id"], node["intent"], 1)
    here.bus.deliver(Message(subject, wire.encode(wire.AnyReply(outcome=outcome))))
    await here.frontend.collector.replies_step()


async def have(here: Site, *names: str, digest: str = "sha256:old") -> None:
    """The node reports these backends."""
    found = tuple(InstalledBackend(name=name, is_system=False, is_meta=False, digest=digest) for name in names)
    mark = (await here.frontend.nodes.every())[1]
    report = Report(boot_id="b", sequence=1, mark=mark, boot_mark=1.0, backends=found)
    await here.frontend.reports.report(NodeId(here.tokens["node id"]), report)


async def test_operations_have_localais_keys_and_their_nodes_by_name(here: Site) -> None:
    await install(here)
    (listed,) = (await admin(here, "GET", "/api/operations")).json["operations"]
    assert set(listed) >= OPERATION_KEYS
    assert (listed["isQueued"], listed["cancellable"], listed["phase"]) == (True, True, "queued")
    assert all(set(row) >= NODE_KEYS for row in listed["nodes"])
    assert listed["asked"] == {}
    assert "nodeID" not in listed
    one = await install(here, nodes=["old"], force=True)
    assert (one["nodeID"], one["asked"]) == (here.tokens["node id"], {"nodes": ["old"], "force": True})


async def test_the_same_key_is_the_same_operation_and_another_body_is_refused(here: Site) -> None:
    body = {"kind": "install", "name": "llama-cpp"}
    first, second = [await admin(here, "POST", "/api/operations", body, key="k") for _ in range(2)]
    assert first.json["jobID"] == second.json["jobID"]
    other = await admin(here, "POST", "/api/operations", {**body, "force": True}, key="k")
    assert (other.status, other.error["code"]) == (422, "idempotency_mismatch")


async def test_cancel_retry_dismiss_and_history(here: Site) -> None:
    operation = await install(here)
    cancelled = await admin(here, "POST", f"/api/operations/{operation['jobID']}/cancel")
    assert (cancelled.status, cancelled.json["success"]) == (200, True)
    assert cancelled.json["operation"]["status"] == "cancelled"
    again = await admin(here, "POST", f"/api/operations/{operation['jobID']}/cancel", {})
    assert (again.status, again.error["code"]) == (409, "already_terminal")

    retried = await admin(here, "POST", f"/api/operations/{operation['jobID']}/retry", {"node": "old"}, key="r")
    assert (retried.status, retried.json["retryOf"]) == (202, operation["jobID"])
    await here.frontend.dispatcher.step()
    await reply(here, retried.json, Outcome(code="not_found", message="no such image"))
    failed = retried.json["jobID"]
    assert [one["jobID"] for one in (await admin(here, "GET", "/api/operations")).json["operations"]] == [failed]
    assert (await admin(here, "POST", f"/api/operations/{failed}/dismiss")).json["success"] is True
    assert (await admin(here, "GET", "/api/operations")).json["operations"] == []

    records = (await admin(here, "GET", "/api/operations/history")).json["operations"]
    assert [(one["jobID"], one["outcome"], one["taskType"]) for one in records] == [
        (failed, "failed", "installation"),
        (operation["jobID"], "cancelled", "installation"),
    ]
    assert records[0]["error"] == "old: no such image"
    assert records[0]["nodes"][0]["status"] == "error"
    assert records[0]["startedAt"] <= records[0]["finishedAt"]


async def test_an_archive_without_its_sha256_is_refused_before_any_node_is_asked(here: Site) -> None:
    archive = "https://files.example/engine.tar.gz"
    body = {"kind": "install", "name": "mine", "uri": archive}
    for wrong in ({}, {"sha256": "zz"}, {"uri": "registry.example/mine:1", "sha256": "zz"}):
        for path in ("/api/operations", "/api/operations/plan"):
            refused = await admin(here, "POST", path, {**body, **wrong})
            assert (refused.status, refused.error["param"]) == (422, "sha256"), refused.body
    one = await admin(here, "POST", "/api/nodes/old/backends/install", {"uri": archive, "name": "mine"})
    assert (one.status, one.error["param"]) == (422, "sha256")
    assert (await admin(here, "GET", "/api/operations?all=true")).json["operations"] == []
    good = await admin(here, "POST", "/api/operations", {**body, "sha256": "sha256:" + "A" * 64})
    assert good.status == 202, good.body


async def test_one_reason_of_several_nodes_is_told_once(here: Site) -> None:
    names = ["second", "third"]
    for name in names:
        machine = {"name": name, "platform": "linux/amd64", "capability": "default"}
        await here.ask("POST", "/api/node/register", machine, token=here.tokens["join"])
        await admin(here, "POST", f"/api/nodes/{name}/approve")
    request = {"kind": "upgrade", "name": "llama-cpp", "nodes": names}
    refused = await admin(here, "POST", "/api/operations", request)
    assert refused.status == 404
    assert "(second, third: llama-cpp is not installed there)" in refused.error["message"]


async def test_a_worker_of_localais_that_does_not_answer_is_no_proof_that_it_has_nothing(here: Site) -> None:
    refused = await admin(here, "POST", "/api/operations", {"kind": "upgrade", "name": "llama-cpp"})
    assert (refused.status, refused.error["code"]) == (503, "unknown")
    assert "(old: its worker did not answer which backends it has; retry when it answers)" in refused.error["message"]


async def test_a_plan_changes_nothing(here: Site) -> None:
    plan = (await admin(here, "POST", "/api/operations/plan", {"kind": "install", "name": "llama-cpp"})).json
    assert [(row["node_name"], row["does"], row["backend"]) for row in plan["nodes"]] == [
        ("old", "install", "xllamacpp")
    ]
    assert (await admin(here, "GET", "/api/operations?all=true")).json["operations"] == []


async def test_localais_routes_make_the_same_operations(here: Site) -> None:
    applied = await admin(here, "POST", "/backends/apply", {"id": "llama-cpp"})
    assert set(applied.json) == {"id", "status_url"}
    assert applied.json["status_url"].endswith(f"/backends/jobs/{applied.json['id']}")
    status = (await admin(here, "GET", f"/backends/jobs/{applied.json['id']}")).json
    assert set(status) >= JOB_KEYS
    assert (status["processed"], status["deletion"], status["gallery_element_name"]) == (False, False, "llama-cpp")
    await here.frontend.dispatcher.step()
    await reply(here, (await admin(here, "GET", f"/api/operations/{applied.json['id']}")).json, Outcome())
    status = (await admin(here, "GET", f"/backends/jobs/{applied.json['id']}")).json
    assert (status["processed"], status["progress"], status["message"]) == (True, 100.0, "completed")
    unknown = await admin(here, "GET", "/backends/jobs/nobody")
    assert (unknown.status, unknown.error["code"]) == (404, "not_found")

    await have(here, "xllamacpp")
    for verb in ("upgrade", "delete"):
        answer = await admin(here, "POST", f"/backends/{verb}/xllamacpp")
        assert set(answer.json) == {"id", "status_url"}, answer.body
        assert (await admin(here, "GET", f"/api/operations/{answer.json['id']}")).json["kind"] == verb
    # The node has no key, so it is asked what it has, and does not answer here.
    nothing = await admin(here, "POST", "/backends/upgrade/enginehouse@nobody-knows-it")
    assert (nothing.status, nothing.error["code"]) == (503, "unknown")


async def test_a_build_for_one_kind_of_hardware_is_not_installed_everywhere(here: Site) -> None:
    refused = await admin(here, "POST", "/backends/apply", {"id": "xllamacpp"})
    assert (refused.status, refused.error["code"]) == (409, "concrete_backend_requires_target")
    assert refused.json["meta_alternative"] == "llama-cpp"
    assert (await admin(here, "GET", "/api/operations?all=true")).json["operations"] == []


async def test_the_routes_of_one_node(here: Site) -> None:
    path = "/api/nodes/old/backends"
    answer = await admin(here, "POST", f"{path}/install", {"backend": "llama-cpp"})
    assert (answer.status, set(answer.json)) == (202, {"jobID", "statusUrl", "message"})
    assert (await admin(here, "GET", answer.json["statusUrl"])).status == 200
    external = {"uri": "registry.example/mine:1", "name": "mine", "alias": "short"}
    answer = await admin(here, "POST", f"{path}/install", external)
    asked = (await admin(here, "GET", f"/api/operations/{answer.json['jobID']}")).json
    assert (asked["name"], asked["asked"]["uri"]) == ("mine", "registry.example/mine:1")
    for body, code in (
        ({}, "invalid_name"),
        ({"uri": "registry.example/x:1"}, "invalid_name"),
        ({"backend": "llama-cpp", "backend_galleries": "[]"}, "unsupported"),
    ):
        refused = await admin(here, "POST", f"{path}/install", body)
        assert (refused.status, refused.error["code"]) == (422, code)
    await have(here, "xllamacpp")
    assert [one["name"] for one in (await admin(here, "GET", path)).json] == ["xllamacpp"]
    assert (await admin(here, "POST", f"{path}/delete", {"backend": "xllamacpp"})).status == 202
    assert (await admin(here, "GET", "/api/nodes/nobody/backends")).status == 404


async def test_drain_resume_and_remove(here: Site) -> None:
    drained = await admin(here, "POST", "/api/nodes/old/drain")
    assert (drained.status, drained.json["kind"]) == (202, "drain")
    assert (await admin(here, "GET", "/api/nodes/old")).json["status"] == "draining"
    waiting = await install(here)
    assert waiting["nodes"][0]["reason"] == "draining"
    assert (await admin(here, "POST", "/api/nodes/old/resume")).json["message"] == "node resumed"
    assert (await admin(here, "GET", "/api/nodes/old")).json["status"] == "healthy"
    assert (await admin(here, "DELETE", "/api/nodes/old?force=true")).json["message"] == "node deregistered"
    assert (await admin(here, "GET", "/api/nodes")).json == []
    ended = (await admin(here, "GET", f"/api/operations/{waiting['jobID']}")).json
    assert (ended["status"], ended["nodes"][0]["reason"]) == ("cancelled", "node_removed")


async def test_what_is_installed_has_localais_keys(here: Site) -> None:
    await have(here, "xllamacpp")
    (listed,) = (await admin(here, "GET", "/backends")).json
    assert set(listed) >= {"Name", "RunFile", "IsMeta", "IsSystem", "Metadata", "nodes"}
    assert set(listed["nodes"][0]) >= {"node_id", "node_name", "node_status", "installed_at", "digest", "uri"}


async def test_what_is_installed_says_how_old_the_news_is_and_who_differs(here: Site) -> None:
    await have(here, "xllamacpp", "mine")
    listed = {one["Name"]: one for one in (await admin(here, "GET", "/backends")).json}
    assert set(listed) == {"xllamacpp", "mine"}
    (holder,) = listed["mine"]["nodes"]
    assert (holder["node_name"], holder["digest"]) == ("old", "sha256:old")
    assert holder["report_age_seconds"] >= 0
    assert listed["mine"]["drift"] == []
    assert listed["xllamacpp"]["upgrade_available"] is True
    upgrades = (await admin(here, "GET", "/backends/upgrades")).json
    assert set(upgrades) == {"xllamacpp"}
    assert upgrades["xllamacpp"]["installed_digest"] == "sha256:old"
    assert (await admin(here, "POST", "/backends/upgrades/check")).json == upgrades


async def test_lists_come_in_pages(here: Site) -> None:
    made = [(await install(here))["jobID"] for _ in range(5)]
    for one in made[:3]:
        await admin(here, "POST", f"/api/operations/{one}/cancel")
    for path, wanted in (("/api/operations?all=true", made), ("/api/operations/history?", made[:3])):
        seen: list[str] = []
        more = ""
        for _ in range(4):
            page = (await admin(here, "GET", f"{path}&limit=2{more}")).json
            seen += [one["jobID"] for one in page["operations"]]
            if "next" not in page:
                break
            assert page["next"] == seen[-1]
            more = f"&before={page['next']}"
        assert seen == list(reversed(wanted))
    for bad in ("x", "9" * 5000):
        answer = await admin(here, "GET", f"/api/operations?all=true&before={bad}")
        assert (answer.status, answer.error["param"]) == (404, "before")
    refused = await admin(here, "GET", f"/api/operations?before={made[0]}")
    assert (refused.status, refused.error["param"]) == (422, "before")


async def test_a_list_without_rows_says_the_same_of_each_operation_and_counts_its_nodes(here: Site) -> None:
    made = [await install(here, force=True) for _ in range(3)]
    await reply(here, made[2], Outcome(code="disk_full", message="the disk is full", can_heal=False))
    await admin(here, "POST", f"/api/operations/{made[0]['jobID']}/cancel")
    for path in ("/api/operations?all=true&limit=2", "/api/operations?limit=10"):
        whole = (await admin(here, "GET", path)).json
        summed = (await admin(here, "GET", f"{path}&rows=false")).json
        assert summed.get("next") == whole.get("next")
        assert len(summed["operations"]) == len(whole["operations"]) > 0
        for short, full in zip(summed["operations"], whole["operations"], strict=True):
            own = {"error", "progress", "excluded_count"}
            assert {key: value for key, value in short.items() if key not in own} == {
                key: full[key] for key in short if key not in own
            }
            words = [row["status"] for row in full["nodes"]]
            assert short["counts"] == {word: words.count(word) for word in words}
            assert ("error" in short) == ("error" in full)
            assert "nodes" not in short
            assert short.keys() >= OPERATION_KEYS
    refused = await admin(here, "GET", "/api/operations?rows=maybe")
    assert (refused.status, refused.error["param"]) == (422, "rows")
    unknown = await admin(here, "GET", "/api/operations?all=true&rows=false&before=x")
    assert (unknown.status, unknown.error["param"]) == (404, "before")


async def test_operations_are_chosen_by_kind_outcome_and_node(here: Site) -> None:
    made = [await install(here, force=True) for _ in range(3)]
    await admin(here, "POST", f"/api/operations/{made[0]['jobID']}/cancel")
    await here.frontend.dispatcher.step()
    await reply(here, made[2], Outcome(code="disk_full", message="the disk is full", can_heal=False))
    node = made[0]["nodes"][0]
    for rows in ("true", "false"):

        async def listed(query: str, rows: str = rows) -> list[str]:
            answer = await admin(here, "GET", f"/api/operations?all=true&rows={rows}&{query}")
            return [one["jobID"] for one in answer.json["operations"]]

        every = await listed("")
        assert await listed("kind=install") == await listed(f"node={node['node_name']}") == every
        assert await listed(f"node={node['node_id']}&kind=install") == every
        assert await listed("kind=upgrade") == await listed("node=nobody") == []
        failed, cancelled = await listed("status=failed"), await listed("status=cancelled")
        assert made[2]["jobID"] in failed
        assert cancelled == [made[0]["jobID"]]
        assert not {*failed, *cancelled} & {*await listed("status=open")}
        assert await listed("status=failed&limit=1") == failed[:1]
    for name, value in (("kind", "x"), ("status", "queued")):
        refused = await admin(here, "GET", f"/api/operations?all=true&{name}={value}")
        assert (refused.status, refused.error["param"]) == (422, name)
    refused = await admin(here, "GET", "/api/operations?kind=install")
    assert (refused.status, refused.error["param"]) == (422, "kind")


async def test_a_row_says_when_its_node_began_and_ended(here: Site) -> None:
    made = await install(here, force=True)
    (row,) = (await admin(here, "GET", f"/api/operations/{made['jobID']}")).json["nodes"]
    assert "finishedAt" not in row
    await here.frontend.dispatcher.step()
    await reply(here, made, Outcome(code="disk_full", message="the disk is full", can_heal=False))
    (row,) = (await admin(here, "GET", f"/api/operations/{made['jobID']}")).json["nodes"]
    assert made["createdAt"] <= row["startedAt"] <= row["finishedAt"]


async def test_a_model_is_deleted(here: Site) -> None:
    missing = await admin(here, "DELETE", "/api/models/nobody")
    assert missing.status == 404
    assert (await admin(here, "POST", "/api/models/tiny-chat/load", {})).status == 202
    deleted = await admin(here, "DELETE", "/api/models/tiny-chat")
    assert (deleted.status, deleted.json["kind"]) == (202, "delete_model")


async def test_a_stream_that_is_resumed_begins_with_what_was_missed(here: Site) -> None:
    routes = EventRoutes(here.frontend.board, here.frontend.models, here.frontend.events, here.frontend.pulse)
    before = (await here.frontend.nodes.every())[1]
    operation = await install(here)
    await admin(here, "POST", f"/api/operations/{operation['jobID']}/cancel")
    removed = here.tokens["node id"]
    assert removed in {node.id for node in (await here.frontend.nodes.every())[0]}
    assert (await admin(here, "DELETE", f"/api/nodes/{removed}?force=true")).status == 200
    told: list[bytes] = []
    async for chunk in routes.stream(OperationId(""), before):
        told.append(chunk)
        if b"caught-up" in chunk:
            break
    missed = b"".join(told)
    assert operation["jobID"].encode() in missed
    assert b'"status":"cancelled"' in missed
    assert told[-1].startswith(b"id: ")
    present = json.loads(told[-1].partition(b"data: ")[2])["nodes"]
    assert present == [node.id for node in (await here.frontend.nodes.every())[0]]
    assert removed not in present
    assert told[0].startswith(b"event: hello")
    assert all(not chunk.startswith(b"id: ") for chunk in told[:-1]), "whoever is cut off in between begins again"


async def test_a_worker_that_is_leaving_gets_nothing_new_and_is_not_drained(here: Site) -> None:
    own = f"/api/node/{here.tokens['node id']}"
    assert (await here.ask("POST", f"{own}/drain", token=here.tokens["node"])).status == 200
    assert (await admin(here, "GET", "/api/nodes/old")).json["status"] == "unhealthy"
    assert (await here.ask("GET", f"{own}/models", token=here.tokens["node"])).json == []
    assert (await here.ask("POST", f"{own}/resume", token=here.tokens["node"])).status == 200
    assert (await admin(here, "GET", "/api/nodes/old")).json["status"] == "healthy"
