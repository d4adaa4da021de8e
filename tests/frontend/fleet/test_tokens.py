"""Tokens that are limited and that expire, on SQLite and PostgreSQL."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from enginehouse.core.allowance import Allowance
from enginehouse.core.errors import Conflict, Invalid
from enginehouse.frontend.fleet.tokens import Keys, TokenLimits
from enginehouse.store import db, keys
from enginehouse.store.db import Connection, Store

ALLOWANCE = Allowance(models=("tiny", "org/*"), requests_per_minute=5, tokens_per_minute=7)
HOUR = TokenLimits(ttl_seconds=3600.0)


@pytest.fixture
async def pair(database_url: str) -> AsyncIterator[tuple[Keys, Keys]]:
    stores = [await Store.open(database_url) for _ in range(2)]
    yield Keys(stores[0]), Keys(stores[1])
    for store in stores:
        store.close()


def later(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    real = db.now

    def now(connection: Connection) -> float:
        return real(connection) + seconds

    monkeypatch.setattr(db, "now", now)


async def test_limits_are_known_on_every_frontend(pair: tuple[Keys, Keys]) -> None:
    one, two = pair
    made = await one.create("user", "app", limits=TokenLimits(allowance=ALLOWANCE))
    plain = await one.create("user", "plain")
    await two.watch_step()
    for each in pair:
        caller, unlimited = each.identify(made.token), each.identify(plain.token)
        assert caller is not None
        assert unlimited is not None
        assert (caller.allowance, unlimited.allowance) == (ALLOWANCE, None)


async def test_an_expired_token_is_refused_before_anything_is_read_again(pair: tuple[Keys, Keys]) -> None:
    one, _ = pair
    token = (await one.create("user", "app", limits=HOUR)).token
    assert one.identify(token) is not None
    one._ahead_seconds += 3599
    assert one.identify(token) is not None
    one._ahead_seconds += 2
    assert one.identify(token) is None


async def test_an_expired_token_is_listed_and_its_name_is_free(
    pair: tuple[Keys, Keys], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = pair
    token = (await one.create("user", "app", limits=HOUR)).token
    with pytest.raises(Conflict):
        await one.create("user", "app")
    later(monkeypatch, 3601)
    await two.step()
    assert two.identify(token) is None
    newer = (await one.create("user", "app")).token
    assert [row.is_expired(one.now()) for row in await one.every()] == [True, False]
    assert (await one.revoke("app")).expires_at == 0, "the valid one is meant"
    assert one.identify(newer) is None
    assert (await one.revoke("app")).expires_at > 0
    assert await one.every() == []


async def test_an_admin_token_that_expires_does_not_replace_one_that_does_not(pair: tuple[Keys, Keys]) -> None:
    one, _ = pair
    await one.create("admin", "lasting")
    await one.create("admin", "short", limits=HOUR)
    with pytest.raises(Conflict, match="never expires"):
        await one.revoke("lasting")
    await one.revoke("short")
    await one.create("admin", "second")
    await one.revoke("lasting")


async def test_a_first_token_is_made_where_the_only_one_has_expired(
    pair: tuple[Keys, Keys], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = pair
    await one.create("join", "short", limits=HOUR)
    assert not await one.make_first("join", "x" * 43)
    later(monkeypatch, 3700)  # the lease on making it has ended too
    assert await two.make_first("join", "y" * 43)


@pytest.mark.parametrize(
    ("role", "limits", "param"),
    [
        ("admin", TokenLimits(allowance=ALLOWANCE), "role"),
        ("join", TokenLimits(allowance=ALLOWANCE), "role"),
        ("user", TokenLimits(node="attic"), "node"),
        ("user", TokenLimits(ttl_seconds=-1.0), "ttl_seconds"),
        ("user", TokenLimits(ttl_seconds=1e12), "ttl_seconds"),
        ("user", TokenLimits(ttl_seconds=float("nan")), "ttl_seconds"),
    ],
)
async def test_limits_that_a_role_cannot_have_are_refused(
    pair: tuple[Keys, Keys], role: str, limits: TokenLimits, param: str
) -> None:
    with pytest.raises(Invalid) as caught:
        await pair[0].create(role, "x", limits=limits)
    assert caught.value.param == param
    assert await pair[0].every() == []


async def test_rows_are_read_as_they_were_written(database_url: str) -> None:
    store = await Store.open(database_url)
    row = keys.TokenRow("t", "user", "app", "hash", 1.0, "", 0.0, 99.0, ALLOWANCE)
    await store.transaction(lambda connection: keys.insert(connection, row))
    assert await store.transaction(keys.every) == [row]
    store.close()
