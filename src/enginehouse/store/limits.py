"""How long the database may take, in one place, with the reasons. Everything else follows from two settings.

The limits of the server lie below that of the client: a statement that is slow or blocked ends as an error that says
so, with nothing left open, and only a server that does not answer at all is given up by the client.
"""

from __future__ import annotations

from msgspec import Struct

ANSWER_SECONDS = 4.0  # for a transaction with its wait for a thread: a request is told 503 within five seconds
COMMIT_SECONDS = 0.5  # more, for one whose commit has begun: its outcome decides what the request is told
MIGRATION_SECONDS = 60.0  # to wait for another frontend's; one that hangs for longer needs somebody's look
SERVER_MARGIN_SECONDS = 1.0  # by which the server's limits are shorter than the client's
LEAST_SERVER_SECONDS = 0.25
KEEPALIVE_IDLE_SECONDS = 10  # a server that vanished is noticed within half a minute on a connection that nobody uses


class StoreLimits(Struct, frozen=True):
    answer_seconds: float = ANSWER_SECONDS
    start_seconds: float = 0.0  # to wait for a database that is not there yet

    @property
    def statement_milliseconds(self) -> int:
        return int(1000 * max(LEAST_SERVER_SECONDS, self.answer_seconds - SERVER_MARGIN_SECONDS))

    @property
    def lock_milliseconds(self) -> int:
        """Shorter, because whoever was not given a lock may try again."""
        return self.statement_milliseconds * 5 // 6

    @property
    def idle_milliseconds(self) -> int:
        """For standing still inside a transaction, which only a frozen frontend does. Shorter again: the others get its
        locks before they give up.
        """
        return self.statement_milliseconds * 2 // 3

    @property
    def connect_seconds(self) -> int:
        """Whole, and at least 2, as the driver wants it."""
        return max(2, int(self.answer_seconds - SERVER_MARGIN_SECONDS))

    @property
    def unacknowledged_milliseconds(self) -> int:
        """For bytes on the way to a machine that is gone: nobody waits for their answer any longer than that."""
        return int(1000 * self.answer_seconds)
