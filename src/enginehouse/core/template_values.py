"""Values in Go templates: truth, printing and JSON, as Go does them.

Values are plain: None, booleans, numbers, strings, lists and mappings. A `Record` is a mapping that stands for a Go
struct: it has fixed fields. Every walk over a value is charged to a budget, because a value may hold the same list many
times and would print exponentially long.
"""

from __future__ import annotations

import math
import re
from decimal import Decimal
from typing import Protocol

from enginehouse.core.errors import Invalid

_CONTROL = re.compile(r'[\x00-\x1f"\\]')
_MARKUP = re.compile("[<>&\u2028\u2029]")
_SHORT = {"\n": "\\n", "\r": "\\r", "\t": "\\t", "\b": "\\b", "\f": "\\f", '"': '\\"', "\\": "\\\\"}


class Record(dict[str, object]):
    """A mapping with fixed fields: a missing one is an error, and fields keep their order."""


class Spending(Protocol):
    """A budget of steps."""

    def spend(self, steps: int) -> None: ...


def kind_of(value: object) -> str:
    """The word for a value's type in messages."""
    if value is None:
        return "nil"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "number"
    if isinstance(value, str):
        return "string"
    return "map" if isinstance(value, dict) else "list"


def printed(value: object, budget: Spending) -> str:
    """As an action prints a value: like `%v`, but a missing one is marked."""
    return "<no value>" if value is None else plain(value, budget)


def plain(value: object, budget: Spending) -> str:
    """Go's `%v`."""
    if isinstance(value, str):
        budget.spend(1 + len(value) // 64)
        return value
    budget.spend(1)
    if value is None:
        return "<nil>"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return _float(value, -4, 21)
    if isinstance(value, list):
        return "[" + " ".join(plain(one, budget) for one in value) + "]"
    if isinstance(value, Record):
        return "{" + " ".join(plain(one, budget) for one in value.values()) + "}"
    assert isinstance(value, dict)
    return "map[" + " ".join(f"{key}:{plain(value[key], budget)}" for key in sorted(value)) + "]"


def to_json(value: object, budget: Spending, *, escapes_markup: bool = True) -> str:
    """Go's `json.Marshal`: keys of maps are sorted, those of structs are not, and markup is escaped."""
    budget.spend(1)
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise Invalid("cannot use the template: JSON has no infinite numbers", code="invalid_template")
        return _float(value, -6, 21).replace("e-0", "e-")
    if isinstance(value, str):
        return json_text(value, budget, escapes_markup=escapes_markup)
    if isinstance(value, list):
        return "[" + ",".join(to_json(one, budget, escapes_markup=escapes_markup) for one in value) + "]"
    assert isinstance(value, dict)
    keys = value if isinstance(value, Record) else sorted(value)
    return (
        "{"
        + ",".join(
            f"{json_text(key, budget, escapes_markup=escapes_markup)}:"
            f"{to_json(value[key], budget, escapes_markup=escapes_markup)}"
            for key in keys
        )
        + "}"
    )


def json_text(text: str, budget: Spending, *, escapes_markup: bool) -> str:
    budget.spend(1 + len(text) // 16)
    escaped = _CONTROL.sub(lambda match: _SHORT.get(match.group()) or f"\\u{ord(match.group()):04x}", text)
    if escapes_markup:
        escaped = _MARKUP.sub(lambda match: f"\\u{ord(match.group()):04x}", escaped)
    return f'"{escaped}"'


def _float(value: float, smallest: int, largest: int) -> str:
    """The shortest digits that give the same number, with an exponent only outside of the given powers of ten."""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    negative, parts, power = Decimal(repr(value)).as_tuple()
    sign = "-" if negative else ""
    written = "".join(map(str, parts)).lstrip("0")
    digits = written.rstrip("0")
    if not digits:
        return f"{sign}0"
    exponent = len(written) + int(power) - 1
    if exponent < smallest or exponent >= largest:
        shown = f"{digits[0]}.{digits[1:]}" if len(digits) > 1 else digits
        return f"{sign}{shown}e{'-' if exponent < 0 else '+'}{abs(exponent):02d}"
    if exponent < 0:
        return f"{sign}0.{'0' * (-exponent - 1)}{digits}"
    whole = digits[: exponent + 1].ljust(exponent + 1, "0")
    rest = digits[exponent + 1 :]
    return f"{sign}{whole}.{rest}" if rest else f"{sign}{whole}"
