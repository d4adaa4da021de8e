"""JSON schemas as GBNF grammars, the form in which engines take a constraint on their output.

    grammar_of({"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]})

Whatever the grammar accepts is valid for the schema, except for what only narrows a scalar: `pattern`, `format`,
`maximum`, `multipleOf`, `uniqueItems` and the upper bounds beyond `MAX_COUNT` are not enforced. What would
change the structure and is not supported is refused with its path. Properties come in the order of the schema.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from urllib.parse import unquote

import msgspec

from enginehouse.core.errors import Invalid

MAX_RULES = 4000
MAX_CHARACTERS = 1024 * 1024  # of a grammar; engines parse it for every request
MAX_DEPTH = 64
MAX_COUNT = 1000  # repetitions: engines expand each into rules of their own

_PRIMITIVES = {
    # At most one line break and its indentation, so that a model cannot go on with white space for ever.
    "ws": r'( " " | "\n" [ \t]{0,20} )?',
    "char": r'[^"\\\x7F\x00-\x1F] | "\\" ( ["\\/bfnrt] | "u" code )',
    # Halves of a pair come as a pair: alone they are no character.
    "code": r'[0-9a-cefA-CEF] hex{3} | [dD] [0-7] hex{2} | [dD] [89abAB] hex{2} "\\u" [dD] [c-fC-F] hex{2}',
    "hex": r"[0-9a-fA-F]",
    "plain": r'[^"\\\x7F\x00-\x1F]',
    "string": r'"\"" char* "\""',
    "natural": r'"0" | [1-9] [0-9]{0,15}',
    "integer": r'"-"? natural',
    "fraction": r'( "." [0-9]{1,16} )? ( [eE] [-+]? [0-9]{1,2} )?',
    "number": r"integer fraction",
    "positive": r"natural fraction",
    "boolean": r'"true" | "false"',
    "null": r'"null"',
    "value": r"object | array | string | number | boolean | null",
    "object": r'"{" ws ( string ws ":" ws value ( ws "," ws string ws ":" ws value )* ws )? "}"',
    "array": r'"[" ws ( value ( ws "," ws value )* ws )? "]"',
}
_NAME = re.compile(r"[a-z]+")
_UNSUPPORTED = ("not", "if", "then", "else", "patternProperties", "dependentSchemas", "dependentRequired", "contains")
_UNSUPPORTED_NAMES = ("propertyNames", "unevaluatedProperties", "unevaluatedItems", "$dynamicRef", "minProperties")
# Words that only describe; everything else beside `$ref` or `anyOf` would have to hold at the same time.
_STRUCTURAL = frozenset({"type", "properties", "required", "items", "prefixItems", "additionalProperties"})
_TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")


def json_grammar() -> str:
    """Any JSON object: what `{"type": "json_object"}` asks for."""
    return GrammarWriter().text("object")


def grammar_of(schema: object, param: str = "schema") -> str:
    """The grammar of a schema; `param` is where the request has it, for messages."""
    writer = GrammarWriter()
    return writer.text(SchemaRules(writer, schema, param).root())


def literal(text: str) -> str:
    """A GBNF literal."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\r", "\\r")
    return '"' + "".join(one if one >= " " and one != "\x7f" else f"\\x{ord(one):02X}" for one in escaped) + '"'


def json_literal(value: object) -> str:
    return literal(msgspec.json.encode(value).decode())


class GrammarWriter:
    """Collects rules under names; equal bodies share a rule."""

    def __init__(self) -> None:
        self._rules: dict[str, str] = {}
        self._by_body: dict[str, str] = {}
        self._characters = 0

    def reserve(self) -> str:
        """A name for a rule whose body refers to itself."""
        name = f"r{len(self._rules)}"
        self.fill(name, "")
        return name

    def fill(self, name: str, body: str) -> None:
        self._rules[name] = body
        self._characters += len(body)
        if len(self._rules) > MAX_RULES or self._characters > MAX_CHARACTERS:
            raise Invalid(
                "cannot make a grammar of the schema: it is too large. Ask for a simpler shape", code="unsupported"
            )

    def rule(self, body: str) -> str:
        """The name of a rule with this body."""
        known = self._by_body.get(body)
        if known is None:
            known = self._by_body[body] = self.reserve()
            self.fill(known, body)
        return known

    def text(self, root: str) -> str:
        """All rules that the body of the root uses, root first."""
        used: dict[str, str] = {"root": root}
        waiting = [root]
        while waiting:
            for word in _references(waiting.pop()):
                body = self._rules.get(word) or _PRIMITIVES.get(word)
                if word not in used and body is not None:
                    used[word] = body
                    waiting.append(body)
        return "".join(f"{name} ::= {body}\n" for name, body in used.items())


