"""Chat requests and whole answers: what is sent to an engine, and what its replies become."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
from openai.types.chat import ChatCompletion

from enginehouse.core.errors import EnginehouseError, Invalid, Malformed, Upstream, http_status
from enginehouse.core.model_config import read_config
from enginehouse.engine.localai import backend_pb2, chat
from enginehouse.engine.localai.planning import Planned, TextContext

USER = {"role": "user", "content": "Hello"}
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "the weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
TIME = {"type": "function", "function": {"name": "get_time"}}
PIXEL = base64.b64encode(b"\x89PNG").decode()
TEMPLATES = {"template": {"chat_message": "{{.RoleName}}: {{.Content}}", "chat": "{{.Input}}\nassistant:"}}


def context(mapping: dict[str, Any] | None = None, **fields: Any) -> TextContext:
    config, _ = read_config({"name": "m", "backend": "llama-cpp", "parameters": {"model": "m.gguf"}, **(mapping or {})})
    return TextContext(config=config, identity="m.gguf", model="asked", id="chatcmpl-1", created=17, seed=5, **fields)


def planned(body: dict[str, Any], mapping: dict[str, Any] | None = None, **fields: Any) -> Planned:
    return chat.plan(json.dumps({"messages": [USER], **body}).encode(), context(mapping, **fields))


def sent(body: dict[str, Any], mapping: dict[str, Any] | None = None) -> backend_pb2.PredictOptions:
    return backend_pb2.PredictOptions.FromString(planned(body, mapping).calls[0].message)


def answered(body: dict[str, Any], *replies: backend_pb2.Reply, **fields: Any) -> ChatCompletion:
    whole = planned(body, **fields).whole
    assert whole is not None
    answer = whole([reply.SerializeToString() for reply in replies])
    return ChatCompletion.model_validate_json(answer, strict=True)


def test_the_engine_renders_messages_where_nothing_is_configured() -> None:
    plan = planned(
        {
            "messages": [
                {"role": "developer", "content": "Be kind."},
                {
                    "role": "user",
                    "name": "ann",
                    "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
                },
                {
                    "role": "assistant",
                    "content": None,
                    "reasoning": "hm",
                    "tool_calls": [{"id": "1", "type": "function"}],
                },
                {"role": "tool", "tool_call_id": "1", "content": "sunny"},
            ]
        }
    )
    assert not plan.streams
    (call,) = plan.calls
    assert call.method == "Predict"
    options = backend_pb2.PredictOptions.FromString(call.message)
    assert options.UseTokenizerTemplate
    assert options.Prompt == ""
    assert options.ModelIdentity == "m.gguf"
    assert [(one.role, one.content, one.name) for one in options.Messages] == [
        ("system", "Be kind.", ""),
        ("user", "ab", "ann"),
        ("assistant", "", ""),
        ("tool", "sunny", ""),
    ]
    assert json.loads(options.Messages[2].tool_calls) == [{"id": "1", "type": "function"}]
    assert options.Messages[2].reasoning_content == "hm"
    assert options.Messages[3].tool_call_id == "1"


def test_configured_templates_are_rendered_here() -> None:
    options = sent({}, TEMPLATES)
    assert options.Prompt == "user: Hello\nassistant:"
    assert not options.UseTokenizerTemplate
    assert not options.Messages


def test_a_configured_system_prompt_is_used_where_the_request_has_none() -> None:
    config = {"system_prompt": "sys"}
    assert [one.role for one in sent({}, config).Messages] == ["system", "user"]
    assert len(sent({"messages": [{"role": "system", "content": "x"}, USER]}, config).Messages) == 2


def test_defaults_of_the_configuration_apply_where_the_request_is_silent() -> None:
    options = sent(
        {}, {"parameters": {"temperature": 0.5, "max_tokens": 9, "seed": 3}, "stopwords": ["END"], "threads": 6}
    )
    assert options.Temperature == 0.5
    assert (options.Tokens, options.Seed, options.Threads, options.TopK) == (9, 3, 6, 40)
    assert list(options.StopPrompts) == ["END"]
    assert options.PromptCacheAll
    assert options.MMap


def test_the_request_wins_over_the_configuration() -> None:
    options = sent(
        {"temperature": 0, "top_p": 0.5, "top_k": 3, "max_tokens": 5, "max_completion_tokens": 7, "seed": 2**40 + 1}
        | {"stop": ["a", "END"], "logit_bias": {"5": -1}, "presence_penalty": 0.5, "logprobs": True, "top_logprobs": 2},
        {"parameters": {"temperature": 0.5}, "stopwords": ["END"]},
    )
    assert options.Temperature == 0
    assert options.TopP == 0.5
    assert (options.TopK, options.Tokens, options.Seed) == (3, 7, 1)
    assert list(options.StopPrompts) == ["END", "a"]
    assert json.loads(options.LogitBias) == {"5": -1}
    assert (options.Logprobs, options.TopLogprobs) == (2, 2)


def test_a_seed_that_nobody_chose_is_the_callers() -> None:
    assert sent({}).Seed == 5
    assert sent({"seed": -1}).Seed == 5


def test_each_choice_is_a_call_with_a_seed_of_its_own() -> None:
    plan = planned({"n": 3, "seed": 100})
    assert [backend_pb2.PredictOptions.FromString(one.message).Seed for one in plan.calls] == [100, 101, 102]


def test_images_are_sent_in_order_and_remote_ones_are_asked_for_first() -> None:
    remote = "http://example.com/cat.png"
    content = [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PIXEL}"}},
        {"type": "text", "text": "and"},
        {"type": "image_url", "image_url": {"url": remote}},
        {"type": "input_audio", "input_audio": {"data": PIXEL, "format": "wav"}},
        {"type": "video_url", "video_url": remote},
    ]
    body = {"messages": [{"role": "user", "content": content}]}
    first = planned(body)
    assert first.urls == (remote,)
    assert first.calls == ()
    second = planned(body, media={remote: b"cat"})
    options = backend_pb2.PredictOptions.FromString(second.calls[0].message)
    cat = base64.b64encode(b"cat").decode()
    assert list(options.Images) == [PIXEL, cat]
    assert list(options.Audios) == [PIXEL]
    assert list(options.Videos) == [cat]
    assert options.Messages[0].content == "and"


def test_tools_are_sent_to_an_engine_that_parses_them() -> None:
    options = sent({"tools": [TOOL, TIME], "tool_choice": "required"})
    assert [one["function"]["name"] for one in json.loads(options.Tools)] == ["get_weather", "get_time"]
    assert options.ToolChoice == '"required"'
    assert options.Grammar == ""


@pytest.mark.parametrize(
    "choice",
    [
        {"type": "function", "function": {"name": "get_time"}},
        {"type": "function", "name": "get_time"},
        '{"type": "function", "function": {"name": "get_time"}}',
    ],
)
def test_a_named_choice_leaves_no_other_tool(choice: Any) -> None:
    options = sent({"tools": [TOOL, TIME], "tool_choice": choice})
    assert [one["function"]["name"] for one in json.loads(options.Tools)] == ["get_time"]
    assert json.loads(options.ToolChoice)["function"]["name"] == "get_time"


def test_no_choice_means_no_tools() -> None:
    assert sent({"tools": [TOOL], "tool_choice": "none"}).Tools == ""


def test_tools_are_a_grammar_where_prompts_are_rendered_here() -> None:
    options = sent({"tools": [TOOL]}, TEMPLATES)
    assert "get_weather" in options.Grammar
    assert "answer" in options.Grammar
    assert "answer" not in sent({"tools": [TOOL], "tool_choice": "required"}, TEMPLATES).Grammar
    off = {**TEMPLATES, "function": {"grammar": {"disable": True}}}
    assert sent({"tools": [TOOL]}, off).Grammar == ""
    strict = {"type": "function", "function": {**TOOL["function"], "strict": True}}  # type: ignore[dict-item]
    assert "get_weather" in sent({"tools": [strict]}, off).Grammar


def test_a_format_is_a_grammar() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    options = sent({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}})
    assert options.Grammar.startswith('root ::= "{" ws')
    assert sent({"response_format": {"type": "json_object"}}).Grammar.startswith("root ::= object")
    assert sent({"response_format": {"type": "text"}}).Grammar == ""
    assert sent({"response_format": {"type": "json_object"}, "tools": [TOOL]}).Grammar == ""


def test_reasoning_becomes_switches_of_the_template() -> None:
    metadata = dict(sent({"reasoning_effort": "none"}).Metadata)
    assert metadata["enable_thinking"] == "false"
    assert json.loads(metadata["chat_template_kwargs"]) == {"enable_thinking": False, "reasoning_effort": "none"}
    metadata = dict(
        sent(
            {
                "reasoning_effort": "low",
                "metadata": {"mode": "x", "enable_thinking": "false", "chat_template_kwargs": "{}"},
            },
            {"chat_template_kwargs": {"fixed": 1}},
        ).Metadata
    )
    assert metadata["mode"] == "x"
    assert metadata["enable_thinking"] == "false"
    assert json.loads(metadata["chat_template_kwargs"]) == {
        "fixed": 1,
        "mode": "x",
        "enable_thinking": False,
        "reasoning_effort": "low",
    }
    assert dict(sent({}).Metadata) == {}
    assert sent({"reasoning_effort": "high"}, {"reasoning": {"disable": True}}).Metadata["enable_thinking"] == "false"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 2}, "top_p"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": 2**31}, "max_tokens"),
        ({"n": 0}, "n"),
        ({"n": 1000}, "n"),
        ({"stop": 5}, "stop"),
        ({"stop": [""]}, "stop"),
        ({"stream": "yes"}, "stream"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"content": "x"}]}, "messages[0]"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "user", "content": [{"type": "smell"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "file:///etc/passwd"}]}]}, None),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "data:;base64,###"}]}]}, None),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [TOOL], "tool_choice": "perhaps"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"function": {"name": "other"}}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"top_logprobs": 5}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"reasoning_effort": "extreme"}, "reasoning_effort"),
    ],
)
def test_a_field_that_cannot_be_used_is_refused_by_its_name(body: dict[str, Any], param: str | None) -> None:
    with pytest.raises(Malformed) as caught:
        planned(body)
    assert http_status(caught.value) == 400
    assert caught.value.message.startswith("cannot use")
    assert param is None or caught.value.param == param


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b'{"messages": [{"role": "user", "content": "\xff"}]}', b"[" * 100_000]
)
def test_what_is_no_request_is_refused(body: bytes) -> None:
    with pytest.raises(EnginehouseError) as caught:
        chat.plan(body, context())
    assert http_status(caught.value) == 400


def test_a_schema_that_cannot_be_enforced_is_refused_with_its_path() -> None:
    schema = {"type": "object", "properties": {"a": {"not": {}}}}
    with pytest.raises(Invalid) as caught:
        planned({"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}})
    assert caught.value.param == "response_format.json_schema.schema.properties.a.not"


def test_nulls_are_as_good_as_absent_fields() -> None:
    fields = ("temperature", "stop", "tools", "tool_choice", "response_format", "stream", "n", "logprobs", "metadata")
    assert sent(dict.fromkeys(fields)) == sent({})


# Answers ------------------------------------------------------------------------------------------------------------


def test_a_plain_reply_becomes_an_answer() -> None:
    answer = answered({}, backend_pb2.Reply(message="Olé".encode(), tokens=3, prompt_tokens=7))
    assert (answer.id, answer.object, answer.created, answer.model) == ("chatcmpl-1", "chat.completion", 17, "asked")
    assert answer.choices[0].message.content == "Olé"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (7, 3, 10)


def test_choices_have_their_own_index_and_share_the_prompt() -> None:
    replies = [backend_pb2.Reply(message=text, tokens=2, prompt_tokens=7) for text in (b"a", b"b")]
    answer = answered({"n": 2}, *replies)
    assert [(one.index, one.message.content) for one in answer.choices] == [(0, "a"), (1, "b")]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (7, 4)


def test_an_answer_that_used_its_tokens_up_says_so() -> None:
    reply = backend_pb2.Reply(message=b"a", tokens=5)
    assert answered({"max_tokens": 5}, reply).choices[0].finish_reason == "length"
    assert answered({"max_tokens": 6}, reply).choices[0].finish_reason == "stop"


def test_thoughts_are_kept_apart() -> None:
    message = answered({}, backend_pb2.Reply(message=b"<think>hm</think>yes")).choices[0].message
    assert message.content == "yes"
    assert message.model_extra == {"reasoning": "hm", "reasoning_content": "hm"}
    delta = backend_pb2.ChatDelta(content="yes", reasoning_content="hm")
    message = answered({}, backend_pb2.Reply(message=b"raw", chat_deltas=[delta])).choices[0].message
    assert (message.content, message.model_extra) == ("yes", {"reasoning": "hm", "reasoning_content": "hm"})


def test_an_answer_that_begins_with_thoughts_is_read_so() -> None:
    reply = backend_pb2.Reply(message=b"hm</think>yes")
    assert answered({}, reply, thinks_first="</think>").choices[0].message.content == "yes"
    parsed = backend_pb2.Reply(chat_deltas=[backend_pb2.ChatDelta(content="yes", reasoning_content="hm")])
    assert answered({}, parsed, thinks_first="</think>").choices[0].message.content == "yes"
    prefilled = {"template": {"chat": "{{.Input}}<think>\n"}}
    assert answered({}, reply, mapping=prefilled).choices[0].message.content == "yes"


def test_calls_that_the_engine_parsed_come_first() -> None:
    deltas = [
        backend_pb2.ChatDelta(tool_calls=[backend_pb2.ToolCallDelta(index=0, id="c1", name="get_weather")]),
        backend_pb2.ChatDelta(tool_calls=[backend_pb2.ToolCallDelta(index=1, name="get_time", arguments="{}")]),
        backend_pb2.ChatDelta(tool_calls=[backend_pb2.ToolCallDelta(index=0, arguments='{"city":')]),
        backend_pb2.ChatDelta(tool_calls=[backend_pb2.ToolCallDelta(index=0, arguments='"Rome"}')]),
    ]
    answer = answered({"tools": [TOOL, TIME]}, backend_pb2.Reply(message=b"raw", chat_deltas=deltas))
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    assert choice.message.tool_calls is not None
    assert [
        (one.id, one.function.name, one.function.arguments)
        for one in choice.message.tool_calls
        if one.type == "function"
    ] == [
        ("c1", "get_weather", '{"city":"Rome"}'),
        ("chatcmpl-1-1", "get_time", "{}"),
    ]


def test_calls_are_found_in_text() -> None:
    reply = backend_pb2.Reply(message=b'{"name": "get_weather", "arguments": {"city": "Rome"}}')
    choice = answered({"tools": [TOOL]}, reply).choices[0]
    assert choice.finish_reason == "tool_calls"
    plain = answered({}, reply).choices[0]
    assert plain.finish_reason == "stop"
    assert plain.message.content == reply.message.decode()
    legacy = answered({"functions": [TOOL["function"]]}, reply).choices[0]
    assert legacy.finish_reason == "function_call"
    assert legacy.message.function_call is not None
    assert legacy.message.function_call.name == "get_weather"


def test_log_probabilities_have_openais_shape() -> None:
    entry = {"id": 5, "token": "é", "logprob": -0.5, "top_logprobs": [{"id": 1, "token": "e", "logprob": -1}]}
    reply = backend_pb2.Reply(message=b"x", logprobs=json.dumps({"content": [entry]}).encode())
    logprobs = answered({"logprobs": True, "top_logprobs": 1}, reply).choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert logprobs.content[0].bytes == [0xC3, 0xA9]
    assert logprobs.content[0].top_logprobs[0].token == "e"
    broken = backend_pb2.Reply(message=b"x", logprobs=b"{")
    assert answered({"logprobs": True}, broken).choices[0].logprobs is None


def test_timings_are_shown_when_asked_for() -> None:
    reply = backend_pb2.Reply(message=b"x", timing_prompt_processing=1.5, timing_token_generation=2.5)
    usage = answered({}, reply, shows_timings=True).usage
    assert usage is not None
    assert usage.model_extra == {"timing_prompt_processing": 1.5, "timing_token_generation": 2.5}


def test_bytes_that_are_no_reply_are_the_engines_fault() -> None:
    whole = planned({}).whole
    assert whole is not None
    with pytest.raises(Upstream):
        whole([b"\xff\xff\xff"])
