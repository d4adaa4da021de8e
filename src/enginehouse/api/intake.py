"""Reads requests of inference routes: the body within its limits, the model that it names, and the request id.

The body is decoded once, only for the fields that routing needs; its bytes are passed on unchanged.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import msgspec
from msgspec import Struct

from enginehouse.core.errors import Invalid, Malformed, TooLarge
from enginehouse.core.form import boundary_of, field_of, form_type

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]

MAX_BODY_BYTES = 32 * 1024 * 1024
BODY_SECONDS = 120.0  # enough for 32 MiB over a slow uplink; a slower client does not keep its connection open


class InferenceRequest(Struct, frozen=True):
    """The fields of a request that we read."""

    model: str | None = None
    stream: bool | None = None


_ASKED = msgspec.json.Decoder(InferenceRequest)
_RAW_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])


async def read_body(headers: list[tuple[bytes, bytes]], receive: Receive) -> bytes | None:
    """The whole body, or None if the client disconnected before its end."""
    for name, value in headers:
        if name == b"content-length" and (not value.isdigit() or int(value) > MAX_BODY_BYTES):
            raise _too_large()
    message = await receive()
    if message["type"] == "http.disconnect":
        return None
    first: bytes = message.get("body", b"")
    if not message.get("more_body", False):
        if len(first) > MAX_BODY_BYTES:
            raise _too_large()
        return first
    try:
        async with asyncio.timeout(BODY_SECONDS):
            return await _read_rest(first, receive)
    except TimeoutError as error:
        raise Malformed(
            f"cannot read the request: its body did not arrive within {BODY_SECONDS:.0f} s", code="slow"
        ) from error


async def _read_rest(first: bytes, receive: Receive) -> bytes | None:
    pieces, size, more = [first], len(first), True
    while more:
        if size > MAX_BODY_BYTES:
            raise _too_large()
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        piece: bytes = message.get("body", b"")
        pieces.append(piece)
        size += len(piece)
        more = message.get("more_body", False)
    if size > MAX_BODY_BYTES:
        raise _too_large()
    return b"".join(pieces)


def _too_large() -> TooLarge:
    return TooLarge(f"cannot accept the request: its body is larger than {MAX_BODY_BYTES // 1024**2} MiB")


async def until_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def model_asked_for(body: bytes) -> str:
    """The model that the request names."""
    try:
        asked = _ASKED.decode(body)
    except msgspec.ValidationError as error:
        text = str(error)
        for name in ("model", "stream"):
            if text.endswith(f"`$.{name}`"):
                raise Invalid(f"cannot use this `{name}`: {text}", code="unsupported", param=name) from error
        raise Malformed(f"cannot read the request: {text}", code="invalid_json") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Malformed(f"cannot read the request as JSON: {error}", code="invalid_json") from error
    return _checked(asked.model)


def with_model(body: bytes, name: str) -> bytes:
    """The request with another model: some engines check it."""
    fields = _RAW_FIELDS.decode(body)
    return msgspec.json.encode(fields | {"model": msgspec.Raw(msgspec.json.encode(name))})


def form_type_of(headers: list[tuple[bytes, bytes]]) -> str:
    """The content type of a request that is a form, as it is passed on; "" for any other."""
    for name, value in headers:
        if name == b"content-type":
            boundary = boundary_of(value.decode("latin-1"))
            return form_type(boundary) if boundary is not None else ""
    return ""


def model_of_form(body: bytes, content_type: str) -> str:
    """The model that a form names."""
    return _checked(field_of(body, boundary_of(content_type) or "", "model"))


def _checked(model: str | None) -> str:
    if not model:
        raise Invalid(
            "cannot choose a model: the request names none. Set `model`; GET /v1/models lists them", param="model"
        )
    if "\x00" in model:
        raise Malformed("cannot use this `model`: it contains a NUL character", code="invalid_json", param="model")
    return model


def request_id_of(headers: list[tuple[bytes, bytes]]) -> str:
    """The id that the client sent, if it is safe to repeat in headers and logs; otherwise a new one."""
    for name, value in headers:
        is_id = name in (b"x-request-id", b"x-correlation-id")
        if is_id and 0 < len(value) <= 128 and all(0x21 <= byte <= 0x7E for byte in value):
            return value.decode("ascii")
    # It must be unique, not secret: the generator is seeded by the system, and asks it no more.
    return f"{random.getrandbits(128):032x}"
