"""The misfortunes that the faulty server of `tests.fetch.faulty` can have, as values to plan with.

Positions are those of the whole blob, so a fault at byte N strikes also when the request begins at another byte.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Cut:
    """The connection breaks after this many bytes of the body."""

    after_bytes: int = 0


@dataclass(frozen=True)
class Stall:
    """After this many bytes of the body nothing more comes, and the connection stays open."""

    after_bytes: int = 0


@dataclass(frozen=True)
class Flip:
    """One byte of the blob is another one."""

    at_byte: int = 0


@dataclass(frozen=True)
class Short:
    """The last bytes are missing, and the announced length is that of the rest."""

    missing_bytes: int = 1


@dataclass(frozen=True)
class Extra:
    """More bytes than there are, announced as such."""

    added_bytes: int = 1


@dataclass(frozen=True)
class WrongLength:
    """The announced length differs from what is sent."""

    difference_bytes: int


@dataclass(frozen=True)
class IgnoreRange:
    """A request for a range is answered with 200 and the whole."""


@dataclass(frozen=True)
class WrongRange:
    """A range is answered as 206 with the bytes of another range, honestly labelled."""

    shift_bytes: int = 1


@dataclass(frozen=True)
class Answer:
    """This answer instead of the true one: statuses, lies, documents, challenges."""

    status: int = 200
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Header:
    """The true answer with one header set to another value (removed when it is empty)."""

    name: str
    value: str = ""


@dataclass(frozen=True)
class Redirect:
    """To the same path on another server (`http://host:port`), or to a whole URL if `to` has a path."""

    to: str
    status: int = 307


@dataclass(frozen=True)
class Hang:
    """No answer at all, and the connection stays open."""


@dataclass(frozen=True)
class Drop:
    """The connection is closed without an answer."""


Fault = (
    Cut
    | Stall
    | Flip
    | Short
    | Extra
    | WrongLength
    | IgnoreRange
    | WrongRange
    | Answer
    | Header
    | Redirect
    | Hang
    | Drop
)
