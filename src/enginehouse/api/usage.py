"""The route for what was used. A user token sees what it used itself; admin and viewer tokens see all.

Times are RFC 3339, a date, or seconds since 1970; counts are per hour, so a range begins with the hour of `from`.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import get_args

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from enginehouse.api.requests import caller_of, json_response
from enginehouse.core.errors import Invalid
from enginehouse.core.name import shown
from enginehouse.core.usage import GROUPINGS, HOUR_SECONDS, Grouping, UsageCount, UsageQuery
from enginehouse.frontend.fleet.usage import UsageLedger
from enginehouse.frontend.watching.views import render_time

DEFAULT_SECONDS = 7 * 86400.0
MAX_ROWS = 1000
_LATEST = 253402300799.0  # the last second that a date can show
_BY_DEFAULT = "token,model"


class UsageRoutes:
    def __init__(self, ledger: UsageLedger) -> None:
        self._ledger = ledger

    async def summed(self, request: Request) -> Response:
        given = request.query_params
        by = _groupings(given.get("by", _BY_DEFAULT))
        now = await self._ledger.now()
        until = _moment(given["to"], "to") if given.get("to") else now
        since = _moment(given["from"], "from") if given.get("from") else until - DEFAULT_SECONDS
        if since >= until:
            raise Invalid("cannot sum the usage: `from` is not before `to`", code="unsupported", param="from")
        caller = caller_of(request)
        asked = UsageQuery(
            since=since - since % HOUR_SECONDS,
            until=until,
            by=by,
            token_id=None if caller.role in ("admin", "viewer") else caller.token_id,
            limit=MAX_ROWS + 1,
        )
        rows = await self._ledger.summed(asked)
        (total,) = await self._ledger.summed(msgspec.structs.replace(asked, by=()))
        return json_response(
            {
                "from": render_time(asked.since),
                "to": render_time(until),
                "by": by,
                "usage": [_shown(row, by) for row in rows[:MAX_ROWS]],
                "total": _shown(total, ()),
                "truncated": len(rows) > MAX_ROWS,
            }
        )


def _groupings(text: str) -> tuple[Grouping, ...]:
    named = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    found = tuple(one for one in GROUPINGS if one in named)
    unknown = sorted(set(named) - set(get_args(Grouping)))
    if unknown or not found:
        raise Invalid(
            f"cannot group the usage by {shown(', '.join(unknown))}: use some of {', '.join(GROUPINGS)}",
            code="unsupported",
            param="by",
        )
    return found


def _moment(text: str, name: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        try:
            read = datetime.fromisoformat(text.replace(" ", "+"))  # a `+` that a client did not encode
        except ValueError:
            read = None
        seconds = -1.0 if read is None else (read if read.tzinfo else read.replace(tzinfo=UTC)).timestamp()
    if not 0 <= seconds <= _LATEST:
        raise Invalid(
            f"cannot use {shown(text)} as `{name}`: use a time such as 2026-01-31, 2026-01-31T12:00:00Z or seconds "
            "since 1970",
            code="unsupported",
            param=name,
        )
    return seconds


def _shown(row: UsageCount, by: tuple[Grouping, ...]) -> dict[str, object]:
    every: dict[str, object] = {
        "token": row.token,
        "token_id": row.token_id,
        "model": row.model,
        "node": row.node,
        "hour": render_time(row.hour),
        "day": render_time(row.day)[:10],
    }
    named = {*by, *(("token_id",) if "token" in by else ())}
    amounts = {
        "requests": row.requests,
        "errors": row.errors,
        "prompt_tokens": row.prompt_tokens,
        "completion_tokens": row.completion_tokens,
    }
    return {name: value for name, value in every.items() if name in named} | amounts
