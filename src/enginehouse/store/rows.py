"""How operations and intents stand in their rows: structured columns hold JSON text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
from sqlalchemy import Row

from enginehouse.core.action import Action
from enginehouse.core.intent import Intent, Outcome
from enginehouse.core.operation import Excluded, Operation
from enginehouse.core.progress import Progress

_AT_ONCE = 1000  # ids in one query; both databases have an upper limit, and a fleet may have more waiting


def text_of(value: object) -> str:
    return msgspec.json.encode(value).decode()


def operation_of(row: Row[Any]) -> Operation:
    return Operation(
        id=row.id,
        kind=row.kind,
        name=row.name,
        author=row.author,
        created_at=row.created_at,
        targets=msgspec.json.decode(row.targets, type=tuple[str, ...]),
        excluded=msgspec.json.decode(row.excluded, type=tuple[Excluded, ...]),
        is_steered=row.is_steered,
        error_code=row.error_code,
        error_message=row.error_message,
    )


def intent_of(row: Row[Any]) -> Intent:
    plain = {
        field: getattr(row, field)
        for field in Intent.__struct_fields__
        if field not in ("action", "progress", "outcome")
    }
    return Intent(
        **plain,
        action=msgspec.json.decode(row.action, type=Action),
        progress=None if row.progress is None else msgspec.json.decode(row.progress, type=Progress),
        outcome=None if row.outcome is None else msgspec.json.decode(row.outcome, type=Outcome),
    )


def intent_columns(intent: Intent) -> dict[str, object]:
    plain = {field: getattr(intent, field) for field in Intent.__struct_fields__}
    return plain | {
        "action": text_of(intent.action),
        "progress": None if intent.progress is None else text_of(intent.progress),
        "outcome": None if intent.outcome is None else text_of(intent.outcome),
    }


def slices(ids: Iterable[str]) -> Iterator[list[str]]:
    every = list(ids)
    for start in range(0, len(every), _AT_ONCE):
        yield every[start : start + _AT_ONCE]
