"""One line of a log as operators see it: its time, where it comes from, and its text without secrets.

Whatever wrote a line, what looks like a credential is replaced before the line leaves the machine.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from msgspec import Struct

MAX_LINE = 4096  # characters
REDACTED = "[hidden]"
# What looks like a credential, whoever wrote it: bearer tokens, passwords in URLs, keys of well-known services, ours.
_SECRETS = re.compile(
    r"(?i)(?P<bearer>\bbearer\s+)[^\s\"',;]+"
    r"|(?P<url>\b[a-z][a-z0-9+.-]*://[^\s/@:]*:)[^\s/@]+(?=@)"
    r"|(?P<named>\b(?:api[_-]?key|token|password|secret)[\"']?\s*[=:]\s*[\"']?)[^\s\"',;&]{6,}"
    r"|\b(?:hf_|sk-|ghp_)[A-Za-z0-9_-]{8,}"
    r"|\beh-[a-z]+-[A-Za-z0-9_-]{16,}"
)


class LogLine(Struct, frozen=True):
    """LocalAI's shape."""

    timestamp: str
    stream: str
    text: str


def redacted(text: str, secrets: Iterable[str]) -> str:
    """`text` without these secrets and without what looks like one."""
    for secret in secrets:
        text = text.replace(secret, REDACTED)
    return _SECRETS.sub(
        lambda found: (found["bearer"] or found["url"] or found["named"] or "") + REDACTED, text[: 4 * MAX_LINE]
    )
