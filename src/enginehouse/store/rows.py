"""How operations and intents stand in their rows: structured columns hold JSON text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, get_args

import msgspec
from sqlalchemy import Row

from enginehouse.core.action import Action, Foreign
from enginehouse.core.intent import Intent, Outcome
from enginehouse.core.operation import Asked, Excluded, Operation
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
        asked=msgspec.json.decode(row.asked, type=Asked),
        retry_of=row.retry_of,
        dismissed=row.dismissed,
    )


def operation_columns(operation: Operation) -> dict[str, object]:
    plain = {field: getattr(operation, field) for field in Operation.__struct_fields__}
    structured = ("targets", "excluded", "asked")
    return plain | {field: text_of(getattr(operation, field)) for field in structured}


def intent_of(row: Row[Any]) -> Intent:
    plain = {
        field: getattr(row, field)
        for field in Intent.__struct_fields__
        if field not in ("action", "progress", "outcome")
    }
    return Intent(
        **plain,
        action=_action_of(row.action, row.subject),
        progress=None if row.progress is None else msgspec.json.decode(row.progress, type=Progress),
        outcome=None if row.outcome is None else msgspec.json.decode(row.outcome, type=Outcome),
    )


def _action_of(text: str, subject: str) -> Action:
    try:
        known: Action = msgspec.json.decode(text, type=Action)
        return known
    except msgspec.ValidationError:
        return Foreign(text=text, subject=subject)


def kind_of(action: Action) -> str:
    return str(action.__struct_config__.tag)


# What this version can do. Rows of the first version have no kind.
KNOWN_KINDS = ("", *sorted(str(kind.__struct_config__.tag) for kind in get_args(Action) if kind is not Foreign))


def intent_columns(intent: Intent) -> dict[str, object]:
    plain = {field: getattr(intent, field) for field in Intent.__struct_fields__}
    if isinstance(intent.action, Foreign):
        # As the newer version wrote it.
        return {key: value for key, value in plain.items() if key not in ("action", "progress", "outcome")}
    return plain | {
        "action": text_of(intent.action),
        "kind": kind_of(intent.action),
        "progress": None if intent.progress is None else text_of(intent.progress),
        "outcome": None if intent.outcome is None else text_of(intent.outcome),
    }


def slices(ids: Iterable[str]) -> Iterator[list[str]]:
    every = list(ids)
    for start in range(0, len(every), _AT_ONCE):
        yield every[start : start + _AT_ONCE]
