"""Reranking for LocalAI's engines, in the shape of Jina's API.

Engines differ: some ignore `top_n`, some do not sort, some leave the text out. The answer is always sorted
by score and cut here, and its texts are those of the request.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec
from google.protobuf.message import DecodeError
from msgspec import Struct

from enginehouse.core.errors import Invalid, Upstream
from enginehouse.engine.localai import backend_pb2
from enginehouse.engine.localai.planning import Planned, PlannedCall, TextContext, decode, refuse

MAX_DOCUMENTS = 10_000


class DocumentText(Struct, frozen=True):
    text: str


class RerankBody(Struct, frozen=True, kw_only=True):
    model: str | None = None
    query: str
    documents: list[str | DocumentText]
    top_n: int | None = None
    return_documents: bool | None = None


class RerankShape(Struct, frozen=True, kw_only=True):
    model: str
    documents: tuple[str, ...]
    top_n: int
    has_documents: bool = True


def plan(body: bytes, context: TextContext) -> Planned:
    """The one call of a rerank request."""
    request = decode(body, RerankBody)
    documents = tuple(one if isinstance(one, str) else one.text for one in request.documents)
    if not documents:
        raise refuse("documents", "it must have one document or more")
    if len(documents) > MAX_DOCUMENTS:
        raise refuse("documents", f"it has {len(documents)} documents, at most {MAX_DOCUMENTS} are allowed")
    if request.top_n is not None and request.top_n < 1:
        raise Invalid("cannot use `top_n`: it must be 1 or more", code="unsupported", param="top_n")
    top_n = min(request.top_n or len(documents), len(documents))
    message = backend_pb2.RerankRequest(
        query=request.query, documents=documents, top_n=top_n, ModelIdentity=context.identity
    )
    shape = RerankShape(
        model=context.model, documents=documents, top_n=top_n, has_documents=request.return_documents is not False
    )
    return Planned(
        calls=(PlannedCall("Rerank", message.SerializeToString()),), whole=partial(whole_rerank, shape=shape)
    )


def whole_rerank(replies: Sequence[bytes], *, shape: RerankShape) -> bytes:
    (message,) = replies
    try:
        result = backend_pb2.RerankResult.FromString(message)
    except DecodeError as error:
        raise Upstream("cannot read the answer of the engine: a result is not in its protocol") from error
    scores: dict[int, float] = {}
    for one in result.results:
        if not 0 <= one.index < len(shape.documents) or not math.isfinite(one.relevance_score):
            raise Upstream("cannot pass on the ranking: the engine scored a document that the request does not have")
        scores.setdefault(one.index, one.relevance_score)
    ranked = sorted(scores, key=lambda index: (-scores[index], index))[: shape.top_n]
    results = []
    for index in ranked:
        shown: dict[str, Any] = {"index": index, "relevance_score": scores[index]}
        if shape.has_documents:
            shown["document"] = {"text": shape.documents[index]}
        results.append(shown)
    usage = {"total_tokens": result.usage.total_tokens, "prompt_tokens": result.usage.prompt_tokens}
    return msgspec.json.encode({"model": shape.model, "usage": usage, "results": results})
