"""Tool calls in text: the formats of model families, configured patterns, and what is no call."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from enginehouse.core.model_config import Replacement, ToolConfig
from enginehouse.core.tool_calls import FoundCall, find_calls, held_from
from enginehouse.core.tool_grammar import ToolFunction

WEATHER = ToolFunction(
    name="get_weather",
    parameters={"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
)
TIME = ToolFunction(name="get_time")
FUNCTIONS = (WEATHER, TIME)
ROME = {"city": "Rome"}
ONE = [("get_weather", ROME)]


def _found(text: str, config: ToolConfig | None = None) -> tuple[list[tuple[str, Any]], str]:
    calls, content = find_calls(text, FUNCTIONS, config or ToolConfig())
    return [(call.name, json.loads(call.arguments)) for call in calls], content


@pytest.mark.parametrize(
    ("text", "calls", "content"),
    [
        ('{"name": "get_weather", "arguments": {"city": "Rome"}}', ONE, ""),
        ('{"name": "get_weather", "arguments": "{\\"city\\": \\"Rome\\"}"}', ONE, ""),
        ('{"function": "get_weather", "parameters": {"city": "Rome"}}', ONE, ""),
        ('{"type": "function", "function": {"name": "get_weather", "arguments": {"city": "Rome"}}}', ONE, ""),
        ('Let me see. {"name": "get_weather", "arguments": {"city": "Rome"}}', ONE, "Let me see."),
        ('```json\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n```', ONE, ""),
        (
            '[{"name": "get_weather", "arguments": {"city": "Rome"}}, {"name": "get_time", "arguments": {}}]',
            [*ONE, ("get_time", {})],
            "",
        ),
        (
            '{"name": "get_weather", "arguments": {"city": "Rome"}}\n{"name": "get_time", "arguments": {}}',
            [*ONE, ("get_time", {})],
            "",
        ),
        (
            'Sure.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>\n'
            '<tool_call>{"name": "get_time", "arguments": {}}',
            [*ONE, ("get_time", {})],
            "Sure.",
        ),
        (
            "<tool_call>\n<function=get_weather>\n<parameter=city>\nRome\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
            "</function>\n</tool_call>",
            [("get_weather", {"city": "Rome", "days": 3})],
            "",
        ),
        ('<function=get_weather>{"city": "Rome"}</function>', ONE, ""),
        (
            "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>12</arg_value>\n<arg_key>days</arg_key>\n"
            "<arg_value>2</arg_value>\n</tool_call>",
            [("get_weather", {"city": "12", "days": 2})],
            "",
        ),
        (
            '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Rome</parameter>\n</invoke>\n'
            '<invoke name="get_time">\n</invoke>\n</minimax:tool_call>',
            [*ONE, ("get_time", {})],
            "",
        ),
        (
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
            '{"city": "Rome"}<|tool_call_end|><|tool_calls_section_end|>',
            ONE,
            "",
        ),
        (
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>"  # noqa: RUF001
            '{"city": "Rome"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',  # noqa: RUF001
            ONE,
            "",
        ),
        ('[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Rome"}}]', ONE, ""),
        ('[TOOL_CALLS]get_weather[ARGS]{"city": "Rome"}', ONE, ""),
    ],
)
def test_calls_of_known_formats_are_found(text: str, calls: list[tuple[str, Any]], content: str) -> None:
    assert _found(text) == (calls, content)


@pytest.mark.parametrize(
    "text",
    [
        "It is sunny.",
        '{"city": "Rome"}',
        '{"name": "launch_rocket", "arguments": {}}',
        '{"name": "get_weather", "arguments": {"city": "Ro',
        '{"name": "get_weather", "arguments": 5}',
        "[1, 2, 3]",
        "<tool_call>launch_rocket</tool_call>",
        "use <function=...> like this",
        "",
        "[" * 100_000,
    ],
)
def test_what_is_no_call_stays_content(text: str) -> None:
    assert _found(text) == ([], text)


def test_the_function_that_only_answers_is_an_answer() -> None:
    assert _found('{"name": "answer", "arguments": {"message": "Hello!"}}') == ([], "Hello!")
    named = ToolConfig(no_action_function_name="reply")
    assert _found('{"name": "reply", "arguments": {"message": "Hello!"}}', named) == ([], "Hello!")


def test_configured_patterns_come_first() -> None:
    config = ToolConfig(response_regex=(r"CALL (?P<name>\w+) WITH (?P<arguments>\{.*\})",))
    assert _found('CALL get_weather WITH {"city": "Rome"}', config) == (
        ONE,
        'CALL get_weather WITH {"city": "Rome"}',
    )
    pairs = ToolConfig(
        response_regex=(r"(?P<name>\w+)\((?P<arguments>.*)\)",), argument_regex=(r"(?P<key>\w+)=(?P<value>\w+)",)
    )
    assert _found("get_weather(city=Rome)", pairs)[0] == ONE
    within = ToolConfig(json_regex_match=(r"(?s)<json>(.*?)</json>",))
    assert _found('x <json>{"name": "get_weather", "arguments": {"city": "Rome"}}</json>', within)[0] == ONE


def test_configured_replacements_use_gos_references() -> None:
    config = ToolConfig(replace_llm_results=(Replacement(key=r"'(\w+)'", value='"${1}"'),))
    assert _found("{'name': 'get_weather', 'arguments': {'city': 'Rome'}}", config)[0] == ONE


def test_renamed_keys_are_used() -> None:
    config = ToolConfig(function_name_key="tool", function_arguments_key="with")
    assert _found('{"tool": "get_weather", "with": {"city": "Rome"}}', config)[0] == ONE
    assert _found('{"name": "get_weather", "arguments": {}}', config)[0] == []


def test_a_stream_holds_back_what_could_be_a_call() -> None:
    assert held_from("hello there", is_start=True) == 11
    assert held_from('  {"a"', is_start=True) == 0
    assert held_from("``", is_start=True) == 0
    assert held_from("x {", is_start=False) == 3
    assert held_from("text <tool", is_start=False) == 5
    assert held_from("text <tools>", is_start=False) == 12
    assert held_from("see [TOOL_CALLS] now", is_start=False) == 4


@given(st.text("<>{}[]/=tool_call function\"':,", max_size=60))
def test_any_text_is_read(text: str) -> None:
    calls, content = find_calls(text, FUNCTIONS, ToolConfig())
    assert calls or content == text


def test_a_found_call_is_a_name_and_json() -> None:
    calls, _ = find_calls('{"name": "get_time", "arguments": {}}', FUNCTIONS, ToolConfig())
    assert calls == [FoundCall("get_time", "{}")]
