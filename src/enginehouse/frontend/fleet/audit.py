"""The audit of this frontend: records in memory, written in batches off the path of requests.

Nothing here waits or fails a request. A frontend that stops in order writes what is left; one that is killed loses at
most the records of the last batch. While the store is away the memory is bounded, and what was lost is counted and
recorded. Refusals are bounded too: of one address a few per minute are kept, and the others of that minute as one.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable

import msgspec
from msgspec import Struct

from enginehouse.core.audit import TEXT_LIMITS, AuditQuery, AuditRecord, recordable
from enginehouse.core.errors import EnginehouseError
from enginehouse.store import audit, db
from enginehouse.store.db import Connection, Store

log = logging.getLogger(__name__)

WRITE_SECONDS = 2.0
BATCH = 500  # records per transaction
MOST_WAITING = 10_000  # records in memory, a few megabytes
REFUSED_STATUSES = (401, 403, 429)
MOST_REFUSALS = 10  # of one address in a minute
WINDOW_SECONDS = 60.0
MOST_ADDRESSES = 1000  # that are told apart within a minute
_FURTHER = "Further refused requests of this address within a minute."
_LOST = "Records that were lost, because the database was unavailable."


class _Refusals(Struct):
    """Those of one address in one minute."""

    began_at: float
    count: int = 0
    last: AuditRecord | None = None  # of those that get no record of their own


class AuditLedger:
    def __init__(self, store: Store, now: Callable[[], float], *, kept_seconds: float) -> None:
        """`now` is the store's clock, without asking the store."""
        self._store = store
        self._now = now
        self._kept_seconds = kept_seconds
        self._waiting: list[AuditRecord] = []
        self._refusals: dict[str, _Refusals] = {}
        self._lost = 0

    def note(self, record: AuditRecord) -> None:
        """Record one request; its id and time are set here."""
        texts = {name: recordable(getattr(record, name), limit) for name, limit in TEXT_LIMITS.items()}
        made = msgspec.structs.replace(record, id=str(uuid.uuid4()), at=self._now(), **texts)
        # A client without a credential may also send nonsense, any number of times.
        is_bounded = made.status in REFUSED_STATUSES or not made.role
        if not is_bounded or self._is_kept(made):
            self._add(made)

    def _add(self, record: AuditRecord) -> None:
        last = self._waiting[-1] if self._waiting else None
        if last is not None and not record.operation_id and record.is_like(last):
            self._waiting[-1] = msgspec.structs.replace(last, at=record.at, count=last.count + record.count)
        elif len(self._waiting) < MOST_WAITING:
            self._waiting.append(record)
        else:
            self._lost += record.count

    def _is_kept(self, record: AuditRecord) -> bool:
        """Whether a refusal gets a record of its own. Otherwise it is counted."""
        address = record.address
        if address not in self._refusals and len(self._refusals) >= MOST_ADDRESSES:
            address = ""
        of_address = self._refusals.get(address)
        if of_address is None:
            of_address = self._refusals[address] = _Refusals(record.at)
        of_address.count += 1
        if of_address.count <= MOST_REFUSALS:
            return True
        of_address.last = record
        return False

    def _end_minutes(self, now: float) -> None:
        """Forget the refusals of minutes that are over, and record those that were only counted."""
        over = [key for key, one in self._refusals.items() if now - one.began_at >= WINDOW_SECONDS]
        for key in over:
            ended = self._refusals.pop(key)
            if ended.last is not None:
                self._add(_pooled(ended.last, key, ended.count - MOST_REFUSALS))

    async def step(self) -> None:
        """Write what was recorded since the last step."""
        self._end_minutes(self._now())
        while self._waiting and not self._store.is_away:
            await self._write()

    async def _write(self) -> None:
        batch, self._waiting = self._waiting[:BATCH], self._waiting[BATCH:]
        lost, self._lost = self._lost, 0
        if lost:
            batch.append(AuditRecord(id=str(uuid.uuid4()), at=self._now(), summary=_LOST, count=lost))

        def work(connection: Connection) -> None:
            audit.add(connection, batch)

        is_written = False
        try:
            await self._store.transaction(work)
            is_written = True
        finally:
            if not is_written:
                self._waiting = batch + self._waiting
        if lost:
            log.warning("audit.lost records=%d", lost)

    async def finish(self) -> None:
        """Write what is left when the frontend stops."""
        self._end_minutes(self._now() + WINDOW_SECONDS)
        try:
            await self.step()
        except EnginehouseError as error:
            log.warning("audit.not_written error=%s", error)
        if self._waiting:
            log.warning("audit.lost records=%d", len(self._waiting))

    async def prune_step(self) -> None:
        await self._store.transaction(
            lambda connection: audit.prune(connection, db.now(connection) - self._kept_seconds)
        )

    async def page(self, asked: AuditQuery) -> list[AuditRecord]:
        """What is written; the last two seconds are not in it yet."""
        return await self._store.read(lambda connection: audit.page(connection, asked))


def _pooled(last: AuditRecord, address: str, count: int) -> AuditRecord:
    return AuditRecord(
        id=last.id, at=last.at, address=address, summary=_FURTHER, status=last.status, error=last.error, count=count
    )
