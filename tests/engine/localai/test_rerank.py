"""Rankings: sorted and cut here, whatever an engine does."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.engine.localai.test_chat import context

from enginehouse.core.errors import EnginehouseError, Upstream, http_status
from enginehouse.engine.localai import rerank
from enginehouse.engine.localai.backend_pb2 import DocumentResult, RerankRequest, RerankResult, Usage
from enginehouse.engine.localai.planning import Planned

BODY: dict[str, Any] = {"query": "q", "documents": ["a", {"text": "b"}, "c"]}
SCORED = RerankResult(
    usage=Usage(total_tokens=9, prompt_tokens=8),
    results=[DocumentResult(index=n, relevance_score=score) for n, score in enumerate((0.25, 0.75, 0.5))],
)


def planned(body: dict[str, Any]) -> Planned:
    return rerank.plan(json.dumps(body).encode(), context())


def answered(body: dict[str, Any], result: RerankResult) -> dict[str, Any]:
    whole = planned(body).whole
    assert whole is not None
    decoded: dict[str, Any] = json.loads(whole([result.SerializeToString()]))
    return decoded


def test_a_request_is_one_call() -> None:
    (call,) = planned({**BODY, "top_n": 50}).calls
    assert call.method == "Rerank"
    request = RerankRequest.FromString(call.message)
    assert (request.query, list(request.documents), request.top_n) == ("q", ["a", "b", "c"], 3)
    assert request.ModelIdentity == "m.gguf"


def test_results_are_sorted_cut_and_have_the_texts_of_the_request() -> None:
    answer = answered({**BODY, "top_n": 2}, SCORED)
    assert answer == {
        "model": "asked",
        "usage": {"total_tokens": 9, "prompt_tokens": 8},
        "results": [
            {"index": 1, "relevance_score": 0.75, "document": {"text": "b"}},
            {"index": 2, "relevance_score": 0.5, "document": {"text": "c"}},
        ],
    }
    assert len(answered(BODY, SCORED)["results"]) == 3
    assert "document" not in answered({**BODY, "return_documents": False}, SCORED)["results"][0]


def test_a_score_for_no_document_is_the_engines_fault() -> None:
    for result in (DocumentResult(index=3), DocumentResult(index=-1), DocumentResult(relevance_score=float("nan"))):
        with pytest.raises(Upstream):
            answered(BODY, RerankResult(results=[result]))


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"documents": ["a"]}, 400, None),
        ({"query": "q", "documents": []}, 400, "documents"),
        ({"query": 5, "documents": ["a"]}, 400, "query"),
        ({"query": "q", "documents": [5]}, 400, "documents[0]"),
        ({**BODY, "top_n": 0}, 422, "top_n"),
    ],
)
def test_what_cannot_be_ranked_is_refused_by_its_name(body: dict[str, Any], status: int, param: str | None) -> None:
    with pytest.raises(EnginehouseError) as caught:
        planned(body)
    assert (http_status(caught.value), caught.value.param) == (status, param)
