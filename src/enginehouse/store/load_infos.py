"""Rows of load infos: what is known of a model beyond its replicas. Removed with the model only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from sqlalchemy import Row, delete, select, update

from enginehouse.core.ids import NodeId
from enginehouse.core.operation import Operation
from enginehouse.core.reconcile import RECONCILER
from enginehouse.core.schedule import LoadInfo, without_kept
from enginehouse.store import checksums, db
from enginehouse.store.db import Connection
from enginehouse.store.rows import insert_unless_there, text_of
from enginehouse.store.schema import load_infos

_KEPT = msgspec.json.Decoder(tuple[NodeId, ...])


def _load_info(row: Row[Any]) -> LoadInfo:
    plain = {field: getattr(row, field) for field in LoadInfo.__struct_fields__ if field != "kept"}
    return LoadInfo(**plain, kept=_KEPT.decode(row.kept))


def every(connection: Connection) -> list[LoadInfo]:
    return [_load_info(row) for row in connection.execute(select(load_infos).order_by(load_infos.c.model))]


def with_checksum(connection: Connection) -> tuple[dict[str, LoadInfo], int]:
    """All of them by model, without authors and reasons, and the checksum of exactly these."""
    rows, checksum = checksums.info_rows(connection)
    found = [
        LoadInfo(
            model=row.model,
            revision=row.revision,
            memory_bytes=row.memory_bytes,
            kept=_KEPT.decode(row.kept),
            scaled_at=row.scaled_at,
            failures=row.failures,
            retry_at=row.retry_at,
        )
        for row in rows
    ]
    return {one.model: one for one in found}, checksum


def get(connection: Connection, model: str) -> LoadInfo:
    """An empty one if nothing is known."""
    row = connection.execute(select(load_infos).where(load_infos.c.model == model)).one_or_none()
    return LoadInfo(model=model) if row is None else _load_info(row)


def change(connection: Connection, model: str, how: Callable[[LoadInfo], LoadInfo]) -> LoadInfo:
    """Change what is known of a model, and return it. The row is locked meanwhile, so that frontends that learn, load
    and unload at the same moment do not undo each other.
    """
    insert_unless_there(connection, load_infos, _columns(LoadInfo(model=model)))
    row = connection.execute(select(load_infos).where(load_infos.c.model == model).with_for_update()).one()
    before = _load_info(row)
    after = how(before)
    if after != before:
        connection.execute(update(load_infos).where(load_infos.c.model == model).values(_columns(after)))
    return after


def lock(connection: Connection, model: str) -> LoadInfo:
    """Lock the row until the end of the transaction, and return it. Whoever begins a load locks it before looking which
    loads there are, so that two at the same moment do not both begin one.
    """
    return change(connection, model, lambda known: known)


def _columns(found: LoadInfo) -> dict[str, object]:
    plain = {field: getattr(found, field) for field in LoadInfo.__struct_fields__}
    return {**plain, "kept": text_of(found.kept)}


def remove(connection: Connection, model: str) -> None:
    connection.execute(delete(load_infos).where(load_infos.c.model == model))


def note_cancelled(connection: Connection, operation: Operation, pause_seconds: float) -> None:
    """Whoever cancels a load that somebody asked for does not want it any more. One that follows from a schedule is
    put off for this pause.
    """
    until = db.now(connection) + pause_seconds

    def how(found: LoadInfo) -> LoadInfo:
        if operation.author == RECONCILER:
            return msgspec.structs.replace(found, retry_at=until)
        return without_kept(found, operation.targets[0] if operation.targets else None)

    change(connection, operation.name, how)


def forgive(connection: Connection, model: str | None = None) -> bool:
    """Let loads that failed be tried again at once: of one model, or of all after nodes changed. Returns whether there
    were any.
    """
    query = update(load_infos).where(load_infos.c.retry_at > 0).values(retry_at=0.0, failures=0)
    return connection.execute(query if model is None else query.where(load_infos.c.model == model)).rowcount > 0
