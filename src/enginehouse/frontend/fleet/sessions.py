"""Sessions of people in browsers, and the one-use codes of login links that begin them.

A session comes from a token and ends with it, on every frontend within a second; `Keys` has all sessions in memory, so
a request of a browser asks no database. Nothing says which part of a refused sign-in was wrong.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import uuid
from typing import Literal

from msgspec import Struct

from enginehouse.core.errors import Denied, Invalid, NotFound, RateLimited, Unauthenticated
from enginehouse.core.name import shown
from enginehouse.frontend.fleet.nodes import token_hash
from enginehouse.frontend.fleet.sign_in_limit import SignInLimit
from enginehouse.frontend.fleet.tokens import Caller, Keys
from enginehouse.store import db, keys, sessions
from enginehouse.store.db import Connection, Store
from enginehouse.store.sessions import SessionRow

PersonRole = Literal["admin", "viewer"]
PERSON_ROLES: tuple[PersonRole, ...] = ("admin", "viewer")
CODE_SECONDS = 600.0  # long enough to find the other device
MOST_SESSIONS = 100  # of one token; a program that signs in again and again ends its own
MOST_CODES = 100
MAX_ADDRESS = 64  # characters; an IPv6 address with its zone is shorter
_CODE_BYTES = 18


class SignedIn(Struct, frozen=True):
    """A new session. The secret is for the cookie only."""

    caller: Caller
    secret: str


class LoginCode(Struct, frozen=True):
    code: str
    expires_at: float


class Sessions:
    def __init__(self, store: Store, keys: Keys, session_seconds: float) -> None:
        self._store = store
        self._keys = keys
        self._session_seconds = session_seconds
        self._limit = SignInLimit()

    async def make_code(self, by: Caller, role: str) -> LoginCode:
        """Make a code that begins one session with this role. It counts as long as the token of its maker."""
        if role not in PERSON_ROLES:
            raise Invalid(
                f"cannot make a login link for the role {shown(role)}: use {' or '.join(PERSON_ROLES)}",
                code="unsupported",
                param="role",
            )
        code = secrets.token_urlsafe(_CODE_BYTES)

        def work(connection: Connection) -> float:
            now = db.now(connection)
            row = SessionRow(
                id=str(uuid.uuid4()),
                kind="login",
                role=role,
                name=by.name,
                hash=token_hash(code),
                created_at=now,
                expires_at=now + CODE_SECONDS,
                parent=by.token_id,
            )
            sessions.insert(connection, row, MOST_CODES)
            return row.expires_at

        return LoginCode(code, await self._store.transaction(work))

    async def sign_in(self, *, code: str = "", token: str = "", address: str, replaces: Caller | None) -> SignedIn:
        """Begin a session with a login code or with a token that a person typed. It takes the place of the one that
        this browser had.
        """
        running = asyncio.get_running_loop()
        wait = self._limit.begin(address, running.time())
        if wait:
            error = RateLimited("cannot sign in now: too many attempts from this address failed; try again in a minute")
            error.retry_after_seconds = self._limit.retry_seconds(wait)
            raise error
        grantor = await self._person(token) if token else None
        secret = secrets.token_urlsafe(32)

        def work(connection: Connection) -> SessionRow | None:
            now = db.now(connection)
            if grantor is None:
                taken = sessions.take_code(connection, token_hash(code))
                if taken is None or taken.expires_at <= now:
                    return None
                role, parent_id = taken.role, taken.parent
            else:
                role, parent_id = grantor.role, grantor.token_id
            parent = keys.one(connection, parent_id)
            if parent is None or not parent.is_valid(now):
                return None
            row = SessionRow(
                id=str(uuid.uuid4()),
                kind="session",
                role=role,
                name=parent.name,
                hash=token_hash(secret),
                created_at=now,
                expires_at=min(now + self._session_seconds, parent.expires_at or math.inf),
                parent=parent.id,
                address=address[:MAX_ADDRESS],
            )
            if replaces is not None:
                sessions.end(connection, session_id=replaces.session_id)
            sessions.insert(connection, row, MOST_SESSIONS)
            return row

        row = await self._store.transaction(work)
        if row is None:
            raise _refused()
        self._limit.forgive(address)
        await self._keys.step()
        caller = self._keys.identify_session(secret)
        if caller is None:
            raise _refused()  # its token was revoked at this moment
        return SignedIn(caller, secret)

    async def _person(self, token: str) -> Caller:
        caller = self._keys.identify(token)
        if caller is None:
            # Another frontend may have created it a moment ago.
            await self._keys.look_again(token)
            caller = self._keys.identify(token)
        if caller is None:
            raise _refused()
        if caller.role not in PERSON_ROLES:
            raise Denied(
                f"cannot sign in with a {caller.role} token: it takes an admin token, or a viewer token, which changes "
                "nothing (`enginehouse tokens create --role viewer`, or `enginehouse login-link` for a link)",
                param="token",
            )
        return caller

    async def end(self, session_id: str) -> None:
        """End a session on every frontend."""
        found = await self._store.transaction(lambda connection: sessions.end(connection, session_id=session_id))
        if not found:
            raise NotFound(f"cannot find a session {shown(session_id)}: it has ended, or never was")
        await self._keys.step()

    async def every(self) -> list[SessionRow]:
        return await self._store.read(lambda connection: sessions.every(connection, db.now(connection)))

    async def prune_step(self) -> None:
        await self._store.transaction(lambda connection: sessions.prune(connection, db.now(connection)))


def _refused() -> Unauthenticated:
    return Unauthenticated(
        "cannot sign in: this code or token is wrong, or was used already, or has expired; `enginehouse login-link` "
        "makes a new link"
    )
