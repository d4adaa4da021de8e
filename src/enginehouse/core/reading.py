"""JSON from others as one of our types, read as LocalAI's programs read it: `null` is what is absent.

Go writes `null` for a list or a map that was never made, and takes it for any field. Whatever else does not fit its
type is refused with msgspec's own errors, which name the field.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

T = TypeVar("T")


def read_json(content: bytes, kind: type[T]) -> T:
    """`content` as `kind`. A `null` that the type itself allows stays one."""
    try:
        return msgspec.json.decode(content, type=kind)
    except msgspec.ValidationError as error:
        # Twice only for what is refused anyway: the usual message costs nothing more.
        try:
            return msgspec.convert(_without_nulls(msgspec.json.decode(content)), kind)
        except msgspec.ValidationError:
            raise error from None


def _without_nulls(value: object) -> object:
    if isinstance(value, dict):
        return {key: _without_nulls(one) for key, one in value.items() if one is not None}
    if isinstance(value, list):
        return [_without_nulls(one) for one in value]
    return value
