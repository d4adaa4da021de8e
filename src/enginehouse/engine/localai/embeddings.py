"""Embeddings for LocalAI's engines: one call of `Embedding` per input, all at the same time.

Results keep the order of the inputs. Engines that give a vector per token get them pooled here. A vector may be cut to
`dimensions` and normalized again, which is how models made for shorter vectors are used.
"""

from __future__ import annotations

import base64
import math
import struct
from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec
from google.protobuf.message import DecodeError
from msgspec import Struct

from enginehouse.core.errors import Upstream
from enginehouse.engine.localai import backend_pb2
from enginehouse.engine.localai.planning import MAX_INT32, Planned, PlannedCall, TextContext, decode, refuse

MAX_INPUTS = 2048  # OpenAI's own limit
POOLINGS = ("mean", "last", "decayed_mean")


class EmbeddingRequest(Struct, frozen=True, kw_only=True):
    model: str | None = None
    input: str | list[str | int | list[int]] | None = None
    encoding_format: str | None = None
    dimensions: int | None = None
    pooling: str | None = None
    pooling_half_life_tokens: int | None = None


class EmbeddingShape(Struct, frozen=True, kw_only=True):
    model: str
    is_base64: bool = False
    dimensions: int = 0
    pooling: str = "mean"
    half_life: int = 256


def plan(body: bytes, context: TextContext) -> Planned:
    """The calls of an embedding request."""
    request = decode(body, EmbeddingRequest)
    inputs = _inputs(request)
    defaults = context.config.parameters
    encoding = request.encoding_format or defaults.encoding_format or "float"
    if encoding not in ("float", "base64"):
        raise refuse("encoding_format", "it must be 'float' or 'base64'")
    pooling = request.pooling or defaults.pooling or "mean"
    if pooling not in POOLINGS and request.pooling:
        raise refuse("pooling", f"it must be one of {', '.join(POOLINGS)}")
    half_life = request.pooling_half_life_tokens or defaults.pooling_half_life_tokens
    if half_life < 1:
        raise refuse("pooling_half_life_tokens", "it must be 1 or more")
    if request.dimensions is not None and request.dimensions < 1:
        raise refuse("dimensions", "it must be 1 or more")
    calls = []
    for one in inputs:
        options = backend_pb2.PredictOptions(ModelIdentity=context.identity)
        if isinstance(one, str):
            options.Embeddings = one
        else:
            options.EmbeddingTokens.extend(one)
        calls.append(PlannedCall("Embedding", options.SerializeToString()))
    shape = EmbeddingShape(
        model=context.model,
        is_base64=encoding == "base64",
        dimensions=request.dimensions or 0,
        pooling=pooling,
        half_life=half_life,
    )
    return Planned(calls=tuple(calls), whole=partial(whole_embeddings, shape=shape))


def _inputs(request: EmbeddingRequest) -> list[str | list[int]]:
    given = request.input
    if given is None or given == "" or given == []:
        raise refuse("input", "it is missing or empty")
    if isinstance(given, str):
        return [given]
    numbers = [one for one in given if isinstance(one, int)]
    if numbers and len(numbers) == len(given):
        given = [numbers]
    if len(given) > MAX_INPUTS:
        raise refuse("input", f"it has {len(given)} items, at most {MAX_INPUTS} are allowed")
    inputs: list[str | list[int]] = []
    for position, one in enumerate(given):
        if isinstance(one, int):
            raise refuse(f"input[{position}]", "texts and lists of tokens can be mixed, single tokens cannot")
        if not one:
            raise refuse(f"input[{position}]", "it is empty")
        if isinstance(one, list) and any(not 0 <= token <= MAX_INT32 for token in one):
            raise refuse(f"input[{position}]", "a token must be a number of 0 or more")
        inputs.append(one)
    return inputs


def whole_embeddings(replies: Sequence[bytes], *, shape: EmbeddingShape) -> bytes:
    tokens = 0
    items = []
    for index, message in enumerate(replies):
        try:
            result = backend_pb2.EmbeddingResult.FromString(message)
        except DecodeError as error:
            raise Upstream("cannot read the answer of the engine: a result is not in its protocol") from error
        vector = _vector(result, shape)
        tokens += result.prompt_tokens or (result.tokens if _is_per_token(result) else 0)
        shown: Any = vector
        if shape.is_base64:
            shown = base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
        items.append({"object": "embedding", "index": index, "embedding": shown})
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return msgspec.json.encode({"object": "list", "data": items, "model": shape.model, "usage": usage})


def _is_per_token(result: backend_pb2.EmbeddingResult) -> bool:
    return result.layout == backend_pb2.EMBEDDING_LAYOUT_PER_TOKEN


def _vector(result: backend_pb2.EmbeddingResult, shape: EmbeddingShape) -> list[float]:
    vector = list(result.embeddings)
    if not vector:
        raise Upstream("cannot pass on an embedding: the engine gave an empty one")
    if _is_per_token(result):
        if result.dim < 1 or len(vector) % result.dim:
            raise Upstream(f"cannot pool {len(vector)} numbers into a vector of {result.dim}")
        vector = pooled([vector[n : n + result.dim] for n in range(0, len(vector), result.dim)], shape)
    if shape.dimensions > len(vector):
        raise refuse("dimensions", f"vectors of this model have {len(vector)}")
    if shape.dimensions and shape.dimensions < len(vector):
        vector = _normalized(vector[: shape.dimensions])
    return vector


def pooled(rows: list[list[float]], shape: EmbeddingShape) -> list[float]:
    """One vector from a vector per token, of length 1."""
    if shape.pooling == "last":
        return _normalized(rows[-1])
    # With a half-life, a token counts half as much as one that is so many tokens nearer to the end.
    decay = 0.5 ** (1 / shape.half_life) if shape.pooling == "decayed_mean" else 1.0
    weights = [decay ** (len(rows) - 1 - number) for number in range(len(rows))]
    total = sum(weights)
    return _normalized(
        [
            sum(weight * row[column] for weight, row in zip(weights, rows, strict=True)) / total
            for column in range(len(rows[0]))
        ]
    )


def _normalized(vector: list[float]) -> list[float]:
    length = math.sqrt(sum(one * one for one in vector))
    return [one / length for one in vector] if length else vector
