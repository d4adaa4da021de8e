"""Chats for LocalAI's engines: a request becomes calls of `Predict` or `PredictStream`.

The engine renders the messages with the template of its tokenizer, or this module does with the templates of the
configuration. With tools or a format, the output is constrained by a grammar where the engine does not do it itself.
"""

from __future__ import annotations

from functools import partial

import msgspec

from enginehouse.core.answer_reader import TextRules, rules_of
from enginehouse.core.load_options import uses_tokenizer_template
from enginehouse.core.model_config import ModelConfig
from enginehouse.core.prompt import ChatMessage, Surroundings, chat_prompt
from enginehouse.core.reasoning import begins_inside, tags_of
from enginehouse.core.tool_grammar import answer_function, tool_grammar
from enginehouse.engine.localai import backend_pb2
from enginehouse.engine.localai.chat_answer import ChatShape, whole_chat
from enginehouse.engine.localai.chat_request import (
    ChatRequest,
    ToolUse,
    effort_of,
    format_grammar,
    metadata_of,
    read_messages,
    read_tools,
)
from enginehouse.engine.localai.chat_stream import ChatEvents
from enginehouse.engine.localai.planning import (
    Planned,
    PlannedCall,
    TextContext,
    check_sampling,
    decode,
    max_tokens_of,
    predict_options,
    refuse,
    seeded,
)

MAX_TOP_LOGPROBS = 20


def plan(body: bytes, context: TextContext) -> Planned:
    """The calls of a chat request: one per choice."""
    request = decode(body, ChatRequest)
    _check(request)
    messages, media = read_messages(request, context)
    if media.urls:
        return Planned(urls=tuple(media.urls))
    config = context.config
    tools = read_tools(request)
    options = predict_options(request, context)
    options.Images.extend(media.images)
    options.Audios.extend(media.audios)
    options.Videos.extend(media.videos)
    options.Metadata.update(metadata_of(request, config))
    if tools.functions:
        options.Tools = tools.tools_text()
        options.ToolChoice = tools.choice
    if request.logprobs:
        options.Logprobs = options.TopLogprobs = request.top_logprobs or 1
    uses_tokenizer = uses_tokenizer_template(config)
    grammar = _grammar(request, tools, config, uses_tokenizer)
    if grammar:
        options.Grammar = grammar
    if uses_tokenizer:
        options.UseTokenizerTemplate = True
        _add_messages(options, messages, config)
    else:
        options.Prompt = chat_prompt(config, messages, _around(request, tools, context))
    rules = _rules(request, tools, context, options)
    streams = bool(request.stream)
    shape = ChatShape(
        id=context.id,
        created=context.created,
        model=context.model,
        rules=rules,
        max_tokens=max_tokens_of(request, config),
        is_legacy=tools.is_legacy,
        has_logprobs=bool(request.logprobs),
        choices=_choices(request, config),
        includes_usage=bool(request.stream_options and request.stream_options.include_usage),
        shows_timings=context.shows_timings,
    )
    method = "PredictStream" if streams else "Predict"
    return Planned(
        calls=tuple(PlannedCall(method, seeded(options, request, context, n)) for n in range(shape.choices)),
        streams=streams,
        whole=None if streams else partial(whole_chat, shape=shape),
        events=partial(ChatEvents, shape) if streams else None,
    )


def _check(request: ChatRequest) -> None:
    check_sampling(request)
    if request.top_logprobs is not None:
        if not 0 <= request.top_logprobs <= MAX_TOP_LOGPROBS:
            raise refuse("top_logprobs", f"it must be between 0 and {MAX_TOP_LOGPROBS}")
        if not request.logprobs and request.top_logprobs:
            raise refuse("top_logprobs", "it needs `logprobs`")


def _choices(request: ChatRequest, config: ModelConfig) -> int:
    return request.n or max(1, min(config.parameters.n, 16))


def _grammar(request: ChatRequest, tools: ToolUse, config: ModelConfig, uses_tokenizer: bool) -> str:
    """The grammar to send. Tools come before a format: an engine that gets a grammar ignores its tools."""
    if request.grammar:
        return request.grammar
    if not tools.functions:
        return format_grammar(request.response_format)
    is_strict = any(one.strict for one in tools.functions)
    if uses_tokenizer or (config.function.grammar.disable and not is_strict):
        return ""  # the engine's template parses calls itself, or the model does without a grammar
    functions = list(tools.functions)
    if not (tools.is_demanded or is_strict or config.function.disable_no_action):
        functions.append(answer_function(config.function))
    arranged = config.function
    if request.parallel_tool_calls is False:
        single = msgspec.structs.replace(arranged.grammar, parallel_calls=False)
        arranged = msgspec.structs.replace(arranged, grammar=single)
    return tool_grammar(functions, arranged)


def _add_messages(options: backend_pb2.PredictOptions, messages: list[ChatMessage], config: ModelConfig) -> None:
    if config.system_prompt and not any(one.role == "system" for one in messages):
        options.Messages.add(role="system", content=config.system_prompt)
    for one in messages:
        options.Messages.add(
            role=one.role,
            content=one.content,
            name=one.name,
            tool_call_id=one.tool_call_id,
            reasoning_content=one.reasoning,
            tool_calls=msgspec.json.encode(one.tool_calls).decode() if one.tool_calls else "",
        )


def _around(request: ChatRequest, tools: ToolUse, context: TextContext) -> Surroundings:
    return Surroundings(
        functions=tools.functions,
        reasoning_effort=effort_of(request, context.config),
        metadata=metadata_of(request, context.config),
        files=context.files,
        media_marker=context.media_marker,
    )


def _rules(
    request: ChatRequest, tools: ToolUse, context: TextContext, options: backend_pb2.PredictOptions
) -> TextRules:
    reasoning = context.config.reasoning
    tags = tags_of(reasoning)
    inside = ""
    if not reasoning.disable_reasoning_tag_prefill and options.Metadata.get("enable_thinking") != "false":
        inside = begins_inside(options.Prompt, tags) if options.Prompt else context.thinks_first
    is_free = context.config.function.grammar.mixed_mode or context.config.function.grammar.expect_strings_after_json
    return msgspec.structs.replace(
        rules_of(context.config),
        functions=tools.functions,
        tags=tags,
        inside=inside,
        is_call=bool(tools.functions and options.Grammar and not request.grammar and not is_free),
    )
