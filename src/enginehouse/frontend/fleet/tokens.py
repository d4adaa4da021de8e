"""Tokens and their callers, cached in memory so that authentication does not wait for the database.

Only hashes are stored and cached. A lookup is by hash, so no comparison depends on the secret. A token that another
frontend creates is known here after at most one refresh.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import uuid
from typing import Literal

from msgspec import Struct

from enginehouse.core.errors import Conflict, Invalid, NotFound
from enginehouse.core.ids import NodeId
from enginehouse.core.name import check_name, shown
from enginehouse.frontend.fleet.nodes import token_hash
from enginehouse.store import db, keys, leases, nodes
from enginehouse.store.db import Connection, Store
from enginehouse.store.keys import TokenRow

Role = Literal["admin", "user", "join"]
ROLES: tuple[Role, ...] = ("admin", "user", "join")
MIN_TOKEN_LENGTH = 32  # 256 random bits are 43 characters; a much shorter token was made by hand
WATCH_SECONDS = 0.5  # a token revoked on another frontend is refused within a second
LOOK_AGAIN_SECONDS = 0.5  # between two reads for unknown tokens: each wrong token must not cost a query
_MAKING_SECONDS = 10.0  # lease on making the first token, for frontends that start together


def new_token(role: str) -> str:
    return f"eh-{role}-{secrets.token_urlsafe(32)}"


class Created(Struct, frozen=True):
    id: str
    role: str
    name: str
    token: str


class Caller(Struct, frozen=True):
    """The identity behind a token. `node_id` is set for a node's own token, `only_node` for a join token for one
    node only.
    """

    role: Literal["admin", "user", "join", "node"]
    name: str
    node_id: NodeId = NodeId("")
    token_id: str = ""
    only_node: str = ""
    has_previous: bool = False  # this is a node's newest token, and the previous one is still valid


class Keys:
    def __init__(self, store: Store) -> None:
        self._store = store
        self._callers: dict[str, Caller] = {}
        self._changes = ""
        self._looked_at = -math.inf
        self._looking = asyncio.Lock()

    async def look_again(self) -> None:
        """Read all tokens again for an unknown one, which another frontend may have just issued.

        Only a read that began after this call proves that a token is unknown. Concurrent calls share one read per half
        second.
        """
        running = asyncio.get_running_loop()
        asked_at = running.time()
        async with self._looking:
            if self._looked_at > asked_at:
                return
            await asyncio.sleep(max(0.0, self._looked_at + LOOK_AGAIN_SECONDS - running.time()))
            await self.step()

    def identify(self, token: str) -> Caller | None:
        return self._callers.get(token_hash(token))

    async def create(self, role: str, name: str | None, token: str | None = None, *, node: str = "") -> Created:
        """Create a token, or store a given one (from the settings or from a file).

        A given token replaces the token of the same role and name; a new one never does. Without a name, a unique name
        is made up. With `node`, the result is a join token for that node only.
        """
        if role not in ROLES:
            raise Invalid(
                f"cannot create a token with the role {shown(role)}: use {', '.join(ROLES)}", code="invalid_name"
            )
        row_id = str(uuid.uuid4())
        name = check_name(f"{role}-{row_id[:8]}" if name is None else name, "token")
        if node:
            check_name(node, "node")
            if role != "join":
                raise Invalid(
                    f"cannot create a {role} token for one node: only a join token can have a node",
                    code="unsupported",
                    param="node",
                )
        if token is not None and len(token) < MIN_TOKEN_LENGTH:
            raise Invalid(
                f"cannot use the {role} token: it has {len(token)} characters, at least {MIN_TOKEN_LENGTH} are needed",
                code="invalid_name",
            )
        given = token or new_token(role)
        hashed = token_hash(given)

        def work(connection: Connection) -> None:
            if token is not None:
                # Every start of every frontend stores it. The lease serializes them: otherwise each would find the row
                # that another put in place of the one it removed.
                now = db.now(connection)
                leases.acquire(connection, f"given-{role}-token", row_id, now, now)
                if any(one.revoked_at and one.hash == hashed for one in keys.every(connection)):
                    raise Conflict(
                        f"cannot use the {role} token from the settings or from {role}.token: it was revoked; set "
                        "another one, or remove the file to get a new one",
                        code="revoked",
                    )
                if any((one.role, one.name, one.hash) == (role, name, hashed) for one in keys.every(connection)):
                    return
                keys.remove_named(connection, role, name)
            for known in keys.every(connection):
                if (known.role, known.name) == (role, name) and not known.revoked_at:
                    raise Conflict(f"cannot create a second {role} token named {name}: choose another name")
                if known.hash == hashed:
                    raise Conflict(
                        f"cannot use the {role} token: it equals the {known.role} token {known.name}; use another"
                    )
            keys.insert(connection, TokenRow(row_id, role, name, hashed, db.now(connection), node))

        await self._store.transaction(work)
        await self.step()
        return Created(row_id, role, name, given)

    async def make_first(self, role: Role, token: str) -> bool:
        """Store `token` as the first of its role. Returns False if there is one, or another frontend is making it."""

        def work(connection: Connection) -> bool:
            now = db.now(connection)
            is_ours = leases.acquire(connection, f"first-{role}-token", token_hash(token), now, now + _MAKING_SECONDS)
            if not is_ours or any(row.role == role and not row.revoked_at for row in keys.every(connection)):
                return False
            keys.insert(connection, TokenRow(str(uuid.uuid4()), role, role, token_hash(token), now))
            return True

        made = await self._store.transaction(work)
        await self.step()
        return made

    async def revoke(self, name_or_id: str) -> TokenRow:
        """Revoke a token; it is refused at once here, and within a second by other frontends."""

        def work(connection: Connection) -> TokenRow:
            now = db.now(connection)
            # The lease serializes revocations: two at once could revoke the last two admin tokens.
            leases.acquire(connection, "revoking-tokens", name_or_id, now, now)
            valid = [row for row in keys.every(connection) if not row.revoked_at]
            found = [row for row in valid if row.id == name_or_id] or [row for row in valid if row.name == name_or_id]
            if not found:
                raise NotFound(f"cannot find a token {shown(name_or_id)}: `enginehouse tokens list` shows all tokens")
            if len(found) > 1:
                ids = ", ".join(f"{row.id} ({row.role})" for row in found)
                raise Conflict(
                    f"cannot choose a token named {shown(name_or_id)}: several have this name; use one of the ids {ids}"
                )
            (row,) = found
            if row.role == "admin" and sum(one.role == "admin" for one in valid) == 1:
                raise Conflict("cannot revoke the last admin token: create another admin token first")
            keys.revoke(connection, row.id, now)
            return row

        row = await self._store.transaction(work)
        await self.step()
        return row

    async def every(self) -> list[TokenRow]:
        """Return all tokens that are not revoked."""
        rows = await self._store.transaction(keys.every)
        return [row for row in rows if not row.revoked_at]

    async def step(self) -> None:
        """Read all tokens again."""

        def work(connection: Connection) -> tuple[dict[str, Caller], str]:
            callers = {
                row.hash: Caller(row.role, row.name, token_id=row.id, only_node=row.node)  # type: ignore[arg-type]
                for row in keys.every(connection)
                if not row.revoked_at
            }
            for node in nodes.tokens(connection):
                if node.previous:
                    callers[node.previous] = Caller("node", node.name, node.node_id)
                callers[node.hash] = Caller("node", node.name, node.node_id, has_previous=bool(node.previous))
            return callers, keys.changes(connection)

        began_at = asyncio.get_running_loop().time()
        self._callers, self._changes = await self._store.transaction(work)
        self._looked_at = began_at  # set only after success: a failed read proves nothing

    async def watch_step(self) -> None:
        """Read all tokens again if one was created or revoked on any frontend."""
        if await self._store.transaction(keys.changes) != self._changes:
            await self.step()
