"""Requests and tokens per minute of limited tokens, over all frontends, without a database round trip per request.

Each frontend counts in memory and decides by what it knows: its own counts, and those of all frontends as of the last
exchange. The exchange is one transaction twice a second through the store, which every frontend reaches anyway and
which keeps the counts of a frontend that restarts; with no limited token in use there is none. Within one exchange
the frontends do not know of each other: a burst that begins on several of them at once may exceed the limit by what
each of them admits in half a second, and while the store is away each of them admits the limit. Requests count when
they are admitted; tokens count when the answer has ended, so answers under way may exceed the limit by their own size.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from msgspec import Struct

from enginehouse.core.allowance import Allowance
from enginehouse.core.rate import Remainder, oldest_step, remainder, step_of
from enginehouse.store import db, rates
from enginehouse.store.db import Connection, Store

SHARE_SECONDS = 0.5
_FORGET_EVERY = 120  # exchanges: once a minute while limited tokens are in use
_LATE_STEPS = 24  # rows are kept a little longer than they count, for frontends whose clock estimate is behind


class Admission(Struct, frozen=True):
    """Whether a request was admitted, and how the limits of its token stand after it; None where there is no limit."""

    requests: Remainder | None
    tokens: Remainder | None
    refused_by: str  # "requests", "tokens", or "" if it was admitted

    @property
    def wait_seconds(self) -> float:
        return max((one.wait_seconds for one in (self.requests, self.tokens) if one is not None), default=0.0)


class _Window:
    """The counts of one token by step: all that is known here, and the part that was not shared yet."""

    def __init__(self) -> None:
        self.requests: dict[int, int] = {}
        self.tokens: dict[int, int] = {}
        self.unshared: dict[int, tuple[int, int]] = {}

    def add(self, step: int, requests: int, tokens: int) -> None:
        self.requests[step] = self.requests.get(step, 0) + requests
        self.tokens[step] = self.tokens.get(step, 0) + tokens
        before = self.unshared.get(step, (0, 0))
        self.unshared[step] = (before[0] + requests, before[1] + tokens)

    def replace(self, found: dict[int, tuple[int, int]]) -> None:
        """Take the counts of the store, and add what is not in it yet."""
        self.requests = {step: counts[0] for step, counts in found.items()}
        self.tokens = {step: counts[1] for step, counts in found.items()}
        for step, (requests, tokens) in self.unshared.items():
            self.requests[step] = self.requests.get(step, 0) + requests
            self.tokens[step] = self.tokens.get(step, 0) + tokens

    def forget(self, before: int) -> bool:
        """Drop old steps; True if nothing is left."""
        self.requests = {step: count for step, count in self.requests.items() if step >= before}
        self.tokens = {step: count for step, count in self.tokens.items() if step >= before}
        self.unshared = {step: pair for step, pair in self.unshared.items() if step >= before}
        return not self.requests and not self.tokens


class RateLimits:
    def __init__(self, store: Store, now: Callable[[], float], wake: Callable[[], None]) -> None:
        """`now` estimates the store's clock without asking it; `wake` starts the next exchange at once."""
        self._store = store
        self._now = now
        self._wake = wake
        self._windows: dict[str, _Window] = {}
        self._exchanges = 0

    def admit(self, token_id: str, allowance: Allowance) -> Admission:
        """Count a request if it fits into the limits of its token."""
        now = self._now()
        window = self._windows.get(token_id)
        if window is None:
            window = self._windows[token_id] = _Window()
            self._wake()  # other frontends may have counted for this token
        requests, tokens = _remainders(window, allowance, now)
        refused_by = "requests" if _is_used_up(requests) else "tokens" if _is_used_up(tokens) else ""
        if not refused_by:
            window.add(step_of(now), 1, 0)
            requests, tokens = _remainders(window, allowance, now)
        return Admission(requests, tokens, refused_by)

    def count_tokens(self, token_id: str, tokens: int) -> None:
        """Count the tokens of an answer that has ended."""
        window = self._windows.get(token_id)
        if window is None:
            window = self._windows[token_id] = _Window()
        window.add(step_of(self._now()), 0, tokens)

    async def step(self) -> None:
        """Exchange counts with the other frontends, for the tokens that were used here in the last minute."""
        if not self._windows:
            return
        taken = {token_id: window.unshared for token_id, window in self._windows.items()}
        counts = {
            (token_id, step): pair for token_id, unshared in taken.items() for step, pair in sorted(unshared.items())
        }
        for window in self._windows.values():
            window.unshared = {}
        self._exchanges += 1
        forgets = self._exchanges % _FORGET_EVERY == 0

        def work(connection: Connection) -> tuple[dict[tuple[str, int], tuple[int, int]], float]:
            now = db.now(connection)
            rates.add(connection, counts)
            if forgets:
                rates.forget(connection, step_of(now) - _LATE_STEPS)
            return rates.since(connection, taken, oldest_step(now)), now

        is_shared = False
        try:
            found, now = await self._store.transaction(work)
            is_shared = True
        finally:
            if not is_shared:
                self._take_back(taken)
        self._learn(taken.keys(), found, now)

    def _take_back(self, taken: dict[str, dict[int, tuple[int, int]]]) -> None:
        """The exchange failed: share these counts with the next one, unless they no longer matter then."""
        oldest = oldest_step(self._now())
        for token_id, unshared in taken.items():
            window = self._windows[token_id]
            for step, (requests, tokens) in unshared.items():
                before = window.unshared.get(step, (0, 0))
                window.unshared[step] = (before[0] + requests, before[1] + tokens)
            if window.forget(oldest):
                del self._windows[token_id]

    def _learn(self, token_ids: Collection[str], found: dict[tuple[str, int], tuple[int, int]], now: float) -> None:
        by_token: dict[str, dict[int, tuple[int, int]]] = {}
        for (token_id, step), pair in found.items():
            by_token.setdefault(token_id, {})[step] = pair
        for token_id, window in list(self._windows.items()):
            if token_id in token_ids:
                window.replace(by_token.get(token_id, {}))
                if window.forget(oldest_step(now)):
                    del self._windows[token_id]


def _remainders(window: _Window, allowance: Allowance, now: float) -> tuple[Remainder | None, Remainder | None]:
    by_requests, by_tokens = allowance.requests_per_minute, allowance.tokens_per_minute
    return (
        remainder(window.requests, by_requests, now) if by_requests else None,
        remainder(window.tokens, by_tokens, now) if by_tokens else None,
    )


def _is_used_up(one: Remainder | None) -> bool:
    return one is not None and one.wait_seconds > 0
