"""Sessions and login codes of two frontends, on SQLite and PostgreSQL: used once, known and ended everywhere."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from enginehouse.core.errors import Denied, Invalid, NotFound, RateLimited, Unauthenticated
from enginehouse.frontend.fleet.sessions import CODE_SECONDS, MOST_CODES, MOST_SESSIONS, Sessions, SignedIn
from enginehouse.frontend.fleet.sign_in_limit import MOST_ADDRESSES, MOST_FAILURES, WINDOW_SECONDS, SignInLimit
from enginehouse.frontend.fleet.tokens import Caller, Keys, TokenLimits
from enginehouse.store import db, keys, sessions
from enginehouse.store.db import Connection, Store

WEEK = 7 * 86400.0


class Side:
    """One frontend."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.keys = Keys(store)
        self.sessions = Sessions(store, self.keys, WEEK)

    async def caller(self, role: str = "admin", ttl_seconds: float = 0.0) -> tuple[str, Caller]:
        made = await self.keys.create(role, None, limits=TokenLimits(ttl_seconds=ttl_seconds))
        caller = self.keys.identify(made.token)
        assert caller is not None
        return made.token, caller

    async def sign_in(self, code: str = "", token: str = "", address: str = "10.0.0.9") -> SignedIn:
        return await self.sessions.sign_in(code=code, token=token, address=address, replaces=None)


@pytest.fixture
async def pair(database_url: str) -> AsyncIterator[tuple[Side, Side]]:
    stores = [await Store.open(database_url) for _ in range(2)]
    yield Side(stores[0]), Side(stores[1])
    for store in stores:
        store.close()


