"""What tokens used, per hour, model and node: counted in memory, and written in batches off the path of requests.

A request costs one look-up and a few additions here. A frontend that stops in order writes what is left; one that is
killed loses at most the counts of the last batch. The hour is that of the write, so at the turn of an hour the counts
of some seconds belong to the next one. If the answer to a commit is lost, its batch may be counted twice.
"""

from __future__ import annotations

import logging

from enginehouse.core.errors import EnginehouseError
from enginehouse.core.usage import HOUR_SECONDS, UsageCount, UsageQuery, Used
from enginehouse.store import db, usage
from enginehouse.store.db import Connection, Store

log = logging.getLogger(__name__)

WRITE_SECONDS = 5.0
PRUNE_SECONDS = 3600.0
KEPT_SECONDS = 400 * 86400.0  # a year can be compared with the one before


class UsageLedger:
    def __init__(self, store: Store) -> None:
        self._store = store
        self._counts: dict[usage.Place, list[int]] = {}

    def count(self, place: usage.Place, used: Used | None, *, is_error: bool, is_failure: bool = False) -> None:
        """Count one request. `place` is the id and name of the token, the model and the node. A failure is an error
        that is no fault of the client.
        """
        counts = self._counts.get(place)
        if counts is None:
            counts = self._counts[place] = [0, 0, 0, 0, 0]
        counts[0] += 1
        if is_error:
            counts[1] += 1
        if is_failure:
            counts[4] += 1
        if used is not None:
            counts[2] += used[0]
            counts[3] += used[1]

    async def step(self) -> None:
        """Write what was counted since the last step."""
        if not self._counts or self._store.is_away:
            return
        taken, self._counts = self._counts, {}
        batch = {place: (counts[0], counts[1], counts[2], counts[3], counts[4]) for place, counts in taken.items()}

        def work(connection: Connection) -> None:
            now = int(db.now(connection))
            usage.add(connection, now - now % HOUR_SECONDS, batch)

        is_written = False
        try:
            await self._store.transaction(work)
            is_written = True
        finally:
            if not is_written:
                for place, counts in taken.items():
                    newer = self._counts.setdefault(place, [0, 0, 0, 0, 0])
                    newer[:] = [one + other for one, other in zip(newer, counts, strict=True)]

    async def finish(self) -> None:
        """Write what is left when the frontend stops."""
        try:
            await self.step()
        except EnginehouseError as error:
            log.warning("usage.lost requests=%d error=%s", sum(one[0] for one in self._counts.values()), error)

    async def prune_step(self) -> None:
        await self._store.transaction(lambda connection: usage.prune(connection, db.now(connection) - KEPT_SECONDS))

    async def summed(self, asked: UsageQuery) -> list[UsageCount]:
        """The sums of what is written; the last seconds are not in them yet."""
        return await self._store.read(lambda connection: usage.summed(connection, asked))

    async def now(self) -> float:
        return await self._store.read(db.now)