def _references(body: str) -> Iterable[str]:
    """The names in a body, outside of literals and classes."""
    bare = re.sub(r'"(?:[^"\\]|\\.)*"|\[(?:[^\]\\]|\\.)*\]|\{[\d,]*\}', " ", body)
    return re.findall(r"[a-z][a-z0-9-]*", bare)


class SchemaRules:
    """The rules of one schema document. Every reference within it becomes a rule once, so recursion ends."""

    def __init__(self, writer: GrammarWriter, document: object, param: str) -> None:
        self._writer = writer
        self._document = document
        self._param = param
        self._references: dict[str, str] = {}
        # References that are being resolved without anything between them: a second visit would never end.
        self._open: list[str] = []

    def root(self) -> str:
        return self.body(self._document, self._param, 0)

    def body(self, schema: object, path: str, depth: int) -> str:
        """The body of a rule that accepts the values of a schema."""
        if depth > MAX_DEPTH:
            raise _unsupported(path, f"it is nested deeper than {MAX_DEPTH}")
        if schema is True:
            return "value"
        if not isinstance(schema, dict):
            raise _unsupported(path, "it is not a schema")
        for word in (*_UNSUPPORTED, *_UNSUPPORTED_NAMES):
            if word in schema:
                raise _unsupported(f"{path}.{word}", "this keyword is not supported")
        if "const" in schema:
            return json_literal(schema["const"])
        if "enum" in schema:
            return self._enum(schema["enum"], path)
        if "$ref" in schema:
            self._check_alone(schema, "$ref", path)
            return self._reference(schema["$ref"], path, depth)
        for word in ("anyOf", "oneOf"):
            if word in schema:
                self._check_alone(schema, word, path)
                return self._alternatives(schema[word], f"{path}.{word}", depth)
        if "allOf" in schema:
            return self._all_of(schema, path, depth)
        return self._typed(schema, path, depth)

    def named(self, schema: object, path: str, depth: int) -> str:
        """A name, or a body that needs no parentheses."""
        body = self.body(schema, path, depth)
        return body if _NAME.fullmatch(body) or (body.startswith("r") and body[1:].isdigit()) else self._rule(body)

    def _rule(self, body: str) -> str:
        return self._writer.rule(body)

    def _check_alone(self, schema: Mapping[str, object], word: str, path: str) -> None:
        others = [one for one in schema if one in _STRUCTURAL - {"type"} or one in ("anyOf", "oneOf", "allOf")]
        for one in others:
            if one != word:
                raise _unsupported(f"{path}.{one}", f"beside '{word}' it is not supported")

    def _enum(self, values: object, path: str) -> str:
        if not isinstance(values, list) or not values:
            raise _unsupported(f"{path}.enum", "it is not a list of values")
        return " | ".join(json_literal(value) for value in values)

    def _reference(self, reference: object, path: str, depth: int) -> str:
        if not isinstance(reference, str) or not reference.startswith("#"):
            raise _unsupported(f"{path}.$ref", "only references within the schema are supported")
        if reference in self._open:
            raise _unsupported(f"{path}.$ref", f"{reference} refers to itself and to nothing else")
        known = self._references.get(reference)
        if known is None:
            known = self._references[reference] = self._writer.reserve()
            self._open.append(reference)
            target = self._resolve(reference, path)
            self._writer.fill(known, self.body(target, f"{self._param}{reference[1:].replace('/', '.')}", depth + 1))
            self._open.pop()
        return known

    def _resolve(self, reference: str, path: str) -> object:
        target = self._document
        for part in reference[1:].split("/")[1:]:
            key = unquote(part).replace("~1", "/").replace("~0", "~")
            if isinstance(target, list) and key.isdigit() and int(key) < len(target):
                target = target[int(key)]
            elif isinstance(target, dict) and key in target:
                target = target[key]
            else:
                raise _unsupported(f"{path}.$ref", f"there is no {reference}")
        return target

    def _alternatives(self, schemas: object, path: str, depth: int) -> str:
        if not isinstance(schemas, list) or not schemas:
            raise _unsupported(path, "it is not a list of schemas")
        names = [self.named(one, f"{path}[{number}]", depth + 1) for number, one in enumerate(schemas)]
        return " | ".join(dict.fromkeys(names))

    def _all_of(self, schema: Mapping[str, object], path: str, depth: int) -> str:
        parts = schema["allOf"]
        if not isinstance(parts, list) or not parts:
            raise _unsupported(f"{path}.allOf", "it is not a list of schemas")
        outer = {key: value for key, value in schema.items() if key in _STRUCTURAL}
        if len(parts) == 1 and not set(outer) - {"type"}:
            return self.body(parts[0], f"{path}.allOf[0]", depth + 1)
        merged: dict[str, object] = {"type": "object", "properties": {}, "required": []}
        for number, part in enumerate([outer, *parts]):
            self._merge(merged, part, f"{path}.allOf[{number - 1}]" if number else path, depth + 1)
        return self._object(merged, path, depth)

    def _merge(self, merged: dict[str, object], part: object, path: str, depth: int) -> None:
        """Objects that must all hold become one object with all their properties."""
        for _ in range(MAX_DEPTH):
            if not isinstance(part, dict) or "$ref" not in part:
                break
            self._check_alone(part, "$ref", path)
            part = self._resolve(str(part["$ref"]), path)
        is_object = isinstance(part, dict) and part.get("type", "object") == "object"
        described = {"type", "properties", "required", "title", "description", "additionalProperties", "$defs"}
        if not isinstance(part, dict) or not is_object or set(part) - described - {"default", "examples"}:
            raise _unsupported(path, "only plain objects can be joined by 'allOf'")
        properties, required = merged["properties"], merged["required"]
        assert isinstance(properties, dict)
        assert isinstance(required, list)
        for key, value in _properties(part, path).items():
            if properties.setdefault(key, value) != value:
                raise _unsupported(f"{path}.properties.{key}", "two parts of 'allOf' describe it differently")
        required.extend(_required(part, path))

    def _typed(self, schema: Mapping[str, object], path: str, depth: int) -> str:
        kind = schema.get("type")
        if kind is None:
            kind = "object" if "properties" in schema else "array" if {"items", "prefixItems"} & set(schema) else None
        if kind is None:
            return "value"
        if isinstance(kind, list):
            return self._alternatives([{**schema, "type": one} for one in kind], path, depth)
        if kind == "object":
            return self._object(schema, path, depth)
        if kind == "array":
            return self._array(schema, path, depth)
        if kind == "string":
            return self._string(schema, path)
        if kind in ("number", "integer"):
            least = schema.get("minimum", schema.get("exclusiveMinimum"))
            is_positive = isinstance(least, int | float) and least >= 0
            return {"number": "positive", "integer": "natural"}[str(kind)] if is_positive else str(kind)
        if kind not in _TYPES:
            raise _unsupported(f"{path}.type", f"{kind!r} is not a type")
        return str(kind)

    def _string(self, schema: Mapping[str, object], path: str) -> str:
        least, most = _bounds(schema, "minLength", "maxLength", path)
        return "string" if (least, most) == (0, None) else f'"\\"" char{_times(least, most)} "\\""'

    # Containers: what is inside is consumed only after a bracket, so references may come back there.

    def _array(self, schema: Mapping[str, object], path: str, depth: int) -> str:
        least, most = _bounds(schema, "minItems", "maxItems", path)
        held, self._open = self._open, []
        fixed = schema.get("prefixItems", [])
        if not isinstance(fixed, list):
            raise _unsupported(f"{path}.prefixItems", "it is not a list of schemas")
        first = [self.named(one, f"{path}.prefixItems[{n}]", depth + 1) for n, one in enumerate(fixed)]
        items = schema.get("items", True)
        has_more = items is not False and (most is None or most > len(first))
        item = self.named(items, f"{path}.items", depth + 1) if has_more else ""
        self._open = held
        if first:
            body = ' ws "," ws '.join(first)
            if has_more:
                times = _times(max(0, least - len(first)), None if most is None else most - len(first))
                body += f' ( ws "," ws {item} ){times}'
            return f'"[" ws {body} ws "]"'
        if not has_more:
            return '"[" ws "]"'
        body = f'{item} ( ws "," ws {item} ){_times(max(0, least - 1), None if most is None else most - 1)} ws'
        return f'"[" ws {body} "]"' if least else f'"[" ws ( {body} )? "]"'

    def _object(self, schema: Mapping[str, object], path: str, depth: int) -> str:
        properties = _properties(schema, path)
        required = _required(schema, path)
        others = schema.get("additionalProperties", not properties)
        for name in required:
            if name not in properties:
                if others is False:
                    raise _unsupported(f"{path}.required", f"{name!r} is required and not a property")
                properties[name] = others
        if not properties and others is True:
            return "object"
        held, self._open = self._open, []
        pairs = [
            (f'{json_literal(name)} ws ":" ws {self.named(one, f"{path}.properties.{name}", depth + 1)}', name)
            for name, one in properties.items()
        ]
        more = ""
        if others is not False:
            value = self.named(others, f"{path}.additionalProperties", depth + 1)
            more = self._rule(f'"\\"" {other_name(self._rule, list(properties))} "\\"" ws ":" ws {value}')
        self._open = held
        return f'"{{" ws {self._members(pairs, set(required), more)} ws "}}"'

    def _members(self, pairs: list[tuple[str, str]], required: set[str], more: str) -> str:
        """From the last property to the first: `rest` follows a member and begins with a comma, `start` does not."""
        rest = f'( ws "," ws {more} )*' if more else ""
        start = f"( {more} {rest} )?" if more else ""
        for pair, name in reversed(pairs):
            member = self._rule(f"{pair} {rest}".strip())
            if name in required:
                rest, start = f'ws "," ws {member}', member
            else:
                # Another rule each time: without it the text would double with every optional property.
                start = self._rule(f"{member} | {start}") if start else f"( {member} )?"
                rest = self._rule(f'ws "," ws {member} | {rest}') if rest else f'( ws "," ws {member} )?'
        return start


