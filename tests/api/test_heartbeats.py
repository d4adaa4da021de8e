"""Heartbeats over HTTP: as LocalAI's workers, workers of the version before and workers of this one send them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tests.api.whole_frontend import Answer, Site, site

from enginehouse.core.report import Report, digest_of
from enginehouse.frontend.fleet.tokens import Keys

REPORT: dict[str, Any] = {"boot_id": "b", "sequence": 1, "mark": 1.0, "boot_mark": 1.0, "version": "0"}
DIGEST = "of the worker's own making"


@pytest.fixture
async def here(tmp_path: Path, database_url: str) -> AsyncIterator[Site]:
    async with site(tmp_path, database_url) as made:
        assert (await made.ask("POST", "/api/nodes/old/approve", token=made.tokens["admin"])).status == 200
        yield made


async def beat(here: Site, body: object, token: str = "node") -> Answer:
    return await here.ask("POST", f"/api/node/{here.tokens['node id']}/heartbeat", body, token=here.tokens[token])


async def stored(here: Site) -> Report:
    return (await here.frontend.nodes.get(here.tokens["node id"]))[0].report


@pytest.mark.parametrize("body", [{}, {"available_vram": 5, "total_vram": 9, "gpu_vendor": "nvidia"}])
async def test_a_worker_of_localai_s_is_answered_as_ever(here: Site, body: dict[str, object]) -> None:
    answer = await beat(here, body, "join")
    assert answer.status == 200
    assert set(answer.json) == {"message", "mark"}
    assert (await here.ask("GET", "/api/nodes/old", token=here.tokens["admin"])).json["status"] == "healthy"


async def test_a_worker_that_knows_no_digests_is_answered_as_before(here: Site) -> None:
    for sequence in range(1, 4):
        answer = await beat(here, {"available_ram": 7, "report": {**REPORT, "sequence": sequence}})
        assert (answer.status, set(answer.json)) == (200, {"message", "mark"})
    assert (await stored(here)).sequence == 3


async def test_a_digest_is_confirmed_and_stands_for_the_report(here: Site) -> None:
    first = await beat(here, {"report": REPORT, "report_digest": DIGEST})
    assert first.json["report_digest"] == DIGEST
    stamp = {"sequence": 2, "mark": first.json["mark"]}
    second = await beat(here, {"report_digest": DIGEST, "unchanged": stamp, "available_ram": 9})
    assert second.json["report_digest"] == DIGEST
    report = await stored(here)
    assert (report.sequence, report.mark, report.version) == (2, first.json["mark"], "0")
    node = (await here.ask("GET", "/api/nodes/old", token=here.tokens["admin"])).json
    assert node["available_ram"] == 9


async def test_a_node_that_is_away_is_shown_with_what_it_last_had(here: Site) -> None:
    installed = {"name": "llama-cpp", "is_system": False, "is_meta": False, "version": "1.4", "digest": "sha256:ab"}
    replica = {"model_id": "tiny", "replica_index": 0, "address": "127.0.0.1:9", "nonce": "n", "pid": 1}
    report = {**REPORT, "version": "0.4", "backends": [installed], "replicas": [replica]}
    said = {"available_ram": 7, "used_cores": 1.5, "report": report, "report_digest": DIGEST}
    assert (await beat(here, said)).json["report_digest"] == DIGEST
    admin = here.tokens["admin"]
    assert (await here.ask("PUT", "/api/nodes/old/labels", {"room": "attic"}, token=admin)).status == 200
    own = f"/api/node/{here.tokens['node id']}"
    assert (await here.ask("POST", f"{own}/deregister", token=here.tokens["node"])).status == 200
    (shown,) = (await here.ask("GET", "/api/nodes", token=admin)).json
    assert (shown["health"], shown["approved"], shown["worker_version"]) == ("offline", True, "0.4")
    assert (shown["available_ram"], shown["used_cores"], shown["labels"]) == (7, 1.5, {"room": "attic"})
    assert [(one["version"], one["digest"]) for one in shown["backends"]] == [("1.4", "sha256:ab")]
    assert [one["model_id"] for one in shown["replicas"]] == ["tiny"]
    assert shown["heartbeat_age_seconds"] >= 0
    assert "fingerprint" in shown
    # How many requests wait for it: rows of open operations.
    asked = {"kind": "delete", "name": "llama-cpp"}
    assert (await here.ask("POST", "/api/operations", asked, token=admin)).status == 202
    (operation,) = (await here.ask("GET", "/api/operations", token=admin)).json["operations"]
    assert [(row["node_id"], row["reason"]) for row in operation["nodes"]] == [(shown["id"], "node_away")]


async def test_a_report_that_is_not_there_is_asked_for_by_saying_nothing_of_it(here: Site) -> None:
    for body in (
        {"report_digest": DIGEST, "unchanged": {"sequence": 2, "mark": 3.0}},
        {"report_digest": DIGEST},
        {"unchanged": {"sequence": 2}},
    ):
        answer = await beat(here, body)
        assert (answer.status, set(answer.json)) == (200, {"message", "mark"})
    assert await stored(here) == Report()


async def test_the_digest_of_a_worker_need_not_be_that_of_this_version(here: Site) -> None:
    """A newer worker reports more than this frontend knows."""
    odd = {**REPORT, "weather": "fair"}
    assert (await beat(here, {"report": odd, "report_digest": DIGEST})).json["report_digest"] == DIGEST
    assert digest_of(await stored(here)) != DIGEST


@pytest.mark.parametrize(
    "body",
    [
        {"report_digest": 5},
        {"report_digest": DIGEST, "unchanged": {"sequence": "2"}},
        {"report_digest": DIGEST, "unchanged": []},
    ],
)
async def test_what_has_another_shape_is_refused(here: Site, body: dict[str, object]) -> None:
    assert (await beat(here, body)).status == 400


async def test_a_registration_reads_the_tokens_of_no_other_node(here: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    async def step(self: Keys) -> None:
        raise AssertionError("all tokens were read")

    monkeypatch.setattr(Keys, "step", step)
    before = here.tokens["node"]
    machine = {"name": "old", "platform": "linux/amd64", "capability": "default"}
    answer = await here.ask("POST", "/api/node/register", machine, token=here.tokens["join"])
    assert answer.status == 201
    here.tokens["node"] = answer.json["node_token"]
    assert (await beat(here, {})).status == 200
    assert (await beat(here, {"renew": True})).json["node_token"]
    here.tokens["node"] = before
    assert (await beat(here, {})).status == 401, "another one has replaced it"


async def test_a_token_that_another_frontend_gave_to_a_node_is_found_alone(
    here: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def step(self: Keys) -> None:
        raise AssertionError("all tokens were read")

    token = await here.frontend.nodes.rotate_token((await here.frontend.nodes.get("old"))[0].id, here.tokens["node"])
    old, here.tokens["node"] = here.tokens["node"], token
    monkeypatch.setattr(Keys, "step", step)
    assert (await beat(here, {})).status == 200
    here.tokens["node"] = old
    assert (await beat(here, {})).status == 401, "it counts until the new one was used"
    assert (await here.ask("GET", "/version", token="nobody's")).status == 401
