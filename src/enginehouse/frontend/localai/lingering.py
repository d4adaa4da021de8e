"""Commands that LocalAI's workers continue although their intents have ended: these workers cannot be stopped.

A row records such a command until the worker replies, registers again, or is silent for too long. Meanwhile no newer
command for the same subject is sent to that node (`store/claims`), and no listing settles an intent about it. The
functions of this module are the collector's `LingeringCommands`.
"""

from __future__ import annotations

from collections.abc import Mapping

from enginehouse.core.action import InstallBackend
from enginehouse.core.ids import IntentId, NodeId
from enginehouse.core.intent import Intent, Outcome
from enginehouse.core.listing import was_put_in_place
from enginehouse.core.operation import STILL_RUNNING
from enginehouse.core.report import Report
from enginehouse.store import lingering, operations
from enginehouse.store.db import Connection

RESTARTED = "LocalAI's worker continued it until it was restarted"
RESULT_UNKNOWN = "LocalAI's worker continued it and never reported the result"


def note_replies(connection: Connection, outcomes: Mapping[IntentId, Outcome], now: float) -> list[Intent]:
    """Workers have replied to these intents: their commands have ended. Returns the intents whose message changed."""
    return note_commands_ended(
        connection, {intent_id: _ended_as(outcome) for intent_id, outcome in outcomes.items()}, now
    )


def note_restart(connection: Connection, node_id: NodeId, now: float) -> list[Intent]:
    """The worker of this node was restarted, which ended its commands. Returns the intents whose message changed."""
    return note_commands_ended(connection, dict.fromkeys(lingering.on_node(connection, node_id), RESTARTED), now)


def _ended_as(outcome: Outcome) -> str:
    if outcome.succeeded:
        return "LocalAI's worker continued it, and it succeeded"
    return f"LocalAI's worker continued it, and it failed: {outcome.message}"


def note_commands_ended(connection: Connection, ended: Mapping[IntentId, str], now: float) -> list[Intent]:
    """Remove ended commands; `ended` says how, by intent. Returns the intents whose message changed."""
    ids = lingering.among(connection, ended)
    if not ids:
        return []
    lingering.remove(connection, ids)
    return [
        operations.remark(connection, intent, intent.message.replace(STILL_RUNNING, ended[intent.id]), now)
        for intent in operations.lock_intents(connection, ids).values()
        if not intent.is_open and STILL_RUNNING in intent.message
    ]


def note_settled_by_listing(connection: Connection, before: Intent, report: Report) -> None:
    """A listing has settled an intent. Its command has ended if its own effect was seen; an upgrade to the version that
    was there already may still run.
    """
    action = before.action
    does_anyway = isinstance(action, InstallBackend) and (action.upgrade or action.force or not action.keep)
    if does_anyway and not was_put_in_place(report.backends, before):
        lingering.add(connection, [before])
    else:
        lingering.remove(connection, [before.id])


def continuing_commands(connection: Connection, node_id: NodeId) -> dict[str, set[IntentId]]:
    """Return the commands that the node's worker may still carry out, by subject."""
    found: dict[str, set[IntentId]] = {}
    for one in lingering.every(connection):
        if one.node_id == node_id:
            found.setdefault(one.subject, set()).add(one.intent_id)
    return found
