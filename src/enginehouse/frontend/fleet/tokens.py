"""Tokens and their callers, cached in memory so that authentication does not wait for the database.

Only hashes are stored and cached. A lookup is by hash, so no comparison depends on the secret. A token that another
frontend creates is known here after at most one refresh. A node whose token changed is read alone, and an unknown token
is looked for alone: with many nodes, one of them registers at any time. Expiry is a time of the store's clock; it is
compared with an estimate of that clock, which every refresh sets again. Sessions of people are known here too, apart
from tokens: the secret of one is good in a cookie only, and a token in none.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import uuid
from typing import Literal, NamedTuple

import msgspec
from msgspec import Struct

from enginehouse.core.allowance import Allowance
from enginehouse.core.errors import Conflict, Invalid, NotFound
from enginehouse.core.ids import NodeId
from enginehouse.core.name import check_name, shown
from enginehouse.frontend.fleet.nodes import token_hash
from enginehouse.store import checksums, db, keys, leases, nodes, sessions
from enginehouse.store.db import Connection, Store
from enginehouse.store.keys import TokenRow
from enginehouse.store.nodes import NodeToken
from enginehouse.store.sessions import SessionRow

Role = Literal["admin", "viewer", "user", "join"]
ROLES: tuple[Role, ...] = ("admin", "viewer", "user", "join")
MIN_TOKEN_LENGTH = 32  # 256 random bits are 43 characters; a much shorter token was made by hand
WATCH_SECONDS = 0.5  # a token revoked on another frontend is refused within a second
LOOK_AGAIN_SECONDS = 0.5  # between two reads for unknown tokens: each wrong token must not cost a query
MAX_TTL_SECONDS = 10 * 365 * 86400.0  # a longer one is a typing error
MAX_KEEP_SECONDS = 30 * 86400.0  # that an old secret counts beside the new one
USES_SECONDS = 10.0  # between two writings of which tokens were used
_MAKING_SECONDS = 10.0  # lease on making the first token, for frontends that start together


TOKEN_START = "eh-"  # of every token that this program makes, so that others are recognized as foreign


def new_token(role: str) -> str:
    return f"{TOKEN_START}{role}-{secrets.token_urlsafe(32)}"


class Created(Struct, frozen=True):
    id: str
    role: str
    name: str
    token: str
    expires_at: float = 0.0


class Rotated(Struct, frozen=True):
    row: TokenRow  # before
    token: str
    old_until: float  # when the old secret ends; 0 if it has ended


class TokenLimits(Struct, frozen=True, kw_only=True):
    """What a new token is limited to: a node, for join tokens; an allowance, for user tokens; a lifetime, for all."""

    node: str = ""
    allowance: Allowance | None = None
    ttl_seconds: float = 0.0  # 0 if it never expires


NO_LIMITS = TokenLimits()


class Caller(Struct, frozen=True):
    """Who is behind a token; a stranger has none. `node_id`: a node's own token; `only_node`: a join token for one
    node; `allowance`: its limits; `session_id`: a person with a session, whose token is the one that it came from.
    """

    role: Literal["admin", "viewer", "user", "join", "node", "stranger"]
    name: str
    node_id: NodeId = NodeId("")
    token_id: str = ""
    session_id: str = ""
    only_node: str = ""
    has_previous: bool = False  # this is a node's newest token, and the previous one is still valid
    allowance: Allowance | None = None
    expires_at: float = 0.0  # by the store's clock; 0 if never


class _ReadKeys(NamedTuple):
    callers: dict[str, Caller]
    sessions: dict[str, Caller]
    of_nodes: list[NodeToken]
    changes: str
    node_checksum: int
    now: float


class Keys:
    def __init__(self, store: Store) -> None:
        self._store = store
        self._callers: dict[str, Caller] = {}
        self._sessions: dict[str, Caller] = {}
        self._of_nodes: dict[NodeId, tuple[str, ...]] = {}  # the hashes of each node
        self._used: dict[str, float] = {}  # when tokens were used since that was last written, by the loop's clock
        self._sought: set[str] = set()  # hashes of unknown tokens, for the next look
        self._changes = ""
        self._node_tokens: int | None = None  # their checksum
        self._ahead_seconds = 0.0  # the store's clock is so far ahead of the loop's
        self._looked_at = -math.inf
        self._looking = asyncio.Lock()

    async def look_again(self, token: str) -> None:
        """Look for an unknown token or session, which another frontend may have just issued.

        Only a look that began after this call proves that it is unknown. Calls share one look per half second.
        """
        running = asyncio.get_running_loop()
        asked_at, hashed = running.time(), token_hash(token)
        self._sought.add(hashed)
        async with self._looking:
            if self._looked_at > asked_at:
                return
            await asyncio.sleep(max(0.0, self._looked_at + LOOK_AGAIN_SECONDS - running.time()))
            began_at = running.time()
            sought, self._sought = self._sought | {hashed}, set()
            await self._look_for(sought)
            self._looked_at = began_at  # set only after success: a failed read proves nothing

    async def _look_for(self, hashes: set[str]) -> None:
        def work(connection: Connection) -> tuple[list[TokenRow], list[SessionRow], list[NodeToken]]:
            now = db.now(connection)
            valid = [row for row in keys.among(connection, hashes) if row.is_valid(now)]
            return valid, sessions.among(connection, hashes, now), nodes.tokens_among(connection, hashes)

        found, of_people, of_nodes = await self._store.transaction(work)
        for row in found:
            self._callers.update(_callers_by_hash(row))
        self._sessions.update({row.hash: _person(row) for row in of_people})
        for node in of_nodes:
            self._put(node)

    def learn_node(self, node_id: NodeId, name: str, token: str) -> None:
        """A node was given this token here: it has no other one."""
        self._put(NodeToken(node_id, name, token_hash(token), ""))

    async def read_node(self, node_id: NodeId) -> None:
        """Read the tokens of one node, which changed."""
        node = await self._store.transaction(lambda connection: nodes.token_of(connection, node_id))
        self._put(node or NodeToken(node_id, "", "", ""))

    def _put(self, node: NodeToken) -> None:
        """Replace the tokens of a node."""
        for hashed in self._of_nodes.pop(node.node_id, ()):
            self._callers.pop(hashed, None)
        self._callers.update(made := _callers_of(node))
        self._of_nodes[node.node_id] = tuple(made)

    def now(self) -> float:
        """The store's clock as estimated at the last refresh, without asking the store."""
        return asyncio.get_running_loop().time() + self._ahead_seconds

    def identify(self, token: str) -> Caller | None:
        caller = self._unexpired(self._callers.get(token_hash(token)))
        if caller is not None and caller.token_id:
            self._used[caller.token_id] = asyncio.get_running_loop().time()
        return caller

    def identify_session(self, secret: str) -> Caller | None:
        """The person whose browser has this cookie."""
        return self._unexpired(self._sessions.get(token_hash(secret)))

    def _unexpired(self, caller: Caller | None) -> Caller | None:
        if caller is not None and caller.expires_at and caller.expires_at <= self.now():
            return None
        return caller

    async def create(
        self, role: str, name: str | None, token: str | None = None, *, limits: TokenLimits = NO_LIMITS
    ) -> Created:
        """Create a token, or store a given one (from the settings or from a file).

        A given token replaces the token of the same role and name; a new one never does. Without a name, a unique name
        is made up.
        """
        if role not in ROLES:
            raise Invalid(
                f"cannot create a token with the role {shown(role)}: use {', '.join(ROLES)}", code="invalid_name"
            )
        row_id = str(uuid.uuid4())
        name = check_name(f"{role}-{row_id[:8]}" if name is None else name, "token")
        _check_limits(role, limits)
        if token is not None and len(token) < MIN_TOKEN_LENGTH:
            raise Invalid(
                f"cannot use the {role} token: it has {len(token)} characters, at least {MIN_TOKEN_LENGTH} are needed",
                code="invalid_name",
            )
        given = token or new_token(role)
        hashed = token_hash(given)

        def work(connection: Connection) -> float:
            now = db.now(connection)
            expires_at = now + limits.ttl_seconds if limits.ttl_seconds else 0.0
            if token is not None:
                # Every start of every frontend stores it. The lease serializes them: otherwise each would find the row
                # that another put in place of the one it removed.
                leases.acquire(connection, f"given-{role}-token", row_id, now, now)
                if any(one.previous_hash == hashed and now < one.previous_until for one in keys.every(connection)):
                    return expires_at  # the token was rotated, and this secret counts for a while
                if any(one.revoked_at and one.hash == hashed for one in keys.every(connection)):
                    raise Conflict(
                        f"cannot use the {role} token from the settings or from {role}.token: it was revoked; set "
                        "another one, or remove the file to get a new one",
                        code="revoked",
                    )
                if any((one.role, one.name, one.hash) == (role, name, hashed) for one in keys.every(connection)):
                    return expires_at
                keys.remove_named(connection, role, name)
            for known in keys.every(connection):
                if (known.role, known.name) == (role, name) and known.is_valid(now):
                    raise Conflict(f"cannot create a second {role} token named {name}: choose another name")
                if known.hash == hashed:
                    raise Conflict(
                        f"cannot use the {role} token: it equals the {known.role} token {known.name}; use another"
                    )
            row = TokenRow(row_id, role, name, hashed, now, limits.node, 0.0, expires_at, limits.allowance)
            keys.insert(connection, row)
            return expires_at

        expires_at = await self._store.transaction(work)
        await self.step()
        return Created(row_id, role, name, given, expires_at)

    async def make_first(self, role: Role, token: str) -> bool:
        """Store `token` as the first of its role. Returns False if there is one, or another frontend is making it."""

        def work(connection: Connection) -> bool:
            now = db.now(connection)
            is_ours = leases.acquire(connection, f"first-{role}-token", token_hash(token), now, now + _MAKING_SECONDS)
            if not is_ours or any(row.role == role and row.is_valid(now) for row in keys.every(connection)):
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
            row, valid = _named(connection, name_or_id, now)
            lasting = [one for one in valid if one.role == "admin" and not one.expires_at]
            if lasting == [row]:
                raise Conflict(
                    "cannot revoke the last admin token that never expires: create another such admin token first"
                )
            keys.revoke(connection, row.id, now)
            return row

        row = await self._store.transaction(work)
        await self.step()
        return row

    async def rotate(self, name_or_id: str, *, keep_seconds: float = 0.0) -> Rotated:
        """Give a token a new secret; name, limits and usage stay. The old one ends at once, or after `keep_seconds`.

        Sessions that came from the token end: who had the old secret could have made them.
        """
        if not 0 <= keep_seconds <= MAX_KEEP_SECONDS:
            raise Invalid(
                f"cannot keep the old token so long: at most {MAX_KEEP_SECONDS / 86400:.0f} days",
                code="invalid_setting",
                param="keep_seconds",
            )

        def work(connection: Connection) -> tuple[TokenRow, str]:
            now = db.now(connection)
            leases.acquire(connection, "revoking-tokens", name_or_id, now, now)
            row, _ = _named(connection, name_or_id, now)
            if row.is_expired(now):
                raise Conflict(f"cannot rotate the {row.role} token {row.name}: it has expired; create another one")
            made = new_token(row.role)
            kept_until = now + keep_seconds if keep_seconds else 0.0
            keys.rotate(connection, row, token_hash(made), kept_until, now, str(uuid.uuid4()))
            sessions.end_of(connection, row.id)
            return row, made

        row, made = await self._store.transaction(work)
        await self.step()
        return Rotated(row=row, token=made, old_until=self.now() + keep_seconds if keep_seconds else 0.0)

    async def note_uses_step(self) -> None:
        """Write which tokens were used since the last step."""
        used, self._used = self._used, {}
        if used:
            at = {token_id: seconds + self._ahead_seconds for token_id, seconds in used.items()}
            await self._store.transaction(lambda connection: keys.note_used(connection, at))

    async def every(self) -> list[TokenRow]:
        """Return all tokens that are not revoked. Expired ones are among them: they explain why a client is refused."""
        rows = await self._store.read(keys.every)
        return [row for row in rows if not row.revoked_at]

    async def step(self) -> None:
        """Read all tokens and sessions again."""

        def work(connection: Connection) -> _ReadKeys:
            now = db.now(connection)
            callers: dict[str, Caller] = {}
            for row in keys.every(connection):
                callers |= _callers_by_hash(row) if row.is_valid(now) else {}
            people = {row.hash: _person(row) for row in sessions.every(connection, now)}
            of_nodes, checksum = nodes.tokens(connection), checksums.of_node_tokens(connection)
            return _ReadKeys(callers, people, of_nodes, keys.changes(connection), checksum, now)

        running = asyncio.get_running_loop()
        began_at = running.time()
        read = await self._store.look(work)
        self._callers, self._sessions = read.callers, read.sessions
        self._changes, self._node_tokens = read.changes, read.node_checksum
        self._of_nodes = {}
        for node in read.of_nodes:
            self._put(node)
        # The store read its clock later than that, so the estimate is never behind, and no token lives too long.
        self.note_time(read.now, began_at)
        self._looked_at = began_at  # set only after success: a failed read proves nothing

    async def watch_step(self) -> None:
        """Read all of them again if one was created or revoked on any frontend."""
        if not self.knows_changes(await self._store.look(keys.changes)):
            await self.step()

    def knows_changes(self, changes: str) -> bool:
        """Whether all tokens and sessions were read since they last changed."""
        return changes == self._changes

    def knows_tokens(self, checksum: int) -> bool:
        """Whether this is the checksum of the tokens of all nodes as they were last read."""
        return checksum == self._node_tokens

    def note_time(self, now: float, at: float) -> None:
        """The store's clock said `now`, and not before the loop's clock said `at`."""
        self._ahead_seconds = now - at