def later(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    real = db.now

    def now(connection: Connection) -> float:
        return real(connection) + seconds

    monkeypatch.setattr(db, "now", now)


@pytest.mark.parametrize("role", ["admin", "viewer"])
async def test_of_many_who_use_a_code_at_once_exactly_one_is_signed_in(pair: tuple[Side, Side], role: str) -> None:
    one, _ = pair
    _, admin = await one.caller()
    code = (await one.sessions.make_code(admin, role)).code
    signed: list[SignedIn] = []
    refused: list[Unauthenticated] = []

    async def attempt(side: Side, address: str) -> None:
        try:
            signed.append(await side.sign_in(code, address=address))
        except Unauthenticated as error:
            refused.append(error)

    async with asyncio.TaskGroup() as group:
        for number, side in enumerate(pair * 4):
            group.create_task(attempt(side, f"10.0.0.{number}"))
    assert [session.caller.role for session in signed] == [role]
    assert len(refused) == 7


async def test_a_session_is_known_on_the_other_frontend_at_once(pair: tuple[Side, Side]) -> None:
    one, two = pair
    token, _ = await one.caller()
    await two.keys.step()
    signed = await one.sign_in(token=token)
    assert two.keys.identify_session(signed.secret) is None
    await two.keys.look_again(signed.secret)
    assert two.keys.identify_session(signed.secret) == signed.caller
    assert two.keys.identify(signed.secret) is None


@pytest.mark.parametrize("how", ["sign out", "revoke", "expire", "replace"])
async def test_a_session_that_ends_is_refused_by_the_other_frontend_after_its_next_look(
    pair: tuple[Side, Side], how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = pair
    await one.caller()  # the last admin token is not revoked
    token, admin = await one.caller(ttl_seconds=3600.0 if how == "expire" else 0.0)
    given = await one.keys.create("admin", "given", "g" * 40)
    token = given.token if how == "replace" else token
    typed = await one.sign_in(token=token)
    linked = typed
    if how != "replace":
        linked = await two.sign_in((await one.sessions.make_code(admin, "viewer")).code)
    await two.keys.watch_step()
    for session in (typed, linked):
        assert two.keys.identify_session(session.secret) is not None
    match how:
        case "sign out":
            for session in (typed, linked):
                await one.sessions.end(session.caller.session_id)
        case "revoke":
            await one.keys.revoke(admin.token_id)
        case "replace":
            await one.keys.create("admin", "given", "h" * 40)
        case _:
            assert typed.caller.expires_at <= admin.expires_at
            later(monkeypatch, 3601)
            await one.keys.step()
            await two.keys.step()
    await two.keys.watch_step()
    for side in pair:
        for session in (typed, linked):
            assert side.keys.identify_session(session.secret) is None
    assert await one.sessions.every() == []


async def test_a_code_expires_and_counts_only_with_its_token(
    pair: tuple[Side, Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = pair
    await one.caller()
    _, admin = await one.caller()
    revoked, old, fresh = [(await one.sessions.make_code(admin, "admin")).code for _ in range(3)]
    assert isinstance(await two.sign_in(fresh), SignedIn)
    await one.keys.revoke(admin.token_id)
    with pytest.raises(Unauthenticated):
        await two.sign_in(revoked)
    _, admin = await one.caller()
    old = (await one.sessions.make_code(admin, "admin")).code
    later(monkeypatch, CODE_SECONDS + 1)
    with pytest.raises(Unauthenticated):
        await two.sign_in(old)


async def test_a_session_lives_as_long_as_the_setting_says_or_its_token(pair: tuple[Side, Side]) -> None:
    one, _ = pair
    for ttl, lives in ((0.0, WEEK), (60.0, 60.0)):
        token, _ = await one.caller(ttl_seconds=ttl)
        signed = await one.sign_in(token=token)
        assert lives - 5 < signed.caller.expires_at - one.keys.now() <= lives


async def test_only_tokens_of_people_sign_in(pair: tuple[Side, Side]) -> None:
    one, _ = pair
    for role in ("user", "join"):
        token, _ = await one.caller(role)
        with pytest.raises(Denied, match="admin token"):
            await one.sign_in(token=token)
    token, caller = await one.caller("viewer")
    assert (await one.sign_in(token=token)).caller.role == "viewer"
    with pytest.raises(Invalid):
        await one.sessions.make_code(caller, "join")
    with pytest.raises(NotFound):
        await one.sessions.end(caller.token_id)


async def test_a_token_has_a_bounded_number_of_sessions_and_codes(pair: tuple[Side, Side]) -> None:
    one, _ = pair
    token, admin = await one.caller()
    signed = [await one.sign_in(token=token) for _ in range(MOST_SESSIONS + 2)]
    listed = await one.sessions.every()
    assert [row.id for row in listed] == [session.caller.session_id for session in signed[2:]]
    codes = [(await one.sessions.make_code(admin, "viewer")).code for _ in range(MOST_CODES + 1)]
    with pytest.raises(Unauthenticated):
        await one.sign_in(codes[0])
    assert isinstance(await one.sign_in(codes[1]), SignedIn)


async def test_what_has_ended_is_pruned_and_tokens_are_not(
    pair: tuple[Side, Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, _ = pair
    await one.caller()
    token, admin = await one.caller()
    revoked, gone = await one.caller()
    await one.sign_in(token=revoked)
    await one.keys.revoke(gone.token_id)
    await one.sign_in(token=token)
    await one.sessions.make_code(admin, "viewer")

    def prune(connection: Connection) -> int:
        return sessions.prune(connection, db.now(connection))

    assert await one.store.transaction(prune) == 1  # that of the revoked token
    assert await one.store.transaction(prune) == 0
    later(monkeypatch, CODE_SECONDS + 1)
    assert await one.store.transaction(prune) == 1
    later(monkeypatch, WEEK + 1)
    await one.sessions.prune_step()
    assert await one.store.transaction(prune) == 0
    assert len(await one.store.read(keys.every)) == 3


async def test_many_failures_stop_an_address_for_the_rest_of_the_minute(pair: tuple[Side, Side]) -> None:
    one, _ = pair
    for _ in range(MOST_FAILURES):
        with pytest.raises(Unauthenticated):
            await one.sign_in("wrong")
    with pytest.raises(RateLimited) as caught:
        await one.sign_in("wrong")
    assert caught.value.retry_after_seconds is not None
    assert 1 <= caught.value.retry_after_seconds <= WINDOW_SECONDS


def test_failures_are_counted_per_address_and_minute() -> None:
    limit = SignInLimit()
    for second in range(MOST_FAILURES):
        assert limit.begin("10.0.0.1", float(second)) == 0.0
    assert limit.begin("10.0.0.1", 20.0) == WINDOW_SECONDS - 20.0
    assert limit.begin("10.0.0.2", 20.0) == 0.0
    limit.forgive("10.0.0.1")
    assert limit.begin("10.0.0.1", 21.0) == 0.0
    assert limit.begin("10.0.0.1", 22.0) > 0.0
    assert limit.begin("10.0.0.1", WINDOW_SECONDS) == 0.0


def test_the_addresses_of_one_network_are_one_and_few_are_remembered() -> None:
    limit = SignInLimit()
    for number in range(MOST_FAILURES):
        assert limit.begin(f"2001:db8::{number:x}", 0.0) == 0.0
    assert limit.begin("2001:db8::ffff", 0.0) > 0.0
    assert limit.begin("2001:db8:0:1::1", 0.0) == 0.0
    assert limit.begin("::ffff:10.0.0.1", 0.0) == limit.begin("not an address", 0.0) == 0.0
    for number in range(MOST_ADDRESSES):
        limit.begin(f"host-{number}", 0.0)
    assert limit.begin("2001:db8::1", 0.0) == 0.0, "forgotten"
