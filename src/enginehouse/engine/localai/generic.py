"""Any call of the protocol with its messages as JSON: the request is read and the answer written by the descriptor.

Nothing that an engine can do is out of reach for want of a route of its own. Field names are the protocol's own, 64-bit
integers are text and bytes are base64, as protobuf's JSON form has it. Pure.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Protocol

import msgspec
from google.protobuf import json_format
from google.protobuf.message import DecodeError
from msgspec import Struct

from enginehouse.core.errors import Invalid, Malformed, NotFound, Upstream
from enginehouse.engine.localai import backend_pb2

PREFIX = "/localai/"  # of the paths that this module takes, before the name of the call
MAX_DEPTH = 64
_SERVICE = backend_pb2.DESCRIPTOR.services_by_name["Backend"]
# A process serves one model, and its worker loads and frees it.
_OWN = frozenset({"LoadModel", "Free"})


class MessageSource(Protocol):
    """A call whose messages arrive."""

    async def next_messages(self) -> list[bytes]:
        """All messages that arrived since the last call; none at the end."""


class GenericCall(Struct, frozen=True):
    """A call that was asked for as JSON."""

    method: str
    requests: tuple[bytes, ...]
    is_stream: bool  # of answers
    answer: Any  # the class of the answer


def methods() -> tuple[str, ...]:
    """The calls that can be made, by name."""
    return tuple(sorted(one.name for one in _SERVICE.methods if one.name not in _OWN))


def read_call(path: str, body: bytes, identity: str) -> GenericCall:
    """The call of a request. A call that takes a stream takes a JSON array of messages."""
    name = path.removeprefix(PREFIX)
    method = _SERVICE.methods_by_name.get(name)
    if method is None or name in _OWN:
        raise NotFound(
            f"cannot call {name[:60]!r}: the engine's protocol has the calls {', '.join(methods())}", code="not_found"
        )
    given = _read(body)
    if isinstance(given, list) and not method.client_streaming:
        raise Invalid(f"cannot call {name} with a list: it takes one message", code="unsupported")
    kind = getattr(backend_pb2, method.input_type.name)
    several = given if isinstance(given, list) else [given]
    requests = tuple(_message(one, kind, name, identity) for one in several)
    answer = getattr(backend_pb2, method.output_type.name)
    return GenericCall(name, requests, method.server_streaming, answer)


def write_answer(call: GenericCall, message: bytes) -> bytes:
    """One message of the answer as JSON."""
    try:
        text = json_format.MessageToJson(
            call.answer.FromString(message), preserving_proto_field_name=True, indent=None, ensure_ascii=False
        )
    except (DecodeError, ValueError) as error:
        raise Upstream(f"cannot read the engine's answer to {call.method}: {error}") from error
    return text.encode()


async def events(call: GenericCall, first: list[bytes], stream: MessageSource) -> AsyncIterator[bytes]:
    """The messages of a stream as events; all that arrived together are one chunk."""
    messages = first
    while messages:
        yield b"".join(b"data: " + write_answer(call, one) + b"\n\n" for one in messages)
        messages = await stream.next_messages()
    yield b"data: [DONE]\n\n"


def _read(body: bytes) -> object:
    try:
        return msgspec.json.decode(body or b"{}")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Malformed(f"cannot read the message as JSON: {error}", code="invalid_json") from error


def _message(given: object, kind: Any, name: str, identity: str) -> bytes:
    if not isinstance(given, dict):
        raise Invalid(f"cannot call {name}: its message must be a JSON object", code="unsupported")
    message: Any = kind()
    try:
        json_format.ParseDict(given, message, max_recursion_depth=MAX_DEPTH)
    except (json_format.ParseError, ValueError, TypeError) as error:
        raise Invalid(f"cannot call {name}: {error}", code="unsupported") from error
    if "ModelIdentity" in message.DESCRIPTOR.fields_by_name and not message.ModelIdentity:
        message.ModelIdentity = identity
    return bytes(message.SerializeToString())
