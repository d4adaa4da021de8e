"""Progress of one Action: the same shape on the bus, in the row and in the UI.

Ordered by (attempt, sequence). Older progress is dropped, so numbers never decrease within an attempt.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from msgspec import Struct

Phase = Literal["", "resolving", "downloading", "extracting", "starting", "loading"]
ReportProgress = Callable[[Phase, str, int, int], None]  # phase, file, bytes done, bytes in total
MAX_BYTES = 2**63 - 1  # the largest 64-bit size; larger numbers are invalid and would overflow floats
MAX_FILE_NAME = 255
UNFINISHED_PERCENT = 99.0  # upper limit before the end: received bytes are not yet verified and in place
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")


def no_progress(_phase: Phase, _file: str, _done_bytes: int, _total_bytes: int) -> None:
    """For callers that are not interested in progress."""


class Progress(Struct, frozen=True, omit_defaults=True):
    phase: Phase = ""
    file: str = ""
    done_bytes: int = 0
    total_bytes: int = 0
    attempt: int = 0
    sequence: int = 0

    @property
    def percentage(self) -> float:
        if self.total_bytes <= 0:
            return 0.0
        return min(UNFINISHED_PERCENT, 100.0 * self.done_bytes / self.total_bytes)


def bounded(progress: Progress) -> Progress:
    """Limit progress to numbers and a name that can be shown: the frontend does not trust the bus."""
    return Progress(
        phase=progress.phase,
        file=progress.file[:MAX_FILE_NAME],
        done_bytes=min(max(progress.done_bytes, 0), MAX_BYTES),
        total_bytes=min(max(progress.total_bytes, 0), MAX_BYTES),
        attempt=min(max(progress.attempt, 0), MAX_BYTES),
        sequence=min(max(progress.sequence, 0), MAX_BYTES),
    )


def continued(progress: Progress, known: Progress) -> Progress:
    """The progress after `known` from a worker without sequence numbers, scaled to the first total; never decreases.

    LocalAI workers restart the count for each file and for extraction, with another total.
    """
    total, reported = known.total_bytes or progress.total_bytes, progress.total_bytes
    done = progress.done_bytes if reported in (0, total) else progress.done_bytes * total // reported
    done = max(done, known.done_bytes)
    return Progress(
        phase=progress.phase,
        file=progress.file,
        done_bytes=min(done, total) if total else done,
        total_bytes=total,
        attempt=known.attempt,
        sequence=known.sequence + 1,
    )


def is_newer(candidate: Progress, known: Progress | None) -> bool:
    if known is None:
        return True
    if candidate.attempt == known.attempt and candidate.done_bytes < known.done_bytes:
        # A command delivered twice is reported twice, each time counted from one.
        return False
    return (candidate.attempt, candidate.sequence) > (known.attempt, known.sequence)


def format_bytes(count: int) -> str:
    """LocalAI's form: below 1024 `"<n> B"`, else one decimal and a binary unit. Go frontends parse it back."""
    if count < 1024:
        return f"{count} B"
    value = float(count)
    unit = 0
    while value >= 1024 and unit < len(_UNITS) - 1:
        value /= 1024
        unit += 1
    return f"{value:.1f} {_UNITS[unit]}"


def parse_bytes(text: str) -> int:
    """The inverse of `format_bytes` within its rounding; 0 for any other form, as LocalAI's frontend does."""
    number, _, unit = text.partition(" ")
    if unit not in _UNITS:
        return 0
    try:
        return int(float(number) * 1024 ** _UNITS.index(unit))
    except (ValueError, OverflowError):
        return 0
