"""The model's name on both sides of an engine: the one our clients use, and the one the engine was started with.

Pure, and used only where the two differ. Nothing else in a body is touched: requests are put together again from the
raw values, answers are changed in place as bytes, also where a name is cut by the border of two chunks.
"""

from __future__ import annotations

import re

import msgspec

from enginehouse.core.errors import Malformed

# A quote inside a JSON string always follows a backslash, so a quote that does not is the border of a string and
# `"model"` before a colon is a key.
_MEMBER = re.compile(rb'(?<!\\)("model"\s*:\s*)("(?:[^"\\]|\\.)*")', re.DOTALL)
# The beginning of such a member at the end of what has arrived.
_BEGUN = re.compile(rb'(?<!\\)"(?:m(?:o(?:d(?:el?)?)?)?|model"\s*(?::\s*(?:"(?:[^"\\]|\\.)*\\?)?)?)?\Z', re.DOTALL)
LONGEST_HELD_BYTES = 4096  # twice the longest model name with every character escaped; a longer value is not one


def rename_request(body: bytes, name: str) -> bytes:
    """`body`, a JSON object, with its top-level `model` set to `name`."""
    try:
        members = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Malformed(f"cannot read the request: {error}", code="invalid_json") from error
    members["model"] = msgspec.Raw(msgspec.json.encode(name))
    return msgspec.json.encode(members)


class Renamer:
    """Replaces `"model": "<engine's name>"` by the served name in a body that comes in pieces. `feed` all of them, then
    `finish`."""

    def __init__(self, engine_name: str, served_name: str) -> None:
        self._engine_name = engine_name
        self._served = msgspec.json.encode(served_name)
        self._held = b""
        self._before = b""  # the last byte let go: whether it is a backslash decides about the next quote

    def feed(self, chunk: bytes) -> bytes:
        """What can be let go. Only an unfinished member is held back, so an event that ends its line is never late."""
        received = self._before + self._held + chunk
        if b'"' not in received:
            return self._let_go(received, len(received))
        begun = self._begun(received)
        return self._let_go(received, len(received) if begun is None else begun)

    def finish(self) -> bytes:
        return self._let_go(self._before + self._held, len(self._before + self._held))

    def _begun(self, received: bytes) -> int | None:
        """Where a member begins that the next chunk may complete."""
        gone = len(self._before)  # already let go, so nothing begins there
        key = received.rfind(b'"model"', max(len(received) - LONGEST_HELD_BYTES, gone))
        if key >= 0 and _BEGUN.match(received, key) is not None:
            return key
        quote = received.rfind(b'"', gone)
        whole = _MEMBER.match(received, key) if key >= 0 else None
        if whole is not None and quote < whole.end():
            return None  # the quote is the end of a member that is all there
        return quote if quote >= 0 and _BEGUN.match(received, quote) is not None else None

    def _let_go(self, received: bytes, until: int) -> bytes:
        released = received[:until]
        self._held = received[until:]
        changed = _MEMBER.sub(self._replaced, released)[len(self._before) :]
        self._before = released[-1:]
        return changed

    def _replaced(self, match: re.Match[bytes]) -> bytes:
        try:
            name = msgspec.json.decode(match[2], type=str)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return match[0]
        return match[1] + self._served if name == self._engine_name else match[0]
