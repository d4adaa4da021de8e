"""Lets loops rest while nothing happens: one statement per second says for all of them whether anything changed or is
due.

Hints and wakes only make that faster. Who is woken always takes its own step and reads for itself, so a glance decides
nothing but whether to look. One that is too old says nothing: then every loop goes on as if there were none.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from msgspec import Struct

from enginehouse.frontend.fleet.bus_credentials import BusCredentials
from enginehouse.frontend.fleet.tokens import Keys
from enginehouse.frontend.localai.carrier import Carrier
from enginehouse.frontend.localai.poller import Poller
from enginehouse.frontend.serving.reconciler import Reconciler
from enginehouse.frontend.serving.router import Router
from enginehouse.frontend.watching.board import Board
from enginehouse.loop import Loop
from enginehouse.store import checksums
from enginehouse.store.checksums import ServingChecksums
from enginehouse.store.db import Connection, Store
from enginehouse.store.glance import Glance, glance

GLANCE_SECONDS = 0.75  # a token revoked on another frontend is refused within a second
FRESH_SECONDS = 1.5  # that a glance counts
CHECKSUM_SECONDS = 5.0  # between two readings of all checksums
FRESH_CHECKSUM_SECONDS = 7.5
# A change is dated before it is committed, and may be visible so much later.
SETTLED_SECONDS = 10.0
# What these do must not wait for their own interval.
_WOKEN = ("dispatch", "catch-up", "watch-keys", "revoke")
_WOKEN_BY_CHECKSUMS = ("route", "reconcile", "keys")


class QuietParts(Struct, frozen=True, kw_only=True):
    """What knows whether there is anything to do."""

    store: Store
    board: Board
    keys: Keys
    router: Router
    reconciler: Reconciler
    poller: Poller
    bus_credentials: BusCredentials
    carrier: Carrier | None = None


class _Seen(Struct, frozen=True):
    glance: Glance
    at: float  # by the clock of the event loop, before it was read


class _SeenChecksums(Struct, frozen=True):
    serving: ServingChecksums
    node_tokens: int
    now: float
    at: float


class QuietLoops:
    def __init__(self, parts: QuietParts) -> None:
        self._parts = parts
        self._seen: _Seen | None = None
        self._checksums: _SeenChecksums | None = None
        self._nodes_changed_at = 0.0
        self._loops: dict[str, Loop] = {}
        self._checks: dict[str, Callable[[], bool]] = {
            "dispatch": self._has_nothing_due,
            "catch-up": self._has_told,
            "watch-keys": self._knows_keys,
            "renew": lambda: self._has_none(lambda seen: seen.has_running),
            "load": lambda: self._has_none(lambda seen: seen.has_steered),
            "canary": lambda: self._has_none(lambda seen: seen.has_canaries),
            "poll": lambda: parts.poller.is_idle and self._has_none(lambda seen: seen.has_keyless),
            "revoke": self._has_revoked,
            "route": self._has_routes,
            "reconcile": self._has_reconciled,
            "keys": self._knows_tokens,
        }
        if parts.carrier is not None:
            parts.carrier.rest_while(self._checks["renew"])

    def hold(self, loops: Iterable[Loop]) -> None:
        """Let these loops rest, those that may."""
        for loop in loops:
            if loop.name in self._checks:
                self._loops[loop.name] = loop
                loop.rest_while(self._checks[loop.name])

    async def step(self) -> None:
        """Look once for all loops, and wake those that have something to do."""
        began = asyncio.get_running_loop().time()
        before, old = self._seen, self._checksums
        is_due = old is None or began - old.at >= CHECKSUM_SECONDS

        def work(connection: Connection) -> tuple[Glance, ServingChecksums | None, int]:
            seen = glance(connection)
            if not is_due:
                return seen, None, 0
            return seen, checksums.of_serving(connection), checksums.of_node_tokens(connection)

        seen, serving, tokens = await self._parts.store.look(work)
        idle_before = [name for name in _WOKEN if name in self._loops and self._checks[name]()]
        self._seen = _Seen(seen, began)
        self._parts.keys.note_time(seen.now, began)
        nodes = seen.nodes_at, seen.node_count
        if before is None or nodes != (before.glance.nodes_at, before.glance.node_count):
            self._nodes_changed_at = began
        # What is not idle any more. What was not before goes on by itself, and not more often because of this.
        self._wake(idle_before)
        if serving is not None:
            self._checksums = _SeenChecksums(serving, tokens, seen.now, began)
            self._wake(_WOKEN_BY_CHECKSUMS)

    def _wake(self, names: Iterable[str]) -> None:
        for name in names:
            if name in self._loops and not self._checks[name]():
                self._loops[name].wake()

    def _fresh(self) -> Glance | None:
        return self._seen.glance if self._seen is not None and _age(self._seen.at) <= FRESH_SECONDS else None

    def _fresh_checksums(self) -> _SeenChecksums | None:
        seen = self._checksums
        return seen if seen is not None and _age(seen.at) <= FRESH_CHECKSUM_SECONDS else None

    def _has_none(self, has: Callable[[Glance], bool]) -> bool:
        seen = self._fresh()
        return seen is not None and not has(seen)

    def _has_nothing_due(self) -> bool:
        seen = self._fresh()
        return seen is not None and not seen.has_parted and self._parts.keys.now() < seen.due_at

    def _has_told(self) -> bool:
        return self._has_none(lambda seen: not self._parts.board.has_told(seen))

    def _knows_keys(self) -> bool:
        return self._has_none(lambda seen: not self._parts.keys.knows_changes(seen.token_changes))

    def _has_revoked(self) -> bool:
        """Whether no node was removed or lost its approval since the last step, as far as that is visible by now."""
        is_settled = self._fresh() is not None and _age(self._nodes_changed_at) >= SETTLED_SECONDS
        return is_settled and self._parts.bus_credentials.has_told()

    def _has_routes(self) -> bool:
        seen = self._fresh_checksums()
        return seen is not None and self._parts.router.confirm(seen.serving, seen.now, seen.at)

    def _has_reconciled(self) -> bool:
        seen = self._fresh_checksums()
        return seen is not None and self._parts.reconciler.rests_at(seen.serving, self._parts.keys.now())

    def _knows_tokens(self) -> bool:
        seen = self._fresh_checksums()
        return seen is not None and self._parts.keys.knows_tokens(seen.node_tokens) and self._knows_keys()


def _age(at: float) -> float:
    return asyncio.get_running_loop().time() - at
