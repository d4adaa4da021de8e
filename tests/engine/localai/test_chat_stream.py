"""Streams of chats: the events, their order, and that nothing depends on how replies arrive."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.chat import ChatCompletionChunk
from tests.engine.localai.test_chat import TIME, TOOL, planned

from enginehouse.core.errors import Upstream
from enginehouse.engine.localai.backend_pb2 import ChatDelta, Reply, ToolCallDelta
from enginehouse.engine.localai.planning import EventWriter

ENTRY = {"token": "a", "logprob": -1, "bytes": [97], "top_logprobs": []}


def writer_of(body: dict[str, Any], **fields: Any) -> EventWriter:
    plan = planned({"stream": True, **body}, **fields)
    assert plan.streams
    assert all(call.method == "PredictStream" for call in plan.calls)
    assert plan.events is not None
    return plan.events()


def events(content: bytes) -> list[dict[str, Any]]:
    """The events of a complete stream; each is what OpenAI's own client accepts."""
    assert content.endswith(b"data: [DONE]\n\n")
    pieces = content.split(b"\n\n")
    assert pieces[-1] == b""
    assert all(piece.startswith(b"data: ") and b"\n" not in piece for piece in pieces[:-1])
    assert pieces[-2] == b"data: [DONE]"
    decoded = [json.loads(piece[6:]) for piece in pieces[:-2]]
    for one in decoded:
        ChatCompletionChunk.model_validate_json(json.dumps(one), strict=True)
        assert (one["id"], one["object"], one["created"], one["model"]) == (
            "chatcmpl-1",
            "chat.completion.chunk",
            17,
            "asked",
        )
    return decoded


def streamed(body: dict[str, Any], *batches: Sequence[Reply], **fields: Any) -> list[dict[str, Any]]:
    writer = writer_of(body, **fields)
    pieces = [writer.feed(0, [reply.SerializeToString() for reply in batch]) for batch in batches]
    assert b"".join(pieces).count(b"data: [DONE]") == 0
    return events(b"".join([*pieces, writer.finish(0)]))


def joined(chunks: list[dict[str, Any]], key: str = "content", index: int = 0) -> str:
    choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    return "".join(choice["delta"].get(key) or "" for choice in choices)


def reason(chunks: list[dict[str, Any]], index: int = 0) -> str:
    reasons = [
        choice["finish_reason"]
        for chunk in chunks
        for choice in chunk["choices"]
        if choice["index"] == index and choice["finish_reason"]
    ]
    assert len(reasons) == 1
    return str(reasons[0])


def calls_of(chunks: list[dict[str, Any]]) -> dict[int, tuple[str, str, str]]:
    calls: dict[int, tuple[str, str, str]] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            for part in choice["delta"].get("tool_calls", []):
                known = calls.get(part["index"], ("", "", ""))
                function = part["function"]
                calls[part["index"]] = (
                    known[0] + part.get("id", ""),
                    known[1] + function.get("name", ""),
                    known[2] + function.get("arguments", ""),
                )
    return calls


def test_the_order_is_role_content_reason_usage_and_end() -> None:
    chunks = streamed(
        {"stream_options": {"include_usage": True}, "max_tokens": 2},
        [Reply(message=b"Hel")],
        [Reply(message=b"lo"), Reply(tokens=2, prompt_tokens=7)],
    )
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks[:-1]]
    assert deltas == [{"role": "assistant", "content": ""}, {"content": "Hel"}, {"content": "lo"}, {}]
    assert reason(chunks) == "length"
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == {"prompt_tokens": 7, "completion_tokens": 2, "total_tokens": 9}
    assert all("usage" not in chunk for chunk in chunks[:-1])


def test_no_usage_without_a_request_for_it() -> None:
    assert all("usage" not in chunk for chunk in streamed({}, [Reply(message=b"x", tokens=1)]))


def test_an_empty_answer_is_complete_too() -> None:
    chunks = streamed({})
    assert [chunk["choices"][0]["delta"] for chunk in chunks] == [{"role": "assistant", "content": ""}, {}]


def test_text_is_escaped_as_json() -> None:
    text = 'quote " backslash \\ newline \n tab \t \x00 \u2028 😀'
    assert joined(streamed({}, [Reply(message=text.encode())])) == text


def test_choices_are_told_apart_and_end_once() -> None:
    writer = writer_of({"n": 2, "stream_options": {"include_usage": True}})
    pieces = [
        writer.feed(1, [Reply(message=b"b").SerializeToString()]),
        writer.feed(0, [Reply(message=b"a", tokens=1, prompt_tokens=3).SerializeToString()]),
        writer.finish(1),
        writer.feed(0, [Reply(message=b"A", tokens=2).SerializeToString()]),
    ]
    assert b"[DONE]" not in b"".join(pieces)
    chunks = events(b"".join([*pieces, writer.finish(0)]))
    assert joined(chunks, index=0) == "aA"
    assert joined(chunks, index=1) == "b"
    assert chunks[-1]["usage"]["completion_tokens"] == 2


