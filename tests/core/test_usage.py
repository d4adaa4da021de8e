"""What an answer says that it took: found at its end, in the shapes of several engines, and never in its text."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from enginehouse.core.usage import Used, used_by_answer, used_by_stream

OPENAI = {"prompt_tokens": 7, "completion_tokens": 5, "total_tokens": 12}
DETAILED = {**OPENAI, "prompt_tokens_details": {"cached_tokens": 99}, "completion_tokens_details": {"audio_tokens": 1}}


@pytest.mark.parametrize(
    ("body", "used"),
    [
        ({"choices": [], "usage": OPENAI}, Used(7, 5)),
        ({"choices": [], "usage": DETAILED, "timings": {"prompt_n": 3}}, Used(7, 5)),
        ({"usage": {"prompt_tokens": 3, "total_tokens": 3}, "data": []}, Used(3, 0)),
        ({"usage": {"input_tokens": 4, "output_tokens": 2}}, Used(4, 2)),
        ({"usage": None, "choices": []}, None),
        ({"usage": {}}, None),
        ({"choices": []}, None),
        ({"choices": [{"text": '"usage": {"prompt_tokens": 1000}'}]}, None),
    ],
)
def test_a_plain_answer(body: dict[str, object], used: Used | None) -> None:
    for separators in ((",", ":"), (", ", ": ")):
        assert used_by_answer(json.dumps(body, separators=separators).encode()) == used
    assert used_by_answer(json.dumps(body, indent=2).encode()) == used


def test_a_long_answer_is_searched_at_its_ends_only() -> None:
    vectors = [0.125] * 20000
    at_the_end = json.dumps({"data": vectors, "usage": {"prompt_tokens": 3}}).encode()
    at_the_beginning = json.dumps({"usage": {"prompt_tokens": 3}, "data": vectors}).encode()
    between = json.dumps({"data": vectors, "usage": {"prompt_tokens": 3}, "more": vectors}).encode()
    assert used_by_answer(at_the_end) == used_by_answer(at_the_beginning) == Used(3, 0)
    assert used_by_answer(between) is None


def test_a_stream_says_it_in_one_of_its_last_events() -> None:
    end = b'data: {"choices":[],"usage":null}\n\ndata: {"choices":[],"usage":%b}\n\ndata: [DONE]\n\n'
    assert used_by_stream(end % json.dumps(OPENAI).encode(), 9) == Used(7, 5)


def test_a_stream_that_does_not_say_it_is_estimated_by_its_events() -> None:
    assert used_by_stream(b'data: {"choices":[],"usage":null}\n\ndata: [DONE]\n\n', 10) == Used(0, 7, True)
    assert used_by_stream(b"", 0) == Used(0, 0, True)


@given(st.text(max_size=60), st.integers(0, 10**9), st.integers(0, 10**9))
def test_no_text_of_an_answer_changes_what_is_found(text: str, prompt: int, completion: int) -> None:
    usage = {"prompt_tokens": prompt, "completion_tokens": completion}
    tricky = text + '"usage":{"prompt_tokens":1}'
    body = json.dumps({"choices": [{"message": {"content": tricky}}], "usage": usage, "id": tricky})
    assert used_by_answer(body.encode()) == Used(prompt, completion)
    assert used_by_answer(json.dumps({"choices": [{"message": {"content": tricky}}]}).encode()) is None
