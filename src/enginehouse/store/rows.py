"""Conversion between rows and the structs of operations and intents, and statements shared by the store's modules.

Structured columns hold JSON text. An action that this version does not know is kept as text and written back unchanged.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from operator import attrgetter
from typing import Any, TypeVar, get_args

import msgspec
from sqlalchemy import Row, Select, Table

from enginehouse.core.action import Action, UnknownAction, kind_of
from enginehouse.core.canary import Canary
from enginehouse.core.ids import NodeId
from enginehouse.core.intent import Intent, Outcome
from enginehouse.core.operation import Excluded, Operation, ReplacedReplica, RequestOptions
from enginehouse.core.progress import Progress
from enginehouse.store.db import Connection
from enginehouse.store.per_database import PerDatabase

_AT_ONCE = 1000  # ids per query; both databases have an upper limit, and a cluster may have more waiting
# Built once: inspecting a type costs more than decoding a value.
_TARGETS = msgspec.json.Decoder(tuple[NodeId, ...])
_EXCLUDED = msgspec.json.Decoder(tuple[Excluded, ...])
_ASKED = msgspec.json.Decoder(RequestOptions)
_REPLACES = msgspec.json.Decoder(ReplacedReplica | None)
_ACTION: msgspec.json.Decoder[Action] = msgspec.json.Decoder(Action)
_PROGRESS = msgspec.json.Decoder(Progress)
_OUTCOME = msgspec.json.Decoder(Outcome)
_CANARY = msgspec.json.Decoder(Canary | None)
_STRUCTURED_OF_OPERATIONS = ("targets", "excluded", "asked", "replaces", "canary")
_PLAIN_OF_OPERATIONS = tuple(field for field in Operation.__struct_fields__ if field not in _STRUCTURED_OF_OPERATIONS)
STRUCTURED = ("action", "progress", "outcome")
_PLAIN = tuple(field for field in Intent.__struct_fields__ if field not in STRUCTURED)
_plain_of = attrgetter(*_PLAIN)

T = TypeVar("T", bound=str)


def ignoring_known(table: Table) -> PerDatabase:
    """An insert into `table` that skips rows whose key exists."""
    return PerDatabase(lambda insert: insert(table).on_conflict_do_nothing())


def insert_unless_there(connection: Connection, table: Table, row: dict[str, object]) -> bool:
    """Insert a row; False if its primary key exists."""
    return connection.execute(_adding(table, connection.dialect.name), row).one_or_none() is not None


@cache
def _adding(table: Table, dialect: str) -> Any:
    return ignoring_known(table)[dialect].returning(*table.primary_key.columns)


def text_of(value: object) -> str:
    return msgspec.json.encode(value).decode()


def operation_of(row: Row[Any]) -> Operation:
    return Operation(
        **{field: getattr(row, field) for field in _PLAIN_OF_OPERATIONS},
        targets=_TARGETS.decode(row.targets),
        excluded=_EXCLUDED.decode(row.excluded),
        asked=_ASKED.decode(row.asked),
        replaces=_REPLACES.decode(row.replaces),
        canary=_CANARY.decode(row.canary),
    )


def operation_columns(operation: Operation) -> dict[str, object]:
    plain = {field: getattr(operation, field) for field in _PLAIN_OF_OPERATIONS}
    structured = {field: text_of(getattr(operation, field)) for field in _STRUCTURED_OF_OPERATIONS}
    return plain | structured | {"canary_phase": operation.canary.phase if operation.canary is not None else ""}


def intent_of(row: Row[Any]) -> Intent:
    return Intent(
        **dict(zip(_PLAIN, _plain_of(row), strict=True)),
        action=_action_of(row.action, row.subject),
        progress=None if row.progress is None else _PROGRESS.decode(row.progress),
        outcome=None if row.outcome is None else _OUTCOME.decode(row.outcome),
    )


def _action_of(text: str, subject: str) -> Action:
    try:
        return _ACTION.decode(text)
    except msgspec.ValidationError:
        return UnknownAction(text=text, subject=subject)


# The kinds that this version can carry out. Rows of the first schema have no kind.
KNOWN_KINDS = ("", *sorted(str(kind.__struct_config__.tag) for kind in get_args(Action) if kind is not UnknownAction))


def intent_columns(intent: Intent) -> dict[str, object]:
    plain = {field: getattr(intent, field) for field in Intent.__struct_fields__}
    if isinstance(intent.action, UnknownAction):
        # Keep what the newer version wrote.
        return {key: value for key, value in plain.items() if key not in STRUCTURED}
    return plain | {
        "action": text_of(intent.action),
        "kind": kind_of(intent.action),
        "progress": None if intent.progress is None else text_of(intent.progress),
        "outcome": None if intent.outcome is None else text_of(intent.outcome),
    }


def slices(ids: Iterable[T]) -> Iterator[list[T]]:
    every = list(ids)
    for start in range(0, len(every), _AT_ONCE):
        yield every[start : start + _AT_ONCE]


def select_among(
    connection: Connection, query: Select[Any], ids: Iterable[str], **values: object
) -> Iterator[Row[Any]]:
    """The rows of a query with the expanding parameter `ids`, for any number of ids."""
    for some in slices(ids):
        yield from connection.execute(query, {"ids": some, **values}).all()
