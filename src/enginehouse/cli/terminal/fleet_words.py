"""The words of `enginehouse top`, which are those of the page (`api/web/words.js`, `attention.js`): change both.

Pure. Names and errors come from other machines: whoever shows a sentence removes control characters from it
(`output.printable`).
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Literal

from msgspec import Struct

from enginehouse.cli.terminal.fleet_state import FleetState
from enginehouse.core.finding import LEAST_DISK_BYTES, LITTLE_DISK
from enginehouse.core.ids import NodeId
from enginehouse.core.intent import DRAINING, NODE_AWAY
from enginehouse.core.progress import format_bytes
from enginehouse.core.views import NodeView, OperationView

UNKNOWN = "\N{EN DASH}"
TIMES = "\N{MULTIPLICATION SIGN}"
ARRIVING_SECONDS = 60.0
_NODES = {"healthy": "●", "unhealthy": "◔", "offline": "◌"}
_LATE = "{} is unhealthy: its heartbeats come late. Check its load and its network."
_UNREACHED = "{} sends heartbeats, but commands do not reach it. Check that it reaches the port of NATS."

Kind = Literal["server", "node", "operation", "model", "backend"]

_KINDS = {
    "install": "Install",
    "upgrade": "Upgrade",
    "delete": "Delete",
    "rollback": "Roll back",
    "load": "Load",
    "unload": "Unload",
    "delete_model": "Delete the model",
    "drain": "Drain",
}


class Need(Struct, frozen=True):
    """Something that needs a person: what it is about, the sentence, and the key and the command that help."""

    kind: Kind
    id: str
    sentence: str
    key: str = ""
    command: str = ""


def counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def figure(value: float | None) -> str:
    """A rate with one decimal below a hundred; a dash if it is unknown."""
    if value is None:
        return UNKNOWN
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def ago(seconds: float | None) -> str:
    return UNKNOWN if seconds is None else f"{span(seconds)} ago"


def span(seconds: float) -> str:
    """In one unit; in two from an hour on, for a day."""
    whole = max(0, int(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min"
    return f"{whole // 3600} h {whole % 3600 // 60} min" if whole < 86400 else f"{whole // 86400} d"


def clock(seconds: float) -> str:
    """Time left, such as 0:48 or 1:02:03."""
    minutes, rest = divmod(math.ceil(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def bytes_of_bytes(done: int, total: int) -> str:
    """Two sizes in the unit of the second: `1.2 of 3.1 GiB`."""
    _, _, unit = format_bytes(total).partition(" ")
    scale = 1024 ** ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB").index(unit)
    return f"{done} of {total} B" if scale == 1 else f"{done / scale:.1f} of {total / scale:.1f} {unit}"


def truth(state: FleetState, at: float) -> list[str]:
    """The parts of the first line: how many nodes are healthy, replicas, traffic, running operations."""
    nodes = [node for node in state.nodes.rows.values() if node.approved]
    healthy = sum(node.health == "healthy" and not node.drained for node in nodes)
    replicas = sum(len(model.replicas) for model in state.models.rows.values())
    running = sum(not one.has_ended for one in state.operations.values())
    traffic = state.traffic(at)
    return [
        f"{healthy} of {counted(len(nodes), 'node')} healthy" if nodes else "no nodes yet",
        counted(replicas, "replica"),
        f"{figure(traffic.requests_per_second)} req/s",
        f"{figure(traffic.tokens_per_second)} tok/s",
        *([f"{counted(running, 'operation')} running"] if running else []),
    ]


def link(state: FleetState, at: float) -> str:
    """Whether what is shown is current: `● live`, or how old it is."""
    silence = state.silence(at)
    if state.is_live(at):
        return "● live"
    word = "not allowed" if state.is_refused else "connecting" if silence is None else "reconnecting"
    return f"◌ {word} · {'no data yet' if silence is None else f'data {span(silence)} old'}"


def needs(state: FleetState, at: float) -> list[Need]:
    """What needs a person, most urgent first: nodes that ask to join, models that do not stay up, full disks, failures,
    models without a place, nodes that commands do not reach or that are slow, nodes that are away.
    """
    nodes = sorted(state.nodes.rows.values(), key=lambda node: node.name)
    approved = [node for node in nodes if node.approved]
    unplaced = _unplaced(state)
    return [
        *(_pending(node) for node in nodes if not node.approved),
        *(
            Need(
                "node",
                node.id,
                f"{one.model_id} does not stay up on {node.name}: {one.message}",
                "Enter",
                f"enginehouse logs {node.name} {one.model_id}",
            )
            for node in approved
            for one in node.failed_replicas
        ),
        *(_full(node, state) for node in approved if _is_nearly_full(node, state)),
        *(
            Need("operation", one.jobID, failure(one, state), "r retry", f"enginehouse ops retry {one.jobID[:8]}")
            for one in sorted(state.operations.values(), key=lambda one: one.createdAt, reverse=True)
            if _needs_look(one, state) and not (one.kind == "load" and one.name in unplaced)
        ),
        *(
            Need("model", name, f"{name} cannot be {reason}", "Enter", f"enginehouse models explain {name}")
            for name, reason in unplaced.items()
        ),
        *(
            Need("node", node.id, _UNREACHED.format(node.name), "Enter", "enginehouse doctor")
            for node in approved
            if node.degraded
        ),
        *(
            Need("node", node.id, _LATE.format(node.name), "Enter", f"enginehouse logs worker --node {node.name}")
            for node in approved
            if node.health == "unhealthy" and not node.degraded
        ),
        *(
            _away(node, state, at)
            for node in approved
            if node.health == "offline" and not _is_arriving(node, state, at)
        ),
    ]


def nothing(state: FleetState, at: float) -> str:
    """That nothing needs a person, or did when anything was last heard."""
    silence = state.silence(at)
    return "Nothing needs you." if silence is None or state.is_live(at) else f"Nothing needed you {ago(silence)}."


def failure(operation: OperationView, state: FleetState) -> str:
    """How it stands, and what one of its nodes said."""
    sentence = headline(operation, state)
    failed = next((row for row in operation.nodes if row.status == "error" and row.error), None)
    why = f"{failed.node_name}: {failed.error}" if failed else operation.error
    return sentence if not why or why in sentence else f"{sentence} {why}"


def title(operation: OperationView, state: FleetState) -> str:
    """What an operation is, in words: "Upgrade llama-cpp"."""
    node = state.nodes.rows.get(NodeId(operation.name)) if operation.kind == "drain" else None
    return f"{_KINDS.get(operation.kind, operation.kind)} {node.name if node else operation.name}"


def headline(operation: OperationView, state: FleetState) -> str:
    """How an operation stands: "Upgrade llama-cpp: 3 of 5 done, 1 failed, 1 waits for jetson."."""
    rows = operation.nodes
    counts = Counter(row.status for row in rows)
    if not rows:
        return f"{title(operation, state)}: {operation.error or operation.message or operation.status}."
    away = [row for row in rows if row.reason == NODE_AWAY and row.status == "queued"]
    waiting = f"1 waits for {away[0].node_name}" if len(away) == 1 else f"{len(away)} wait for their nodes"
    pieces = [
        (True, f"{counts['success']} of {len(rows)} done"),
        (counts["error"], f"{counts['error']} failed"),
        (away, waiting),
        (counts["queued"] - len(away), f"{counts['queued'] - len(away)} queued"),
        (counts["downloading"] + counts["running_on_worker"], f"{_at_work(counts)} at work"),
        (counts["cancelled"], f"{counts['cancelled']} cancelled"),
        (operation.excluded, f"{len(operation.excluded)} skipped"),
    ]
    return f"{title(operation, state)}: {', '.join(piece for is_so, piece in pieces if is_so)}."


def _at_work(counts: Counter[str]) -> int:
    return counts["downloading"] + counts["running_on_worker"]


def waiting_for(node_id: NodeId, state: FleetState) -> int:
    """How many requests wait until a node returns or is resumed."""
    return sum(
        row.node_id == node_id and row.reason in (NODE_AWAY, DRAINING)
        for one in state.operations.values()
        if not one.has_ended
        for row in one.nodes
    )


def requests_wait(count: int) -> str:
    return f"{counted(count, 'request')} {'waits' if count == 1 else 'wait'} for it"


def state_of(node: NodeView) -> tuple[str, str]:
    """The mark and the word of a node's state."""
    if not node.approved:
        return "○", "asks to join"
    if node.degraded:
        return "◔", "no commands reach it"
    if _is_new(node):
        return "○", "approved, not connected yet"
    if node.drained:
        return ("◒", "drained") if node.health == "healthy" else ("◌", f"drained, {node.health}")
    return _NODES.get(node.health, "○"), node.health or node.status


