"""Tokens that get a new secret, and when tokens were used, as routes tell it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tests.api.whole_frontend import Site, site

from enginehouse.core.errors import Conflict, Invalid
from enginehouse.frontend.fleet.token_files import take_tokens


@pytest.fixture
async def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Site]:
    monkeypatch.setattr("enginehouse.frontend.fleet.tokens.LOOK_AGAIN_SECONDS", 0.0)
    async with site(tmp_path) as made:
        yield made


async def ask(here: Site, method: str, path: str, body: object = None, token: str = "") -> Any:
    return await here.ask(method, path, body, token=token or here.tokens["admin"])


async def made_key(here: Site, **more: object) -> Any:
    made = await ask(here, "POST", "/api/tokens", {"name": "app", "models": ["tiny-*"], **more})
    assert made.status == 201
    return made.json


async def works(here: Site, token: str) -> bool:
    return bool((await ask(here, "GET", "/v1/models", token=token)).status == 200)


async def test_a_rotated_token_keeps_its_id_and_limits_and_the_old_secret_ends(here: Site) -> None:
    old = await made_key(here)
    rotated = (await ask(here, "POST", "/api/tokens/app/rotate")).json
    assert (rotated["id"], rotated["name"], rotated["models"]) == (old["id"], "app", ["tiny-*"])
    assert rotated["token"] != old["token"]
    assert await works(here, rotated["token"])
    assert not await works(here, old["token"])
    listed = [one for one in (await ask(here, "GET", "/api/tokens")).json if one["name"] == "app"]
    assert len(listed) == 1
    assert "token" not in listed[0]


async def test_the_old_secret_may_count_for_a_while(here: Site) -> None:
    old = await made_key(here)
    rotated = (await ask(here, "POST", "/api/tokens/app/rotate", {"keep_seconds": 600})).json
    assert rotated["old_until"]
    assert await works(here, old["token"])
    assert await works(here, rotated["token"])
    # Until its end, not longer.
    here.frontend.keys._ahead_seconds += 601
    assert not await works(here, old["token"])
    assert await works(here, rotated["token"])
    # A second rotation ends what the first one kept.
    again = (await ask(here, "POST", "/api/tokens/app/rotate")).json
    assert [await works(here, one["token"]) for one in (old, rotated, again)] == [False, False, True]


async def test_a_rotated_secret_in_a_file_or_setting_does_not_come_back(here: Site, tmp_path: Path) -> None:
    old = (await ask(here, "POST", "/api/tokens", {"role": "admin", "name": "admin"})).json
    (tmp_path / "admin.token").write_text(old["token"] + "\n")
    await ask(here, "POST", f"/api/tokens/{old['id']}/rotate")
    with pytest.raises(Conflict, match="it was revoked"):
        await take_tokens(here.frontend.keys, {"admin": old["token"]}, tmp_path)
    assert not await works(here, old["token"])


async def test_a_named_file_without_a_token_is_refused_and_makes_none(here: Site, tmp_path: Path) -> None:
    named = tmp_path / "secret"
    for content in (None, "", " \n"):
        if content is not None:
            named.write_text(content)
        with pytest.raises(Invalid, match=f"cannot read the join token from {named}"):
            await take_tokens(here.frontend.keys, {"join": f"@{named}"}, tmp_path)
    assert not (tmp_path / "join.token").exists()


async def test_what_cannot_be_rotated_is_refused(here: Site) -> None:
    await made_key(here, ttl_seconds=0.0)
    assert (await ask(here, "POST", "/api/tokens/nobody/rotate")).status == 404
    assert (await ask(here, "POST", "/api/tokens/app/rotate", {"keep_seconds": -1})).status == 422
    assert (await ask(here, "POST", "/api/tokens/app/rotate", {"keep_seconds": 1e9})).status == 422
    assert (await ask(here, "POST", "/api/tokens/app/rotate", {"ttl": 1})).status == 400


async def test_sessions_of_a_rotated_token_end(here: Site) -> None:
    token = (await ask(here, "POST", "/api/tokens", {"role": "viewer", "name": "looker"})).json["token"]
    signed_in = await here.ask("POST", "/api/session", {"token": token})
    assert signed_in.status == 201
    assert len((await ask(here, "GET", "/api/sessions")).json) == 1
    await ask(here, "POST", "/api/tokens/looker/rotate")
    assert (await ask(here, "GET", "/api/sessions")).json == []


async def test_when_a_token_was_used_last_is_told(here: Site) -> None:
    key = await made_key(here)

    async def last_used() -> str:
        await here.frontend.keys.note_uses_step()
        listed = (await ask(here, "GET", "/api/tokens")).json
        return next(str(one.get("last_used_at", "")) for one in listed if one["name"] == "app")

    assert await last_used() == ""
    assert await works(here, key["token"])
    first = await last_used()
    assert first
    assert await last_used() == first, "nothing was asked with it since"


async def test_names_of_removed_nodes_stay_in_the_history(here: Site) -> None:
    node = here.tokens["node id"]
    name = (await ask(here, "GET", f"/api/nodes/{node}")).json["name"]
    await ask(here, "POST", f"/api/nodes/{node}/approve")
    begun = await ask(here, "POST", "/api/operations", {"kind": "install", "name": "llama-cpp", "nodes": [name]})
    assert begun.status == 202, begun.body
    assert (await ask(here, "DELETE", f"/api/nodes/{node}?force=perhaps")).status == 422
    removed = await ask(here, "DELETE", f"/api/nodes/{node}?force=true")
    assert removed.json["name"] == name
    shown = (await ask(here, "GET", f"/api/operations/{begun.json['jobID']}")).json
    assert [row["node_name"] for row in shown["nodes"]] == [name]
