"""Errors of engines: which status a client sees, and when another replica is tried."""

from __future__ import annotations

import pytest

from enginehouse.core.errors import can_heal, http_status
from enginehouse.engine.localai import failures, status


@pytest.mark.parametrize(
    ("given", "message", "expected", "code"),
    [
        (status.NOT_FOUND, "llama-cpp: model identity mismatch: a != b", 503, "replica_unreachable"),
        (status.FAILED_PRECONDITION, "Model not loaded", 503, "replica_unreachable"),
        (status.INTERNAL, "model not loaded", 503, "replica_unreachable"),
        (status.NOT_FOUND, "no such voice", 502, "upstream_error"),
        (status.UNIMPLEMENTED, "", 422, "unsupported"),
        (status.UNKNOWN, "unimplemented", 422, "unsupported"),
        (status.INTERNAL, "unimplemented opcode", 502, "upstream_error"),
        (status.INVALID_ARGUMENT, "bad grammar", 400, "invalid_request"),
        (status.INVALID_ARGUMENT, "the request exceeds the available context size", 400, "context_length_exceeded"),
        (status.RESOURCE_EXHAUSTED, "Received message larger than max (60000000 vs. 52428800)", 413, "too_large"),
        (status.RESOURCE_EXHAUSTED, "no free slot", 503, "resource_exhausted"),
        (status.DEADLINE_EXCEEDED, "", 502, "upstream_timeout"),
        (status.UNAVAILABLE, "connection reset", 502, "upstream_error"),
        (status.UNAUTHENTICATED, "bad token", 502, "upstream_error"),
        (status.INTERNAL, "CUDA out of memory", 502, "upstream_error"),
        (status.CANCELLED, "", 502, "upstream_error"),
    ],
)
def test_a_status_of_an_engine_is_an_error_of_ours(given: int, message: str, expected: int, code: str) -> None:
    error = failures.failure_of(given, message, model="m", task="answer a chat")
    assert (http_status(error), error.code) == (expected, code)
    assert error.message.startswith("cannot ")
    assert can_heal(error) == (expected >= 500)


def test_a_stale_route_and_a_missing_load_are_told_apart() -> None:
    assert failures.wrong_replica(status.NOT_FOUND, "x: Model identity mismatch") == failures.ANOTHER_MODEL
    assert failures.wrong_replica(status.FAILED_PRECONDITION, "anything") == failures.NOT_LOADED
    assert failures.wrong_replica(status.INVALID_ARGUMENT, "model identity mismatch") == ""
    assert failures.wrong_replica(status.NOT_FOUND, "file not found") == ""


def test_what_an_engine_says_is_shown_on_one_line_and_not_at_any_length() -> None:
    message = failures.failure_of(status.INTERNAL, "a\n\tb" + "x" * 9000, model="m", task="answer a chat").message
    assert "a b" in message
    assert len(message) < 600
    assert "\n" not in message