def _is_new(node: NodeView) -> bool:
    """Whether a machine of ours was approved and has not reported since; one of LocalAI's has no fingerprint."""
    return node.approved and node.health == "offline" and bool(node.fingerprint) and not node.worker_version


def _is_arriving(node: NodeView, state: FleetState, at: float) -> bool:
    """Whether it was just approved and may still be on its way: it asks again after a pause."""
    age = state.heartbeat_age(node.id, at)
    return _is_new(node) and age is not None and age < ARRIVING_SECONDS


def _pending(node: NodeView) -> Need:
    again = f" again: {node.waits_for}" if node.waits_for else ""
    key = node.fingerprint or "without a key of its own"
    sentence = f"{node.name} asks to join{again} ({key})"
    return Need("node", node.id, sentence, "a approve", f"enginehouse nodes approve {node.name}")


def _needs_look(operation: OperationView, state: FleetState) -> bool:
    """Whether it failed, and nothing has done since what it could not: a retry, the same again, a model that runs."""
    if operation.dismissed or operation.status not in ("failed", "partial"):
        return False
    model = state.models.rows.get(operation.name) if operation.kind == "load" else None
    if model is not None and model.replicas:
        return False
    what = (operation.kind, operation.name)
    return not any(
        one.retryOf == operation.jobID
        or ((one.kind, one.name) == what and one.createdAt > operation.createdAt and one.status == "succeeded")
        for one in state.operations.values()
    )


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
    is_heard = node.health != "offline"
    little = max(LEAST_DISK_BYTES, LITTLE_DISK * node.total_disk)
    return is_heard and node.total_disk > 0 and free is not None and free < little


def _full(node: NodeView, state: FleetState) -> Need:
    free = format_bytes(state.figures(node).available_disk or 0)
    sentence = f"{node.name} has {free} of {format_bytes(node.total_disk)} disk free. Delete what it no longer needs."
    return Need("node", node.id, sentence, "Enter", f"enginehouse nodes show {node.name}")


def _away(node: NodeView, state: FleetState, at: float) -> Need:
    age, waiting = state.heartbeat_age(node.id, at), waiting_for(node.id, state)
    since = f"has been offline for {span(age)}" if age is not None else "is offline"
    more = f"; {requests_wait(waiting)}" if waiting else ""
    return Need("node", node.id, f"{node.name} {since}{more}.", "Enter", f"enginehouse nodes show {node.name}")
