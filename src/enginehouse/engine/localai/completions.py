"""Completions for LocalAI's engines: prompts become calls of `Predict` or `PredictStream`, one per prompt and choice.

Choices are numbered as OpenAI does it: all choices of the first prompt, then those of the second. The text is passed
on as it is, with its thoughts; a completion has no place for them elsewhere.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec
from msgspec import Struct

from enginehouse.core.answer_reader import TextRules, adjusted, rules_of
from enginehouse.core.prompt import completion_prompt
from enginehouse.engine.localai.chat_answer import Counts, logprobs_of, parse_reply, usage_of
from enginehouse.engine.localai.chat_request import ResponseFormat, format_grammar
from enginehouse.engine.localai.chat_stream import DONE
from enginehouse.engine.localai.planning import (
    Planned,
    PlannedCall,
    Sampled,
    TextContext,
    check_sampling,
    decode,
    max_tokens_of,
    predict_options,
    refuse,
    seeded,
    unsupported,
)

MAX_CALLS = 128  # of one request: prompts times choices
MAX_LOGPROBS = 20
_encode = msgspec.json.Encoder().encode


class CompletionRequest(Sampled, frozen=True, kw_only=True):
    prompt: str | list[str | int | list[int]] | None = None
    echo: bool | None = None
    suffix: str | None = None
    logprobs: int | bool | None = None
    best_of: int | None = None
    response_format: ResponseFormat | None = None


class CompletionShape(Struct, frozen=True, kw_only=True):
    """What an answer needs to know of its request."""

    id: str
    created: int
    model: str
    rules: TextRules
    echoes: tuple[str, ...]  # the prompt of each choice if it is to be repeated, else ""
    prompts: int
    max_tokens: int = 0
    has_logprobs: bool = False
    includes_usage: bool = False
    shows_timings: bool = False


def plan(body: bytes, context: TextContext) -> Planned:
    """The calls of a completion request."""
    request = decode(body, CompletionRequest)
    check_sampling(request)
    prompts = _prompts(request)
    choices = request.n or 1
    if len(prompts) * choices > MAX_CALLS:
        raise refuse("prompt", f"prompts times `n` is {len(prompts) * choices}, at most {MAX_CALLS} are allowed")
    options = predict_options(request, context)
    options.Grammar = options.Grammar or format_grammar(request.response_format)
    if request.logprobs:
        options.Logprobs = options.TopLogprobs = int(request.logprobs)
    streams = bool(request.stream)
    method = "PredictStream" if streams else "Predict"
    calls = []
    for prompt in prompts:
        options.Prompt = completion_prompt(context.config, prompt, context.files)
        calls += [PlannedCall(method, seeded(options, request, context, n)) for n in range(choices)]
    echoes = request.echo if request.echo is not None else context.config.parameters.echo
    shape = CompletionShape(
        id=context.id,
        created=context.created,
        model=context.model,
        rules=rules_of(context.config),
        echoes=tuple(prompt if echoes else "" for prompt in prompts for _ in range(choices)),
        prompts=len(prompts),
        max_tokens=max_tokens_of(request, context.config),
        has_logprobs=bool(request.logprobs),
        includes_usage=bool(request.stream_options and request.stream_options.include_usage),
        shows_timings=context.shows_timings,
    )
    return Planned(
        calls=tuple(calls),
        streams=streams,
        whole=None if streams else partial(whole_completion, shape=shape),
        events=partial(CompletionEvents, shape) if streams else None,
    )


def _prompts(request: CompletionRequest) -> list[str]:
    if request.suffix:
        raise unsupported("suffix", "LocalAI's engines complete a text at its end only")
    if request.best_of is not None and request.best_of > (request.n or 1):
        raise unsupported("best_of", "answers are not ranked. Ask for `n` and choose among them")
    if request.logprobs is not None and not 0 <= request.logprobs <= MAX_LOGPROBS:
        raise refuse("logprobs", f"it must be between 0 and {MAX_LOGPROBS}")
    prompt = request.prompt
    if prompt is None or prompt == []:
        raise refuse("prompt", "it is missing")
    if isinstance(prompt, str):
        return [prompt]
    texts = [one for one in prompt if isinstance(one, str)]  # else numbers of tokens
    if len(texts) != len(prompt):
        raise unsupported("prompt", "LocalAI's engines take text. POST /v1/detokenize turns tokens into text")
    return texts


def _finished(tokens: int, shape: CompletionShape) -> str:
    return "length" if 0 < shape.max_tokens <= tokens else "stop"


def whole_completion(replies: Sequence[bytes], *, shape: CompletionShape) -> bytes:
    counts: list[Counts] = []
    choices = []
    for index, message in enumerate(replies):
        reply = parse_reply(message)
        count = Counts()
        count.take(reply)
        counts.append(count)
        # Engines that parse answers as chats may leave the plain text out.
        text = reply.message.decode("utf-8", "replace") or "".join(one.content for one in reply.chat_deltas)
        text = adjusted(shape.rules.prefix + text, shape.rules)
        choices.append(
            {
                "index": index,
                "text": shape.echoes[index] + text,
                "logprobs": _legacy_logprobs(reply.logprobs, len(shape.echoes[index])) if shape.has_logprobs else None,
                "finish_reason": _finished(count.tokens, shape),
            }
        )
    return msgspec.json.encode(
        {
            "id": shape.id,
            "object": "text_completion",
            "created": shape.created,
            "model": shape.model,
            "choices": choices,
            "usage": usage_of(counts, shows_timings=shape.shows_timings, prompts=shape.prompts),
        }
    )


def _legacy_logprobs(content: bytes, offset: int) -> dict[str, Any] | None:
    """Log probabilities in the shape of completions, which is not that of chats."""
    found = logprobs_of(content)
    if found is None:
        return None
    shown: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for entry in found["content"]:
        shown["tokens"].append(entry["token"])
        shown["token_logprobs"].append(entry["logprob"])
        shown["top_logprobs"].append({one["token"]: one["logprob"] for one in entry["top_logprobs"]})
        shown["text_offset"].append(offset)
        offset += len(entry["token"])
    return shown


class CompletionEvents:
    """Writes the events of a streamed completion; see `ChatEvents` for the way it saves time."""

    def __init__(self, shape: CompletionShape) -> None:
        self._shape = shape
        number = len(shape.echoes)
        self._decoders = [codecs.getincrementaldecoder("utf-8")("replace") for _ in range(number)]
        self._counts = [Counts() for _ in range(number)]
        self._open = number
        self._held: list[list[str]] = [[shape.rules.prefix] for _ in range(number)]
        self._begun = [False] * number
        self._offsets = [len(one) for one in shape.echoes]
        self._head = b'data: {"id":%b,"object":"text_completion","created":%d,"model":%b,' % (
            _encode(shape.id),
            shape.created,
            _encode(shape.model),
        )
        self._fronts = [b'%b"choices":[{"index":%d,"text":' % (self._head, index) for index in range(number)]
        self._tail = b',"logprobs":null,"finish_reason":null}]}\n\n'

    def feed(self, index: int, messages: Sequence[bytes]) -> bytes:
        decode_text = self._decoders[index].decode
        front, tail = self._fronts[index], self._tail
        out: list[bytes] = []
        if not self._begun[index]:
            self._begun[index] = True
            opening = self._shape.echoes[index] + ("" if self._shape.rules.holds_all else self._shape.rules.prefix)
            if opening:
                out += (front, _encode(opening), tail)
        for message in messages:
            reply = parse_reply(message)
            text = decode_text(reply.message or "".join(one.content for one in reply.chat_deltas).encode())
            if reply.tokens or reply.prompt_tokens:
                self._counts[index].take(reply)
            if self._shape.has_logprobs and reply.logprobs:
                out.append(self._with_logprobs(index, text, reply.logprobs))
            elif self._shape.rules.holds_all:
                self._held[index].append(text)
            elif text:
                out += (front, _encode(text), tail)
        return b"".join(out)

    def finish(self, index: int) -> bytes:
        shape = self._shape
        out = [self.feed(index, ())]
        rest = self._decoders[index].decode(b"", final=True)
        if shape.rules.holds_all:
            rest = adjusted("".join(self._held[index]) + rest, shape.rules)
        reason = _finished(self._counts[index].tokens, shape)
        out.append(
            self._fronts[index] + b'%b,"logprobs":null,"finish_reason":%b}]}\n\n' % (_encode(rest), _encode(reason))
        )
        self._open -= 1
        if self._open == 0:
            if shape.includes_usage:
                usage = usage_of(self._counts, shows_timings=shape.shows_timings, prompts=shape.prompts)
                out.append(self._head + b'"choices":[],"usage":%b}\n\n' % _encode(usage))
            out.append(DONE)
        return b"".join(out)

    def _with_logprobs(self, index: int, text: str, content: bytes) -> bytes:
        shown = _legacy_logprobs(content, self._offsets[index])
        self._offsets[index] += sum(len(one) for one in shown["tokens"]) if shown else 0
        return b'%b%b,"logprobs":%b,"finish_reason":null}]}\n\n' % (self._fronts[index], _encode(text), _encode(shown))
