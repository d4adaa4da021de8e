"""Reports: everything a worker has, sent when it joins and whenever it has changed.

`mark` is the store's time from the answer to one heartbeat, returned with the next one. A report with mark M was
therefore taken after M by the store's clock, independent of the worker's clock. This makes a report usable as evidence.
A heartbeat that names the digest of the stored report is a report too: the same one, with a newer sequence and mark.
"""

from __future__ import annotations

from hashlib import sha256
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
from enginehouse.core.ids import IntentId
from enginehouse.core.intent import Intent, Outcome
from enginehouse.core.listing import shows_install
from enginehouse.core.model import HeldModel, holds
from enginehouse.core.replica import FailedReplica, RunningReplica


class CommandResult(Struct, frozen=True, omit_defaults=True, kw_only=True):
    """The journalled end of a command, kept so that a lost reply does no harm."""

    intent: IntentId
    attempt: int
    outcome: Outcome


class Report(Struct, frozen=True, omit_defaults=True, kw_only=True):
    boot_id: str = ""  # identifies one run of the worker
    sequence: int = 0
    mark: float = 0.0
    boot_mark: float = 0.0  # the mark of the registration that began this run
    version: str = ""  # of the worker program
    confinement: str = ""  # of its engines: the kinds, or "none" and the reason
    backends: tuple[InstalledBackend, ...] = ()
    models: tuple[HeldModel, ...] = ()
    replicas: tuple[RunningReplica, ...] = ()
    failed: tuple[FailedReplica, ...] = ()
    restarting: tuple[str, ...] = ()  # process keys of replicas that the worker is about to start again by itself
    results: tuple[CommandResult, ...] = ()
    running: tuple[IntentId, ...] = ()  # intents being worked on

    @property
    def is_whole(self) -> bool:
        """Whether a worker of ours sent it. Listings of LocalAI's workers have no generations, intents or files."""
        return bool(self.boot_id)


class ReportStamp(Struct, frozen=True, omit_defaults=True, kw_only=True):
    """When a report was taken."""

    sequence: int = 0
    mark: float = 0.0


def digest_of(report: Report) -> str:
    """Of everything in a report but its stamp: reports of one run of a worker that are otherwise equal share it."""
    return sha256(msgspec.json.encode(msgspec.structs.replace(report, sequence=0, mark=0.0))).hexdigest()


def stored_digest(digest: str, version: str) -> str:
    """The digest that a worker gave, as it is stored: of bounded length, and bound to the version of the frontend.
    Another version may keep fields of the report that this one dropped, so it needs the report again.
    """
    return sha256(f"{version} {digest}".encode()).hexdigest() if digest else ""


def restamped(report: Report, stamp: ReportStamp) -> Report:
    """The same report, taken again."""
    return msgspec.structs.replace(report, sequence=stamp.sequence, mark=stamp.mark)


def without_future_marks(report: Report, now: float) -> Report:
    """Limit the marks to the store's current time: a mark that was not issued yet proves nothing."""
    return msgspec.structs.replace(report, mark=min(report.mark, now), boot_mark=min(report.boot_mark, now))


def is_older(report: Report, known: Report) -> bool:
    """Whether a report was taken before the one that is known. A frozen frontend may deliver one late, even from a run
    of the worker that has ended since.
    """
    if not report.is_whole and not known.is_whole:
        return report.mark < known.mark  # listings of LocalAI's workers are ordered by the time of the poll
    if report.boot_id == known.boot_id:
        return report.sequence < known.sequence
    return report.is_whole and report.mark < known.boot_mark


def shows(report: Report, intent: Intent) -> Outcome | None:
    """The success of an intent, if the report proves it; else None.

    Only state that the request names counts. An install settles on its digest or on its applied generation, and only if
    the requested meta name points to it. With `keep` it settles on any installed version. A forced install settles on
    its generation only, because the same digest was there before; so does one whose digest is unknown before the fetch.
    A delete settles on absence. A start never settles on state: its address comes with the result or with a replica of
    this generation.
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
            # A listing of a LocalAI worker does not include files.
            held = any(model.name == action.model for model in report.models)
            return None if held or not report.is_whole else Outcome()
        case StartReplica():
            for replica in report.replicas:
                if (replica.model_id, replica.replica_index) == (action.model.name, action.slot) and (
                    replica.generation == intent.generation
                ):
                    return Outcome(
                        address=replica.address,
                        nonce=replica.nonce,
                        checks_key=replica.checks_key,
                        protocol=replica.protocol,
                    )
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
    """Whether it is safely on disk, as far as its worker knows."""
    return not backend.is_unsettled


def may_settle(report: Report, intent: Intent) -> bool:
    """Whether the state in a report may settle an intent.

    After a failure our worker's own result counts, because the state it left may look complete but not last. LocalAI
    workers also report a failure if a backend to delete is absent, or if an installed one could not be started, so for
    them the listing counts, except for a failed upgrade.
    """
    if not intent.failures:
        return True
    is_upgrade = isinstance(intent.action, InstallBackend) and intent.action.upgrade
    return not report.is_whole and (intent.state == "running" or not is_upgrade)


def _is_pointed(report: Report, action: InstallBackend) -> bool:
    """Whether the requested meta name points to the build. A LocalAI listing does not show where a name points, and has
    an alias instead of a pointer of the same name.
    """
    meta, build = pointer_of(action), action.resolved
    if not meta or (not report.is_whole and build.alias == meta):
        return True
    return any(
        backend.name == meta and (not report.is_whole or backend.meta_backend_for == build.directory)
        for backend in report.backends
    )


def has_applied(report: Report, intent: Intent) -> bool:
    """Whether the worker shows that it has applied this generation."""
    action = intent.action
    return isinstance(action, InstallBackend) and any(
        backend.name == action.resolved.directory and backend.generation >= intent.generation
        for backend in report.backends
    )


DELIVERY_SECONDS = 2.0  # delivery time of a message on the bus; a report taken later counts as evidence of its loss


def lost(report: Report, intent: Intent) -> bool:
    """Whether the worker certainly lacks the command of a running intent: it registered, or reported much, later."""
    if intent.id in report.running or not report.is_whole:
        return False
    return report.boot_mark > intent.dispatched_at or report.mark > intent.dispatched_at + DELIVERY_SECONDS


def result_for(report: Report, intent: Intent) -> Outcome | None:
    """The journalled result of this attempt, if the report contains it."""
    for result in report.results:
        if (result.intent, result.attempt) == (intent.id, intent.attempt):
            return result.outcome
    return None
