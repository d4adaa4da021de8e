"""The sentences of `enginehouse top`, which are those of the page: the line of truth, and what needs a person.

Pure. Names and errors come from other machines: whoever shows a sentence removes control characters from it
(`output.printable`).
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from enginehouse.cli.terminal.fleet_state import FleetState
from enginehouse.core.ids import NodeId
from enginehouse.core.intent import NODE_AWAY
from enginehouse.core.progress import format_bytes
from enginehouse.core.views import NodeRow, NodeView, OperationView

UNKNOWN = "\N{EN DASH}"
TIMES = "\N{MULTIPLICATION SIGN}"
NEARLY_FULL = 0.05  # free, of a disk
NAMED = 3  # nodes named in one sentence

Kind = Literal["node", "operation", "model", "backend"]

_NOUNS = {
    "install": "Install of",
    "upgrade": "Upgrade of",
    "delete": "Removal of",
    "rollback": "Rollback of",
    "load": "Load of",
    "unload": "Unload of",
    "delete_model": "Deletion of",
    "drain": "Drain of",
}


class Need(Struct, frozen=True):
    """Something that needs a person: what it is about, the sentence, and the key that helps."""

    kind: Kind
    id: str
    sentence: str
    key: str = ""


def counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def figure(value: float | None) -> str:
    """A rate with one decimal below a hundred; a dash if it is unknown."""
    if value is None:
        return UNKNOWN
    return f"{value:.1f}" if value < 99.95 else f"{value:.0f}"


def ago(seconds: float | None) -> str:
    return UNKNOWN if seconds is None else f"{span(seconds)} ago"


def span(seconds: float) -> str:
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{int(seconds // size)} {unit}"
    return f"{max(0, int(seconds))} s"


def truth(state: FleetState, at: float) -> list[str]:
    """The parts of the first line: how many nodes are healthy, replicas, traffic, running operations."""
    nodes = [node for node in state.nodes.rows.values() if node.approved]
    healthy = sum(node.health == "healthy" for node in nodes)
    replicas = sum(len(model.replicas) for model in state.models.rows.values())
    running = sum(not one.is_over for one in state.operations.values())
    traffic = state.traffic(at)
    are = "node is" if len(nodes) == 1 else "nodes are"
    return [
        f"{healthy} of {len(nodes)} {are} healthy" if nodes else "no nodes yet",
        counted(replicas, "replica"),
        f"{figure(traffic.requests_per_second)} req/s",
        f"{_whole(traffic.tokens_per_second)} tok/s",
        f"{counted(running, 'operation')} running",
    ]


def link(state: FleetState, at: float) -> str:
    """Whether what is shown is current: `● live`, or how old it is."""
    silence = state.silence(at)
    if silence is None:
        return "◌ connecting"
    if state.is_live(at):
        return "● live"
    age = f"data {span(silence)} old"
    return f"◌ {age}" if state.is_connected else f"◌ reconnecting · {age}"


def needs(state: FleetState, at: float) -> list[Need]:
    """What needs a person: pending nodes, failures, models without a place, full disks, absent nodes with requests."""
    nodes = sorted(state.nodes.rows.values(), key=lambda node: node.name)
    unplaced = _unplaced(state)
    return [
        *(_pending(node) for node in nodes if not node.approved),
        *(
            Need("operation", one.jobID, failure(one), "Enter")
            for one in sorted(state.operations.values(), key=lambda one: one.createdAt, reverse=True)
            if _needs_look(one, state) and not (one.kind == "load" and one.name in unplaced)
        ),
        *(Need("model", name, f"{name} cannot be {reason}", "Enter") for name, reason in unplaced.items()),
        *(_full(node, state) for node in nodes if node.approved and _is_nearly_full(node, state)),
        *_awaited(nodes, state, at),
    ]


def nothing(state: FleetState, at: float) -> str:
    """That nothing needs a person, or did when anything was last heard."""
    silence = state.silence(at)
    return "Nothing needs you." if silence is None or state.is_live(at) else f"Nothing needed you {ago(silence)}."


def failure(operation: OperationView) -> str:
    """What failed, where, and the first error."""
    failed = [row for row in operation.nodes if row.status == "error"]
    names = list(dict.fromkeys(row.node_name for row in failed))
    where = f" on {_several(names)}" if names else ""
    error = next((row.error or row.reason for row in failed), "") or operation.error or "no reason was given"
    return f"{title(operation)} failed{where}: {error}"


def title(operation: OperationView) -> str:
    return f"{_NOUNS.get(operation.kind, operation.kind.replace('_', ' '))} {operation.name}"


def headline(operation: OperationView) -> str:
    """How an operation stands: "Upgrade of llama-cpp: 3 of 5 done, 1 failed, 1 waits for jetson"."""
    rows = operation.nodes
    done = sum(row.status == "success" for row in rows)
    parts = [f"{done} of {len(rows)} done"] if rows else [operation.message or operation.status]
    failed = sum(row.status == "error" for row in rows)
    parts += [f"{failed} failed"] if failed else []
    away = [row for row in rows if row.status == "queued" and row.reason == NODE_AWAY]
    if away:
        parts.append(f"{len(away)} {'waits' if len(away) == 1 else 'wait'} for {_several(_names(away))}")
    parts += [f"{len(operation.excluded)} skipped"] if operation.excluded else []
    return f"{title(operation)}: {', '.join(parts)}"


def waiting_for(node_id: NodeId, state: FleetState) -> list[OperationView]:
    """The open operations with something to do on a node that is away."""
    return [
        one
        for one in state.operations.values()
        if not one.has_ended
        and any(row.node_id == node_id and row.status == "queued" and row.reason == NODE_AWAY for row in one.nodes)
    ]


def requests_wait(count: int) -> str:
    return "1 request waits for it" if count == 1 else f"{count} requests wait for it"


def state_of(node: NodeView) -> tuple[str, str]:
    """The mark and the word of a node's state."""
    if not node.approved:
        return "○", "pending"
    if node.health == "offline":
        return "◌", "offline"
    if node.drained:
        return "○", "drained"
    if node.degraded:
        return "◌", "degraded"
    return ("●", "healthy") if node.health == "healthy" else ("◌", node.health or node.status)


