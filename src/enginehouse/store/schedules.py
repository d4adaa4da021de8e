"""Rows of schedules, one per model. The last write wins."""

from __future__ import annotations

from typing import Any

import msgspec
from sqlalchemy import Row, delete, select, update

from enginehouse.core.schedule import Schedule
from enginehouse.store.checksums import part_of
from enginehouse.store.db import Connection
from enginehouse.store.rows import insert_unless_there, text_of
from enginehouse.store.schema import schedules

_EVERY = select(schedules).order_by(schedules.c.model_name)
_STORED = select(schedules, part_of(schedules.c.updated_at).label("part"))
_SELECTOR = msgspec.json.Decoder(dict[str, str])


def _schedule(row: Row[Any]) -> Schedule:
    plain = {field: getattr(row, field) for field in Schedule.__struct_fields__ if field != "node_selector"}
    return Schedule(**plain, node_selector=_SELECTOR.decode(row.node_selector))


def _columns(schedule: Schedule) -> dict[str, object]:
    plain = {field: getattr(schedule, field) for field in Schedule.__struct_fields__}
    return {**plain, "node_selector": text_of(schedule.node_selector)}


def every(connection: Connection) -> list[Schedule]:
    return [_schedule(row) for row in connection.execute(_EVERY)]


def with_checksum(connection: Connection) -> tuple[dict[str, Schedule], tuple[int, int]]:
    """All of them by model, and the checksum of exactly these."""
    rows = list(connection.execute(_STORED))
    return {row.model_name: _schedule(row) for row in rows}, (len(rows), sum(int(row.part) for row in rows))


def get(connection: Connection, model: str) -> Schedule | None:
    row = connection.execute(select(schedules).where(schedules.c.model_name == model)).one_or_none()
    return None if row is None else _schedule(row)


def put(connection: Connection, schedule: Schedule, now: float) -> Schedule:
    """Insert or replace; returns the stored row."""
    fresh = msgspec.structs.replace(schedule, created_at=now, updated_at=now)
    if insert_unless_there(connection, schedules, _columns(fresh)):
        return fresh
    columns = _columns(fresh)
    del columns["created_at"]
    connection.execute(update(schedules).where(schedules.c.model_name == schedule.model_name).values(columns))
    stored = get(connection, schedule.model_name)
    assert stored is not None
    return stored


def remove(connection: Connection, model: str) -> bool:
    return connection.execute(delete(schedules).where(schedules.c.model_name == model)).rowcount > 0
