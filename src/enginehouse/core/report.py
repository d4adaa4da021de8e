"""Reports: everything a worker has, sent when it joins and with every heartbeat.

`mark` is the frontend's own time, handed out with the answer to one heartbeat and returned with the next: a report
with mark M was taken after M by the store's clock, whatever the worker's clock says. That is what makes a report
usable as evidence.
"""

from __future__ import annotations

from typing import assert_never

import msgspec
from msgspec import Struct

from enginehouse.core.action import (
    Action,
    InstallBackend,
    PullModel,
    RemoveBackend,
    RemoveModel,
    StartReplica,
    StopReplica,
    UnknownAction,
    pointer_of,
)
from enginehouse.core.backend import InstalledBackend
from enginehouse.core.intent import Intent, Outcome
from enginehouse.core.listing import shows_install
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
    confinement: str = ""  # of its engines: the kinds, or "none" and the reason
    backends: tuple[InstalledBackend, ...] = ()
    models: tuple[HeldModel, ...] = ()
    replicas: tuple[RunningReplica, ...] = ()
    results: tuple[CommandResult, ...] = ()
    running: tuple[str, ...] = ()  # intents being worked on

    @property
    def is_whole(self) -> bool:
        """Whether a worker made it; else it was put together from the listings of one of LocalAI's, which knows no
        generations, no intents and nothing of files.
        """
        return bool(self.boot_id)


def believed(report: Report, now: float) -> Report:
    """The report with no mark later than the store's own time: what was not handed out yet is no evidence."""
    return msgspec.structs.replace(report, mark=min(report.mark, now), boot_mark=min(report.boot_mark, now))


def shows(report: Report, intent: Intent) -> Outcome | None:
    """The success of an intent, where the report proves it; None where it proves nothing.

    Only state that the request names counts: an install settles on its digest or on its own applied generation, and
    only where the meta name that was asked for leads to it; a delete settles on absence. An install that keeps what is
    there settles on whatever is there. A forced install settles on its generation alone, because the same digest was
    there before it; so does one whose digest is not known before it is fetched. A start is never settled by state: its
    address comes with the result or with the replica that carries this generation.
    """
    action: Action = intent.action
    match action:
        case InstallBackend():
            return _shows_install(report, action, intent)
        case RemoveBackend():
            present = any(backend.name in (action.directory, action.called) for backend in report.backends)
            return None if present else Outcome()
        case PullModel():
            return Outcome() if holds(report.models, action.model) else None
        case RemoveModel():
            # A listing of LocalAI's workers says nothing of files.
            held = any(model.name == action.model for model in report.models)
            return None if held or not report.is_whole else Outcome()
        case StartReplica():
            for replica in report.replicas:
                if (replica.model_id, replica.replica_index) == (action.model.name, action.slot) and (
                    replica.generation == intent.generation
                ):
                    return Outcome(address=replica.address, nonce=replica.nonce, checks_key=replica.checks_key)
            return None
        case StopReplica():
            running = {(replica.model_id, replica.replica_index) for replica in report.replicas}
            return None if (action.model, action.slot) in running else Outcome()
        case UnknownAction():
            return None
        case _:
            assert_never(action)


def _shows_install(report: Report, action: InstallBackend, intent: Intent) -> Outcome | None:
    wanted = {action.resolved.digest, action.resolved.index_digest} - {""}
    if not _is_pointed(report, action):
        return None
    for backend in report.backends:
        if backend.name != action.resolved.directory or backend.is_broken or not _lasts(backend):
            continue
        is_same = backend.digest in wanted or action.keep
        if not report.is_whole:
            return Outcome(digest=backend.digest) if shows_install(backend, action, intent) else None
        is_applied = backend.generation >= intent.generation
        if (is_same and not action.force) or (is_applied and (is_same or not wanted)):
            return Outcome(digest=backend.digest)
    return None


def _lasts(backend: InstalledBackend) -> bool:
    """Whether it is on disk for good, as far as its worker knows."""
    return not backend.is_unsettled


def is_evidence(report: Report, intent: Intent) -> bool:
    """Whether what a report shows may settle an intent at all.

    A worker that said it failed is believed until it says otherwise: what it left may look done and not last. LocalAI's
    call it a failure to delete what is not there, or to install what they could not start: there the listing counts,
    but for an upgrade that they have just called failed.
    """
    if not intent.failures:
        return True
    is_upgrade = isinstance(intent.action, InstallBackend) and intent.action.upgrade
    return not report.is_whole and (intent.state == "running" or not is_upgrade)


def _is_pointed(report: Report, action: InstallBackend) -> bool:
    """Whether the meta name that was asked for leads to the build. A listing of LocalAI's workers does not tell where a
    name leads, and has an alias instead of a pointer of the same name.
    """
    meta, build = pointer_of(action), action.resolved
    if not meta or (not report.is_whole and build.alias == meta):
        return True
    return any(
        backend.name == meta and (not report.is_whole or backend.meta_backend_for == build.directory)
        for backend in report.backends
    )


def has_applied(report: Report, intent: Intent) -> bool:
    """Whether the worker shows that it has seen this very generation."""
    action = intent.action
    return isinstance(action, InstallBackend) and any(
        backend.name == action.resolved.directory and backend.generation >= intent.generation
        for backend in report.backends
    )


DELIVERY_SECONDS = 2.0  # how long a message on the bus may be under way before a report that lacks it counts


def lost(report: Report, intent: Intent) -> bool:
    """Whether the worker certainly does not have the command of a running intent.

    Either this run of the worker registered after the command was sent, or the report was taken long enough after the
    sending.
    """
    if intent.id in report.running or not report.is_whole:
        return False
    return report.boot_mark > intent.dispatched_at or report.mark > intent.dispatched_at + DELIVERY_SECONDS


def result_for(report: Report, intent: Intent) -> Outcome | None:
    """The journalled result of this very attempt, if the report carries it."""
    for result in report.results:
        if (result.intent, result.attempt) == (intent.id, intent.attempt):
            return result.outcome
    return None
