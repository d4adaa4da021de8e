"""The frames of HTTP/2 (RFC 9113) as bytes: numbers, names, and what a client sends. It keeps no state.

Reading is in `http2.py`, in one loop without an object per frame, because that loop decides how many tokens per second
a frontend can read.
"""

from __future__ import annotations

import struct

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)
END_STREAM, ACK, END_HEADERS, PADDED, WITH_PRIORITY = 0x1, 0x1, 0x4, 0x8, 0x20

(NO_ERROR, PROTOCOL_ERROR, INTERNAL_ERROR, FLOW_CONTROL_ERROR, SETTINGS_TIMEOUT, STREAM_CLOSED, FRAME_SIZE_ERROR) = (
    range(7)
)
REFUSED_STREAM, CANCEL, COMPRESSION_ERROR, CONNECT_ERROR, ENHANCE_YOUR_CALM = range(7, 12)
ERROR_NAMES = (
    "NO_ERROR",
    "PROTOCOL_ERROR",
    "INTERNAL_ERROR",
    "FLOW_CONTROL_ERROR",
    "SETTINGS_TIMEOUT",
    "STREAM_CLOSED",
    "FRAME_SIZE_ERROR",
    "REFUSED_STREAM",
    "CANCEL",
    "COMPRESSION_ERROR",
    "CONNECT_ERROR",
    "ENHANCE_YOUR_CALM",
    "INADEQUATE_SECURITY",
    "HTTP_1_1_REQUIRED",
)

ENABLE_PUSH, MAX_CONCURRENT_STREAMS, INITIAL_WINDOW_SIZE, MAX_FRAME_SIZE, MAX_HEADER_LIST_SIZE = 2, 3, 4, 5, 6

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEADER_BYTES = 9
DEFAULT_WINDOW_BYTES = 65_535
DEFAULT_FRAME_BYTES = 16_384
LARGEST_FRAME_BYTES = 2**24 - 1
LARGEST_WINDOW_BYTES = 2**31 - 1
LAST_STREAM = 2**31 - 1
SETTINGS_ACK = b"\x00\x00\x00\x04\x01\x00\x00\x00\x00"

# Length and type are read as one number: `length << 8 | type`.
_head = struct.Struct(">IBI").pack
_number = struct.Struct(">I").pack
_setting = struct.Struct(">HI").pack


class Violation(Exception):
    """The peer broke the protocol: the error code of HTTP/2, and what it did."""

    def __init__(self, code: int, cause: str) -> None:
        super().__init__(cause)
        self.code = code


def frame_head(kind: int, flags: int, stream: int, length: int) -> bytes:
    return _head(length << 8 | kind, flags, stream)


def settings(values: dict[int, int]) -> bytes:
    body = b"".join(_setting(name, value) for name, value in values.items())
    return frame_head(SETTINGS, 0, 0, len(body)) + body


def window_update(stream: int, credit: int) -> bytes:
    return frame_head(WINDOW_UPDATE, 0, stream, 4) + _number(credit)


def reset(stream: int, code: int) -> bytes:
    return frame_head(RST_STREAM, 0, stream, 4) + _number(code)


def ping_ack(opaque: bytes) -> bytes:
    return frame_head(PING, ACK, 0, 8) + opaque


def goaway(code: int, cause: str) -> bytes:
    """Our streams are the only ones, so no stream of the peer was ever processed."""
    body = _number(0) + _number(code) + cause.encode()
    return frame_head(GOAWAY, 0, 0, len(body)) + body


def header_frames(stream: int, block: bytes, max_frame_bytes: int) -> bytes:
    """HEADERS, and CONTINUATION for what does not fit."""
    if len(block) <= max_frame_bytes:
        return frame_head(HEADERS, END_HEADERS, stream, len(block)) + block
    pieces = [block[start : start + max_frame_bytes] for start in range(0, len(block), max_frame_bytes)]
    frames = []
    for index, piece in enumerate(pieces):
        flags = END_HEADERS if index == len(pieces) - 1 else 0
        frames += [frame_head(CONTINUATION if index else HEADERS, flags, stream, len(piece)), piece]
    return b"".join(frames)


def data_frames(stream: int, payload: memoryview, max_frame_bytes: int, *, ends: bool) -> list[bytes | memoryview]:
    """DATA, in pieces to be joined; one empty frame if there is only the end to tell."""
    frames: list[bytes | memoryview] = []
    for start in range(0, len(payload) or 1, max_frame_bytes):
        piece = payload[start : start + max_frame_bytes]
        is_last = start + max_frame_bytes >= len(payload)
        frames += [frame_head(DATA, END_STREAM if ends and is_last else 0, stream, len(piece)), piece]
    return frames


def error_name(code: int) -> str:
    return ERROR_NAMES[code] if code < len(ERROR_NAMES) else f"error {code}"


def content(payload: bytes, flags: int) -> tuple[int, int]:
    """Where the content of a frame that may be padded begins and ends."""
    if not flags & PADDED:
        return 0, len(payload)
    if not payload or payload[0] >= len(payload):
        raise Violation(PROTOCOL_ERROR, "padding that is longer than its frame")
    return 1, len(payload) - payload[0]


def check(payload: bytes, size: int, *, is_placed: bool = True) -> None:
    """Raise unless the frame has its one size, and is on the connection if it belongs there."""
    if not is_placed:
        raise Violation(PROTOCOL_ERROR, "a frame of the connection on a stream")
    if len(payload) != size:
        raise Violation(FRAME_SIZE_ERROR, "a frame of the wrong size")
