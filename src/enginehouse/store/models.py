"""Rows of models. The definition is stored as JSON text.

The name is the primary key. A caller that decides about a model locks its row, so that frontends take turns.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
from sqlalchemy import bindparam, delete, select, update

from enginehouse.core.model import Model, PinnedFile, pinned
from enginehouse.store import checksums
from enginehouse.store.db import Connection
from enginehouse.store.rows import insert_unless_there, select_among, text_of
from enginehouse.store.schema import models

_DEFINITION = select(models.c.definition).where(models.c.name == bindparam("named"))
_NAMED = select(models.c.name, models.c.definition).where(models.c.name.in_(bindparam("ids", expanding=True)))
_LOCKED_DEFINITION = _DEFINITION.with_for_update()
_MODEL = msgspec.json.Decoder(Model)


def get(connection: Connection, name: str, *, lock: bool = False) -> Model | None:
    """With `lock`, the row is locked until the transaction ends, so that two frontends decide about a model in turn."""
    query = _LOCKED_DEFINITION if lock else _DEFINITION
    definition = connection.execute(query, {"named": name}).scalar_one_or_none()
    return None if definition is None else _MODEL.decode(definition)


def named(connection: Connection, names: Iterable[str]) -> dict[str, Model]:
    """Those of these models that there are, by name."""
    return {row.name: _MODEL.decode(row.definition) for row in select_among(connection, _NAMED, names)}


def definitions(connection: Connection) -> tuple[dict[str, str], int]:
    """The text of every model by name, for `read`, and the checksum of exactly these."""
    rows, checksum = checksums.model_rows(connection)
    return {row.name: row.definition for row in rows}, checksum


def created_at(connection: Connection, name: str) -> float:
    """When the model was added; 0 if there is none."""
    return connection.execute(select(models.c.created_at).where(models.c.name == name)).scalar_one_or_none() or 0.0


def insert(connection: Connection, model: Model, now: float) -> None:
    connection.execute(models.insert().values(**_row(model), created_at=now))


def add(connection: Connection, model: Model, now: float) -> bool:
    """Insert the model; False if there is one of that name."""
    return insert_unless_there(connection, models, {**_row(model), "created_at": now})


def replace(connection: Connection, model: Model) -> None:
    connection.execute(update(models).where(models.c.name == model.name).values(**_row(model)))


def _row(model: Model) -> dict[str, object]:
    return {"name": model.name, "definition": text_of(model), "has_endpoint": not model.runs_here}


_ENDPOINTS = select(models.c.definition).where(models.c.has_endpoint.is_(True))


def that_run_elsewhere(connection: Connection) -> list[Model]:
    """The models that a server elsewhere or another model serves. There are few of them, and no other row is read."""
    found = [_MODEL.decode(definition) for definition in connection.execute(_ENDPOINTS).scalars()]
    # The migration of older rows looked for a text that a configuration may contain as well.
    return [model for model in found if not model.runs_here]


def pin(connection: Connection, name: str, pins: Iterable[PinnedFile]) -> None:
    """Store the digests that a worker found for files without one."""
    model = get(connection, name, lock=True)
    if model is not None and (after := pinned(model, pins)) != model:
        connection.execute(update(models).where(models.c.name == name).values(definition=text_of(after)))


def remove(connection: Connection, name: str) -> bool:
    """Remove the model; False if there was none."""
    return connection.execute(delete(models).where(models.c.name == name)).rowcount > 0


def every(connection: Connection) -> list[tuple[Model, float]]:
    rows = connection.execute(select(models).order_by(models.c.name))
    return [(_MODEL.decode(row.definition), row.created_at) for row in rows]