def other_name(rule: Callable[[str], str], names: list[str]) -> str:
    """The inside of a JSON string that is none of `names`.

    The part shared with one of them has no escapes. If a name needs escapes itself, the others have none at all.
    """
    plain = [name for name in names if json_literal(name) == literal(f'"{name}"')]
    rest = "char*" if len(plain) == len(names) else "plain*"
    return _differing(rule, plain, rest) if plain else rest


def _differing(rule: Callable[[str], str], names: list[str], rest: str) -> str:
    by_first: dict[str, list[str]] = {}
    for name in names:
        if name:
            by_first.setdefault(name[0], []).append(name[1:])
    # By number: llama.cpp knows no escapes of these signs.
    excluded = "".join(f"\\x{ord(one):02X}" if one in "[]\\^-" else one for one in by_first)
    choices = [f'[^"\\\\\\x7F\\x00-\\x1F{excluded}] {rest}']
    choices += [f"{literal(first)} {_differing(rule, ends, rest)}" for first, ends in by_first.items()]
    body = " | ".join(choices)
    return rule(body if "" in names else f"( {body} )?")


def _properties(schema: Mapping[str, object], path: str) -> dict[str, object]:
    properties = schema.get("properties", {})
    if not isinstance(properties, dict):
        raise _unsupported(f"{path}.properties", "it is not an object")
    return dict(properties)


def _required(schema: Mapping[str, object], path: str) -> list[str]:
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(one, str) for one in required):
        raise _unsupported(f"{path}.required", "it is not a list of names")
    return required


def _bounds(schema: Mapping[str, object], low: str, high: str, path: str) -> tuple[int, int | None]:
    least, most = schema.get(low, 0), schema.get(high)
    for word, bound in ((low, least), (high, most)):
        if bound is not None and (isinstance(bound, bool) or not isinstance(bound, int) or bound < 0):
            raise _unsupported(f"{path}.{word}", "it is not a number of items or characters")
    assert isinstance(least, int)
    assert most is None or isinstance(most, int)
    if least > MAX_COUNT or (most is not None and most < least):
        raise _unsupported(f"{path}.{low}", f"it must be at most {MAX_COUNT} and at most '{high}'")
    return least, None if most is not None and most > MAX_COUNT else most


def _times(least: int, most: int | None) -> str:
    if most is None:
        return "*" if least == 0 else "+" if least == 1 else f"{{{least},}}"
    return f"{{{least},{most}}}"


def _unsupported(path: str, cause: str) -> Invalid:
    return Invalid(f"cannot make a grammar of `{path}`: {cause}", code="unsupported", param=path)
