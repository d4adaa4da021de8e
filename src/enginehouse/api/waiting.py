"""What a frontend answers while it waits for its database and its bus: that it lives, that it is not ready and why.

It knows no tokens yet, so whatever else is asked gets the same answer, whoever asks.
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
            status, told, body = error_answer(error, request_id_of(scope["headers"]))
            headers = [*told, (b"connection", b"close")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})
