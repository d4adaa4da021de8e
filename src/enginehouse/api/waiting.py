"""The answers of a frontend that waits for its database and its bus: it is alive, and not ready for this reason.

It has no tokens yet, so every other request gets the same 503, with or without a token.
"""

from __future__ import annotations

import msgspec
from starlette.types import Receive, Scope, Send

from enginehouse.api.errors import error_answer
from enginehouse.api.intake import request_id_of
from enginehouse.core.errors import Unavailable

RETRY_SECONDS = 2.0


class Waiting:
    reason = ""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
        if scope["path"] == "/healthz":
            status, body = 200, b'{"status":"ok"}'
        elif scope["path"] == "/readyz":
            status, body = 503, msgspec.json.encode({"status": "not ready", "reasons": [self.reason]})
        else:
            error = Unavailable(f"cannot answer yet: {self.reason}; try again in a moment", code="not_ready")
            error.retry_after_seconds = RETRY_SECONDS
            status, given, body = error_answer(error, request_id_of(scope["headers"]))
            headers = [*given, (b"connection", b"close")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})
