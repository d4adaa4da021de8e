"""What a route reads from a request and how it answers: the caller, the JSON body within its limits, a JSON response.

Every control route goes through these functions, so limits and errors are the same everywhere. The inference routes
read their bodies in `intake`, because they pass them on as bytes.
"""

from __future__ import annotations

import asyncio
import gzip
from typing import TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from enginehouse.core.errors import Invalid, Malformed, TooLarge, Unavailable
from enginehouse.core.ids import OperationId
from enginehouse.core.name import shown
from enginehouse.core.reading import read_json
from enginehouse.frontend.acceptance import Requester
from enginehouse.frontend.fleet.tokens import Caller
from enginehouse.frontend.watching.board import Board

MAX_CONTROL_BYTES = 1024 * 1024
PACKED_FROM_BYTES = 16 * 1024  # a smaller answer fits in a few packets anyway
BODY_SECONDS = 30.0  # to receive 1 MiB; a slower client does not keep its connection open
# Key in the state of a request: a function that ends its connection at once. An orderly close would wait for a client
# that does not read.
ABORT = "enginehouse.abort"
# Key in the state of a request: a function that limits the bytes the kernel buffers for a client that does not read.
SEND_BUFFER = "enginehouse.send_buffer"
# Key in the state of a request: a function that takes a callback for the moment when the client disconnects. Not every
# ASGI server has it.
WHEN_GONE = "enginehouse.when_gone"
T = TypeVar("T")


def caller_of(request: Request) -> Caller:
    caller: Caller = request.scope["enginehouse.caller"]
    return caller


def requester_of(request: Request) -> Requester:
    """The author of a request and its idempotency key."""
    return Requester(author=caller_of(request).name, key=request.headers.get("idempotency-key", ""))


def limit_of(request: Request, most: int) -> int:
    """How many elements of a list are asked for."""
    given = request.query_params.get("limit", "50")
    # At most nine digits: int() raises ValueError on thousands of digits.
    if not given.isdecimal() or len(given) > 9 or not 1 <= int(given) <= most:
        raise Invalid(
            f"cannot use {shown(given)} as `limit`: it must be a number from 1 to {most}",
            code="invalid_name",
            param="limit",
        )
    return int(given)


def is_true(request: Request, name: str, otherwise: str) -> bool:
    """Read a switch of the query."""
    given = request.query_params.get(name, otherwise)
    if given not in ("true", "1", "false", "0"):
        raise Invalid(
            f"cannot use {shown(given)} as `{name}`: it must be true or false", code="invalid_name", param=name
        )
    return given in ("true", "1")


async def read_body(request: Request, kind: type[T], *, limit_bytes: int = MAX_CONTROL_BYTES) -> T:
    """Read the body as `kind`. An empty body counts as `{}`: many clients send none where every field is optional."""
    received = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for chunk in request.stream():
                received += chunk
                if len(received) > limit_bytes:
                    raise TooLarge(f"cannot read the body: it is larger than {limit_bytes} bytes", code="too_large")
    except TimeoutError as error:
        raise Malformed(f"cannot read the body: it did not arrive within {BODY_SECONDS:.0f} s", code="slow") from error
    try:
        # Only bodies from people are checked: a worker's report may quote the output of an engine.
        is_from_people = getattr(kind, "__struct_config__", None) and kind.__struct_config__.forbid_unknown_fields  # type: ignore[attr-defined]
        if is_from_people and b"\\u0000" in received and _has_nul(msgspec.json.decode(received)):
            raise Malformed("cannot read the body: it contains a NUL character", code="invalid_json")
        return read_json(bytes(received) or b"{}", kind)
    except msgspec.ValidationError as error:
        raise Malformed(f"cannot read the body: {error}", code="invalid_json") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Malformed(f"cannot read the body: it is not valid JSON ({error})", code="invalid_json") from error


def _has_nul(value: object) -> bool:
    if isinstance(value, dict):
        return any(_has_nul(part) for pair in value.items() for part in pair)
    if isinstance(value, list):
        return any(_has_nul(part) for part in value)
    return isinstance(value, str) and "\x00" in value


def json_response(value: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


async def list_response(request: Request, value: object) -> Response:
    """A list that may be long, or its JSON; packed for clients that take it so, such as browsers on a slow link."""
    body = value if isinstance(value, bytes) else msgspec.json.encode(value)
    headers = {"vary": "accept-encoding"}
    if len(body) >= PACKED_FROM_BYTES and "gzip" in request.headers.get("accept-encoding", ""):
        # The fastest level, in a thread: the list of a thousand nodes must not hold up what is streamed meanwhile.
        body = await asyncio.to_thread(gzip.compress, body, 1)
        headers["content-encoding"] = "gzip"
    return Response(body, media_type="application/json", headers=headers)


async def stored_view(board: Board, operation_id: OperationId) -> object:
    """The operation after a change that is stored. If the store fails now, the view is shorter, but never an error: a
    refusal would mean that nothing was stored.
    """
    try:
        return await board.view(operation_id)
    except Unavailable:
        return {"jobID": operation_id, "status": "queued", "message": "stored; its state cannot be read now"}


async def accepted_response(board: Board, operation_id: OperationId, **more: object) -> Response:
    """202 with an operation that was just stored; `more` replaces fields of it."""
    view = await stored_view(board, operation_id)
    return json_response({**msgspec.to_builtins(view), **more} if more else view, 202)
