"""Texts to tokens and back."""

from __future__ import annotations

import json

import pytest
from tests.engine.localai.test_chat import context

from enginehouse.core.errors import Malformed, Upstream
from enginehouse.engine.localai import tokens
from enginehouse.engine.localai.backend_pb2 import (
    DetokenizeRequest,
    DetokenizeResponse,
    PredictOptions,
    TokenizationResponse,
)


def test_a_text_becomes_tokens() -> None:
    plan = tokens.plan_tokenize(b'{"content": "hi"}', context())
    (call,) = plan.calls
    assert call.method == "TokenizeString"
    assert PredictOptions.FromString(call.message) == PredictOptions(Prompt="hi", ModelIdentity="m.gguf")
    assert plan.whole is not None
    assert json.loads(plan.whole([TokenizationResponse(tokens=[1, 2]).SerializeToString()])) == {"tokens": [1, 2]}
    with pytest.raises(Upstream):
        plan.whole([b"\xff"])


def test_tokens_become_a_text() -> None:
    plan = tokens.plan_detokenize(b'{"tokens": [1, 2]}', context())
    (call,) = plan.calls
    assert call.method == "Detokenize"
    assert list(DetokenizeRequest.FromString(call.message).tokens) == [1, 2]
    assert plan.whole is not None
    assert json.loads(plan.whole([DetokenizeResponse(content="hi").SerializeToString()])) == {"content": "hi"}


@pytest.mark.parametrize("body", [b"{}", b'{"content": 5}', b"[]"])
def test_no_text_is_refused(body: bytes) -> None:
    with pytest.raises(Malformed):
        tokens.plan_tokenize(body, context())


@pytest.mark.parametrize("body", [b"{}", b'{"tokens": ["a"]}', b'{"tokens": [-1]}', b'{"tokens": [4294967296]}'])
def test_no_tokens_are_refused(body: bytes) -> None:
    with pytest.raises(Malformed):
        tokens.plan_detokenize(body, context())
