"""Reports: everything a worker has, sent when it joins and with every heartbeat.

`mark` is the frontend's own time, handed out with the answer to one heartbeat and returned with the next: a report
with mark M was taken after M by the store's clock, whatever the worker's clock says. That is what makes a report
usable as evidence.
"""

from __future__ import annotations

import msgspec
from msgspec import Struct

from enginehouse.core.action import (
    Action,
    InstallBackend,
    PullModel,
    RemoveBackend,
    StartReplica,
    StopReplica,
)
from enginehouse.core.backend import InstalledBackend
from enginehouse.core.intent import Intent, Outcome
from enginehouse.core.model import HeldModel, holds
from enginehouse.core.replica import RunningReplica


class CommandResult(Struct, frozen=True, omit_defaults=True, kw_only=True):
    """The journalled end of a command, kept so that a reply nobody heard is not lost."""

    intent: str
    attempt: int
    outcome: Outcome


class Report(Struct, frozen=True, omit_defaults=True, kw_only=True):
    boot_id: str = ""  # one run of the worker
    sequence: int = 0
    mark: float = 0.0
    boot_mark: float = 0.0  # the mark of the registration that began this run
    version: str = ""  # of the worker program
    backends: tuple[InstalledBackend, ...] = ()
    models: tuple[HeldModel, ...] = ()
    replicas: tuple[RunningReplica, ...] = ()
    results: tuple[CommandResult, ...] = ()
    running: tuple[str, ...] = ()  # intents being worked on


def believed(report: Report, now: float) -> Report:
    """The report with no mark later than the store's own time: what was not handed out yet is no evidence."""
    return msgspec.structs.replace(report, mark=min(report.mark, now), boot_mark=min(report.boot_mark, now))


def shows(report: Report, intent: Intent) -> Outcome | None:
    """The success of an intent, where the report proves it; None where it proves nothing.

    Only state that the wish names counts: an install settles on its digest or on its own applied generation, a delete
    on absence. A forced install settles on its generation alone, because the same digest was there before it; so does
    one whose digest is not known before it is fetched. A start is never settled by state: its address comes with the
    result or with the replica that carries this generation.
    """
    action: Action = intent.action
    match action:
        case InstallBackend():
            for backend in report.backends:
                if backend.name == action.resolved.directory and not backend.is_broken:
                    wanted = action.resolved.digest
                    is_same = not wanted or backend.digest == wanted
                    is_applied = backend.generation >= intent.generation
                    if is_same and (is_applied or (wanted and not action.force)):
                        return Outcome(digest=backend.digest)
            return None
        case RemoveBackend():
            present = any(backend.name == action.directory for backend in report.backends)
            return None if present else Outcome()
        case PullModel():
            return Outcome() if holds(report.models, action.model) else None
        case StartReplica():
            for replica in report.replicas:
                if (replica.model_id, replica.replica_index) == (action.model.name, action.slot) and (
                    replica.generation == intent.generation
                ):
                    return Outcome(address=replica.address, nonce=replica.nonce)
            return None
        case StopReplica():
            running = {(replica.model_id, replica.replica_index) for replica in report.replicas}
            return None if (action.model, action.slot) in running else Outcome()


DELIVERY_SECONDS = 2.0  # how long a message on the bus may be under way before a report that lacks it counts


def lost(report: Report, intent: Intent) -> bool:
    """Whether the worker certainly does not have the command of a running intent.

    Either this run of the worker registered after the command was sent, or the report was taken long enough after the
    sending.
    """
    if intent.id in report.running:
        return False
    return report.boot_mark > intent.dispatched_at or report.mark > intent.dispatched_at + DELIVERY_SECONDS


def result_for(report: Report, intent: Intent) -> Outcome | None:
    """The journalled result of this very attempt, if the report carries it."""
    for result in report.results:
        if (result.intent, result.attempt) == (intent.id, intent.attempt):
            return result.outcome
    return None