def _named(connection: Connection, name_or_id: str, now: float) -> tuple[TokenRow, list[TokenRow]]:
    """The token of this id or name, and all that are valid."""
    known = [row for row in keys.every(connection) if not row.revoked_at]
    valid = [row for row in known if row.is_valid(now)]
    # An expired token may have the name of a valid one, and is meant only by its id then.
    found = (
        [row for row in known if row.id == name_or_id]
        or [row for row in valid if row.name == name_or_id]
        or [row for row in known if row.name == name_or_id][:1]
    )
    if not found:
        raise NotFound(f"cannot find a token {shown(name_or_id)}: `enginehouse tokens list` shows all tokens")
    if len(found) > 1:
        ids = ", ".join(f"{row.id} ({row.role})" for row in found)
        raise Conflict(
            f"cannot choose a token named {shown(name_or_id)}: several have this name; use one of the ids {ids}"
        )
    return found[0], valid


def _callers_of(node: NodeToken) -> dict[str, Caller]:
    made = {node.previous: Caller("node", node.name, node.node_id)} if node.previous else {}
    if node.hash:
        made[node.hash] = Caller("node", node.name, node.node_id, has_previous=bool(node.previous))
    return made


def _callers_by_hash(row: TokenRow) -> dict[str, Caller]:
    """A token, and until its end the secret that it had before its rotation."""
    made = {row.hash: _caller(row)}
    if row.previous_hash and row.previous_until:
        until = min(row.previous_until, row.expires_at or math.inf)
        made[row.previous_hash] = msgspec.structs.replace(made[row.hash], expires_at=until)
    return made


def _caller(row: TokenRow) -> Caller:
    return Caller(
        row.role,  # type: ignore[arg-type]  # one of `ROLES`
        row.name,
        token_id=row.id,
        only_node=row.node,
        allowance=row.allowance,
        expires_at=row.expires_at,
    )


def _person(row: SessionRow) -> Caller:
    return Caller(
        row.role,  # type: ignore[arg-type]  # admin or viewer
        row.name,
        token_id=row.parent,
        session_id=row.id,
        expires_at=row.expires_at,
    )


def _check_limits(role: str, limits: TokenLimits) -> None:
    if limits.node:
        check_name(limits.node, "node")
        if role != "join":
            raise Invalid(
                f"cannot create a {role} token for one node: only a join token can have a node",
                code="unsupported",
                param="node",
            )
    if limits.allowance is not None and role != "user":
        raise Invalid(
            f"cannot limit a {role} token to models or to a rate: only a user token can have these limits",
            code="unsupported",
            param="role",
        )
    if not 0 <= limits.ttl_seconds <= MAX_TTL_SECONDS:
        raise Invalid(
            f"cannot create a token that lives for {limits.ttl_seconds:g} s: use 0 for ever, or at most ten years",
            code="unsupported",
            param="ttl_seconds",
        )
