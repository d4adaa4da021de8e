"""Lists of operations without their nodes. The database counts the intents of each, so that a page costs the same
whether its operations have one node or a thousand.

Reads only. Live progress is not in it; whoever wants that asks for one operation, or follows the events.
"""

from __future__ import annotations

from enginehouse.core.errors import NotFound
from enginehouse.core.ids import OperationId
from enginehouse.core.operation import (
    ALL_OPERATIONS,
    ENDED,
    Operation,
    OperationFilter,
    counts_by_word,
    status_by_states,
)
from enginehouse.core.views import OperationSummary
from enginehouse.frontend.watching.views import TASK_TYPES, render_time
from enginehouse.store import history, operations
from enginehouse.store.db import Connection, Store
from enginehouse.store.history import StateCounts


class Summaries:
    def __init__(self, store: Store) -> None:
        self._store = store

    async def unfinished(self, limit: int) -> list[OperationSummary]:
        """Return the operations that are open or have failed, newest first."""
        return await self._store.read(lambda connection: _summed(connection, history.unfinished(connection, limit)))

    async def page(
        self, limit: int, before: OperationId | None = None, wanted: OperationFilter = ALL_OPERATIONS
    ) -> list[OperationSummary]:
        """Return the wanted operations, newest first, beginning after `before`."""

        def work(connection: Connection) -> list[OperationSummary]:
            after = None if before is None else operations.get(connection, before)
            if before is not None and after is None:
                raise NotFound(f"cannot list operations after {before}: this operation does not exist", param="before")
            return _summed(connection, operations.recent(connection, limit, after, wanted=wanted))

        return await self._store.read(work)


def _summed(connection: Connection, found: list[Operation]) -> list[OperationSummary]:
    counts = history.counts_of(connection, [one.id for one in found])
    return [summarize(one, counts[one.id]) for one in found]


def summarize(operation: Operation, counts: StateCounts) -> OperationSummary:
    status = status_by_states(operation, counts.states.keys())
    total, done = sum(counts.states.values()), counts.states.get("succeeded", 0)
    return OperationSummary(
        id=operation.name,
        name=operation.name.rpartition("@")[2],
        fullName=operation.name,
        jobID=operation.id,
        progress=100 * done // total if total else 0,
        taskType=TASK_TYPES.get(operation.kind, operation.kind),
        isDeletion=operation.kind in ("delete", "delete_model"),
        isBackend=operation.is_about_backend,
        isQueued=status == "queued",
        cancellable=status in ("queued", "running"),
        message=f"{status}: {done} of {total} done" if total > 1 else status,
        error=operation.error_message or counts.error,
        kind=operation.kind,
        status=status,
        author=operation.author,
        createdAt=render_time(operation.created_at),
        counts=counts_by_word(counts.states),
        excluded_count=len(operation.excluded),
        retryOf=operation.retry_of or OperationId(""),
        dismissed=operation.dismissed,
        finishedAt=render_time(counts.changed_at or operation.created_at) if status in ENDED else "",
        errorCode=operation.error_code,
    )
