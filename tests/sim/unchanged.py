"""Deliberate faults of what an unchanged report proves: it is a report with the mark of its heartbeat, and no other.

The worker sends only the digest then, so these are faults of the frontend that takes the stored report again.
"""

from __future__ import annotations

import math
from random import Random

import msgspec
from tests.sim.lapses import QUICK, request
from tests.sim.mutation import Mutant, Patch
from tests.sim.options import BACKENDS, SimRequest

from enginehouse.core import report
from enginehouse.core.ids import NodeId
from enginehouse.core.node_api import HeartbeatRequest
from enginehouse.core.report import Report, ReportStamp
from enginehouse.frontend.delivery.reports import Answered, WorkerReports
from enginehouse.frontend.fleet import heartbeats
from enginehouse.frontend.fleet.heartbeats import Heard
from enginehouse.store.liveness import Liveness, LivenessChange


def _as_of_now() -> list[Patch]:
    def restamped(stored: Report, stamp: ReportStamp) -> Report:
        return msgspec.structs.replace(stored, sequence=stamp.sequence, mark=math.inf)  # limited to the store's time

    return [(report, "restamped", restamped)]


def _deleted_in_a_calm(chance: Random) -> tuple[SimRequest, ...]:
    """Deleted and installed again while the heartbeat that found nothing changed is still on its way."""
    name, at = chance.choice(BACKENDS), chance.uniform(11.0, 14.0)
    return (
        request(0, 1.0, "install", f"one@{name}"),
        request(1, at, "delete", name),
        request(2, at + chance.uniform(0.1, 0.5), "install", f"one@{name}"),
    )


def _as_of_then() -> list[Patch]:
    def restamped(stored: Report, stamp: ReportStamp) -> Report:
        return msgspec.structs.replace(stored, sequence=stamp.sequence)

    return [(report, "restamped", restamped)]


def _proves_nothing() -> list[Patch]:
    """Nodes on which something waits for a newer report count as those on which nothing does."""
    real = heartbeats.judge

    def judge(row: Liveness, said: HeartbeatRequest, digest: str, now: float) -> tuple[Heard, LivenessChange | None]:
        return real(msgspec.structs.replace(row, is_busy=False), said, digest, now)

    return [(heartbeats, "judge", judge)]


def _confirmed_unseen() -> list[Patch]:
    """A worker is told that the store has its report, whatever the store has."""
    real = WorkerReports.heartbeat

    async def heartbeat(self: WorkerReports, node_id: NodeId, said: HeartbeatRequest) -> Answered:
        if said.report is not None:
            said = msgspec.structs.replace(said, report=None, unchanged=heartbeats.stamp_of(said))
        answer = await real(self, node_id, said)
        return msgspec.structs.replace(answer, report_digest=said.report_digest)

    return [(WorkerReports, "heartbeat", heartbeat)]


UNCHANGED = (
    Mutant(
        "an unchanged report is newer than it is",
        ("G10",),
        _as_of_now,
        {
            **QUICK,
            **{"nodes": 8, "install_seconds": 1.0, "safety_seconds": 18.0},
            **{"late_rate": 0.0, "late_link_rate": 0.5, "drop_rate": 0.0},
        },
        _deleted_in_a_calm,
        (),
    ),
    Mutant("an unchanged report is as old as when it was stored", ("end",), _as_of_then),
    Mutant("an unchanged report settles nothing", ("end",), _proves_nothing),
    Mutant("a report that was never stored is confirmed", ("end", "G10"), _confirmed_unseen),
)