def _whole(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.0f}"


def _names(rows: list[NodeRow]) -> list[str]:
    return list(dict.fromkeys(row.node_name for row in rows))


def _several(names: list[str]) -> str:
    shown = ", ".join(names[:NAMED])
    return f"{shown} and {len(names) - NAMED} more" if len(names) > NAMED else shown


def _pending(node: NodeView) -> Need:
    again = f" again: {node.waits_for}" if node.waits_for else ""
    return Need("node", node.id, f"{node.name} asks to join{again} ({node.fingerprint or 'no key'})", "a approve")


def _needs_look(operation: OperationView, state: FleetState) -> bool:
    if operation.dismissed:
        return False
    if not operation.has_ended:
        return any(row.status == "error" for row in operation.nodes)
    retried = (one.retryOf == operation.jobID for one in state.operations.values())
    return operation.status in ("failed", "partial") and not any(retried)


def _unplaced(state: FleetState) -> dict[str, str]:
    """The wanted models that are not where they should be: "placed: …", or "loaded: …" where a load failed."""
    found = {}
    for name, one in sorted(state.schedules.items()):
        reason = one.reason.removeprefix(f"cannot place {name}: ")
        if reason:
            found[name] = f"{'loaded' if reason == one.reason else 'placed'}: {reason}"
    return found


def _is_nearly_full(node: NodeView, state: FleetState) -> bool:
    free = state.figures(node).available_disk
    return node.total_disk > 0 and free is not None and free < NEARLY_FULL * node.total_disk


def _full(node: NodeView, state: FleetState) -> Need:
    free = state.figures(node).available_disk or 0
    sentence = f"The disk of {node.name} is nearly full: {format_bytes(free)} of {format_bytes(node.total_disk)} free"
    return Need("node", node.id, sentence, "Enter")


def _awaited(nodes: list[NodeView], state: FleetState, at: float) -> list[Need]:
    found = []
    for node in nodes:
        waiting = waiting_for(node.id, state) if node.approved and node.health == "offline" else []
        if waiting:
            age = state.heartbeat_age(node.id, at)
            away = f"has been away for {span(age)}" if age is not None else "is away"
            found.append(Need("node", node.id, f"{node.name} {away}; {requests_wait(len(waiting))}", "Enter"))
    return found
