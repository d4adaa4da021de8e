"""Completions: prompts, choices, echo, and the shapes of answers and streams."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types import Completion
from tests.engine.localai.test_chat import context

from enginehouse.core.errors import EnginehouseError, Malformed, http_status
from enginehouse.engine.localai import completions
from enginehouse.engine.localai.backend_pb2 import ChatDelta, PredictOptions, Reply
from enginehouse.engine.localai.planning import Planned

TEMPLATE = {"template": {"completion": "<{{.Input}}>"}}
ENTRY = {"token": "ab", "logprob": -1, "top_logprobs": [{"token": "x", "logprob": -2}]}


def planned(body: dict[str, Any], mapping: dict[str, Any] | None = None) -> Planned:
    return completions.plan(json.dumps({"prompt": "Once", **body}).encode(), context(mapping))


def answered(body: dict[str, Any], *replies: Reply, mapping: dict[str, Any] | None = None) -> Completion:
    whole = planned(body, mapping).whole
    assert whole is not None
    return Completion.model_validate_json(whole([one.SerializeToString() for one in replies]), strict=True)


def streamed(
    body: dict[str, Any], *replies: list[Reply], mapping: dict[str, Any] | None = None
) -> list[dict[str, Any]]:
    plan = planned({"stream": True, **body}, mapping)
    assert plan.events is not None
    writer = plan.events()
    content = b""
    for index, ones in enumerate(replies):
        content += writer.feed(index, [one.SerializeToString() for one in ones])
    for index in range(len(plan.calls)):
        assert b"[DONE]" not in content
        content += writer.finish(index)
    *pieces, end, rest = content.split(b"\n\n")
    assert (end, rest) == (b"data: [DONE]", b"")
    chunks = [json.loads(piece.removeprefix(b"data: ")) for piece in pieces]
    for chunk in chunks:
        assert chunk["object"] == "text_completion"
        # OpenAI's type of a chunk is that of a whole answer, whose choices always have ended.
        ended = [{**one, "finish_reason": one["finish_reason"] or "stop"} for one in chunk["choices"]]
        Completion.model_validate_json(json.dumps({**chunk, "choices": ended}), strict=True)
    return chunks


def text_of(chunks: list[dict[str, Any]], index: int = 0) -> str:
    return "".join(one["text"] for chunk in chunks for one in chunk["choices"] if one["index"] == index)


def test_prompts_go_through_their_template() -> None:
    plan = planned({"prompt": ["a", "b"], "n": 2, "seed": 1}, TEMPLATE)
    options = [PredictOptions.FromString(one.message) for one in plan.calls]
    assert [(one.Prompt, one.Seed) for one in options] == [("<a>", 1), ("<a>", 2), ("<b>", 1), ("<b>", 2)]
    assert not options[0].UseTokenizerTemplate
    assert options[0].ModelIdentity == "m.gguf"


def test_an_answer_has_usage_and_a_reason() -> None:
    replies = [Reply(message=b" upon", tokens=4, prompt_tokens=3), Reply(message=b"!", tokens=1, prompt_tokens=5)]
    answer = answered({"prompt": ["a", "b"], "max_tokens": 4}, *replies)
    assert [(one.index, one.text, one.finish_reason) for one in answer.choices] == [
        (0, " upon", "length"),
        (1, "!", "stop"),
    ]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (8, 5)


def test_the_prompt_is_repeated_as_it_was_given() -> None:
    assert answered({"echo": True}, Reply(message=b" upon"), mapping=TEMPLATE).choices[0].text == "Once upon"
    assert text_of(streamed({"echo": True}, [Reply(message=b" upon")], mapping=TEMPLATE)) == "Once upon"


def test_an_engine_that_only_fills_deltas_is_understood() -> None:
    assert answered({}, Reply(chat_deltas=[ChatDelta(content=" upon")])).choices[0].text == " upon"
    assert text_of(streamed({}, [Reply(chat_deltas=[ChatDelta(content=" upon")])])) == " upon"


def test_thoughts_stay_in_the_text() -> None:
    assert answered({}, Reply(message=b"<think>a</think>b")).choices[0].text == "<think>a</think>b"


def test_log_probabilities_have_the_shape_of_completions() -> None:
    reply = Reply(message=b"ab", logprobs=json.dumps({"content": [ENTRY, ENTRY]}).encode())
    logprobs = answered({"logprobs": 1, "echo": True}, reply).choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == ["ab", "ab"]
    assert logprobs.text_offset == [4, 6]
    assert logprobs.top_logprobs == [{"x": -2}, {"x": -2}]
    chunks = streamed({"logprobs": 1}, [reply, reply])
    assert [one["choices"][0]["logprobs"]["text_offset"] for one in chunks[:2]] == [[0, 2], [4, 6]]


def test_a_stream_ends_with_reason_usage_and_end() -> None:
    chunks = streamed(
        {"stream_options": {"include_usage": True}, "prompt": ["a", "b"]},
        [Reply(message=b"x", tokens=1, prompt_tokens=2)],
        [Reply(message=b"y", tokens=3, prompt_tokens=4)],
    )
    assert (text_of(chunks, 0), text_of(chunks, 1)) == ("x", "y")
    reasons = [one["finish_reason"] for chunk in chunks for one in chunk["choices"] if one["finish_reason"]]
    assert reasons == ["stop", "stop"]
    assert chunks[-1]["usage"] == {"prompt_tokens": 6, "completion_tokens": 4, "total_tokens": 10}
    assert chunks[-1]["object"] == "text_completion"


def test_configured_changes_apply_to_streams_too() -> None:
    config = {"cutstrings": ["<[^>]*>"], "trimsuffix": ["END"]}
    pieces = [Reply(message=one) for one in (b"a<", b"b>c E", b"ND")]
    assert answered({}, Reply(message=b"a<b>c END"), mapping=config).choices[0].text == "ac"
    assert text_of(streamed({}, pieces, mapping=config)) == "ac"


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"prompt": None}, 400, "prompt"),
        ({"prompt": []}, 400, "prompt"),
        ({"prompt": 5}, 400, "prompt"),
        ({"prompt": [1, 2, 3]}, 422, "prompt"),
        ({"prompt": [[1, 2], [3]]}, 422, "prompt"),
        ({"suffix": "end"}, 422, "suffix"),
        ({"best_of": 3}, 422, "best_of"),
        ({"logprobs": 100}, 400, "logprobs"),
        ({"prompt": ["a"] * 100, "n": 2}, 400, "prompt"),
        ({"temperature": "x"}, 400, "temperature"),
    ],
)
def test_what_cannot_be_done_is_refused_by_its_name(body: dict[str, Any], status: int, param: str) -> None:
    with pytest.raises(EnginehouseError) as caught:
        planned(body)
    assert (http_status(caught.value), caught.value.param) == (status, param)


def test_what_is_no_json_is_refused() -> None:
    with pytest.raises(Malformed):
        completions.plan(b"{", context())


_RAW = "Grüße 😀 an alle <think>".encode()


@given(st.lists(st.integers(0, len(_RAW)), max_size=10))
@settings(deadline=None)
def test_replies_cut_at_any_byte_give_the_same_text(cuts: list[int]) -> None:
    edges = [0, *sorted(cuts), len(_RAW)]
    replies = [Reply(message=_RAW[begin:end]) for begin, end in itertools.pairwise(edges)]
    assert text_of(streamed({}, replies)) == _RAW.decode()