def test_deltas_count_before_the_raw_text() -> None:
    chunks = streamed(
        {"stream_options": {"include_usage": True}},
        [Reply(message=b"<think>", chat_deltas=[ChatDelta(reasoning_content="hm")])],
        [Reply(message=b"hm</think>a", tokens=1, chat_deltas=[ChatDelta(content="a")])],
        [Reply(message=b"b", tokens=2, chat_deltas=[ChatDelta(content="b")])],
        [Reply(message=b"c", chat_deltas=[ChatDelta(content="c")]), Reply(message=b"ignored")],
    )
    assert joined(chunks) == "abc"
    assert joined(chunks, "reasoning") == joined(chunks, "reasoning_content") == "hm"
    assert chunks[-1]["usage"]["completion_tokens"] == 2


def test_deltas_that_repeat_the_text_at_the_end_do_not_repeat_it_to_the_client() -> None:
    chunks = streamed(
        {}, [Reply(message=b"Hel"), Reply(message=b"lo")], [Reply(chat_deltas=[ChatDelta(content="Hello!")])]
    )
    assert joined(chunks) == "Hello!"


def test_calls_from_the_engine_are_passed_on_in_parts() -> None:
    chunks = streamed(
        {"tools": [TOOL, TIME]},
        [
            Reply(
                chat_deltas=[
                    ChatDelta(content="Sure."),
                    ChatDelta(tool_calls=[ToolCallDelta(id="c1", name="get_weather")]),
                ]
            )
        ],
        [Reply(chat_deltas=[ChatDelta(tool_calls=[ToolCallDelta(arguments='{"city":')])])],
        [Reply(chat_deltas=[ChatDelta(tool_calls=[ToolCallDelta(arguments='"Rome"}')])])],
        [Reply(chat_deltas=[ChatDelta(tool_calls=[ToolCallDelta(index=1, name="get_time", arguments="{}")])])],
    )
    assert calls_of(chunks) == {0: ("c1", "get_weather", '{"city":"Rome"}'), 1: ("chatcmpl-1-1", "get_time", "{}")}
    assert joined(chunks) == "Sure."
    assert reason(chunks) == "tool_calls"
    for chunk in chunks:
        for choice in chunk["choices"]:
            assert len({"content", "reasoning", "tool_calls"} & set(choice["delta"])) <= 1


def test_calls_in_text_are_found_at_the_end() -> None:
    text = 'Sure. <tool_call>{"name": "get_weather", "arguments": {"city": "Rome"}}</tool_call>'
    chunks = streamed({"tools": [TOOL]}, [Reply(message=one.encode()) for one in text])
    assert joined(chunks) == "Sure. "
    assert calls_of(chunks) == {0: ("chatcmpl-1-0", "get_weather", '{"city":"Rome"}')}
    assert reason(chunks) == "tool_calls"


def test_calls_that_come_as_text_and_again_as_deltas_are_sent_once() -> None:
    text = '{"name": "get_time", "arguments": {}}'
    call = ChatDelta(tool_calls=[ToolCallDelta(id="c1", name="get_time", arguments="{}")])
    chunks = streamed({"tools": [TIME]}, [Reply(message=text.encode())], [Reply(chat_deltas=[call])])
    assert joined(chunks) == ""
    assert calls_of(chunks) == {0: ("c1", "get_time", "{}")}


def test_legacy_functions_are_streamed_in_their_shape() -> None:
    text = b'{"name": "get_time", "arguments": {}}'
    chunks = streamed({"functions": [TIME["function"]]}, [Reply(message=text)])
    parts = [chunk["choices"][0]["delta"].get("function_call") for chunk in chunks]
    assert [part for part in parts if part] == [{"name": "get_time", "arguments": ""}, {"arguments": "{}"}]
    assert reason(chunks) == "function_call"


def test_log_probabilities_are_streamed() -> None:
    reply = Reply(message=b"a", logprobs=json.dumps({"content": [ENTRY]}).encode())
    chunks = streamed({"logprobs": True}, [reply, reply])
    assert joined(chunks) == "aa"
    tokens = [
        one["token"] for chunk in chunks for one in (chunk["choices"][0]["logprobs"] or {"content": []})["content"]
    ]
    assert tokens == ["a", "a"]


def test_a_grammar_that_allows_calls_only_sends_nothing_of_its_text() -> None:
    text = b'{"name": "answer", "arguments": {"message": "Hi!"}}'
    templates = {"template": {"chat": "{{.Input}}"}}
    chunks = streamed({"tools": [TOOL]}, [Reply(message=text[:20]), Reply(message=text[20:])], mapping=templates)
    assert joined(chunks) == "Hi!"
    assert reason(chunks) == "stop"


