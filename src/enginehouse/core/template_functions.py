"""Functions of Go templates: Go's own and the string, list and map functions of Sprig that prompts use.

They take and give plain values and reach nothing else: no clock, no files, no environment, no regular expressions
(a pattern can take exponential time). Arguments are in Sprig's order, where the piped value comes last.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from enginehouse.core.errors import Invalid
from enginehouse.core.template_values import Spending, json_text, kind_of, plain, to_json

_VERB = re.compile(r"%([-+ 0#]*)(\d*)(?:\.(\d+))?(.)", re.DOTALL)
MAX_WIDTH = 1000  # of a number or text in `printf`
MAX_REPEATED = 1024 * 1024  # characters
SPACES = " \t\r\n\v\f\x85\xa0"


class TemplateFunction(Protocol):
    def __call__(self, budget: Spending, arguments: Sequence[object], /) -> object: ...


def wrong(cause: str) -> Invalid:
    return Invalid(f"cannot use the template: {cause}", code="invalid_template")


def text_of(value: object) -> str:
    if not isinstance(value, str):
        raise wrong(f"a string is expected where a {kind_of(value)} is")
    return value


def number_of(value: object) -> int | float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise wrong(f"a number is expected where a {kind_of(value)} is")
    return value


def integer_of(value: object) -> int:
    number = number_of(value)
    if number != number or abs(number) >= 2**63:
        raise wrong("a number is too large")
    return int(number)


def list_of(value: object) -> list[object]:
    if not isinstance(value, list):
        raise wrong(f"a list is expected where a {kind_of(value)} is")
    return value


def map_of(value: object) -> dict[str, object]:
    if not isinstance(value, dict):
        raise wrong(f"a map is expected where a {kind_of(value)} is")
    return value


# Comparing ----------------------------------------------------------------------------------------------------------


def is_equal(left: object, right: object) -> bool:
    if left is None or right is None:
        return left is right
    kinds = {kind_of(left), kind_of(right)}
    if len(kinds) > 1 or kinds & {"list", "map"}:
        raise wrong(f"a {kind_of(left)} cannot be compared with a {kind_of(right)}")
    return left == right


def is_less(left: object, right: object) -> bool:
    if isinstance(left, str) and isinstance(right, str):
        return left.encode() < right.encode()
    return number_of(left) < number_of(right)


def _eq(budget: Spending, arguments: Sequence[object]) -> object:
    first, *others = arguments
    if not others:
        raise wrong("eq needs two arguments or more")
    return any(is_equal(first, other) for other in others)


# Go's own -----------------------------------------------------------------------------------------------------------


def _print(budget: Spending, arguments: Sequence[object]) -> str:
    pieces: list[str] = []
    for position, value in enumerate(arguments):
        # Go puts a space between two values of which neither is a string.
        if position and not isinstance(value, str) and not isinstance(arguments[position - 1], str):
            pieces.append(" ")
        pieces.append(plain(value, budget))
    return "".join(pieces)


def _println(budget: Spending, arguments: Sequence[object]) -> str:
    return " ".join(plain(value, budget) for value in arguments) + "\n"


def _printf(budget: Spending, arguments: Sequence[object]) -> str:
    values = list(arguments[1:])

    def one(match: re.Match[str]) -> str:
        flags, width, precision, verb = match.groups()
        if verb == "%":
            return "%"
        if int(width or 0) > MAX_WIDTH or int(precision or 0) > MAX_WIDTH:
            raise wrong(f"printf: {match.group()} is wider than {MAX_WIDTH}")
        if not values:
            return f"%!{verb}(MISSING)"
        return _padded(_formatted(values.pop(0), flags, precision, verb, budget), flags, int(width or 0))

    return _VERB.sub(one, text_of(arguments[0]))


def _formatted(value: object, flags: str, precision: str | None, verb: str, budget: Spending) -> str:
    if verb in "vs":
        text = plain(value, budget)
        return text[: int(precision)] if precision and isinstance(value, str) else text
    if verb == "q":
        return json_text(text_of(value), budget, escapes_markup=False)
    if verb == "t" and isinstance(value, bool):
        return plain(value, budget)
    if verb in "dxX" and isinstance(value, int) and not isinstance(value, bool):
        return ("+" if "+" in flags and value >= 0 else "") + format(value, verb)
    if verb in "feg" and isinstance(value, int | float) and not isinstance(value, bool):
        return format(float(value), f".{precision or 6}{verb}") if verb != "g" or precision else plain(value, budget)
    if verb not in "vsqtdxXfeg":
        raise wrong(f"printf: the verb %{verb} is not supported")
    return f"%!{verb}({kind_of(value)}={plain(value, budget)})"


def _padded(text: str, flags: str, width: int) -> str:
    if "-" in flags:
        return text.ljust(width)
    if "0" in flags and text.lstrip("+-").replace(".", "").isdigit():
        return text.zfill(width)
    return text.rjust(width)


def _len(budget: Spending, arguments: Sequence[object]) -> int:
    (value,) = arguments
    if isinstance(value, str):
        budget.spend(1 + len(value) // 64)
        return len(value.encode())  # Go counts bytes
    if isinstance(value, list | dict):
        return len(value)
    raise wrong(f"a {kind_of(value)} has no length")


def _index(budget: Spending, arguments: Sequence[object]) -> object:
    value, *keys = arguments
    for key in keys:
        if isinstance(value, dict):
            value = value.get(text_of(key))
        elif isinstance(value, list | str):
            items: Sequence[object] = value.encode() if isinstance(value, str) else value
            position = integer_of(key)
            if not 0 <= position < len(items):
                raise wrong(f"the index {position} is outside of a {kind_of(value)} of {len(items)}")
            value = items[position]
        else:
            raise wrong(f"a {kind_of(value)} has no index")
    return value


def _slice(budget: Spending, arguments: Sequence[object]) -> object:
    value, *limits = arguments
    start, end = (*(integer_of(one) for one in limits), None, None)[:2]
    items = value.encode() if isinstance(value, str) else list_of(value)
    budget.spend(len(items) // 64)
    if not 0 <= (start or 0) <= (len(items) if end is None else end) <= len(items):
        raise wrong(f"a slice is outside of a {kind_of(value)} of {len(items)}")
    cut = items[start:end]
    return cut.decode(errors="replace") if isinstance(cut, bytes) else cut


# Sprig's ------------------------------------------------------------------------------------------------------------


def _repeat(budget: Spending, arguments: Sequence[object]) -> str:
    count, text = integer_of(arguments[0]), text_of(arguments[1])
    if count * len(text) > MAX_REPEATED:
        raise wrong(f"repeat gives more than {MAX_REPEATED} characters")
    budget.spend(max(0, count) * len(text) // 64)
    return text * count


def _substr(budget: Spending, arguments: Sequence[object]) -> str:
    start, end, text = integer_of(arguments[0]), integer_of(arguments[1]), text_of(arguments[2])
    if start < 0:
        return text[: max(end, 0)]
    return text[start:] if end < 0 or end > len(text) else text[start:end]


def _trunc(budget: Spending, arguments: Sequence[object]) -> str:
    count, text = integer_of(arguments[0]), text_of(arguments[1])
    return text[count:] if count < 0 else text[:count]


def _indent(budget: Spending, arguments: Sequence[object]) -> str:
    width, text = integer_of(arguments[0]), text_of(arguments[1])
    if not 0 <= width <= MAX_WIDTH:
        raise wrong(f"an indent must be 0 to {MAX_WIDTH}")
    padding = " " * width
    lines = text.count("\n") + 1
    if lines * width > MAX_REPEATED:
        raise wrong(f"indent adds more than {MAX_REPEATED} characters")
    budget.spend((len(text) + lines * width) // 64)
    return padding + text.replace("\n", "\n" + padding)


def _join(budget: Spending, arguments: Sequence[object]) -> str:
    separator, values = text_of(arguments[0]), arguments[1]
    if not isinstance(values, list):
        return plain(values, budget)
    budget.spend(len(values) * (len(separator) // 64 + 1))
    return separator.join(plain(value, budget) for value in values if value is not None)


def _quote(mark: str) -> TemplateFunction:
    def quoted(budget: Spending, arguments: Sequence[object]) -> str:
        texts = [plain(one, budget) for one in arguments if one is not None]
        if mark == '"':
            return " ".join(json_text(one, budget, escapes_markup=False) for one in texts)
        return " ".join(f"'{one}'" for one in texts)

    return quoted


def _dict(budget: Spending, arguments: Sequence[object]) -> dict[str, object]:
    pairs = list(arguments)
    if len(pairs) % 2:
        pairs.append("")
    return {plain(key, budget): value for key, value in zip(pairs[::2], pairs[1::2], strict=True)}


def _from_json(budget: Spending, arguments: Sequence[object]) -> object:
    text = text_of(arguments[0])
    budget.spend(1 + len(text) // 16)
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return None


def _coalesce(budget: Spending, arguments: Sequence[object]) -> object:
    return next((one for one in arguments if one), None)


def _divide(left: int | float, right: int | float) -> int:
    if int(right) == 0:
        raise wrong("a division by zero")
    quotient = abs(int(left)) // abs(int(right))  # Go rounds towards zero
    return quotient if (left < 0) == (right < 0) else -quotient


def _texts(function: Callable[..., object]) -> TemplateFunction:
    """A function of texts only, charged by their length."""

    def called(budget: Spending, arguments: Sequence[object]) -> object:
        texts = [text_of(one) for one in arguments]
        budget.spend(sum(map(len, texts)) // 64)
        return function(*texts)

    return called


def _numbers(function: Callable[..., int | float]) -> TemplateFunction:
    def called(budget: Spending, arguments: Sequence[object]) -> object:
        return integer_of(function(*(integer_of(one) for one in arguments)))

    return called


def _listed(function: Callable[[list[object]], object]) -> TemplateFunction:
    def called(budget: Spending, arguments: Sequence[object]) -> object:
        values = list_of(arguments[0])
        budget.spend(len(values) // 8)
        return function(values)

    return called


def _split(separator: str, text: str) -> list[object]:
    return list(text.split(separator)) if separator else list(text)


def _replace(old: str, new: str, text: str) -> str:
    # Each replaced piece may grow, so the size is known before anything is built.
    if text.count(old) * len(new) > MAX_REPEATED + len(text):
        raise wrong(f"replace adds more than {MAX_REPEATED} characters")
    return text.replace(old, new)


# By name: the fewest and the most arguments (None: any number), and the function.
FUNCTIONS: dict[str, tuple[int, int | None, TemplateFunction]] = {
    "eq": (2, None, _eq),
    "ne": (2, 2, lambda _, values: not is_equal(*values)),
    "lt": (2, 2, lambda _, values: is_less(*values)),
    "le": (2, 2, lambda _, values: not is_less(values[1], values[0])),
    "gt": (2, 2, lambda _, values: is_less(values[1], values[0])),
    "ge": (2, 2, lambda _, values: not is_less(*values)),
    "not": (1, 1, lambda _, values: not values[0]),
    "index": (1, None, _index),
    "slice": (1, 3, _slice),
    "len": (1, 1, _len),
    "print": (0, None, _print),
    "println": (0, None, _println),
    "printf": (1, None, _printf),
    "toJson": (1, 1, lambda budget, values: to_json(values[0], budget)),
    "toRawJson": (1, 1, lambda budget, values: to_json(values[0], budget, escapes_markup=False)),
    "fromJson": (1, 1, _from_json),
    "toString": (1, 1, lambda budget, values: plain(values[0], budget)),
    "trim": (1, 1, _texts(lambda text: text.strip(SPACES))),
    "trimAll": (2, 2, _texts(lambda marks, text: text.strip(marks))),
    "trimPrefix": (2, 2, _texts(lambda prefix, text: text.removeprefix(prefix))),
    "trimSuffix": (2, 2, _texts(lambda suffix, text: text.removesuffix(suffix))),
    "upper": (1, 1, _texts(str.upper)),
    "lower": (1, 1, _texts(str.lower)),
    "title": (1, 1, _texts(str.title)),
    "nospace": (1, 1, _texts(lambda text: "".join(text.split()))),
    "contains": (2, 2, _texts(lambda part, text: part in text)),
    "hasPrefix": (2, 2, _texts(lambda prefix, text: text.startswith(prefix))),
    "hasSuffix": (2, 2, _texts(lambda suffix, text: text.endswith(suffix))),
    "replace": (3, 3, _texts(_replace)),
    "splitList": (2, 2, _texts(_split)),
    "repeat": (2, 2, _repeat),
    "substr": (3, 3, _substr),
    "trunc": (2, 2, _trunc),
    "indent": (2, 2, _indent),
    "nindent": (2, 2, lambda budget, values: "\n" + _indent(budget, values)),
    "join": (2, 2, _join),
    "cat": (0, None, lambda budget, values: " ".join(plain(one, budget) for one in values if one is not None)),
    "quote": (0, None, _quote('"')),
    "squote": (0, None, _quote("'")),
    "default": (2, 2, lambda _, values: values[1] or values[0]),
    "empty": (1, 1, lambda _, values: not values[0]),
    "coalesce": (0, None, _coalesce),
    "ternary": (3, 3, lambda _, values: values[0] if values[2] else values[1]),
    "list": (0, None, lambda _, values: list(values)),
    "dict": (0, None, _dict),
    "get": (2, 2, lambda _, values: map_of(values[0]).get(text_of(values[1]), "")),
    "hasKey": (2, 2, lambda _, values: text_of(values[1]) in map_of(values[0])),
    "keys": (1, 1, lambda _, values: list(sorted(map_of(values[0])))),
    "first": (1, 1, _listed(lambda values: values[0] if values else None)),
    "last": (1, 1, _listed(lambda values: values[-1] if values else None)),
    "rest": (1, 1, _listed(lambda values: values[1:])),
    "initial": (1, 1, _listed(lambda values: values[:-1])),
    "append": (2, 2, lambda budget, values: [*_copied(budget, values[0]), values[1]]),
    "has": (2, 2, lambda budget, values: any(_is_same(values[0], one) for one in _copied(budget, values[1]))),
    "add": (1, None, _numbers(lambda *values: sum(values))),
    "add1": (1, 1, _numbers(lambda value: value + 1)),
    "sub": (2, 2, _numbers(lambda left, right: left - right)),
    "mul": (2, 2, _numbers(lambda left, right: left * right)),
    "div": (2, 2, _numbers(_divide)),
    "mod": (2, 2, _numbers(lambda left, right: left - right * _divide(left, right))),
    "max": (1, None, _numbers(max)),
    "min": (1, None, _numbers(lambda *values: min(values))),
    "int": (1, 1, lambda _, values: integer_of(values[0])),
}


def _copied(budget: Spending, value: object) -> list[object]:
    values = list_of(value)
    budget.spend(len(values) // 8)
    return values


def _is_same(left: object, right: object) -> bool:
    return kind_of(left) == kind_of(right) and kind_of(left) not in ("list", "map") and left == right
