"""Credentials in the wrong hands, as routes see them: join tokens, tokens of nodes, what is revoked and renewed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from nacl.signing import SigningKey
from tests.api.whole_frontend import Site, site

from enginehouse.core.node_api import RegisterRequest
from enginehouse.worker.identity import Identity

MACHINE = {"platform": "linux/amd64", "capability": "default"}


@pytest.fixture
async def here(tmp_path: Path) -> AsyncIterator[Site]:
    async with site(tmp_path) as made:
        yield made


async def join(here: Site, name: str, *, token: str = "", seed: bytes = b"1" * 32) -> dict[str, Any]:
    """A worker with a key."""
    given = token or here.tokens["join"]
    challenge = (await here.ask("POST", "/api/node/challenge", token=given)).json["challenge"]
    asked = RegisterRequest(name=name, address="10.0.0.9:50051", platform="linux/amd64", challenge=challenge)
    request = Identity(SigningKey(seed)).signed(asked)
    fields = {field: getattr(request, field) for field in RegisterRequest.__struct_fields__}
    answer = await here.ask("POST", "/api/node/register", fields, token=given)
    assert answer.status == 201, answer.body
    found: dict[str, Any] = answer.json
    return found


async def beat(here: Site, node: dict[str, Any], token: str, **body: object) -> Any:
    return await here.ask("POST", f"/api/node/{node['id']}/heartbeat", body, token=token)


async def by_key(here: Site, name: str, seed: bytes, **fields: object) -> Any:
    """A registration of a machine that has only its key."""
    challenge = (await here.ask("POST", "/api/node/challenge")).json["challenge"]
    asked = RegisterRequest(name=name, address="10.0.0.9:50051", platform="linux/amd64", challenge=challenge)
    request = Identity(SigningKey(seed)).signed(asked)
    body = {field: getattr(request, field) for field in RegisterRequest.__struct_fields__}
    return await here.ask("POST", "/api/node/register", body | fields)


async def test_an_approved_node_comes_back_by_its_key_alone(here: Site) -> None:
    node = await join(here, "first")
    refused = await by_key(here, "first", b"1" * 32)
    assert (refused.status, refused.error["code"]) == (401, "unauthenticated"), "it waits for its first approval"
    await here.ask("POST", "/api/nodes/first/approve", token=here.tokens["admin"])
    again = await by_key(here, "first", b"1" * 32)
    assert (again.status, again.json["id"], again.json["status"]) == (201, node["id"], "offline")
    assert (await beat(here, again.json, again.json["node_token"])).status == 200
    assert (await beat(here, node, node["node_token"])).status == 401
    # Another key, a signature of somebody else, and no key at all.
    assert (await by_key(here, "first", b"2" * 32)).status == 401
    assert (await by_key(here, "first", b"1" * 32, signature="00" * 64)).status == 403
    assert (await by_key(here, "first", b"1" * 32, public_key="", signature="")).status == 401
    assert (await here.ask("DELETE", "/api/nodes/first?force=true", token=here.tokens["admin"])).status == 200
    assert (await by_key(here, "first", b"1" * 32)).status == 401, "it was removed"


async def test_strangers_are_heard_only_so_often(here: Site) -> None:
    statuses = [(await by_key(here, "stranger", b"3" * 32)).status for _ in range(12)]
    assert statuses == [401] * 10 + [429] * 2


async def test_a_rejected_machine_is_refused_until_that_is_taken_back(here: Site) -> None:
    await join(here, "first")
    admin = here.tokens["admin"]
    rejected = await here.ask("POST", "/api/nodes/first/reject", token=admin)
    assert rejected.status == 200, rejected.body
    assert (await here.ask("GET", "/api/nodes?name=first", token=admin)).json == []
    with pytest.raises(AssertionError, match="rejected"):
        await join(here, "other-name")
    listed = (await here.ask("GET", "/api/nodes/rejected", token=admin)).json
    assert [(one["name"], len(one["fingerprint"])) for one in listed] == [("first", 19)]
    assert (await here.ask("DELETE", "/api/nodes/rejected/first", token=admin)).status == 204
    assert (await join(here, "first"))["status"] == "pending"
    await here.ask("POST", "/api/nodes/first/approve", token=admin)
    refused = await here.ask("POST", "/api/nodes/first/reject", token=admin)
    assert (refused.status, refused.error["code"]) == (409, "conflict")


async def test_an_approval_with_a_fingerprint_is_for_that_key_only(here: Site) -> None:
    node = await join(here, "first")
    admin = here.tokens["admin"]
    shown = (await here.ask("GET", f"/api/nodes/{node['id']}", token=admin)).json["fingerprint"]
    assert [len(part) for part in shown.split("-")] == [4, 4, 4, 4]
    wrong = {"fingerprint": "0000-0000-0000-0000"}
    refused = await here.ask("POST", "/api/nodes/first/approve", wrong, token=admin)
    assert (refused.status, refused.error["code"]) == (409, "fingerprint_mismatch")
    assert shown in refused.error["message"]
    asked = {"fingerprint": shown.upper().replace("-", " ")}
    assert (await here.ask("POST", "/api/nodes/first/approve", asked, token=admin)).json["approved"] is True


async def test_a_node_token_is_rotated_with_an_overlap(here: Site) -> None:
    node = await join(here, "first")
    assert (await here.ask("POST", "/api/nodes/first/approve", token=here.tokens["admin"])).status == 200
    first = node["node_token"]
    renewed = (await beat(here, node, first, renew=True)).json
    second = renewed["node_token"]
    assert second != first
    assert "nats_url" in renewed["credential"]
    # The answer may have been lost: the old one counts, and brings another.
    third = (await beat(here, node, first, renew=True)).json["node_token"]
    assert (await beat(here, node, second)).status == 401
    assert (await beat(here, node, first)).status == 200
    # Once the new one was used, the old one is over.
    assert (await beat(here, node, third)).status == 200
    assert (await beat(here, node, first)).status == 401
    assert (await beat(here, node, third)).status == 200
    assert "node_token" not in (await beat(here, node, third)).json


async def test_a_pending_node_is_renewed_nothing(here: Site) -> None:
    node = await join(here, "first")
    answer = await beat(here, node, node["node_token"], renew=True)
    assert (answer.status, set(answer.json)) == (200, {"message", "mark"})


async def test_the_token_of_a_removed_node_counts_for_nothing(here: Site) -> None:
    node = await join(here, "first")
    assert (await beat(here, node, node["node_token"])).status == 200
    assert (await here.ask("DELETE", "/api/nodes/first?force=true", token=here.tokens["admin"])).status == 200
    await here.frontend.keys.watch_step()
    assert (await beat(here, node, node["node_token"])).status == 401


async def test_a_revoked_token_counts_for_nothing_on_every_frontend(here: Site) -> None:
    from enginehouse.frontend.fleet.tokens import Keys

    other = Keys(here.store)
    await other.step()
    token = here.tokens["user"]
    assert other.identify(token) is not None
    listed = (await here.ask("GET", "/api/tokens", token=here.tokens["admin"])).json
    (row,) = [one for one in listed if one["role"] == "user"]
    answer = await here.ask("DELETE", f"/api/tokens/{row['id']}", token=here.tokens["admin"])
    assert (answer.status, answer.json["message"]) == (200, "token revoked")
    assert (await here.ask("GET", "/v1/models", token=token)).status == 401
    await other.watch_step()
    assert other.identify(token) is None
    listed = (await here.ask("GET", "/api/tokens", token=here.tokens["admin"])).json
    assert row["id"] not in {one["id"] for one in listed}
    again = await here.ask("DELETE", f"/api/tokens/{row['id']}", token=here.tokens["admin"])
    assert again.error["code"] == "not_found"


async def test_the_last_admin_token_is_not_revoked(here: Site) -> None:
    listed = (await here.ask("GET", "/api/tokens", token=here.tokens["admin"])).json
    (row,) = [one for one in listed if one["role"] == "admin"]
    answer = await here.ask("DELETE", f"/api/tokens/{row['id']}", token=here.tokens["admin"])
    assert (answer.status, answer.error["code"]) == (409, "conflict")
    assert (await here.ask("GET", "/api/tokens", token=here.tokens["admin"])).status == 200


async def test_who_may_revoke(here: Site) -> None:
    for role in ("user", "join", "node"):
        assert (await here.ask("DELETE", "/api/tokens/test", token=here.tokens[role])).status == 403
    answer = await here.ask("DELETE", "/api/tokens/test", token=here.tokens["admin"])
    assert answer.error["code"] == "conflict"  # three have that name


async def test_a_join_token_for_one_node_speaks_for_no_other(here: Site) -> None:
    answer = await here.ask(
        "POST", "/api/tokens", {"role": "join", "node": "go", "name": "go"}, token=here.tokens["admin"]
    )
    own = answer.json["token"]
    assert (await here.ask("POST", "/api/node/register", {"name": "other", **MACHINE}, token=own)).status == 403
    node = (await here.ask("POST", "/api/node/register", {"name": "go", **MACHINE}, token=own)).json
    assert (await beat(here, node, own)).status == 200
    # The shared one neither speaks for it nor takes its name.
    assert (await beat(here, node, here.tokens["join"])).status == 403
    goodbye = await here.ask("POST", f"/api/node/{node['id']}/deregister", token=here.tokens["join"])
    assert goodbye.status == 403
    taken = await here.ask("POST", "/api/node/register", {"name": "go", **MACHINE}, token=here.tokens["join"])
    assert taken.error["code"] == "identity_conflict"
    # And it does not speak for a node that joined with the shared one.
    assert (await beat(here, {"id": here.tokens["node id"]}, own)).status == 403
    bad = await here.ask("POST", "/api/tokens", {"role": "user", "node": "go"}, token=here.tokens["admin"])
    assert bad.status == 422


async def test_a_shared_join_token_speaks_for_a_node_only_from_where_it_joined(here: Site) -> None:
    node = {"id": here.tokens["node id"]}
    assert (await beat(here, node, here.tokens["join"])).status == 200
    for path in ("heartbeat", "deregister", "drain", "resume"):
        answer = await here.ask(
            "POST", f"/api/node/{node['id']}/{path}", {}, token=here.tokens["join"], client="10.0.0.66"
        )
        assert answer.status == 403, path


async def test_a_token_that_another_frontend_gave_out_just_now_is_known(here: Site) -> None:
    """Right after a look, too: to call a node's own token unknown makes its worker join again, and its work be lost."""
    from enginehouse.frontend.fleet.tokens import Keys

    other = Keys(here.store)
    for number in range(3):
        await here.frontend.keys.step()
        token = (await other.create("user", f"new-{number}")).token
        assert (await here.ask("GET", "/version", token=token)).status == 200


async def test_a_database_that_is_away_makes_no_token_unknown(here: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    from enginehouse.core.errors import Unavailable
    from enginehouse.frontend.fleet.tokens import Keys

    token = (await Keys(here.store).create("user", "new")).token

    async def away(_work: object) -> None:
        raise Unavailable("cannot use the database now: try again in a moment", code="store_unavailable")

    with monkeypatch.context() as patched:
        for method in ("transaction", "look", "read"):
            patched.setattr(here.store, method, away)
        for _ in range(3):
            assert (await here.ask("GET", "/version", token=token)).status == 503
    assert (await here.ask("GET", "/version", token=token)).status == 200


async def test_many_wrong_tokens_at_once_cost_few_looks(here: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = 0
    really_look = here.store.look

    async def counted(work: Any) -> Any:
        nonlocal looks
        looks += 1
        return await really_look(work)

    monkeypatch.setattr(here.store, "look", counted)
    async with asyncio.TaskGroup() as group:
        asked = [group.create_task(here.ask("GET", "/version", token=f"wrong-{number}")) for number in range(200)]
    assert {task.result().status for task in asked} == {401}
    assert looks <= 3
