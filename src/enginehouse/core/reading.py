"""Decoding of JSON from peers as LocalAI's programs do it: `null` means absent.

Go writes `null` for a nil list or map and accepts it for any field. Other mismatches are refused with msgspec's errors,
which name the field.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

T = TypeVar("T")


def read_json(content: bytes, kind: type[T]) -> T:
    """Decode `content` as `kind`. A `null` that the type allows stays `null`."""
    try:
        return msgspec.json.decode(content, type=kind)
    except msgspec.ValidationError as error:
        # A second pass only after a refusal, so that the usual message costs nothing extra.
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