def test_bytes_that_are_no_reply_are_the_engines_fault() -> None:
    with pytest.raises(Upstream):
        writer_of({}).feed(0, [b"\xff\xff"])


_TEXT = "Grüße 😀 <think>hm é</think> a < b [1] done\n{x}"


@given(
    st.lists(st.integers(0, len(_TEXT.encode())), max_size=12),
    st.lists(st.integers(1, 4), min_size=1, max_size=6),
    st.booleans(),
)
@settings(deadline=None)
def test_replies_cut_at_any_byte_give_the_same_text(cuts: list[int], sizes: list[int], has_tools: bool) -> None:
    raw = _TEXT.encode()
    edges = [0, *sorted(cuts), len(raw)]
    replies = [Reply(message=raw[a:b]) for a, b in itertools.pairwise(edges)]
    batches: list[list[Reply]] = []
    while replies:
        size = sizes[len(batches) % len(sizes)]
        batches.append(replies[:size])
        replies = replies[size:]
    chunks = streamed({"tools": [TOOL]} if has_tools else {}, *batches)
    assert joined(chunks) == "Grüße 😀  a < b [1] done\n{x}"
    assert joined(chunks, "reasoning") == "hm é"


_REPLIES = st.lists(
    st.builds(
        lambda text, tokens, prompt, content, has_delta: Reply(
            message=text.encode(),
            tokens=tokens,
            prompt_tokens=prompt,
            chat_deltas=[ChatDelta(content=content)] if has_delta else [],
        ),
        st.sampled_from(["", "a", "bé", "x" * 125, "y" * 126, "z" * 130, "w" * 300]),
        st.sampled_from([0, 0, 1, 127, 128, 70000]),
        st.sampled_from([0, 0, 5, 300]),
        st.sampled_from(["", "q", "r" * 124, "s" * 125, "t" * 126, "u" * 200]),
        st.just(True),
    ),
    max_size=8,
)


@given(_REPLIES)
@settings(deadline=None)
def test_replies_with_deltas_are_read_the_same_with_and_without_protobufs_objects(replies: list[Reply]) -> None:
    chunks = streamed({"stream_options": {"include_usage": True}}, replies)
    has_content = [index for index, one in enumerate(replies) if one.chat_deltas[0].content]
    first = has_content[0] if has_content else len(replies)
    plain = "".join(one.message.decode() for one in replies[:first])
    content = "".join(one.chat_deltas[0].content for one in replies[first:])
    if not plain:
        assert joined(chunks) == content
    counted = [one.tokens for one in replies if one.tokens]
    prompts = [one.prompt_tokens for one in replies if one.prompt_tokens]
    usage = chunks[-1]["usage"]
    assert usage["completion_tokens"] == (counted[-1] if counted else 0)
    assert usage["prompt_tokens"] == (prompts[-1] if prompts else 0)


_PLAIN = st.tuples(
    st.sampled_from(["a", "bé", "x" * 125, "y" * 126, "z" * 130, "<", "[", "w" * 300]),
    st.sampled_from([0, 1, 127, 128, 70000]),
    st.sampled_from([0, 5, 300]),
)


@given(st.lists(_PLAIN, max_size=10))
@settings(deadline=None)
def test_plain_replies_of_any_length_are_passed_on_with_their_numbers(plain: list[tuple[str, int, int]]) -> None:
    replies = [Reply(message=text.encode(), tokens=count, prompt_tokens=prompt) for text, count, prompt in plain]
    chunks = streamed({"stream_options": {"include_usage": True}}, replies)
    assert joined(chunks) == "".join(text for text, _, _ in plain)
    counted, prompts = [one for _, one, _ in plain if one], [one for _, _, one in plain if one]
    assert chunks[-1]["usage"]["completion_tokens"] == (counted[-1] if counted else 0)
    assert chunks[-1]["usage"]["prompt_tokens"] == (prompts[-1] if prompts else 0)


def test_a_plain_reply_that_ends_inside_a_number_is_the_engines_fault() -> None:
    events = writer_of({})
    events.feed(0, [Reply(message=b"a").SerializeToString()])
    with pytest.raises(Upstream):
        events.feed(0, [Reply(message=b"a", tokens=300).SerializeToString()[:-1]])


def test_numbers_that_engines_tell_in_different_replies_are_all_kept() -> None:
    """Tokens of the prompt at the beginning, tokens of the answer with every reply."""
    replies = [Reply(message=b"a", chat_deltas=[ChatDelta(content="a")])] * 2
    replies += [Reply(message=b"a", prompt_tokens=5, chat_deltas=[ChatDelta(content="a")])]
    replies += [Reply(message=b"a", tokens=n, chat_deltas=[ChatDelta(content="a")]) for n in (1, 2, 300)]
    chunks = streamed({"stream_options": {"include_usage": True}}, replies)
    assert chunks[-1]["usage"] == {"prompt_tokens": 5, "completion_tokens": 300, "total_tokens": 305}
