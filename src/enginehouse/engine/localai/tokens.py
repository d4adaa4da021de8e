"""Texts and tokens for LocalAI's engines: `TokenizeString` and `Detokenize`.

`/v1/tokenize` takes `content`, or `prompt` as other servers name it; `/v1/detokenize` takes `tokens`.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from google.protobuf.message import DecodeError
from msgspec import Struct

from enginehouse.core.errors import Upstream
from enginehouse.engine.localai import backend_pb2
from enginehouse.engine.localai.planning import MAX_INT32, Planned, PlannedCall, TextContext, decode, refuse

MAX_TOKENS = 1_000_000


class TokenizeRequest(Struct, frozen=True, kw_only=True):
    model: str | None = None
    content: str | None = None
    prompt: str | None = None


class DetokenizeBody(Struct, frozen=True, kw_only=True):
    model: str | None = None
    tokens: list[int]


def plan_tokenize(body: bytes, context: TextContext) -> Planned:
    request = decode(body, TokenizeRequest)
    content = request.prompt if request.content is None else request.content
    if content is None:
        raise refuse("content", "it is missing")
    message = backend_pb2.PredictOptions(Prompt=content, ModelIdentity=context.identity).SerializeToString()
    return Planned(calls=(PlannedCall("TokenizeString", message),), whole=whole_tokenize)


def plan_detokenize(body: bytes, context: TextContext) -> Planned:
    """`Detokenize` has no field for the model's identity, so the engine cannot check it."""
    request = decode(body, DetokenizeBody)
    if len(request.tokens) > MAX_TOKENS or any(not 0 <= one <= MAX_INT32 for one in request.tokens):
        raise refuse("tokens", f"it must have at most {MAX_TOKENS} numbers of 0 or more")
    message = backend_pb2.DetokenizeRequest(tokens=request.tokens).SerializeToString()
    return Planned(calls=(PlannedCall("Detokenize", message),), whole=whole_detokenize)


def whole_tokenize(replies: Sequence[bytes]) -> bytes:
    (message,) = replies
    try:
        response = backend_pb2.TokenizationResponse.FromString(message)
    except DecodeError as error:
        raise _unreadable() from error
    # Some engines leave `length` at 0.
    return msgspec.json.encode({"tokens": list(response.tokens)})


def whole_detokenize(replies: Sequence[bytes]) -> bytes:
    (message,) = replies
    try:
        response = backend_pb2.DetokenizeResponse.FromString(message)
    except DecodeError as error:
        raise _unreadable() from error
    return msgspec.json.encode({"content": response.content})


def _unreadable() -> Upstream:
    return Upstream("cannot read the answer of the engine: a result is not in its protocol")
