"""Nodes: registration, approval and health. The only writer of those three facts.

A node is a name *and* a key: the same name with another key is another node that waits for its own approval. Silence
is measured by the store's clock, and only from the moment this frontend began to listen: a gap of the observer is no
evidence against a node.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import uuid
from collections.abc import Awaitable, Callable, Collection, Sequence
from hashlib import sha256

import msgspec
from msgspec import Struct

from enginehouse.core import capability
from enginehouse.core import node as node_core
from enginehouse.core.address import Endpoint, host_refusal, parse_endpoint, plain_host, replica_refusal
from enginehouse.core.capacity import capacity_of
from enginehouse.core.challenge import CODE as CHALLENGE_REFUSED
from enginehouse.core.challenge import LIFE_SECONDS as CHALLENGE_SECONDS
from enginehouse.core.challenge import challenge_hash, issued_at, make_challenge
from enginehouse.core.errors import Conflict, Denied, Invalid, NotFound, Unavailable
from enginehouse.core.ids import NodeId
from enginehouse.core.name import shown
from enginehouse.core.node import Health, Node, NodeType
from enginehouse.core.node_api import RegisterRequest
from enginehouse.core.node_identity import (
    JoinOrigin,
    approval_lost,
    check_fingerprint,
    claim_of,
    find_known,
    uninvited,
)
from enginehouse.core.report import Report
from enginehouse.frontend.fleet.registration import (
    MAX_LABELS,
    check_request,
    node_type_of,
    refused,
)
from enginehouse.frontend.watching.board import Board
from enginehouse.store import bus_credentials, challenges, db, gone_nodes, liveness, nodes, replicas
from enginehouse.store.db import Connection, Store
from enginehouse.store.liveness import Hearing, Liveness

log = logging.getLogger(__name__)

MAX_PENDING = 1000  # a leaked join token must not fill the database; the nodes silent for longest are removed
MAX_NAMED = 5  # nodes of one name that an error lists
# After a power cut a thousand machines register at once. Leases and claims must not wait behind all of them, nor
# requests for an interpreter that many threads share.
REGISTRATIONS_AT_ONCE = 2
REGISTRATION_WAIT_SECONDS = 8.0  # a worker waits a little longer for its answer
_WORSE: dict[Health, int] = {"healthy": 0, "unhealthy": 1, "offline": 2}
Verify = Callable[[str, bytes, str], bool]  # takes a public key, a message and its signature


class Registered(Struct, frozen=True):
    node: Node
    token: str
    now: float


def find_node(connection: Connection, name_or_id: str, *, pending: bool = False) -> Node:
    """Find a node by id, else by name.

    If several nodes have the name, the approved one is preferred, or with `pending` the one that waits: a join token
    must not make the name of an approved node ambiguous. If that leaves several, the id is required.
    """
    is_name = "\x00" not in name_or_id  # PostgreSQL refuses a query with NUL
    node = nodes.get(connection, NodeId(name_or_id)) if is_name else None
    if node is not None:
        return node
    named = nodes.by_name(connection, name_or_id) if is_name else []
    named = [one for one in named if one.approved != pending] or named
    if len(named) > 1:
        # Most recent heartbeat first: a running machine keeps registering.
        named.sort(key=lambda one: one.last_heartbeat, reverse=True)
        ids = ", ".join(f"{one.id} ({one.status})" for one in named[:MAX_NAMED])
        more = f" and {len(named) - MAX_NAMED} more" if len(named) > MAX_NAMED else ""
        raise Conflict(
            f"cannot choose a node named {shown(name_or_id)}: several have this name; use one of the ids {ids}{more}"
        )
    if not named:
        raise NotFound(
            f"cannot find a node named {shown(name_or_id)}: `enginehouse nodes list` shows all nodes",
            code="not_found",
            param="node",
        )
    return named[0]


def note_no_subscriber(connection: Connection, node_id: NodeId, now: float) -> bool:
    """Set a node to unhealthy because its subjects have no subscriber. Returns whether that is a change."""
    return nodes.set_health(connection, node_id, "unhealthy", now)


def health_of_heard(is_away: bool) -> Health:
    """The health of a node that sent a heartbeat.

    Without the bus it gets no commands and keeps its routes: it is unhealthy, and offline only when silent.
    """
    return "unhealthy" if is_away else "healthy"


def note_all_heard(connection: Connection, heard: Sequence[tuple[Node | Liveness, bool]], now: float) -> list[NodeId]:
    """Set the health of nodes that sent heartbeats, each with whether its bus is away. Returns those that changed."""
    news: list[NodeId] = []
    by_health: dict[Health, list[NodeId]] = {}
    for node, is_away in heard:
        health = health_of_heard(is_away)
        if node.health != health:
            by_health.setdefault(health, []).append(node.id)
        if node.health != health or node.bus_away != is_away:
            news.append(node.id)
        if node.bus_away != is_away:
            nodes.set_bus_away(connection, node.id, is_away, now)
    for health, node_ids in by_health.items():
        nodes.set_health_of_all(connection, node_ids, health, now)
    return news


def token_hash(token: str) -> str:
    # Tokens are 256 random bits and cannot be guessed, so a plain hash is enough.
    return sha256(token.encode()).hexdigest()


async def _resolve_nothing(_host: str) -> Collection[str]:
    return ()


class AddressRules(Struct, frozen=True):
    """The addresses that a node may advertise."""

    networks: tuple[str, ...] = ()  # within them a node may change its address without a new approval
    taken: frozenset[Endpoint] = frozenset()  # endpoints of the store, the bus and this frontend
    resolve: Callable[[str], Awaitable[Collection[str]]] = _resolve_nothing  # the addresses of a host name


ANYWHERE = AddressRules()
HERE = JoinOrigin()


def _claim(request: RegisterRequest, origin: JoinOrigin) -> str:
    return "" if request.public_key else claim_of(origin, request.address)


class Nodes:
    def __init__(
        self,
        store: Store,
        board: Board,
        *,
        stale_seconds: float,
        approve_keys: Collection[str],
        verify: Verify,
        wake: Callable[[], None],
        addresses: AddressRules = ANYWHERE,
    ) -> None:
        self._store = store
        self._board = board
        self._stale_seconds = stale_seconds
        self._approve_keys = frozenset(approve_keys)
        self._verify = verify
        self._wake = wake
        self.addresses = addresses
        self._resolve = addresses.resolve
        self._listening_since: float | None = None
        self._looked_at = 0.0
        self._doubted_since: float | None = None
        self._registering = asyncio.Semaphore(REGISTRATIONS_AT_ONCE)
        self._challenge_key: bytes | None = None
        self._challenges_pruned_at = 0.0
        # No node that sends heartbeats has the bus, so the fault is not this frontend's connection.
        self.is_bus_away = False

    async def challenge(self, now: float | None = None) -> str:
        """Return a challenge, which the worker signs in its next registration. With `now`, an estimate of the store's
        time, it costs no transaction: strangers may ask for one, and a thousand machines at once.
        """

        def work(connection: Connection) -> tuple[bytes, float]:
            return challenges.key(connection, secrets.token_bytes(32)), db.now(connection)

        if self._challenge_key is not None and now is not None:
            return make_challenge(self._challenge_key, secrets.token_urlsafe(16), now)
        key, at = await self._store.transaction(work)
        self._challenge_key = key
        return make_challenge(key, secrets.token_urlsafe(16), at)

    async def register(
        self, request: RegisterRequest, origin: JoinOrigin = HERE, *, is_invited: bool = True
    ) -> Registered:
        """Register a machine as a node. Returns its row and a new token, which replaces the previous one.

        Who comes without a join token (`is_invited`) must have the key of a node that was approved.
        """
        check_request(request)
        if not is_invited and not request.public_key:
            raise uninvited(request.name)
        node_type = node_type_of(request.node_type)
        await self._check_addresses(request, origin)
        message = b""
        if request.public_key:
            addresses = (request.address, request.http_address)
            message = node_core.registration_message(request.name, request.public_key, addresses, request.challenge)

        def work(connection: Connection) -> Registered:
            # Here, in a thread: signatures and random numbers give up the interpreter, which holds up requests.
            if request.public_key and not self._verify(request.public_key, message, request.signature):
                raise Denied(
                    f"cannot register {request.name}: its signature does not match its public key",
                    code="forbidden",
                )
            token = secrets.token_urlsafe(32)
            now = db.now(connection)
            named = nodes.by_name(connection, request.name)
            known = find_known(request.name, request.public_key, request.address, origin, named)
            if gone_nodes.is_rejected(connection, request.public_key):
                raise Denied(
                    f"cannot register {request.name}: an operator has rejected this machine. On the server, "
                    f"`enginehouse nodes reject {request.name} --undo` lets it ask again",
                    code="rejected",
                )
            if not is_invited and not self._is_welcome(request, known):
                raise uninvited(request.name)
            at = self._take_challenge(connection, request, known, now) if request.public_key else 0.0
            waits_for = self._waits_for(request, known)
            node = self._merged(request, node_type, known, now)
            node = msgspec.structs.replace(node, claim=_claim(request, origin), registered_at=at, waits_for=waits_for)
            if len(node.labels) > MAX_LABELS:
                raise refused(
                    request.name, f"it has more than {MAX_LABELS} labels, including those stored before", "labels"
                )
            if known is None:
                if not node.approved:
                    nodes.make_room(connection, MAX_PENDING)
                nodes.insert(connection, node, token_hash(token))
                return Registered(node, token, now)
            nodes.save(connection, node)
            nodes.set_token(connection, node.id, token_hash(token))
            if waits_for:
                nodes.set_pending(connection, node.id, waits_for, now)
                bus_credentials.revoke_of(connection, node.id)
                node = msgspec.structs.replace(node, approved=False)
            elif node.approved and not known.approved:
                nodes.set_approved(connection, node.id, now)
            if not node.approved:
                # A pending node sends no heartbeats, so its registrations show the operator that it is running.
                nodes.set_heartbeat(connection, node.id, node.capacity, now)
            return Registered(node, token, now)

        await self._wait_to_register(request.name)
        try:
            registered = await self._store.transaction(work)
        finally:
            self._registering.release()
        await self._board.node_changed(registered.node.id)
        return registered

    async def _wait_to_register(self, name: str) -> None:
        try:
            async with asyncio.timeout(REGISTRATION_WAIT_SECONDS):
                await self._registering.acquire()
        except TimeoutError as error:
            busy = Unavailable(f"cannot register {name}: too many machines register at this moment; try again soon")
            busy.retry_after_seconds = 2.0
            raise busy from error

    def _take_challenge(
        self, connection: Connection, request: RegisterRequest, known: Node | None, now: float
    ) -> float:
        """Use up the challenge of a registration, and return when it was issued.

        A challenge is valid once, and the registrations of one node are accepted in the order of their challenges: a
        registration that a frozen frontend delayed does not replace the token of a later one.
        """
        key = self._challenge_key or challenges.key(connection, secrets.token_bytes(32))
        at = issued_at(key, request.challenge, now)
        if not 0 <= now - self._challenges_pruned_at < CHALLENGE_SECONDS:
            challenges.prune(connection, now)
            self._challenges_pruned_at = now
        if not challenges.use(connection, challenge_hash(request.challenge), at + CHALLENGE_SECONDS):
            raise Conflict(
                f"cannot register {request.name}: its challenge was used before; get a new one", code=CHALLENGE_REFUSED
            )
        if known is not None and not nodes.take_registration(connection, known.id, at):
            raise Conflict(f"cannot register {request.name}: a later registration was accepted", code=CHALLENGE_REFUSED)
        return at

    async def _check_addresses(self, request: RegisterRequest, origin: JoinOrigin) -> None:
        for field in ("address", "http_address"):
            address = getattr(request, field)
            if not address:
                continue
            endpoint = parse_endpoint(address)
            hosts = [endpoint.host, *await self._resolve(endpoint.host)]
            why = host_refusal(hosts, may_be_loopback=origin.is_loopback)
            if any(Endpoint(plain_host(host), endpoint.port) in self.addresses.taken for host in hosts):
                why = why or f"the store, the bus or a frontend uses {address}"
            if why:
                raise Invalid(f"cannot register {request.name}: {why}", code="invalid_address", param=field)

    def replica_refusal(self, node: Node, address: str) -> str:
        """Return why a replica may not have this address, or "". LocalAI's workers use every port above their first."""
        return replica_refusal(address, node.address, self.addresses.taken, last_port=65535 if node.is_localai else 0)

    def _is_welcome(self, request: RegisterRequest, known: Node | None) -> bool:
        """Whether its key alone lets it in: that of a node that is or was approved, or one that operators named."""
        was_approved = known is not None and (known.approved or bool(known.waits_for))
        return was_approved or request.public_key in self._approve_keys

    def _waits_for(self, request: RegisterRequest, known: Node | None) -> str:
        """Return why a known node waits for a new approval; empty if it does not."""
        if known is None or request.public_key in self._approve_keys:
            return ""
        return approval_lost(known, request.address, self.addresses.networks) or (
            "" if known.approved else known.waits_for
        )

    def _merged(self, request: RegisterRequest, node_type: NodeType, known: Node | None, now: float) -> Node:
        approved = request.public_key in self._approve_keys if request.public_key else False
        platform = request.platform
        return Node(
            id=known.id if known else NodeId(str(uuid.uuid4())),
            name=request.name,
            node_type=node_type,
            public_key=request.public_key,
            approved=approved or (known is not None and known.approved),
            # Not healthy before its first heartbeat, which shows that it has subscribed.
            health=known.health if known else "offline",
            drained=known.drained if known else False,
            address=request.address,
            http_address=request.http_address,
            capability=request.capability or capability.capability_of(platform, request.gpu_vendor, request.total_vram),
            platform=platform,
            labels=(known.labels if known else {}) | request.labels,
            max_replicas_per_model=max(1, request.max_replicas_per_model),
            capacity=capacity_of(request),
            created_at=known.created_at if known else now,
            updated_at=now,
            last_heartbeat=known.last_heartbeat if known else now,
            report=known.report if known else Report(),
        )

    async def approve(self, name_or_id: str, fingerprint: str = "") -> tuple[Node, float]:
        """The approved node, and the store's time. With a `fingerprint`, only the node that has this key."""

        def work(connection: Connection) -> tuple[Node, float]:
            node, now = find_node(connection, name_or_id, pending=True), db.now(connection)
            check_fingerprint(node, fingerprint)
            if node.approved:
                raise Conflict(f"cannot approve {node.name}: it is approved already", code="already_approved")
            nodes.set_approved(connection, node.id, now)
            return msgspec.structs.replace(node, approved=True, waits_for=""), now

        node, now = await self._store.transaction(work)
        await self.publish_changed([node.id])
        return node, now

    async def resume(self, name_or_id: str) -> Node:
        """Let a drained node get work again."""

        def work(connection: Connection) -> Node:
            node = find_node(connection, name_or_id)
            nodes.set_drained(connection, node.id, False, db.now(connection))
            return msgspec.structs.replace(node, drained=False)

        node = await self._store.transaction(work)
        await self.publish_changed([node.id])
        return node

    async def rotate_token(self, node_id: NodeId, shown: str) -> str:
        """Return a new token. The old one counts until the new one is used, because the answer may be lost."""
        token = secrets.token_urlsafe(32)

        def work(connection: Connection) -> None:
            nodes.set_token(connection, node_id, token_hash(token), token_hash(shown))

        await self._store.transaction(work)
        return token

    async def forget_previous_token(self, node_id: NodeId) -> None:
        await self._store.transaction(lambda connection: nodes.forget_previous_token(connection, node_id))

    async def set_health(self, node_id: NodeId, health: Health) -> None:
        """Set the health of a node on positive evidence: its subjects have no subscriber, or it signed off."""

        def work(connection: Connection) -> bool:
            if health == "offline":
                replicas.remove_all_on(connection, node_id)
            return nodes.set_health(connection, node_id, health, db.now(connection))

        if await self._store.transaction(work):
            await self.publish_changed([node_id])

    async def publish_changed(self, node_ids: Collection[NodeId]) -> None:
        """Publish changed nodes, and wake the loops that depend on them."""
        if node_ids:
            await self._board.nodes_changed(node_ids)
            self._wake()

    async def every(self) -> tuple[list[Node], float]:
        return await self._store.read(lambda connection: (nodes.every(connection), db.now(connection)))

    async def get(self, name_or_id: str) -> tuple[Node, float]:
        return await self._store.transaction(lambda connection: (find_node(connection, name_or_id), db.now(connection)))

    async def step(self) -> None:
        """Update the health of nodes that are silent."""

        def work(connection: Connection) -> list[NodeId]:
            now = db.now(connection)
            judged = self._judged(connection, now)
            self.is_bus_away = liveness.every_bus_is_away(connection, now - self._stale_seconds)
            return [node_id for node_id, health in judged.items() if nodes.set_health(connection, node_id, health, now)]

        if not self._hears_all(await self._store.look(liveness.hearing)):
            await self.publish_changed(await self._store.transaction(work))

    def _hears_all(self, heard: Hearing) -> bool:
        """Whether no node is silent and none reports that its bus is away, as most of the time."""
        limit = heard.now - self._stale_seconds
        if heard.oldest_healthy <= limit or heard.oldest_unhealthy <= limit or heard.is_any_bus_away:
            return False
        self._note_look(heard.now)
        self._doubted_since, self.is_bus_away = None, False
        return True

    def _note_look(self, now: float) -> float:
        """Return since when this frontend has listened without a gap."""
        if self._listening_since is None or not 0 <= now - self._looked_at < self._stale_seconds / 2:
            # After a pause, an outage of the store or a clock jump, silence during that time proves nothing.
            self._listening_since = now
        self._looked_at = now
        return self._listening_since

    def _judged(self, connection: Connection, now: float) -> dict[NodeId, Health]:
        """Return the nodes whose health is worse than stored."""
        stale, listening_since = self._stale_seconds, self._note_look(now)
        judged: dict[NodeId, Health] = {}
        is_any_known = now - listening_since >= stale
        for node in liveness.silent(connection, now - stale, now - 2 * stale) if is_any_known else ():
            health = node_core.health_after(now - max(node.heard_at, listening_since), stale)
            if _WORSE[health] > _WORSE[node.health]:
                judged[node.id] = health
        lost = [node_id for node_id, health in judged.items() if health == "offline"]
        count = liveness.count_approved(connection) if len(lost) >= 3 else 0
        if len(lost) < 3 or 2 * len(lost) <= count:
            self._doubted_since = None
        elif self._doubted_since is None or now - self._doubted_since < stale:
            # The loss of most nodes at once is more likely a fault near this frontend: check again before acting.
            if self._doubted_since is None:
                self._doubted_since = now
                log.error("nodes.mass_loss lost=%d of=%d", len(lost), count)
            return {node_id: health for node_id, health in judged.items() if health != "offline"}
        return judged
