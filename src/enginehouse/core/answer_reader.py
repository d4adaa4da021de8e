"""Reads the text of a model as it arrives: thoughts, content and tool calls apart.

Whole answers and streams use the same reader, so they say the same. Content is passed on at once unless it could be the
beginning of a tool call, or the configuration changes texts as a whole.
"""

from __future__ import annotations

import re

from msgspec import Struct

from enginehouse.core.model_config import ModelConfig, ToolConfig
from enginehouse.core.reasoning import DEFAULT_TAGS, ReasoningSplitter, Split
from enginehouse.core.tool_calls import OPENINGS, FoundCall, find_calls, held_from
from enginehouse.core.tool_grammar import ToolFunction

_OPENED = re.compile(r"\s*(?:[{\[]|```json)")


class TextRules(Struct, frozen=True, kw_only=True):
    """How the text of one request is read."""

    functions: tuple[ToolFunction, ...] = ()
    tools: ToolConfig = ToolConfig()
    tags: tuple[tuple[str, str], ...] = DEFAULT_TAGS
    inside: str = ""  # the end tag of thoughts that the answer begins with
    drops_reasoning: bool = False
    prefix: str = ""
    cut: tuple[str, ...] = ()
    extract: tuple[str, ...] = ()
    trim_prefixes: tuple[str, ...] = ()
    trim_suffixes: tuple[str, ...] = ()
    is_call: bool = False  # a grammar leaves nothing but a call

    @property
    def holds_all(self) -> bool:
        """Whether nothing can be passed on before the end."""
        changes = self.cut or self.extract or self.trim_prefixes or self.trim_suffixes
        tools = self.tools
        searches = tools.response_regex or tools.json_regex_match or tools.replace_llm_results
        has_patterns = bool(self.functions) and bool(searches or tools.capture_llm_results)
        return bool(changes) or has_patterns or self.is_call


def rules_of(config: ModelConfig) -> TextRules:
    """The rules of a configuration, for a request without tools."""
    return TextRules(
        tools=config.function,
        drops_reasoning=config.reasoning.strip_reasoning_only,
        prefix=config.template.reply_prefix,
        cut=config.cutstrings,
        extract=config.extract_regex,
        trim_prefixes=config.trimspace,
        trim_suffixes=config.trimsuffix,
    )


class AnswerReader:
    def __init__(self, rules: TextRules) -> None:
        self._rules = rules
        self._splitter = ReasoningSplitter(rules.tags, inside=rules.inside)
        self._prefix = rules.prefix
        self._holds = rules.holds_all
        self._held = [rules.prefix] if rules.holds_all else []
        self._has_passed = False

    def feed(self, text: str) -> Split:
        """What can be passed on."""
        split = self._splitter.feed(text)
        reasoning, content = split
        if content and self._prefix and not self._holds:
            content, self._prefix = self._prefix + content, ""
        if self._rules.functions or self._holds:
            content = self._pass(content)
        elif content is split.content and not self._rules.drops_reasoning:
            return split
        return Split("" if self._rules.drops_reasoning else reasoning, content)

    def is_passing(self) -> bool:
        """Whether the next text would be passed on as content unless it has one of `TAG_BEGINNINGS`.

        Known tool calls begin with one of them too, once content has been passed on.
        """
        if self._holds or self._held or self._prefix or (self._rules.functions and not self._has_passed):
            return False
        return self._splitter.is_passing()

    def finish(self) -> tuple[Split, list[FoundCall]]:
        """The rest, and the calls."""
        reasoning, content = self._splitter.finish()
        text = "".join(self._held) + content
        calls: list[FoundCall] = []
        if self._rules.functions and text:
            calls, text = find_calls(text, self._rules.functions, self._rules.tools)
        if text:
            text = adjusted(text, self._rules)
        return Split("" if self._rules.drops_reasoning else reasoning, text), calls

    def drop(self) -> None:
        """Forget what is held: the engine has parsed it itself."""
        self._held = []

    def _pass(self, content: str) -> str:
        if self._holds or not content:
            if content:
                self._held.append(content)
            return ""
        text = "".join(self._held) + content
        cut = held_from(text, is_start=not self._has_passed)
        self._held = [text[cut:]] if cut < len(text) else []
        # From a full opening on, nothing is decided before the end, so nothing is searched again.
        self._holds = bool(self._held) and _is_opened(self._held[0], is_start=not self._has_passed and cut == 0)
        self._has_passed = self._has_passed or cut > 0
        return text[:cut]


def adjusted(text: str, rules: TextRules) -> str:
    """The configured changes of a text."""
    for pattern in rules.cut:
        text = re.sub(pattern, "", text)
    if rules.extract:
        found = "".join(match.group() for pattern in rules.extract if (match := re.search(pattern, text)))
        text = found or text
    for prefix in rules.trim_prefixes:
        text = text.removeprefix(prefix).strip()
    for suffix in rules.trim_suffixes:
        text = text.removesuffix(suffix).strip()
    return text


def _is_opened(text: str, *, is_start: bool) -> bool:
    return text.startswith(OPENINGS) or (is_start and _OPENED.match(text) is not None)


def read_whole(text: str, rules: TextRules) -> tuple[Split, list[FoundCall]]:
    """The parts of a complete text."""
    reader = AnswerReader(rules)
    first = reader.feed(text)
    last, calls = reader.finish()
    return Split(first.reasoning + last.reasoning, first.content + last.content), calls
