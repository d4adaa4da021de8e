"""Grammars from schemas: they accept what is valid, and what they give is valid. Checked with a matcher of their own
and, for validity, with an implementation of JSON Schema.
"""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema_rs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.core.gbnf import Grammar

from enginehouse.core.errors import Invalid
from enginehouse.core.json_grammar import MAX_COUNT, grammar_of, json_grammar

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0},
        "tags": {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": 2},
        "kind": {"enum": ["a", "b c", None, 3]},
    },
    "required": ["name", "kind"],
    "additionalProperties": False,
}
TREE: dict[str, Any] = {
    "$ref": "#/$defs/tree",
    "$defs": {
        "tree": {
            "type": "object",
            "properties": {
                "value": {"type": "number"},
                "children": {"type": "array", "items": {"$ref": "#/$defs/tree"}},
            },
            "required": ["value"],
        }
    },
}


@pytest.mark.parametrize(
    ("schema", "accepted", "refused"),
    [
        (
            PERSON,
            ['{"name":"x","kind":"a"}', '{"name": "x",\n  "age": 3, "tags": ["q"], "kind": null}'],
            [
                '{"kind":"a"}',
                '{"name":"x","age":-1,"kind":3}',
                '{"name":"x","tags":[],"kind":3}',
                '{"kind":3,"name":"x"}',
                '{"name":"x","kind":"a","more":1}',
                '{"name":"x","kind":"b"}',
                '{"name":"x","tags":["1","2","3"],"kind":3}',
            ],
        ),
        (TREE, ['{"value":1.5e3,"children":[{"value":-1},{"value":0,"children":[]}]}'], ['{"children":[]}', "[]"]),
        ({"type": ["string", "null"]}, ['"é\\n\\u00e9"', "null"], ["1", '"a\nb"', '"\\x"', '"']),
        ({"anyOf": [{"type": "boolean"}, {"const": {"a": [1]}}]}, ["true", '{"a":[1]}'], ['{"a":[2]}', "null"]),
        ({"type": "string", "minLength": 2, "maxLength": 3}, ['"ab"', '"\\n\\"c"'], ['"a"', '"abcd"']),
        (
            {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}]},
            ['[1,"a"]', '[1,"a",{}]'],
            ["[]"],
        ),
        ({"type": "array", "prefixItems": [{"type": "integer"}], "items": False}, ["[1]"], ["[1,2]", "[]"]),
        ({"type": "array", "items": {"type": "null"}, "maxItems": 0}, ["[]"], ["[null]"]),
        ({}, ['{"a":[1,{"b":null}]}', "0"], ["01", "+1", "nul"]),
        ({"type": "object"}, ["{}", '{"a":1}'], ["[]"]),
        (
            {"type": "object", "properties": {"ab": {"type": "null"}}, "additionalProperties": {"type": "integer"}},
            ["{}", '{"ab":null}', '{"ab":null,"a":1,"abc":2,"":3,"b":4}', '{"x":1}'],
            ['{"ab":1}', '{"ab":null,"ab":1}', '{"x":null}'],
        ),
        (
            {"allOf": [{"$ref": "#/$defs/a"}, {"properties": {"y": {"type": "null"}}, "required": ["y"]}]}
            | {"$defs": {"a": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}}},
            ['{"x":1,"y":null}'],
            ['{"x":1}', '{"y":null}'],
        ),
        (
            {
                "properties": {"\\": {"type": "null"}, "a": {"type": "null"}},
                "additionalProperties": {"type": "integer"},
            },
            ['{"\\\\":null,"b":1,"ab":2}'],
            ['{"\\\\":1}', '{"a":null,"\\\\":1}', '{"\\u005c":1}'],
        ),
        ({"type": "integer"}, ["0", "-12"], ["1.5", "-", "00"]),
        ({"type": "object", "required": ["free"]}, ['{"free":[1]}'], ["{}"]),
        ({"const": 'a"b\\c\n'}, [json.dumps('a"b\\c\n')], ['"a"']),
    ],
)
def test_a_grammar_accepts_what_its_schema_allows(schema: Any, accepted: list[str], refused: list[str]) -> None:
    grammar = Grammar(grammar_of(schema))
    for text in accepted:
        assert grammar.accepts(text), text
        assert jsonschema_rs.is_valid(schema, json.loads(text))
    for text in refused:
        assert not grammar.accepts(text), text


