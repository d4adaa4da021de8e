"""Records of who changed something, or was refused. Bodies are no part of them."""

from __future__ import annotations

from msgspec import Struct


class AuditRecord(Struct, frozen=True, kw_only=True):
    """One request. `count` is more than one for requests that are alike and are kept as one."""

    id: str
    at: float  # by the store's clock
    who: str = ""  # the name of a token; "" if nobody was known
    role: str = ""
    token_id: str = ""
    session_id: str = ""
    address: str = ""
    method: str = ""
    path: str = ""
    summary: str = ""
    target: str = ""  # what the path or the answer names
    status: int = 0
    error: str = ""  # the code of the error; "" for a success
    operation_id: str = ""
    count: int = 1

    def is_like(self, other: AuditRecord) -> bool:
        return all(getattr(self, field) == getattr(other, field) for field in _COMPARED)


_COMPARED = tuple(field for field in AuditRecord.__struct_fields__ if field not in ("id", "at", "count"))
# How long a text may be; longer ones are cut, so that no request can fill the table.
TEXT_LIMITS = {
    "who": 128,
    "role": 16,
    "token_id": 36,
    "session_id": 36,
    "address": 64,
    "method": 16,
    "path": 512,
    "summary": 255,
    "target": 512,
    "error": 64,
    "operation_id": 64,
}


def recordable(text: str, limit: int) -> str:
    """The text as it can be stored: cut, and without control characters, which a database may refuse."""
    return "".join(one if one.isprintable() else "\ufffd" for one in text[:limit])


class AuditQuery(Struct, frozen=True, kw_only=True):
    """Which records are listed. `who` is a name, or the id of a token or session; `path` is how paths begin."""

    limit: int
    before: str = ""  # the last record of the previous page
    who: str = ""
    path: str = ""
