"""What LocalAI's workers go on with although nobody waits for it any more: they cannot be told to stop.

A row says so (`STILL`) until the worker has answered, was restarted, or was silent for too long; meanwhile nothing
newer about the same thing is sent to that node (`store/claims`), and no listing proves anything about it.
"""

from __future__ import annotations

from collections.abc import Mapping

from enginehouse.core.action import InstallBackend
from enginehouse.core.intent import Intent, Outcome
from enginehouse.core.listing import has_come
from enginehouse.core.operation import STILL
from enginehouse.core.report import Report
from enginehouse.store import lingering, operations
from enginehouse.store.db import Connection

RESTARTED = "LocalAI's worker went on with it until it was restarted"
UNHEARD = "LocalAI's worker went on with it and never said how that ended"


def ended_as(outcome: Outcome) -> str:
    if outcome.succeeded:
        return "LocalAI's worker went on with it and has done it"
    return f"LocalAI's worker went on with it and failed: {outcome.message}"


def note_over(connection: Connection, ended: Mapping[str, str], now: float) -> list[Intent]:
    """These commands (intent and how it ended, in words) are over on their workers; the intents that say so now."""
    ids = lingering.among(connection, ended)
    if not ids:
        return []
    lingering.remove(connection, ids)
    return [
        operations.remark(connection, intent, intent.message.replace(STILL, ended[intent.id]), now)
        for intent in operations.lock_intents(connection, ids).values()
        if not intent.is_open and STILL in intent.message
    ]


def note_shown(connection: Connection, before: Intent, report: Report) -> None:
    """A listing has settled an intent. Its command is over where its own effect was seen; an upgrade to what was there
    already may go on.
    """
    action = before.action
    does_anyway = isinstance(action, InstallBackend) and (action.upgrade or action.force or not action.keep)
    if does_anyway and not has_come(report.backends, before):
        lingering.add(connection, [before])
    else:
        lingering.remove(connection, [before.id])


def shadows(connection: Connection, node_id: str) -> dict[str, set[str]]:
    """Per subject, the commands that the node's worker may still carry out."""
    found: dict[str, set[str]] = {}
    for one in lingering.every(connection):
        if one.node_id == node_id:
            found.setdefault(one.subject, set()).add(one.intent_id)
    return found
