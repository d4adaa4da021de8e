"""What requests used, and how it is found in the answers of engines.

Pure. An engine says what a request used in an object `usage`, at the end of a plain answer or in one of the last
events of a stream. Only that end is searched, as bytes: inside a JSON string quotation marks are escaped, so `"usage":`
is always a key. Nothing here is done per token.
"""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

from msgspec import Struct

HOUR_SECONDS = 3600
_END_BYTES = 16 * 1024  # of a plain answer; the fields after `usage` are short
_BEGIN_BYTES = 1024  # some answers of rerankers have it first
# OpenAI's names, and those of Anthropic and of OpenAI's responses.
_PROMPT = re.compile(rb'"(?:prompt|input)_tokens"\s*:\s*(\d{1,15})')
_COMPLETION = re.compile(rb'"(?:completion|output)_tokens"\s*:\s*(\d{1,15})')
_KEY = re.compile(rb'"usage"\s*:\s*\{')
# The same in one step, for the order that most engines have.
_USUAL = re.compile(
    rb'"usage"\s*:\s*\{\s*"prompt_tokens"\s*:\s*(\d{1,15}),\s*"completion_tokens"\s*:\s*(\d{1,15})[,}\s]'
)

Grouping = Literal["token", "model", "node", "hour", "day"]
GROUPINGS: tuple[Grouping, ...] = ("token", "model", "node", "hour", "day")


class Used(NamedTuple):
    """The tokens of one request. Estimated ones are the events of a stream whose engine did not say."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    is_estimated: bool = False


class UsageCount(Struct, frozen=True, kw_only=True):
    """What was used, per what it is grouped by; the other fields are empty."""

    token_id: str = ""
    token: str = ""
    model: str = ""
    node: str = ""
    hour: int = 0
    day: int = 0
    requests: int = 0
    errors: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0


class UsageQuery(Struct, frozen=True, kw_only=True):
    """Which rows are summed. `token_id` is None for those of all tokens."""

    since: float
    until: float
    by: tuple[Grouping, ...]
    token_id: str | None = None
    limit: int = 1000


def used_by_answer(body: bytes) -> Used | None:
    """What a plain answer says; None if it says nothing."""
    if len(body) <= _END_BYTES:
        return _used(body)
    return _used(body[-_END_BYTES:]) or _used(body[:_BEGIN_BYTES])


def used_by_stream(end: bytes, events: int) -> Used:
    """What the last events of a stream say; otherwise an estimate from the number of events."""
    found = _used(end)
    # All but the first, which has the role, the last one, which has the reason, and the end marker.
    return Used(0, max(0, events - 3), True) if found is None else found


def _used(part: bytes) -> Used | None:
    at = part.rfind(b'"usage"')
    if at < 0:
        return None
    usual = _USUAL.match(part, at)
    if usual is not None:
        return Used(int(usual[1]), int(usual[2]))
    places = [found.start() for found in _KEY.finditer(part)]
    if not places:
        return None
    prompt, completion = _PROMPT.search(part, places[-1]), _COMPLETION.search(part, places[-1])
    if prompt is None and completion is None:
        return None
    return Used(int(prompt[1]) if prompt else 0, int(completion[1]) if completion else 0)
