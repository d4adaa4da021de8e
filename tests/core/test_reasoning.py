"""Thoughts and content: separated by tags, however the text arrives."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from enginehouse.core.model_config import ReasoningConfig, TagPair
from enginehouse.core.reasoning import (
    DEFAULT_TAGS,
    ReasoningSplitter,
    Split,
    begins_inside,
    tags_of,
)


def split_whole(text: str, tags: Sequence[tuple[str, str]], *, inside: str = "") -> Split:
    splitter = ReasoningSplitter(tags, inside=inside)
    first, last = splitter.feed(text), splitter.finish()
    return Split(first.reasoning + last.reasoning, first.content + last.content)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain answer", Split("", "plain answer")),
        ("<think>\nhm\n</think>\n\nanswer", Split("hm\n", "answer")),
        ("<think></think>answer", Split("", "answer")),
        ("before <think>hm</think> after", Split("hm", "before  after")),
        ("<think>one</think>A<think>two</think>B", Split("onetwo", "AB")),
        ("<think>cut off", Split("cut off", "")),
        ("[THINK]x[/THINK]y", Split("x", "y")),
        ("<|START_THINKING|>x<|END_THINKING|>y", Split("x", "y")),
        ("a < b and c [1] <thin", Split("", "a < b and c [1] <thin")),
        ("<think>a</thinking>b</think>c", Split("a</thinking>b", "c")),
        ("</think>x", Split("", "</think>x")),
    ],
)
def test_thoughts_are_what_is_between_tags(text: str, expected: Split) -> None:
    assert split_whole(text, DEFAULT_TAGS) == expected


def test_an_answer_may_begin_inside_of_thoughts() -> None:
    assert split_whole("\nhm</think>\nanswer", DEFAULT_TAGS, inside="</think>") == Split("hm", "answer")


def test_a_prompt_that_ends_with_a_tag_begins_them() -> None:
    assert begins_inside("user\nassistant\n<think>\n", DEFAULT_TAGS) == "</think>"
    assert begins_inside("what does <think> mean?\n", DEFAULT_TAGS) == ""


def test_configured_tags_are_added_to_the_usual_ones() -> None:
    tags = tags_of(
        ReasoningConfig(tag_pairs=(TagPair(start="{{", end="}}"), TagPair(start="x")), thinking_start_tokens=("<hm>",))
    )
    assert split_whole("{{a}}b<hm>c</think>d<think>e</think>f", tags) == Split("ace", "bdf")


_PIECES = st.lists(
    st.sampled_from(
        [
            "<think>",
            "</think>",
            "<",
            "/",
            "think",
            ">",
            "\n",
            "a",
            "é",
            "[THINK]",
            "[/THINK]",
            "<thinking>",
            "[",
            "THINK]",
        ]
    ),
    max_size=12,
)


@given(_PIECES, st.lists(st.integers(0, 40), max_size=6), st.booleans())
def test_the_result_does_not_depend_on_the_pieces(parts: list[str], cuts: list[int], starts_inside: bool) -> None:
    text = "".join(parts)
    inside = "</think>" if starts_inside else ""
    splitter = ReasoningSplitter(inside=inside)
    reasoning = content = ""
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    for begin, end in itertools.pairwise(edges):
        split = splitter.feed(text[begin:end])
        reasoning += split.reasoning
        content += split.content
    last = splitter.finish()
    assert Split(reasoning + last.reasoning, content + last.content) == split_whole(text, DEFAULT_TAGS, inside=inside)


@given(st.text("ab \n<[/thinkTHINK>]", max_size=20))
def test_text_is_passed_on_at_once_up_to_a_possible_tag(text: str) -> None:
    splitter = ReasoningSplitter()
    splitter.feed("x")
    passed = splitter.feed(text).content
    if splitter.is_passing() and "<" not in text and "[" not in text:
        assert passed == text


def test_only_what_could_be_a_tag_is_held_back() -> None:
    splitter = ReasoningSplitter()
    assert splitter.feed("hello <thi") == Split("", "hello ")
    assert splitter.feed("s is not") == Split("", "<this is not")
    assert splitter.is_passing()
