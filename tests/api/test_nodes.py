"""The list of nodes over HTTP: all of it as LocalAI shows it, or a page of it."""

from __future__ import annotations

import gzip
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.api.whole_frontend import Answer, Site, site
from tests.store.test_store import node

from enginehouse.store import nodes
from enginehouse.store.db import Connection


@pytest.fixture
async def here(tmp_path: Path) -> AsyncIterator[Site]:
    def fill(connection: Connection) -> None:
        for number in range(25):
            nodes.insert(connection, node(f"n{number:02}", drained=number == 3), f"token-{number}")

    async with site(tmp_path) as made:
        await made.store.transaction(fill)
        yield made
        await made.frontend.galleries.close()


async def get(here: Site, query: str = "") -> Answer:
    return await here.ask("GET", f"/api/nodes{query}", token=here.tokens["admin"])


def names(answer: Answer) -> list[str]:
    found: Any = answer.json
    return [one["name"] for one in found]


async def test_without_parameters_the_list_has_every_node_by_name(here: Site) -> None:
    whole = await get(here)
    assert names(whole) == sorted(names(whole))
    assert {f"n{number:02}" for number in range(25)} < set(names(whole))
    for shown in msgspec.json.decode(whole.body):
        one = (await get(here, f"/{shown['id']}")).json
        assert {**shown, "heartbeat_age_seconds": 0} == {**one, "heartbeat_age_seconds": 0}


async def test_pages_follow_each_other_by_the_id_of_the_last_node(here: Site) -> None:
    whole, seen, after = names(await get(here)), [], ""
    while True:
        page = (await get(here, f"?limit=10{after}")).json
        seen += [one["name"] for one in page]
        if len(page) < 10:
            break
        after = f"&after={page[-1]['id']}"
    assert seen == whole


async def test_a_status_or_a_name_makes_the_list_shorter(here: Site) -> None:
    assert names(await get(here, "?status=draining")) == ["n03"]
    assert names(await get(here, "?name=n04")) == ["n04"]
    assert names(await get(here, "?name=n04&status=draining")) == []
    assert "n03" not in names(await get(here, "?status=healthy&limit=1000"))


@pytest.mark.parametrize(
    ("query", "status", "param"),
    [
        ("?limit=0", 422, "limit"),
        ("?limit=1001", 422, "limit"),
        (f"?limit={'9' * 5000}", 422, "limit"),
        ("?status=happy", 422, "status"),
        ("?after=nobody", 404, "after"),
        (f"?after={'x' * 5000}", 404, "after"),
    ],
)
async def test_a_parameter_that_makes_no_sense_is_refused(here: Site, query: str, status: int, param: str) -> None:
    answer = await get(here, query)
    assert (answer.status, answer.error["param"]) == (status, param)


async def test_a_long_list_is_packed_for_who_takes_it_so(here: Site) -> None:
    packed = [("host", "127.0.0.1:8080"), ("accept-encoding", "gzip, deflate")]
    plain = await here.ask("GET", "/api/nodes", token=here.tokens["admin"])
    answer = await here.ask("GET", "/api/nodes", token=here.tokens["admin"], headers=packed)
    assert len(plain.body) > 16_384
    assert ("content-encoding" in plain.headers, answer.headers["content-encoding"]) == (False, "gzip")
    assert gzip.decompress(answer.body)[:20] == plain.body[:20]
    short = await here.ask("GET", "/api/nodes?limit=1", token=here.tokens["admin"], headers=packed)
    assert "content-encoding" not in short.headers
