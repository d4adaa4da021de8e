"""Finds tool calls in the text of a model whose engine did not parse them.

In this order: the configured regular expressions, blocks with the markers of known model families, JSON objects with a
name and arguments. A call must name one of the request's tools; otherwise JSON that a user asked for would be taken
for a call. Text that is no call is content.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from enginehouse.core.model_config import Replacement, ToolConfig
from enginehouse.core.tool_grammar import ToolFunction, answer_name

MAX_TEXT = 1024 * 1024  # characters that are searched; a call in a longer answer is not found
# What a block with calls begins with. Streams hold text back from here on.
OPENINGS = (
    "<tool_call>",
    "<function=",
    "<function_calls>",
    "<minimax:tool_call>",
    "[TOOL_CALLS]",
    "<|tool_calls_section_begin|>",
    "<|tool_call_begin|>",
    "<｜tool▁calls▁begin｜>",  # noqa: RUF001 these bars and blocks are the model's own
    "<｜tool▁call▁begin｜>",  # noqa: RUF001
)
_JSON_BEGINNINGS = ("{", "[", "```json")
_INVOKE = re.compile(r"<invoke name=\"([^\"<>]*)\">")
_PARAMETER = re.compile(r"<parameter(?:=| name=\")([^\">]+)\"?>")
_DECODER = json.JSONDecoder()


class FoundCall(NamedTuple):
    """A call; `arguments` is JSON text."""

    name: str
    arguments: str


class FoundAnswer(NamedTuple):
    calls: list[FoundCall]
    content: str


def find_calls(text: str, functions: Sequence[ToolFunction], config: ToolConfig) -> FoundAnswer:
    """The calls in a complete text, and the content beside them."""
    if len(text) > MAX_TEXT:
        return FoundAnswer([], text)
    known = {function.name: function for function in functions}
    text = _replaced(text, config.replace_llm_results)
    content = text
    for pattern in config.capture_llm_results:
        match = re.search(pattern, text)
        if match:
            content = match.group(1) if match.re.groups else match.group()
            break
    calls = _by_pattern(text, config)
    if not calls:
        calls, beside = _by_markers(text, known, config)
        if not calls:
            calls, beside = _by_json(text, known, config)
        if not config.capture_llm_results:
            content = beside
    return _without_answer(calls, content, config)


def held_from(text: str, *, is_start: bool) -> int:
    """Where a text could begin a call, from where a stream must not pass it on yet; its length if nowhere."""
    if is_start:
        begun = text.lstrip()
        if not begun or begun.startswith(_JSON_BEGINNINGS) or "```json".startswith(begun[:7]):
            return 0
    for position, character in enumerate(text):
        if character in "<[":
            rest = text[position:]
            if any(rest.startswith(one) or one.startswith(rest) for one in OPENINGS):
                return position
    return len(text)


def _without_answer(calls: list[FoundCall], content: str, config: ToolConfig) -> FoundAnswer:
    """A first call of the function that only answers is an ordinary answer."""
    if not calls or calls[0].name != answer_name(config):
        return FoundAnswer(calls, content)
    try:
        arguments = msgspec.json.decode(calls[0].arguments, type=dict[str, object])
    except msgspec.DecodeError:
        return FoundAnswer([], calls[0].arguments)
    message = arguments.get("message", next(iter(arguments.values()), ""))
    return FoundAnswer([], message if isinstance(message, str) else msgspec.json.encode(message).decode())


# Configured patterns ------------------------------------------------------------------------------------------------


def _replaced(text: str, replacements: Sequence[Replacement]) -> str:
    for one in replacements:
        # Go writes `$1` and `${name}` where Python writes `\1` and `\g<name>`.
        value = re.sub(r"\$\{?(\w+)\}?", r"\\g<\1>", one.value.replace("\\", "\\\\"))
        text = re.sub(one.key, value, text)
    return text


def _by_pattern(text: str, config: ToolConfig) -> list[FoundCall]:
    name_key = config.function_name_key or "name"
    arguments_key = config.function_arguments_key or "arguments"
    calls: list[FoundCall] = []
    for pattern in config.response_regex:
        for match in re.finditer(pattern, text):
            found = match.groupdict()
            if found.get(name_key):
                arguments = _replaced(found.get(arguments_key) or "", config.replace_function_results)
                calls.append(FoundCall(str(found[name_key]), _arguments_text(arguments, config)))
        if calls:
            return calls
    for pattern in config.json_regex_match:
        match_ = re.search(pattern, text)
        if match_:
            piece = _replaced(match_.group(1) if match_.re.groups else match_.group(), config.replace_function_results)
            calls, _ = _by_json(piece, {}, config)
            if calls:
                return calls
    return calls


def _arguments_text(arguments: str, config: ToolConfig) -> str:
    """Arguments as a JSON object: as they are, or from pairs that a configured pattern finds."""
    pairs: dict[str, object] = {}
    for pattern in config.argument_regex:
        for match in re.finditer(pattern, arguments):
            found = match.groupdict()
            if found.get("key"):
                pairs[found["key"]] = found.get("value") or ""
    if pairs:
        return msgspec.json.encode(pairs).decode()
    return arguments.strip() or "{}"


# Blocks with markers ------------------------------------------------------------------------------------------------


def _by_markers(text: str, known: Mapping[str, ToolFunction], config: ToolConfig) -> tuple[list[FoundCall], str]:
    positions = [position for one in OPENINGS if (position := text.find(one)) >= 0]
    if not positions:
        return [], text
    start = min(positions)
    calls: list[FoundCall] = []
    block = text[start:]
    for inside in _blocks(block, "<tool_call>", "</tool_call>"):
        if inside.lstrip().startswith(("{", "[")):
            calls += _by_json(inside, known, config)[0]
        elif "<arg_key>" in inside or "<function=" not in inside:
            calls.append(_named_arguments(inside, known))
    for inside in _blocks(block, "<function=", "</function>"):
        name, _, body = inside.partition(">")
        calls.append(FoundCall(name.strip(), _parameters(body, known.get(name.strip()))))
    calls += _invoked(block, known)
    for opening in ("<|tool_call_begin|>", "<｜tool▁call▁begin｜>"):  # noqa: RUF001
        calls += _separated(block, opening, known)
    for inside in _blocks(block, "[TOOL_CALLS]", ""):
        name, marker, body = inside.partition("[ARGS]")
        calls += [FoundCall(name.strip(), body.strip())] if marker else _by_json(inside, known, config)[0]
    named = {*known, answer_name(config)}
    allowed = [call for call in calls if not known or call.name in named]
    return (allowed, text[:start].rstrip()) if allowed else ([], text)


def _blocks(text: str, opening: str, closing: str) -> list[str]:
    """What is between the markers. A block that is not closed ends with the text, because engines drop stop words."""
    blocks: list[str] = []
    position = text.find(opening)
    while position >= 0:
        begin = position + len(opening)
        after = text.find(opening, begin)
        limit = len(text) if after < 0 else after
        end = text.find(closing, begin, limit) if closing else -1
        blocks.append(text[begin : limit if end < 0 else end])
        position = after
    return blocks


def _parameters(body: str, function: ToolFunction | None) -> str:
    if body.lstrip().startswith("{"):
        return body.strip()
    pairs: dict[str, object] = {}
    matches = list(_PARAMETER.finditer(body))
    for number, match in enumerate(matches):
        limit = matches[number + 1].start() if number + 1 < len(matches) else len(body)
        end = body.find("</parameter>", match.end(), limit)
        pairs[match.group(1)] = _typed(body[match.end() : limit if end < 0 else end], match.group(1), function)
    return msgspec.json.encode(pairs).decode()


def _invoked(block: str, known: Mapping[str, ToolFunction]) -> list[FoundCall]:
    matches = list(_INVOKE.finditer(block))
    calls = []
    for number, match in enumerate(matches):
        limit = matches[number + 1].start() if number + 1 < len(matches) else len(block)
        calls.append(FoundCall(match.group(1), _parameters(block[match.end() : limit], known.get(match.group(1)))))
    return calls


def _named_arguments(inside: str, known: Mapping[str, ToolFunction]) -> FoundCall:
    """A name, and keys and values in turn."""
    name = inside.partition("<arg_key>")[0].strip()
    pairs: dict[str, object] = {}
    for piece in inside.split("<arg_key>")[1:]:
        key, _, rest = piece.partition("</arg_key>")
        value = rest.partition("<arg_value>")[2].partition("</arg_value>")[0]
        pairs[key.strip()] = _typed(value, key.strip(), known.get(name))
    return FoundCall(name, msgspec.json.encode(pairs).decode())


def _separated(block: str, opening: str, known: Mapping[str, ToolFunction]) -> list[FoundCall]:
    """A name, a separator and arguments as JSON."""
    calls = []
    for inside in _blocks(block, opening, ""):
        for separator in ("<|tool_call_argument_begin|>", "<｜tool▁sep｜>"):  # noqa: RUF001
            name, found, body = inside.partition(separator)
            if found:
                # One family writes `functions.NAME:0`.
                bare = name.strip().removeprefix("functions.").rpartition(":")
                called = name.strip() if name.strip() in known else (bare[0] or bare[2])
                value, _ = _decoded(body.strip())
                calls.append(FoundCall(called, "{}" if value is None else msgspec.json.encode(value).decode()))
    return calls


def _typed(text: str, key: str, function: ToolFunction | None) -> object:
    """A value as its schema says; text that should be something else and is no JSON stays text."""
    properties = function.parameters.get("properties") if function else None
    schema = properties.get(key) if isinstance(properties, dict) else None
    text = text.removeprefix("\n").removesuffix("\n")
    if isinstance(schema, dict) and schema.get("type") == "string":
        return text
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return text


# JSON ---------------------------------------------------------------------------------------------------------------


def _by_json(text: str, known: Mapping[str, ToolFunction], config: ToolConfig) -> tuple[list[FoundCall], str]:
    """Objects with a name and arguments, one after the other or in a list, from the first bracket of the text on."""
    positions = [position for one in "{[" if (position := text.find(one)) >= 0]
    calls: list[FoundCall] = []
    start = position = min(positions, default=len(text))
    while position < len(text):
        value, end = _decoded(text, position)
        if end <= position:
            break
        for one in value if isinstance(value, list) else [value]:
            call = _call_of(one, config)
            if call is None or (known and call.name not in known and call.name != answer_name(config)):
                return [], text
            calls.append(call)
        position = end
        while position < len(text) and text[position] in " \t\r\n,;":
            position += 1
    before = text[:start].rstrip()
    return (calls, before.removesuffix("```json").rstrip()) if calls else ([], text)


def _decoded(text: str, position: int = 0) -> tuple[object, int]:
    try:
        return _DECODER.raw_decode(text, position)
    except (ValueError, RecursionError):
        return None, position


def _call_of(value: object, config: ToolConfig) -> FoundCall | None:
    if not isinstance(value, dict):
        return None
    inner = value.get("function")
    if isinstance(inner, dict):
        value = inner
    name = value.get(config.function_name_key or "name")
    if name is None and not config.function_name_key:
        name = value.get("function")
    arguments = value.get(config.function_arguments_key or "arguments")
    if arguments is None and not config.function_arguments_key:
        arguments = value.get("parameters", {})
    if not isinstance(name, str) or not isinstance(arguments, dict | str):
        return None
    return FoundCall(name, arguments if isinstance(arguments, str) else msgspec.json.encode(arguments).decode())