def test_the_grammar_of_json_accepts_objects_only() -> None:
    grammar = Grammar(json_grammar())
    assert grammar.accepts('{"a": [1, 2.5, {"b": "c"}], "d": null}')
    assert not grammar.accepts("[1]")
    assert not grammar.accepts('{"a":}')


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        ({"properties": {"a": {"not": {"type": "null"}}}}, "schema.properties.a.not"),
        ({"items": {"patternProperties": {}}}, "schema.items.patternProperties"),
        ({"$ref": "https://example.com/schema"}, "schema.$ref"),
        ({"$ref": "#/$defs/nothing"}, "schema.$ref"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}, "schema.$defs.a.$ref"),
        (
            {"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/a"}]}}},
            "schema.$defs.a.anyOf[1].$ref",
        ),
        ({"anyOf": []}, "schema.anyOf"),
        ({"anyOf": [{}], "properties": {"a": {}}}, "schema.properties"),
        ({"type": "frob"}, "schema.type"),
        ({"type": "array", "minItems": MAX_COUNT + 1}, "schema.minItems"),
        ({"type": "array", "minItems": 3, "maxItems": 2}, "schema.minItems"),
        ({"type": "object", "properties": {}, "additionalProperties": False, "required": ["x"]}, "schema.required"),
        ({"allOf": [{"type": "string"}, {"type": "object"}]}, "schema.allOf[0]"),
        ({"enum": []}, "schema.enum"),
        ("text", "schema"),
    ],
)
def test_what_is_not_supported_is_refused_with_its_path(schema: Any, path: str) -> None:
    with pytest.raises(Invalid) as caught:
        grammar_of(schema)
    assert caught.value.code == "unsupported"
    assert caught.value.param == path


def test_a_huge_schema_is_refused_instead_of_becoming_a_huge_grammar() -> None:
    wide = {"type": "object", "properties": {f"key{number}": {"enum": [number]} for number in range(5000)}}
    deep: dict[str, Any] = {"type": "string"}
    for _ in range(200):
        deep = {"type": "array", "items": deep}
    for schema in (wide, deep):
        with pytest.raises(Invalid):
            grammar_of(schema)


def test_a_grammar_grows_in_step_with_optional_properties() -> None:
    sizes = [
        len(grammar_of({"properties": {f"k{number}": {"type": "null"} for number in range(count)}}))
        for count in (50, 100, 200)
    ]
    assert sizes[2] < 4.5 * sizes[0]


_SCALARS = st.sampled_from(
    [
        {"type": "string"},
        {"type": "integer"},
        {"type": "number"},
        {"type": "boolean"},
        {"type": "null"},
        {"enum": ["x", 1, None, 'q"\\']},
        {"type": "string", "minLength": 1, "maxLength": 4},
        {"type": "integer", "minimum": 0},
    ]
)


def _containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    arrays = st.builds(
        lambda items, least: {"type": "array", "items": items, "minItems": least}, inner, st.integers(0, 2)
    )

    def described(properties: dict[str, Any], flags: list[bool], extra: Any) -> Any:
        required = [name for name, flag in zip(properties, flags, strict=False) if flag]
        return {"type": "object", "properties": properties, "required": required, "additionalProperties": extra}

    objects = st.builds(
        described,
        st.dictionaries(st.text("ab]^-\\\"'é", max_size=3), inner, max_size=4),
        st.lists(st.booleans(), min_size=4, max_size=4),
        st.one_of(st.just(False), st.just(True), inner),
    )
    return st.one_of(arrays, objects, st.lists(inner, min_size=1, max_size=3).map(lambda some: {"anyOf": some}))


_SCHEMAS = st.recursive(_SCALARS, _containers, max_leaves=8)


@given(_SCHEMAS, st.integers(0, 2**32))
@settings(max_examples=150, deadline=None)
def test_whatever_a_grammar_gives_is_valid_for_its_schema(schema: Any, seed: int) -> None:
    grammar = Grammar(grammar_of(schema))
    text = grammar.sample(random.Random(seed))
    value = json.loads(text, parse_constant=pytest.fail)
    assert jsonschema_rs.is_valid(schema, value), text
    assert grammar.accepts(text)


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_every_instance_in_the_order_of_the_schema_is_accepted(data: st.DataObject) -> None:
    schema: Any = data.draw(_SCHEMAS)
    instance = data.draw(_instances(schema))
    assert jsonschema_rs.is_valid(schema, instance)
    text = json.dumps(instance, ensure_ascii=False, separators=(",", ":"))
    assert Grammar(grammar_of(schema)).accepts(text)


def _instances(schema: Any) -> st.SearchStrategy[Any]:
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    if "anyOf" in schema:
        return st.one_of([_instances(one) for one in schema["anyOf"]])
    kind = schema["type"]
    if kind == "array":
        return st.lists(_instances(schema["items"]), min_size=schema["minItems"], max_size=3)
    if kind == "object":
        required = {name: _instances(schema["properties"][name]) for name in schema["required"]}
        optional = {name: _instances(one) for name, one in schema["properties"].items() if name not in required}
        fixed = st.fixed_dictionaries(required, optional=optional)
        return fixed.map(lambda chosen: {name: chosen[name] for name in schema["properties"] if name in chosen})
    letters = st.characters(
        min_codepoint=32, max_codepoint=0xFFFF, exclude_categories=["Cs"], exclude_characters="\x7f"
    )
    return {
        "string": st.text(letters, min_size=schema.get("minLength", 0), max_size=schema.get("maxLength", 8)),
        "integer": st.integers(schema.get("minimum", -(10**15)), 10**15),
        "number": st.floats(-1e9, 1e9, allow_nan=False, width=32).map(lambda one: round(one, 3)),
        "boolean": st.booleans(),
        "null": st.none(),
    }[kind]
