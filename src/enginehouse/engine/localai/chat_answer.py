"""A chat's whole answer from one `Reply` per choice, in OpenAI's shape.

What the engine parsed itself (`chat_deltas`) counts before what is found in the text. The protocol has no reason why an
answer ended, so it is derived: calls, the limit of tokens, or a stop.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from google.protobuf.message import DecodeError
from msgspec import Struct

from enginehouse.core.answer_reader import TextRules, read_whole
from enginehouse.core.errors import Upstream
from enginehouse.core.reasoning import Split
from enginehouse.engine.localai import backend_pb2

Reply = backend_pb2.Reply


class ChatShape(Struct, frozen=True, kw_only=True):
    """What an answer needs to know of its request."""

    id: str
    created: int
    model: str
    rules: TextRules
    max_tokens: int = 0
    is_legacy: bool = False
    has_logprobs: bool = False
    choices: int = 1
    includes_usage: bool = False
    shows_timings: bool = False


class AnswerCall(Struct):
    """A tool call that grows as its parts arrive."""

    id: str = ""
    name: str = ""
    arguments: str = ""


class Counts(Struct):
    """What one call of the engine used."""

    prompt_tokens: int = 0
    tokens: int = 0
    prompt_milliseconds: float = 0.0
    generation_milliseconds: float = 0.0

    def take(self, reply: backend_pb2.Reply) -> None:
        """The last values win: engines count on, or tell the numbers at the end only."""
        self.tokens = reply.tokens or self.tokens
        self.prompt_tokens = reply.prompt_tokens or self.prompt_tokens
        self.prompt_milliseconds = reply.timing_prompt_processing or self.prompt_milliseconds
        self.generation_milliseconds = reply.timing_token_generation or self.generation_milliseconds


def parse_reply(message: bytes) -> backend_pb2.Reply:
    try:
        return Reply.FromString(message)
    except DecodeError as error:
        raise Upstream("cannot read the answer of the engine: a reply is not in its protocol") from error


def usage_of(counts: Iterable[Counts], *, shows_timings: bool, prompts: int = 1) -> dict[str, Any]:
    """All choices of one prompt share its tokens."""
    every = list(counts)
    each = max(1, len(every) // max(1, prompts))
    prompt = sum(max(one.prompt_tokens for one in every[n : n + each]) for n in range(0, len(every), each))
    completion = sum(one.tokens for one in every)
    usage: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }
    if shows_timings:
        usage["timing_prompt_processing"] = sum(one.prompt_milliseconds for one in every)
        usage["timing_token_generation"] = sum(one.generation_milliseconds for one in every)
    return usage


def finish_reason(shape: ChatShape, tokens: int, *, has_calls: bool) -> str:
    if has_calls:
        return "function_call" if shape.is_legacy else "tool_calls"
    return "length" if 0 < shape.max_tokens <= tokens else "stop"


def logprobs_of(content: bytes) -> dict[str, Any] | None:
    """OpenAI's object, with the fields that its clients insist on."""
    try:
        decoded = msgspec.json.decode(content) if content else None
    except msgspec.DecodeError:
        return None
    entries = decoded.get("content") if isinstance(decoded, dict) else None
    if not isinstance(entries, list):
        return None
    return {"content": [_entry(one) for one in entries if isinstance(one, dict)], "refusal": None}


def _entry(entry: dict[str, Any]) -> dict[str, Any]:
    top = entry.get("top_logprobs")
    shown = {**_token(entry), "top_logprobs": []}
    if isinstance(top, list):
        shown["top_logprobs"] = [_token(one) for one in top if isinstance(one, dict)]
    return shown


def _token(entry: dict[str, Any]) -> dict[str, Any]:
    token = str(entry.get("token", ""))
    return {
        "token": token,
        "logprob": entry.get("logprob", 0.0),
        "bytes": entry["bytes"] if isinstance(entry.get("bytes"), list) else list(token.encode()),
    }


def merge_calls(calls: dict[int, AnswerCall], delta: backend_pb2.ChatDelta) -> None:
    for part in delta.tool_calls:
        call = calls.setdefault(part.index, AnswerCall())
        call.id = call.id or part.id
        call.name = call.name or part.name
        call.arguments += part.arguments


def whole_chat(replies: Sequence[bytes], *, shape: ChatShape) -> bytes:
    """The answer; `replies` are in the order of the planned calls."""
    counts: list[Counts] = []
    choices = []
    for index, message in enumerate(replies):
        reply = parse_reply(message)
        count = Counts()
        count.take(reply)
        counts.append(count)
        split, calls = _read(reply, shape.rules)
        choices.append(
            {
                "index": index,
                "message": _message(split, calls, shape, index),
                "logprobs": logprobs_of(reply.logprobs) if shape.has_logprobs else None,
                "finish_reason": finish_reason(shape, count.tokens, has_calls=bool(calls)),
            }
        )
    return msgspec.json.encode(
        {
            "id": shape.id,
            "object": "chat.completion",
            "created": shape.created,
            "model": shape.model,
            "choices": choices,
            "usage": usage_of(counts, shows_timings=shape.shows_timings),
        }
    )


def _read(reply: backend_pb2.Reply, rules: TextRules) -> tuple[Split, list[AnswerCall]]:
    parsed: dict[int, AnswerCall] = {}
    for delta in reply.chat_deltas:
        merge_calls(parsed, delta)
    content = "".join(delta.content for delta in reply.chat_deltas)
    reasoning = "".join(delta.reasoning_content for delta in reply.chat_deltas)
    if parsed:
        shown = "" if rules.drops_reasoning else reasoning
        return Split(shown, content), [parsed[index] for index in sorted(parsed)]
    if not content and not reasoning:
        content = reply.message.decode("utf-8", "replace")
    if reasoning:
        # The engine has taken the thoughts out, and with them the tags.
        rules = msgspec.structs.replace(rules, inside="")
    split, calls = read_whole(content, rules)
    if reasoning and not rules.drops_reasoning:
        split = Split(reasoning + split.reasoning, split.content)
    return split, [AnswerCall(name=one.name, arguments=one.arguments) for one in calls]


def _message(split: Split, calls: list[AnswerCall], shape: ChatShape, index: int) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": split.content or (None if calls else "")}
    if split.reasoning:
        # LocalAI's name, and the one that most engines and clients use.
        message["reasoning"] = message["reasoning_content"] = split.reasoning
    if calls and shape.is_legacy:
        message["function_call"] = {"name": calls[0].name, "arguments": calls[0].arguments or "{}"}
    elif calls:
        message["tool_calls"] = [
            {
                "id": call.id or call_id(shape, index, position),
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments or "{}"},
            }
            for position, call in enumerate(calls)
        ]
    return message


def call_id(shape: ChatShape, index: int, position: int) -> str:
    """An id for a call whose engine gave none. Each call of an answer has its own, also over several choices."""
    return f"{shape.id}-{index}-{position}" if shape.choices > 1 else f"{shape.id}-{position}"
