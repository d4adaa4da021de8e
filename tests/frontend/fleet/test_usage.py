"""What was used, on SQLite and PostgreSQL: summed over frontends, kept when a write fails, pruned after 400 days."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from enginehouse.core.errors import Unavailable
from enginehouse.core.usage import HOUR_SECONDS, Grouping, UsageCount, UsageQuery, Used
from enginehouse.frontend.fleet.usage import KEPT_SECONDS, UsageLedger
from enginehouse.store import db, usage
from enginehouse.store.db import Connection, Store

PLACE = ("id-1", "app", "tiny", "node-1")


@pytest.fixture
async def pair(database_url: str) -> AsyncIterator[tuple[UsageLedger, UsageLedger]]:
    stores = [await Store.open(database_url) for _ in range(2)]
    yield UsageLedger(stores[0]), UsageLedger(stores[1])
    for store in stores:
        store.close()


async def summed(ledger: UsageLedger, *by: Grouping, token_id: str | None = None) -> list[UsageCount]:
    return await ledger.summed(UsageQuery(since=0, until=1e12, by=by, token_id=token_id))


async def test_the_counts_of_all_frontends_are_added(pair: tuple[UsageLedger, UsageLedger]) -> None:
    one, two = pair
    one.count(PLACE, Used(7, 5), is_error=False)
    one.count(PLACE, None, is_error=True)
    two.count(PLACE, Used(1, 2), is_error=False)
    two.count(("id-2", "other", "tiny", "node-2"), Used(10, 10), is_error=False)
    for ledger in (*pair, *pair):
        await ledger.step()
    app = UsageCount(token_id="id-1", token="app", requests=3, errors=1, prompt_tokens=8, completion_tokens=7)
    other = UsageCount(token_id="id-2", token="other", requests=1, prompt_tokens=10, completion_tokens=10)
    assert await summed(one, "token") == [app, other]
    assert await summed(one, "token", token_id="id-2") == [other]
    assert [(row.model, row.requests) for row in await summed(two, "model")] == [("tiny", 4)]
    assert [(row.node, row.requests) for row in await summed(two, "node")] == [("node-1", 3), ("node-2", 1)]
    (total,) = await summed(one)
    assert (total.requests, total.errors, total.prompt_tokens, total.completion_tokens) == (4, 1, 18, 17)


async def test_nothing_used_is_a_total_of_zero(pair: tuple[UsageLedger, UsageLedger]) -> None:
    assert await summed(pair[0]) == [UsageCount()]
    assert await summed(pair[0], "token", "model", "node", "hour", "day") == []


async def test_hours_and_days_come_in_their_order(pair: tuple[UsageLedger, UsageLedger], database_url: str) -> None:
    one, _ = pair
    day = 20_000 * 86400

    def fill(connection: Connection) -> None:
        for hour, requests in ((day, 1), (day + 5 * HOUR_SECONDS, 5), (day + 86400, 3)):
            usage.add(connection, hour, {PLACE: (requests, 0, 0, 0, 0)})

    store = await Store.open(database_url)
    await store.transaction(fill)
    store.close()
    assert [(row.day, row.requests) for row in await summed(one, "day")] == [(day, 6), (day + 86400, 3)]
    assert [row.requests for row in await summed(one, "model", "hour")] == [1, 5, 3]
    asked = UsageQuery(since=day + HOUR_SECONDS, until=day + 86400, by=("model",))
    assert [row.requests for row in await one.summed(asked)] == [5]


async def test_a_write_that_fails_loses_nothing(
    pair: tuple[UsageLedger, UsageLedger], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, _ = pair
    one.count(PLACE, Used(1, 1), is_error=False)

    async def away(_store: Store, _work: object) -> None:
        one.count(PLACE, Used(1, 1), is_error=False)  # while the write is under way
        raise Unavailable("cannot use the database now", code="store_unavailable")

    with monkeypatch.context() as broken:
        broken.setattr(Store, "transaction", away)
        with pytest.raises(Unavailable):
            await one.step()
        await one.finish()  # tells it in the log, and does not fail
    await one.finish()
    (row,) = await summed(one, "token")
    assert (row.requests, row.prompt_tokens) == (3, 3)


async def test_old_hours_are_pruned(pair: tuple[UsageLedger, UsageLedger], database_url: str) -> None:
    one, _ = pair
    store = await Store.open(database_url)

    def fill(connection: Connection) -> None:
        now = int(db.now(connection))
        usage.add(connection, now - int(KEPT_SECONDS) - 60, {PLACE: (1, 0, 0, 0, 0)})
        usage.add(connection, now - int(KEPT_SECONDS) + 3600, {PLACE: (2, 0, 0, 0, 0)})

    await store.transaction(fill)
    store.close()
    await one.prune_step()
    assert [row.requests for row in await summed(one, "token")] == [2]
