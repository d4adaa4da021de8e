"""Time limits of the database, derived from two settings.

The server's limits are shorter than the client's. A slow or blocked statement thus ends as an error with a clear reason
and nothing left open. The client abandons a transaction only when the server does not answer at all.
"""

from __future__ import annotations

from msgspec import Struct

# One transaction including its wait for a thread, so that a request gets its 503 within five seconds.
ANSWER_SECONDS = 4.0
COMMIT_SECONDS = 0.5  # extra time for a commit that has begun, because its outcome decides the answer
MIGRATION_SECONDS = 60.0  # wait for another frontend's migration; one that hangs longer needs an operator
SERVER_MARGIN_SECONDS = 1.0  # how much shorter the server's limits are than the client's
LEAST_SERVER_SECONDS = 0.25
KEEPALIVE_IDLE_SECONDS = 10  # an idle connection to a lost server is detected within half a minute

PAUSE_SECONDS = 0.02  # longer than a transaction takes


class StoreLimits(Struct, frozen=True):
    answer_seconds: float = ANSWER_SECONDS
    start_seconds: float = 0.0  # how long to wait for the database at startup
    pause_seconds: float = PAUSE_SECONDS  # before a transaction that collided with another one is tried again

    @property
    def statement_milliseconds(self) -> int:
        return int(1000 * max(LEAST_SERVER_SECONDS, self.answer_seconds - SERVER_MARGIN_SECONDS))

    @property
    def lock_milliseconds(self) -> int:
        """Shorter than the statement timeout, because a transaction that missed a lock is retried."""
        return self.statement_milliseconds * 5 // 6

    @property
    def idle_milliseconds(self) -> int:
        """Limit for an open transaction of a frozen frontend: others get its locks before they give up."""
        return self.statement_milliseconds * 2 // 3

    @property
    def connect_seconds(self) -> int:
        """The driver requires a whole number, at least 2."""
        return max(2, int(self.answer_seconds - SERVER_MARGIN_SECONDS))

    @property
    def unacknowledged_milliseconds(self) -> int:
        """Limit for unacknowledged bytes to a lost machine: no caller waits longer for the answer."""
        return int(1000 * self.answer_seconds)
