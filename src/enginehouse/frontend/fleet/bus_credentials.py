"""Issues bus credentials to nodes, and revokes them.

A credential is valid for an hour and is renewed with a heartbeat. The store keeps its public key for as long, so that
removing a node or withdrawing its approval revokes its credentials: the frontend beside the embedded server sends the
revocations to the server, which closes the connections. On other servers a credential expires by itself. Revocation is
level-triggered: the whole list is sent whenever the list or the server is new.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence

from msgspec import Struct

from enginehouse.core.ids import NodeId
from enginehouse.core.node import Node
from enginehouse.core.node_api import BusCredential
from enginehouse.frontend.fleet.shared_transactions import Performed, SharedTransactions
from enginehouse.store import bus_credentials, db
from enginehouse.store.db import Connection, Store

log = logging.getLogger(__name__)

STEP_SECONDS = 2.0  # a removed node is disconnected within five seconds, whichever frontend removed it
PRUNE_SECONDS = 60.0
MOST_AT_ONCE = 200
REFRESHED = (0.7, 1.3)  # of a credential's lifetime: when LocalAI's workers register again only to renew it


class Minted(Struct, frozen=True):
    jwt: str
    seed: str
    user: str  # its public key
    expires_at: float  # in seconds since 1970


class BusIssuer(Struct, frozen=True, kw_only=True):
    """How credentials for the bus are made and revoked. The default is a bus that takes anonymous clients."""

    # Makes the credential of a node; None if workers bring their own.
    mint: Callable[[NodeId], Awaitable[Minted]] | None = None
    life_seconds: float = 3600.0
    # The address of the bus for a worker that reached this frontend at the given host name.
    url_for: Callable[[str], str] = lambda host: ""
    revoke: Callable[[Mapping[str, int]], Awaitable[None]] | None = None  # None unless the server is the embedded one


class _Issued(Struct, frozen=True):
    node_id: NodeId
    minted: Minted


def _record(connection: Connection, issued: Sequence[_Issued]) -> Performed[bool, None]:
    now = db.now(connection)
    for one in issued:
        bus_credentials.insert(connection, one.minted.user, one.node_id, now, one.minted.expires_at)
    return Performed([True] * len(issued), None)


async def _publish_nothing(_effects: None) -> None:
    pass


class BusCredentials:
    def __init__(self, store: Store, issuer: BusIssuer, *, wall: Callable[[], float]) -> None:
        """`wall` is the clock that the bus server uses for the expiry of a credential."""
        self._store = store
        self._mint = issuer.mint
        self._life_seconds = issuer.life_seconds
        self._url_for = issuer.url_for
        self._revoke = issuer.revoke
        self._wall = wall
        self._told: dict[str, int] = {}
        self._is_told = False
        self._pruned_at = -math.inf
        # A thousand machines that come back at once get one each.
        self.transactions = SharedTransactions(store, _record, _publish_nothing, most=MOST_AT_ONCE)

    async def issue(self, node: Node, host: str) -> BusCredential:
        """Issue a credential to an approved node that reached this frontend at `host`; its key is stored first."""
        if self._mint is None:
            return BusCredential(nats_url=self._url_for(host))
        made = await self._mint(node.id)
        await self.transactions.add(node.id, _Issued(node.id, made))
        return BusCredential(
            nats_jwt=made.jwt,
            nats_user_seed=made.seed,
            nats_url=self._url_for(host),
            nats_life_seconds=self._life_seconds,
        )

    async def is_refresh(self, node_id: NodeId) -> bool:
        """Whether the node's credential is about due: LocalAI's workers register again for that alone."""

        def work(connection: Connection) -> tuple[float | None, float]:
            return bus_credentials.newest(connection, node_id), db.now(connection)

        newest, now = await self._store.transaction(work)
        first, last = (share * self._life_seconds for share in REFRESHED)
        return newest is not None and first <= now - newest <= last

    def send_again(self) -> None:
        """Send the whole list again with the next step, because the server may be a new one."""
        self._is_told = False

    def has_told(self) -> bool:
        """Whether the server has the list of revocations as it was at the last step, and nothing is to be pruned."""
        return (self._revoke is None or self._is_told) and self._is_pruned(self._wall())

    def _is_pruned(self, now: float) -> bool:
        return 0 <= now - self._pruned_at < PRUNE_SECONDS

    async def step(self) -> None:
        """Send the revocations to the server if they changed."""
        now = self._wall()
        if not self._is_pruned(now):
            await self._store.transaction(lambda connection: bus_credentials.prune(connection, now))
            self._pruned_at = now
        if self._revoke is None:
            return
        found = await self._store.look(lambda connection: bus_credentials.revoked(connection, now))
        revoked = {user: int(ends_at) + 1 for user, ends_at in found.items()}
        if self._is_told and revoked == self._told:
            return
        if revoked or self._told:
            await self._revoke(revoked)
            log.info("bus.revoked count=%d", len(revoked))
        self._told, self._is_told = revoked, True
