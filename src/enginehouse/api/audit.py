"""What of a request is recorded in the audit, and the route that lists the audit.

A record has the path and what the answer names, never a body. The answer is read only for a few fields of it, because
that of a new token has the token.
"""

from __future__ import annotations

import msgspec
from msgspec import UNSET, Struct, UnsetType
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from enginehouse.api.auth import ANONYMOUS
from enginehouse.api.requests import json_response, limit_of
from enginehouse.api.sessions import address_of
from enginehouse.core.audit import AuditQuery, AuditRecord
from enginehouse.core.errors import NotFound
from enginehouse.core.name import shown
from enginehouse.frontend.fleet.audit import AuditLedger
from enginehouse.frontend.fleet.tokens import Caller
from enginehouse.frontend.watching.views import render_time

MAX_LISTED = 500
_MAX_ID = 64
_MAX_FILTER = 512


class _AnsweredOperation(Struct, frozen=True):
    jobID: str = ""


class _Answered(Struct, frozen=True):
    """The fields of an answer that say what it is about."""

    name: str = ""
    jobID: str = ""
    uuid: str = ""  # in LocalAI's answers about models
    id: str = ""
    status_url: str | UnsetType = UNSET  # beside an id that is an operation
    operation: _AnsweredOperation = _AnsweredOperation()

    @property
    def operation_id(self) -> str:
        return self.jobID or self.operation.jobID or self.uuid or (self.id if self.status_url is not UNSET else "")


_NOTHING = _Answered()
_DECODER = msgspec.json.Decoder(_Answered)


def record_of(scope: Scope, summary: str, status: int, *, error: str = "", body: bytes = b"") -> AuditRecord:
    """The record of a request that was answered. `summary` is that of its route."""
    caller: Caller = scope.get("enginehouse.caller", ANONYMOUS)
    is_known = caller is not ANONYMOUS
    answered = _read(body)
    named = " ".join(str(value) for value in scope.get("path_params", {}).values())
    return AuditRecord(
        id="",
        at=0.0,
        who=caller.name if is_known else "",
        role=caller.role if is_known else "",
        token_id=caller.token_id,
        session_id=caller.session_id,
        address=address_of(scope),
        method=scope["method"],
        path=scope["path"],
        summary=summary,
        target=answered.name or named,
        status=status,
        error=error,
        operation_id=answered.operation_id,
    )


def _read(body: bytes) -> _Answered:
    if not body.startswith(b"{"):
        return _NOTHING
    try:
        return _DECODER.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return _NOTHING


class AuditRoutes:
    def __init__(self, ledger: AuditLedger) -> None:
        self._ledger = ledger

    async def every(self, request: Request) -> Response:
        limit, given = limit_of(request, MAX_LISTED), request.query_params
        before, who, path = (given.get(name, "") for name in ("before", "who", "path"))
        if len(before) > _MAX_ID or not before.isprintable():
            raise NotFound(f"cannot list the audit before {shown(before)}: there is no such record", param="before")
        if not (who + path).isprintable() or max(len(who), len(path)) > _MAX_FILTER:
            found: list[AuditRecord] = []  # no record has such a text
        else:
            found = await self._ledger.page(AuditQuery(limit=limit, before=before, who=who, path=path))
        following = {"next": found[-1].id} if len(found) == limit else {}
        return json_response({"audit": [_shown(one) for one in found], **following})


def _shown(record: AuditRecord) -> dict[str, object]:
    return msgspec.structs.asdict(record) | {"at": render_time(record.at)}
