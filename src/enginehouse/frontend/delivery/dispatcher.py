"""Sends due intents to all nodes at once, and never waits for a reply.

Each step claims the due intents of all healthy nodes in one transaction (a new attempt with a new fence) and publishes
them without awaiting replies; the collector stores those. The dispatcher also renews this frontend's leases, takes over
intents whose lease ended, and sets the intents of absent nodes to waiting. It sends only what it has claimed, so each
intent is sent once per attempt, however many frontends run.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

from enginehouse.core import subjects
from enginehouse.core.action import phrase
from enginehouse.core.errors import Conflict, EnginehouseError, can_heal
from enginehouse.core.ids import IntentId, OperationId
from enginehouse.core.intent import Change, Intent, Outcome
from enginehouse.core.operation import wait_for_node
from enginehouse.core.peer import FilePeer
from enginehouse.frontend.delivery.messages import encode_cancel, encode_command, encode_forced
from enginehouse.frontend.delivery.peers import peers_of
from enginehouse.frontend.fleet.nodes import ANYWHERE, AddressRules
from enginehouse.frontend.watching.board import Board
from enginehouse.ports import Bus
from enginehouse.store import claims, db, operations
from enginehouse.store.db import Connection, Store

log = logging.getLogger(__name__)

CLAIM_LIMIT = 250  # per step, about a quarter of a second; the next step starts at once and takes the rest
BUS_RETRY_SECONDS = 1.0  # nothing was sent, so a retry is cheap

_Peers = Mapping[IntentId, tuple[FilePeer, ...]]


class CarriedCommands(Protocol):
    """Commands that a frontend carries out itself, because their workers do not know them (`frontend.localai`)."""

    def among(self, connection: Connection, claimed: Sequence[Intent]) -> set[IntentId]: ...

    def wake(self) -> None: ...


class _Claimed(NamedTuple):
    """The claimed intents with their operations, the changed ones, those not sent, and who has files."""

    claimed: list[tuple[Intent, OperationId]]
    changed: list[Intent]
    carried: set[IntentId]
    peers: _Peers


class Dispatcher:
    def __init__(
        self,
        store: Store,
        bus: Bus,
        board: Board,
        *,
        owner: str,
        lease_seconds: float,
        addresses: AddressRules = ANYWHERE,
    ) -> None:
        self._carried: CarriedCommands | None = None
        self._store = store
        self._bus = bus
        self._board = board
        self.owner = owner
        self._lease_seconds = lease_seconds
        self._addresses = addresses
        self._wake_again: Callable[[], None] = lambda: None

    def on_more(self, wake: Callable[[], None]) -> None:
        """Set the callback for a step that left due intents for the next one."""
        self._wake_again = wake

    def carry_with(self, carried: CarriedCommands | None) -> None:
        """Set who carries out the commands that are not sent."""
        self._carried = carried

    async def step(self) -> None:
        if not self._bus.is_connected:
            # A claim without a connection would only use up attempts.
            return
        found = await self._store.transaction(self._claim)
        claimed, changed = found.claimed, found.changed
        if found.carried and self._carried is not None:
            self._carried.wake()
        unsent: list[tuple[Intent, EnginehouseError]] = []
        for intent, operation_id in claimed:
            self._board.expect(intent, operation_id)
            peers = found.peers.get(intent.id, ())
            error = None if intent.id in found.carried else await self._send(intent, operation_id, peers)
            if error is not None:
                unsent.append((intent, error))
        if unsent:
            await self._store.transaction(lambda connection: _give_back(connection, unsent))
        await self._board.intents_changed([intent for intent, _ in claimed] + changed)
        if len(claimed) >= CLAIM_LIMIT:
            self._wake_again()

    async def _send(
        self, intent: Intent, operation_id: OperationId, peers: tuple[FilePeer, ...]
    ) -> EnginehouseError | None:
        try:
            sent = encode_command(intent, operation_id, peers)
            reply = subjects.reply_subject(intent.node_id, intent.id, intent.attempt)
            await self._bus.publish(sent.subject, sent.payload, reply)
        except EnginehouseError as error:
            return error
        log.info(
            "intent.sent intent=%s node=%s attempt=%d action=%r",
            intent.id,
            intent.node_id,
            intent.attempt,
            phrase(intent.action),
        )
        return None

    async def send_forced(self, intents: Sequence[Intent]) -> None:
        """Send the same attempt again as a forced install, for workers that do not know upgrades."""
        ids = [intent.id for intent in intents]
        first = await self._store.transaction(lambda connection: operations.first_of_intents(connection, ids))
        unsent: list[tuple[Intent, EnginehouseError]] = []
        for intent in intents:
            reply = subjects.reply_subject(intent.node_id, intent.id, intent.attempt, is_forced=True)
            try:
                sent = encode_forced(intent, first.get(intent.id, OperationId(intent.id)))
                await self._bus.publish(sent.subject, sent.payload, reply)
            except EnginehouseError as error:
                unsent.append((intent, error))
            else:
                log.info("intent.sent_forced intent=%s node=%s attempt=%d", intent.id, intent.node_id, intent.attempt)
        if unsent:
            await self._store.transaction(lambda connection: _give_back(connection, unsent))

    async def send_cancels(self, intents: Iterable[Intent]) -> None:
        """Tell workers to stop cancelled intents. A worker that misses the message gets it with the next heartbeat."""
        for intent in intents:
            sent = encode_cancel(intent)
            try:
                await self._bus.publish(sent.subject, sent.payload)
            except EnginehouseError as error:
                log.warning("cancel.not_sent intent=%s error=%s", intent.id, error)

    async def renew_step(self) -> None:
        """Renew this frontend's leases and take over intents whose lease ended."""
        if not self._bus.is_connected:
            # Without the bus it receives no replies, and a valid lease keeps other frontends from storing them.
            return

        def work(connection: Connection) -> list[Intent]:
            until = db.now(connection) + self._lease_seconds
            claims.renew(connection, self.owner, until)
            return claims.take_over(connection, self.owner, db.now(connection), until)

        taken = await self._store.transaction(work)
        if taken and self._carried is not None:
            self._carried.wake()
        for intent in taken:
            log.info("intent.taken_over intent=%s node=%s fence=%d", intent.id, intent.node_id, intent.fence)

    def _claim(self, connection: Connection) -> _Claimed:
        now = db.now(connection)
        if not claims.is_any_to_move(connection, now):
            return _Claimed([], [], set(), {})
        # Running intents of an offline node wait, due as soon as the node is healthy again.
        changed = claims.park_absent(connection, wait_for_node(now))
        claimed = claims.claim_due(connection, self.owner, now, now + self._lease_seconds, CLAIM_LIMIT)
        # Workers report progress under the id of the first operation of an intent.
        first = operations.first_of_intents(connection, [intent.id for intent in claimed])
        carried = self._carried.among(connection, claimed) if self._carried is not None else set()
        return _Claimed(
            claimed=[(intent, first.get(intent.id, OperationId(intent.id))) for intent in claimed],
            changed=changed,
            carried=carried,
            peers=peers_of(connection, claimed, self._addresses),
        )


def _give_back(connection: Connection, unsent: list[tuple[Intent, EnginehouseError]]) -> None:
    """Set unsent intents to waiting; fail those that no bus would accept, such as a message that is too large."""
    now = db.now(connection)
    for intent, error in unsent:
        if can_heal(error):
            due = now + BUS_RETRY_SECONDS
            change = Change(kind="wait", now=now, reason=error.code, message=error.message, due_at=due)
        else:
            outcome = Outcome(code=error.code, message=error.message)
            change = Change(kind="fail", now=now, reason=error.code, message=error.message, outcome=outcome)
        try:
            operations.apply(connection, intent, change)
        except Conflict:
            continue  # cancelled or superseded meanwhile
    operations.note_ended(connection, [intent.id for intent, _ in unsent])
