"""Grammars of tool calls, checked with a matcher, and read back by the finder of calls."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.core.gbnf import Grammar

from enginehouse.core.errors import Invalid
from enginehouse.core.model_config import ToolConfig, ToolGrammarConfig
from enginehouse.core.tool_calls import find_calls
from enginehouse.core.tool_grammar import ToolFunction, answer_function, tool_grammar

WEATHER = ToolFunction(
    name="get_weather",
    parameters={"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
)
TIME = ToolFunction(name="get_time")
CALL = '{"name":"get_weather","arguments":{"city":"Rome"}}'


def _grammar(**options: object) -> Grammar:
    config = ToolConfig(grammar=ToolGrammarConfig(**options))  # type: ignore[arg-type]
    return Grammar(tool_grammar([WEATHER, TIME], config))


def test_a_call_has_a_known_name_and_its_arguments() -> None:
    grammar = _grammar()
    assert grammar.accepts(CALL)
    assert grammar.accepts('{"name": "get_time", "arguments": {}}')
    for text in ('{"name":"get_weather","arguments":{}}', '{"name":"other","arguments":{}}', "Hello", f"[{CALL}]"):
        assert not grammar.accepts(text)


def test_several_calls_are_a_list() -> None:
    grammar = _grammar(parallel_calls=True)
    assert grammar.accepts(CALL)
    assert grammar.accepts(f"[{CALL}]")
    assert grammar.accepts(f"[{CALL}, {CALL}]")
    assert not grammar.accepts("[]")


def test_free_text_is_allowed_only_in_mixed_mode() -> None:
    assert _grammar(mixed_mode=True).accepts("Hello, how are you?")
    assert not _grammar(mixed_mode=True, no_mixed_free_string=True).accepts("Hello")
    assert _grammar(expect_strings_after_json=True).accepts(CALL + "\nDone.")
    assert _grammar(prefix="<tool_call>\n").accepts("<tool_call>\n" + CALL)
    assert not _grammar(prefix="<tool_call>\n").accepts(CALL)


def test_keys_and_their_order_follow_the_configuration() -> None:
    config = ToolConfig(
        function_name_key="tool",
        function_arguments_key="with",
        grammar=ToolGrammarConfig(properties_order="with,tool"),
    )
    grammar = Grammar(tool_grammar([WEATHER], config))
    assert grammar.accepts('{"with":{"city":"Rome"},"tool":"get_weather"}')
    assert not grammar.accepts('{"tool":"get_weather","with":{"city":"Rome"}}')


def test_llamas_own_form_is_possible() -> None:
    assert _grammar(schema_type="llama3.1").accepts('<function=get_weather>{"city":"Rome"}</function>')


def test_parameters_that_make_no_grammar_are_named() -> None:
    broken = ToolFunction(name="x", parameters={"type": "object", "properties": {"a": {"not": {}}}})
    with pytest.raises(Invalid) as caught:
        tool_grammar([WEATHER, broken], ToolConfig())
    assert caught.value.param == "tools[1].function.parameters.properties.a.not"
    with pytest.raises(Invalid):
        tool_grammar([], ToolConfig())


@given(st.integers(0, 2**32), st.booleans(), st.sampled_from(["", "llama3.1"]))
@settings(max_examples=80, deadline=None)
def test_whatever_the_grammar_gives_is_found_as_calls(seed: int, is_parallel: bool, schema_type: str) -> None:
    config = ToolConfig(grammar=ToolGrammarConfig(parallel_calls=is_parallel, schema_type=schema_type))
    functions = [WEATHER, TIME]
    text = Grammar(tool_grammar([*functions, answer_function(config)], config)).sample(random.Random(seed))
    calls, content = find_calls(text, functions, config)
    if calls:
        assert content == ""
        assert {call.name for call in calls} <= {"get_weather", "get_time", "answer"}
        assert all(isinstance(json.loads(call.arguments), dict) for call in calls)
    else:
        assert '"answer"' in text or "<function=answer>" in text
