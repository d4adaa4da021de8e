"""The reader of answers: the same result for whole texts and pieces, and nothing held back without need."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from enginehouse.core.answer_reader import AnswerReader, TextRules, read_whole
from enginehouse.core.reasoning import Split
from enginehouse.core.tool_grammar import ToolFunction

FUNCTIONS = (ToolFunction(name="get_weather"), ToolFunction(name="get_time"))

_TEXTS = st.sampled_from(
    [
        'Sure. <tool_call>{"name": "get_time", "arguments": {}}</tool_call>',
        '{"name": "get_time", "arguments": {}}',
        "plain < text [1] with <tool brackets",
        "<think>hm { </think>\n{}",
        "<think>x</think>Sure <function=get_time></function>",
        " \n [TOOL_CALLS]get_time[ARGS]{}",
        "```python\nprint(1)\n```",
        '{"just": "json"}',
        "",
    ]
)


@given(_TEXTS, st.lists(st.integers(0, 70), max_size=8))
def test_calls_are_found_however_the_text_arrives(text: str, cuts: list[int]) -> None:
    rules = TextRules(functions=FUNCTIONS)
    reader = AnswerReader(rules)
    reasoning = content = ""
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    for begin, end in itertools.pairwise(edges):
        split = reader.feed(text[begin:end])
        reasoning, content = reasoning + split.reasoning, content + split.content
    last, calls = reader.finish()
    whole, expected = read_whole(text, rules)
    assert calls == expected
    assert (reasoning + last.reasoning, (content + last.content).rstrip()) == (whole.reasoning, whole.content.rstrip())


def test_text_is_changed_as_configured_and_only_as_a_whole() -> None:
    rules = TextRules(cut=("<[^>]*>",), trim_prefixes=("Answer:",), trim_suffixes=("END",), prefix="> ")
    reader = AnswerReader(rules)
    assert reader.feed("some <b>bold</b> ") == Split("", "")
    reader.feed("text END")
    assert reader.finish() == (Split("", "> some bold text"), [])
    extracted, _ = read_whole("id 17 and 18", TextRules(extract=(r"\d+",)))
    assert extracted.content == "17"


def test_a_prefix_is_put_before_the_first_content() -> None:
    reader = AnswerReader(TextRules(prefix="> "))
    assert reader.feed("<think>a</think>") == Split("a", "")
    assert reader.feed("b") == Split("", "> b")
    assert reader.feed("c") == Split("", "c")


def test_thoughts_can_be_dropped() -> None:
    split, _ = read_whole("<think>secret</think>open", TextRules(drops_reasoning=True))
    assert split == Split("", "open")


def test_a_call_that_the_engine_parsed_is_not_found_again() -> None:
    reader = AnswerReader(TextRules(functions=FUNCTIONS))
    reader.feed('{"name": "get_time", "arguments": {}}')
    reader.drop()
    assert reader.finish() == (Split("", ""), [])


def test_content_before_a_call_is_passed_on_at_once() -> None:
    reader = AnswerReader(TextRules(functions=FUNCTIONS))
    assert reader.feed("Let me") == Split("", "Let me")
    assert reader.is_passing()
    assert reader.feed(" look <tool") == Split("", " look ")
    assert not reader.is_passing()
    assert reader.feed("box>. ") == Split("", "<toolbox>. ")
    assert reader.is_passing()
    assert reader.feed("<tool_call>{") == Split("", "")
    assert reader.feed("anything") == Split("", "")
    assert reader.finish()[0].content == "<tool_call>{anything"


def test_a_beginning_is_looked_at_where_it_could_be_a_call() -> None:
    assert not AnswerReader(TextRules(functions=FUNCTIONS)).is_passing()
    assert AnswerReader(TextRules()).is_passing()
    assert not AnswerReader(TextRules(prefix="> ")).is_passing()
    assert not AnswerReader(TextRules(cut=("x",))).is_passing()
    assert not AnswerReader(TextRules(inside="</think>")).is_passing()
