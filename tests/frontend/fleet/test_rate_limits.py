"""Limits per minute over several frontends, on SQLite and PostgreSQL: what one counts the others know after an
exchange, and nothing is lost or counted twice when an exchange fails.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

import pytest

from enginehouse.core.allowance import Allowance
from enginehouse.core.errors import Unavailable
from enginehouse.core.rate import STEP_SECONDS, WINDOW_SECONDS, step_of
from enginehouse.frontend.fleet.rate_limits import RateLimits
from enginehouse.store import db, rates
from enginehouse.store.db import Connection, Store

TEN = Allowance(requests_per_minute=10)


class Site:
    """One frontend's limits, with a clock that the test moves."""

    def __init__(self, store: Store, now: float) -> None:
        self.store = store
        self.now = now
        self.wakes = 0
        self.limits = RateLimits(store, lambda: self.now, self._wake)

    def _wake(self) -> None:
        self.wakes += 1

    def ask(self, count: int, allowance: Allowance = TEN, token: str = "t") -> int:
        """How many of so many requests are admitted."""
        return sum(not self.limits.admit(token, allowance).refused_by for _ in range(count))


@pytest.fixture
async def pair(database_url: str) -> AsyncIterator[tuple[Site, Site]]:
    stores = [await Store.open(database_url) for _ in range(2)]
    now = await stores[0].transaction(db.now)
    # In the middle of a step: a test takes less time than is left of it.
    now = step_of(now) * STEP_SECONDS + 1
    yield Site(stores[0], now), Site(stores[1], now)
    for store in stores:
        store.close()


async def test_one_frontend_admits_the_limit_and_no_more(pair: tuple[Site, Site]) -> None:
    one, _ = pair
    assert one.ask(25) == 10
    refused = one.limits.admit("t", TEN)
    assert refused.refused_by == "requests"
    assert WINDOW_SECONDS < refused.wait_seconds <= WINDOW_SECONDS + STEP_SECONDS
    one.now += refused.wait_seconds + 0.01
    assert one.ask(25) == 10
    assert one.ask(3, token="another") == 3


async def test_both_together_admit_the_limit_once_they_have_exchanged(pair: tuple[Site, Site]) -> None:
    one, two = pair
    assert one.ask(6) == 6
    assert two.ask(1) == 1
    for site in (one, two, one):
        await site.limits.step()
    assert (one.ask(10), one.limits.admit("t", TEN).refused_by) == (3, "requests")
    await one.limits.step()
    await two.limits.step()
    assert two.ask(10) == 0
    # A refused request is not counted.
    for site in (one, two):
        await site.limits.step()
    assert await one.store.transaction(lambda c: sum(pair[0] for pair in rates.since(c, ["t"], 0).values())) == 10


async def test_the_first_request_of_a_token_asks_for_an_exchange_at_once(pair: tuple[Site, Site]) -> None:
    one, _ = pair
    one.ask(3)
    assert one.wakes == 1


async def test_a_frontend_that_restarts_knows_what_was_used(pair: tuple[Site, Site], database_url: str) -> None:
    one, _ = pair
    one.ask(10)
    await one.limits.step()
    again = Site(one.store, one.now)
    assert again.ask(1) == 1  # it cannot know yet
    await again.limits.step()
    assert again.ask(5) == 0


async def test_tokens_count_when_the_answer_has_ended_and_on_every_frontend(pair: tuple[Site, Site]) -> None:
    one, two = pair
    hundred = Allowance(tokens_per_minute=100)
    assert one.ask(5, hundred) == 5
    one.limits.count_tokens("t", 60)
    assert one.limits.admit("t", hundred).tokens is not None
    assert one.ask(1, hundred) == 1
    assert two.ask(1, hundred) == 1
    two.limits.count_tokens("t", 60)
    for site in (one, two, one):
        await site.limits.step()
    refused = one.limits.admit("t", hundred)
    assert (refused.refused_by, two.limits.admit("t", hundred).refused_by) == ("tokens", "tokens")
    assert refused.requests is None


async def test_without_the_store_each_goes_on_by_itself_and_shares_it_later(
    pair: tuple[Site, Site], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = pair
    one.ask(4)

    async def away(_work: object) -> None:
        raise Unavailable("cannot use the database now", code="store_unavailable")

    with monkeypatch.context() as broken:
        broken.setattr(one.store, "transaction", away)
        for _ in range(3):
            with pytest.raises(Unavailable):
                await one.limits.step()
        assert one.ask(2) == 2
    await one.limits.step()
    two.ask(1)
    await two.limits.step()
    assert two.ask(20) == 3, "six there and one here were counted once each"


async def test_what_is_admitted_during_an_exchange_is_not_forgotten(
    pair: tuple[Site, Site], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = pair
    real = one.store.transaction
    one.ask(2)

    async def slow(work: Callable[[Connection], object]) -> object:
        found = await real(work)
        assert one.ask(3) == 3
        return found

    with monkeypatch.context() as watched:
        watched.setattr(one.store, "transaction", slow)
        await one.limits.step()
    assert one.ask(20) == 5
    await one.limits.step()
    two.ask(1)
    await two.limits.step()
    assert two.ask(20) == 0


async def test_an_idle_frontend_asks_the_store_nothing(
    pair: tuple[Site, Site], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, _ = pair

    async def asked(_work: object) -> None:
        raise AssertionError("the store was asked")

    with monkeypatch.context() as watched:
        watched.setattr(one.store, "transaction", asked)
        await one.limits.step()
    one.ask(1)
    later = await one.store.transaction(db.now) + 2 * WINDOW_SECONDS
    monkeypatch.setattr(db, "now", lambda _connection: later)
    one.now = later
    await one.limits.step()
    with monkeypatch.context() as watched:
        watched.setattr(one.store, "transaction", asked)
        await one.limits.step()


async def test_old_steps_are_deleted(pair: tuple[Site, Site], monkeypatch: pytest.MonkeyPatch) -> None:
    one, _ = pair

    def old(connection: Connection) -> None:
        rates.add(connection, {("t", 1): (5, 5)})

    await one.store.transaction(old)
    monkeypatch.setattr("enginehouse.frontend.fleet.rate_limits._FORGET_EVERY", 1)
    one.ask(1)
    await one.limits.step()
    left = await one.store.transaction(lambda connection: rates.since(connection, ["t"], 0))
    assert list(left.values()) == [(1, 0)]
