"""Values in Go templates: truth, printing and JSON, as Go does them.

Values are plain: None, booleans, numbers, strings, lists and mappings. A `TemplateRecord` is a mapping that stands for
a Go struct: it has fixed fields. Every walk over a value is charged to a budget, because a value may hold the same list
many times and would print exponentially long.
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
MAX_DEPTH = 100  # of a value that is printed; a template can build any depth


class TemplateRecord(dict[str, object]):
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


def plain(value: object, budget: Spending, depth: int = 0) -> str:
    """Go's `%v`."""
    _check_depth(depth)
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
        return _float(value, -4, 6)
    if isinstance(value, list):
        return "[" + " ".join(plain(one, budget, depth + 1) for one in value) + "]"
    if isinstance(value, TemplateRecord):
        return "{" + " ".join(plain(one, budget, depth + 1) for one in value.values()) + "}"
    assert isinstance(value, dict)
    return "map[" + " ".join(f"{key}:{plain(value[key], budget, depth + 1)}" for key in sorted(value)) + "]"


def to_json(value: object, budget: Spending, *, escapes_markup: bool = True, depth: int = 0) -> str:
    """Go's `json.Marshal`: keys of maps are sorted, those of structs are not, and markup is escaped."""
    budget.spend(1)
    _check_depth(depth)
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
        items = [to_json(one, budget, escapes_markup=escapes_markup, depth=depth + 1) for one in value]
        return "[" + ",".join(items) + "]"
    assert isinstance(value, dict)
    members = []
    for key in value if isinstance(value, TemplateRecord) else sorted(value):
        member = to_json(value[key], budget, escapes_markup=escapes_markup, depth=depth + 1)
        members.append(f"{json_text(key, budget, escapes_markup=escapes_markup)}:{member}")
    return "{" + ",".join(members) + "}"


def _check_depth(depth: int) -> None:
    if depth > MAX_DEPTH:
        raise Invalid(f"cannot use the template: a value is nested deeper than {MAX_DEPTH}", code="invalid_template")


def json_text(text: str, budget: Spending, *, escapes_markup: bool) -> str:
    budget.spend(1 + len(text) // 64)
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
