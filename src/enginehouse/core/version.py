"""Versions of this program, compared. Pure."""

from __future__ import annotations

import re

_NUMBERS = re.compile(r"\d+(?:\.\d+)*")


def is_older(version: str, than: str) -> bool:
    """Whether `version` comes before `than`. What is no version, such as that of another program, is not older."""
    ours, theirs = _numbers(version), _numbers(than)
    return bool(ours and theirs) and ours < theirs


def _numbers(version: str) -> tuple[int, ...]:
    found = _NUMBERS.match(version)
    return tuple(int(part) for part in found.group().split(".")) if found and len(version) < 64 else ()
