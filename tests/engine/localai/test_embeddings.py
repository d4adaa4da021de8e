"""Embeddings: inputs in order, both encodings, pooling of vectors per token."""

from __future__ import annotations

import base64
import json
import math
import struct
from typing import Any

import pytest
from openai.types import CreateEmbeddingResponse
from tests.engine.localai.test_chat import context

from enginehouse.core.errors import EnginehouseError, Malformed, Upstream, http_status
from enginehouse.engine.localai import backend_pb2, embeddings
from enginehouse.engine.localai.backend_pb2 import EmbeddingResult, PredictOptions
from enginehouse.engine.localai.planning import Planned


def planned(body: dict[str, Any], mapping: dict[str, Any] | None = None) -> Planned:
    return embeddings.plan(json.dumps(body).encode(), context(mapping))


def answered(body: dict[str, Any], *results: EmbeddingResult, mapping: dict[str, Any] | None = None) -> dict[str, Any]:
    whole = planned(body, mapping).whole
    assert whole is not None
    answer = whole([one.SerializeToString() for one in results])
    decoded: dict[str, Any] = json.loads(answer)
    if body.get("encoding_format") != "base64":
        CreateEmbeddingResponse.model_validate_json(answer, strict=True)
    return decoded


def test_each_input_is_a_call() -> None:
    plan = planned({"input": ["a", [1, 2], "b"]})
    assert [one.method for one in plan.calls] == ["Embedding"] * 3
    options = [PredictOptions.FromString(one.message) for one in plan.calls]
    assert [(one.Embeddings, list(one.EmbeddingTokens)) for one in options] == [("a", []), ("", [1, 2]), ("b", [])]
    assert all(one.ModelIdentity == "m.gguf" for one in options)
    assert len(planned({"input": "one"}).calls) == 1
    tokens = PredictOptions.FromString(planned({"input": [5, 6]}).calls[0].message)
    assert list(tokens.EmbeddingTokens) == [5, 6]


def test_vectors_keep_their_order_and_tokens_are_counted() -> None:
    answer = answered(
        {"input": ["a", "b"]},
        EmbeddingResult(embeddings=[1.0, 0.5], prompt_tokens=3),
        EmbeddingResult(embeddings=[0.25, 2.0], prompt_tokens=4),
    )
    assert [(one["index"], one["embedding"]) for one in answer["data"]] == [(0, [1.0, 0.5]), (1, [0.25, 2.0])]
    assert answer["usage"] == {"prompt_tokens": 7, "total_tokens": 7}
    assert answer["model"] == "asked"


def test_base64_is_little_endian_float32() -> None:
    answer = answered({"input": "a", "encoding_format": "base64"}, EmbeddingResult(embeddings=[1.5, -0.1]))
    assert base64.b64decode(answer["data"][0]["embedding"]) == struct.pack("<2f", 1.5, -0.1)


def test_fewer_dimensions_are_a_shorter_vector_of_length_one() -> None:
    answer = answered({"input": "a", "dimensions": 2}, EmbeddingResult(embeddings=[3.0, 4.0, 12.0]))
    assert answer["data"][0]["embedding"] == pytest.approx([0.6, 0.8])
    with pytest.raises(Malformed) as caught:
        answered({"input": "a", "dimensions": 5}, EmbeddingResult(embeddings=[3.0, 4.0]))
    assert caught.value.param == "dimensions"


ROWS = EmbeddingResult(
    embeddings=[1.0, 0.0, 0.0, 1.0, 0.0, 3.0], tokens=3, dim=2, layout=backend_pb2.EMBEDDING_LAYOUT_PER_TOKEN
)


@pytest.mark.parametrize(
    ("options", "direction"),
    [
        ({}, (1, 4)),
        ({"pooling": "mean"}, (1, 4)),
        ({"pooling": "last"}, (0, 1)),
        ({"pooling": "decayed_mean", "pooling_half_life_tokens": 1}, (0.25, 0.5 + 3)),
    ],
)
def test_vectors_per_token_are_pooled(options: dict[str, Any], direction: tuple[float, float]) -> None:
    answer = answered({"input": "a", **options}, ROWS)
    length = math.hypot(*direction)
    assert answer["data"][0]["embedding"] == pytest.approx([one / length for one in direction], abs=1e-6)
    assert answer["usage"]["prompt_tokens"] == 3


def test_pooling_follows_the_configuration() -> None:
    answer = answered({"input": "a"}, ROWS, mapping={"parameters": {"pooling": "last"}})
    assert answer["data"][0]["embedding"] == [0.0, 1.0]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": ["a", ""]}, "input[1]"),
        ({"input": ["a", 5]}, "input[1]"),
        ({"input": [[-1]]}, "input[0]"),
        ({"input": {"a": 1}}, "input"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "pooling": "most"}, "pooling"),
        ({"input": ["a"] * 2049}, "input"),
    ],
)
def test_what_cannot_be_embedded_is_refused_by_its_name(body: dict[str, Any], param: str) -> None:
    with pytest.raises(EnginehouseError) as caught:
        planned(body)
    assert (http_status(caught.value), caught.value.param) == (400, param)


@pytest.mark.parametrize(
    "result",
    [EmbeddingResult(), EmbeddingResult(embeddings=[1, 2, 3], dim=2, layout=backend_pb2.EMBEDDING_LAYOUT_PER_TOKEN)],
)
def test_a_result_that_makes_no_sense_is_the_engines_fault(result: EmbeddingResult) -> None:
    with pytest.raises(Upstream):
        answered({"input": "a"}, result)
