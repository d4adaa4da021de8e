"""What a check of the doctor found: about which thing, whether it needs a person, and what to do."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from msgspec import Struct

Level = Literal["ok", "note", "problem"]  # only a problem needs a person
LITTLE_DISK = 0.05  # free, of a disk
LEAST_DISK_BYTES = 512 * 1024**2  # below this a database or an install soon fails
MOST_CLOCK_SECONDS = 5.0  # two clocks that differ more confuse people who compare logs


class Finding(Struct, frozen=True, kw_only=True):
    area: str  # server, database, nats, clock, disk, node, reach, graphics, gallery, kernel, ports
    level: Level
    message: str
    advice: str = ""


class ReachRecord(Struct, frozen=True, kw_only=True):
    """`DATA/reach.json`: whether the server reached this worker when it was asked last."""

    at: float
    finding: Finding


def has_problem(findings: Iterable[Finding]) -> bool:
    return any(one.level == "problem" for one in findings)


def disk_finding(what: str, free: int, total: int, shown_free: str) -> Finding:
    """How full a disk is; `what` lies on it."""
    if free < LEAST_DISK_BYTES:
        advice = "Free some space, or move the data directory to a larger disk"
        return Finding(area="disk", level="problem", message=f"{what}: only {shown_free} free", advice=advice)
    if total and free < LITTLE_DISK * total:
        return Finding(
            area="disk",
            level="note",
            message=f"{what}: {shown_free} free, less than {LITTLE_DISK:.0%}",
            advice="Free some space before it is full",
        )
    return Finding(area="disk", level="ok", message=f"{what}: {shown_free} free")


def clock_finding(here: str, there: str, difference_seconds: float) -> Finding:
    """Whether two clocks agree; positive means that the first is ahead."""
    if abs(difference_seconds) <= MOST_CLOCK_SECONDS:
        return Finding(area="clock", level="ok", message=f"{here} and {there} agree within a few seconds")
    way = "ahead of" if difference_seconds > 0 else "behind"
    return Finding(
        area="clock",
        level="problem",
        message=f"{here} is {abs(difference_seconds):.0f} s {way} {there}",
        advice="Let both follow a time server, for example: timedatectl set-ntp true",
    )
