"""Whether what is called done was so (G10): a row that has succeeded against the ledger of its machine.

Judged at the moment of the commit, so that a word too early is caught even where it becomes true later.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
from tests.sim.invariants import success_was_so
from tests.sim.ledgers import WorkerChecks
from tests.sim.rows import IntentRow
from tests.sim.store import EPOCH

from enginehouse.core.action import (
    Action,
    InstallBackend,
    PullModel,
    RemoveBackend,
    RemoveModel,
    StartReplica,
    StopReplica,
    pointer_of,
    subject_of,
)
from enginehouse.core.reference import parse_uri

_ACTION: msgspec.json.Decoder[Action] = msgspec.json.Decoder(Action)


def is_anew(intent: IntentRow, intents: Iterable[IntentRow]) -> bool:
    """Whether this is an install of an image after a delete that was open then, or had just been done."""
    action = _ACTION.decode(intent.action)
    if not isinstance(action, InstallBackend) or parse_uri(action.resolved.uri).kind != "image":
        return False
    before = (intent.node_id, intent.subject, intent.generation - 1)
    return any(
        (one.node_id, one.subject, one.generation) == before
        and one.state in ("succeeded", "superseded")
        and isinstance(_ACTION.decode(one.action), RemoveBackend)
        for one in intents
    )


def prove(intent: IntentRow, checks: WorkerChecks, *, is_old: bool) -> str:
    """What is wrong with its success; nothing where all is well."""
    action = _ACTION.decode(intent.action)
    meta = pointer_of(action)
    if meta and subject_of(action).partition(":")[2] not in checks.seen_since(
        f"pointer:{meta}", intent.created_at - EPOCH
    ):
        return f"intent {intent.id} succeeded, but {meta} never led to {subject_of(action)}"
    seen = checks.seen_since(intent.subject, intent.created_at - EPOCH)
    match action:
        case InstallBackend() if is_old:
            # It looks the plain name up by itself, and takes what is there for what is wanted.
            return "" if seen - {""} else success_was_so(intent, action.resolved.digest, seen)
        case InstallBackend():
            wanted = action.resolved.digest
            if action.keep:
                wanted = msgspec.json.decode(intent.outcome or "{}").get("digest", "") or "something"
            synced = checks.seen_since(f"synced:{action.resolved.directory}", intent.created_at - EPOCH)
            if wanted in seen and wanted not in synced:
                return f"intent {intent.id} succeeded, but {wanted} was never on disk for good"
            if action.force and not checks.has_taken_effect(intent.subject, intent.generation, wanted):
                return f"intent {intent.id} succeeded, but was forced and never done"
            return success_was_so(intent, wanted, seen)
        case PullModel():
            return success_was_so(intent, "held", seen)
        case StartReplica():
            nonce = msgspec.json.decode(intent.outcome or "{}").get("nonce", "")
            return success_was_so(intent, nonce or "started", seen)
        case RemoveBackend() | RemoveModel() | StopReplica():
            return success_was_so(intent, "", seen)
        case _:
            return ""
