"""The nodes: three lines each in the list, and everything about one."""

from __future__ import annotations

from collections import Counter

from rich.text import Text

from enginehouse.cli.terminal import output
from enginehouse.cli.terminal.fleet_state import FleetState
from enginehouse.cli.terminal.fleet_words import TIMES, UNKNOWN, ago, figure, requests_wait, span, state_of, waiting_for
from enginehouse.cli.terminal.top.drawing import (
    BAD,
    MUTED,
    NO_TARGET,
    OK,
    WARN,
    Row,
    Target,
    cell,
    facts,
    joined,
    line_row,
    name_width,
    plain,
    used,
)
from enginehouse.core.ids import NodeId
from enginehouse.core.views import NodeView

EMPTY = "No machine has joined yet. `enginehouse nodes add` shows how to join one."
_COLOURS = {"●": OK, "◌": BAD, "◔": WARN, "◒": MUTED, "○": WARN}


def rows(state: FleetState, at: float, width: int) -> list[Row]:
    nodes = sorted(state.nodes.rows.values(), key=lambda node: (node.name, node.id))
    name = name_width((node.name for node in nodes), width)
    word = max((len(state_of(node)[1]) for node in nodes), default=0) + 2
    return [_row(node, state, at, (name, word)) for node in nodes]


def _row(node: NodeView, state: FleetState, at: float, widths: tuple[int, int]) -> Row:
    words = [node.name, state_of(node)[1], node.gpu_vendor, node.platform, *(one.name for one in node.backends)]
    words += [*(one.model_id for one in node.replicas), *(f"{key}={value}" for key, value in node.labels.items())]

    def draw(width: int) -> list[Text]:
        return [_first(node, state, at, width, widths), _second(node, state, at, width), _third(node, width)]

    return Row(Target("node", node.id), " ".join(words), 3, draw)


def _first(node: NodeView, state: FleetState, at: float, width: int, widths: tuple[int, int]) -> Text:
    mark, word = state_of(node)
    heard = ago(state.heartbeat_age(node.id, at))
    name, state_width = widths
    hardware = max(8, min(32, width - name - state_width - 12 - 11 - 15 - 5))
    parts = [
        cell(node.name, name, "bold"),
        cell(f"{mark} {word}", state_width, _COLOURS[mark]),
        cell(_hardware(node), hardware),
        cell(node.platform, 12, MUTED),
    ]
    if node.approved:
        rate = figure(state.figures(node).requests_per_second)
        parts.append(cell(f"{rate} req/s", 11, MUTED if rate == UNKNOWN else "", right=True))
    else:
        parts.append(cell("", 11))
    parts.append(cell(heard, 15, MUTED, right=True))
    return joined(*parts)


def _second(node: NodeView, state: FleetState, at: float, width: int) -> Text:
    if not node.approved:
        return plain(f"  {node.fingerprint or 'no key'}  a approves it", WARN)
    if node.health == "offline":
        waiting = waiting_for(node.id, state)
        away = state.heartbeat_age(node.id, at)
        since = f"  last known {span(away)} ago" if away is not None else "  last known state"
        return plain(since + (f"; {requests_wait(waiting)}" if waiting else ""), WARN if waiting else MUTED)
    figures = state.figures(node)
    cores = f"CPU {figure(figures.used_cores)}/{node.cores or UNKNOWN}"
    amounts = [("RAM", figures.available_ram, node.total_ram), ("disk", figures.available_disk, node.total_disk)]
    # Without any graphics card in the cluster, its column would only take room.
    if any(one.total_vram for one in state.nodes.rows.values()):
        amounts.insert(1, ("VRAM", figures.available_vram, node.total_vram))
    room = min(36, (width - 14) // len(amounts) - 1)
    first = cell(cores, 12, MUTED if figures.used_cores is None else "")
    return joined(cell("", 1), first, *(used(*amount, room) for amount in amounts))


def _third(node: NodeView, width: int) -> Text:
    backends = "  ".join(
        f"{one.name} {_version(one.version, one.digest)}".strip() for one in node.backends if not one.is_meta
    )
    counts = Counter(one.model_id for one in node.replicas)
    models = "  ".join(f"{name} {TIMES}{count}" for name, count in sorted(counts.items()))
    half = (width - 4) // 2 if models else width - 2
    found = joined(cell("", 1), cell(backends or "no backends", half, MUTED))
    if models:
        found = joined(found, cell(models, width - found.cell_len - 1))
    return found


def _hardware(node: NodeView) -> str:
    cards = [card.name for card in node.gpu_cards if card.name]
    if cards:
        return cards[0] if len(cards) == 1 else f"{len(cards)}{TIMES} {cards[0]}"
    return f"{node.gpu_vendor} {output.size(node.total_vram)}".strip() or "no GPU"


def _version(version: str, digest: str) -> str:
    return version or output.short_digest(digest)[:7]


def details(state: FleetState, node_id: str, at: float, width: int) -> list[Row]:
    """All about one node; what is last known of it, if it is away."""
    node = state.nodes.rows.get(NodeId(node_id))
    if node is None:
        return [line_row(NO_TARGET, plain("This node was removed."))]
    mark, word = state_of(node)
    age = state.heartbeat_age(node.id, at)
    figures = state.figures(node)
    is_away = node.health == "offline"
    known = f"last known {ago(age)}" if is_away else ""
    pairs = [
        ("state", f"{mark} {word}" + (f", heard {ago(age)}" if age is not None else "")),
        ("fingerprint", node.fingerprint or "no key"),
        ("waits", node.waits_for),
        ("bus", "disconnected: the node gets no commands; its replicas go on serving" if node.degraded else ""),
        ("address", node.address),
        ("platform", f"{node.platform} {node.capability}".strip()),
        ("GPU", _hardware(node)),
        ("worker", node.worker_version),
        ("engines", node.engine_confinement),
        ("labels", ", ".join(f"{key}={value}" for key, value in sorted(node.labels.items())) or "none"),
        ("in flight", UNKNOWN if figures.in_flight is None else str(figures.in_flight)),
        ("inventory", known),
    ]
    target = Target("node", node.id)
    head = [line_row(target, plain(node.name, "bold"), words=node.name), *facts(pairs, width)]
    memory = joined(
        used("RAM", figures.available_ram, node.total_ram, 30),
        used("VRAM", figures.available_vram, node.total_vram, 30),
    )
    disk = used("disk", figures.available_disk, node.total_disk, 30)
    return [
        *head,
        line_row(NO_TARGET, memory),
        line_row(NO_TARGET, disk),
        *_inventory(node, width),
        *_waiting(node, state),
    ]


def _inventory(node: NodeView, width: int) -> list[Row]:
    backends = [
        (f"backend {one.name}", one.meta_backend_for or _version(one.version, one.digest) or UNKNOWN)
        for one in node.backends
    ]
    models = [(f"model {one.model_id}", f"slot {one.replica_index}, {one.backend}") for one in node.replicas]
    failed = [(f"model {one.model_id}", f"given up: {one.message}") for one in node.failed_replicas]
    return facts([*backends, *models, *failed], width)


def _waiting(node: NodeView, state: FleetState) -> list[Row]:
    """The open operations that have something to do on this node; Enter opens one."""
    found = [
        one
        for one in state.operations.values()
        if not one.has_ended and any(row.node_id == node.id and row.is_open for row in one.nodes)
    ]
    return [
        line_row(Target("operation", one.jobID), plain(f"operation  {one.kind} {one.name}: {one.message}", WARN))
        for one in found
    ]
