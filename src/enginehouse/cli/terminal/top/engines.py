"""Backends over nodes, and models: what is wanted, what is there, and where."""

from __future__ import annotations

from rich.text import Text

from enginehouse.cli.answers import ListedBackend, ListedHolder, ShownExplanation
from enginehouse.cli.terminal import output
from enginehouse.cli.terminal.fleet_state import FleetState
from enginehouse.cli.terminal.fleet_words import UNKNOWN, counted, figure
from enginehouse.cli.terminal.top.drawing import (
    MUTED,
    NEWS,
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
    since,
)
from enginehouse.core.progress import format_bytes
from enginehouse.core.views import FleetPlan, ModelView, NodePlan

NO_BACKENDS = "No backends yet. Install one with `enginehouse backends install NAME --all`."
NO_MODELS = "No models. Add one with `enginehouse models add`."
_STATES = {
    "loading": ("◑ loading", NEWS),
    "loaded": ("● ready", OK),
    "added": ("○ not running", ""),
    "available": (f"{UNKNOWN} in the gallery", MUTED),
}
_ORDER = tuple(_STATES)


def backend_rows(state: FleetState, at: float, width: int) -> list[Row]:
    name = name_width((one.name for one in state.backends), width)
    return [_backend_row(one, state, name) for one in sorted(state.backends, key=lambda one: one.name)]


def _backend_row(backend: ListedBackend, state: FleetState, name: int) -> Row:
    holders = backend.nodes or ()
    words = f"{backend.name} {' '.join(f'{one.node_name} {one.version}' for one in holders)}"

    def draw(width: int) -> list[Text]:
        approved = sum(node.approved for node in state.nodes.rows.values())
        versions = ", ".join(sorted({_version(one) for one in holders}))
        where = f"on {len(holders)} of {counted(approved, 'node')}"
        first = joined(cell(backend.name, name, "bold"), cell(versions, 22), cell(where, 17), _standing(backend, state))
        return [first, cell("  " + "  ".join(_held(one, backend) for one in holders), width, MUTED)]

    return Row(Target("backend", backend.name), words, 2, draw)


def _standing(backend: ListedBackend, state: FleetState) -> Text:
    """Whether there is a newer version, and whether nodes differ."""
    upgrade = state.upgrades.get(backend.name)
    if upgrade is not None:
        version = upgrade.available_version or "a newer version"
        return plain(f"↑ {version}" if upgrade.is_certain else "version unknown", WARN)
    differing = sum(not one.unknown for one in backend.drift or ())
    return plain(f"≠ differs on {counted(differing, 'node')}", WARN) if differing else plain("")


def _held(holder: ListedHolder, backend: ListedBackend) -> str:
    differs = any(one.node_name == holder.node_name and not one.unknown for one in backend.drift or ())
    mark = "✕" if holder.is_broken else "≠" if differs else "◌" if holder.node_status == "offline" else "●"
    return f"{mark} {holder.node_name} {_version(holder)}"


def _version(holder: ListedHolder) -> str:
    if holder.meta_backend_for:
        return f"({holder.meta_backend_for})"
    return holder.version or output.short_digest(holder.digest)[:7] or UNKNOWN


def backend_details(state: FleetState, name: str, at: float, width: int) -> list[Row]:
    """One backend, node by node; also the nodes that do not have it."""
    found = next((one for one in state.backends if one.name == name), None)
    if found is None:
        return [line_row(NO_TARGET, plain("This backend is on no node any more."))]
    rows = [line_row(Target("backend", name), joined(plain(name, "bold"), _standing(found, state), gap="  "))]
    holders = {one.node_name: one for one in found.nodes or ()}
    others = {node.name for node in state.nodes.rows.values() if node.approved}
    label = name_width(others | set(holders), width)
    for node_name in sorted(others | set(holders)):
        holder = holders.get(node_name)
        text = _holding(holder, found) if holder else f"{UNKNOWN} not installed"
        rows.append(line_row(NO_TARGET, joined(cell(node_name, label), plain(text, "" if holder else MUTED))))
    return rows


def _holding(holder: ListedHolder, backend: ListedBackend) -> str:
    differs = any(one.node_name == holder.node_name and not one.unknown for one in backend.drift or ())
    installed = f"installed {since(holder.installed_at)}" if holder.installed_at else ""
    parts = (
        _held(holder, backend).replace(f" {holder.node_name}", "", 1),
        output.short_digest(holder.digest),
        installed,
        "broken" if holder.is_broken else "",
        "differs" if differs else "",
        f"the node is {holder.node_status}" if holder.node_status not in ("", "healthy") else "",
    )
    return "  ".join(part for part in parts if part)


def model_rows(state: FleetState, at: float, width: int) -> list[Row]:
    """What runs and loads first; what a gallery only offers last."""
    models = sorted(state.models.rows.values(), key=lambda one: (_ORDER.index(_state(one)), one.name))
    name = name_width((one.name for one in models), width)
    return [_model_row(one, state, at, name) for one in models]


def _state(model: ModelView) -> str:
    return model.state if model.state in _ORDER else "added"


def _model_row(model: ModelView, state: FleetState, at: float, name: int) -> Row:
    nodes = list(dict.fromkeys(one.node_name for one in model.replicas))

    def draw(width: int) -> list[Text]:
        words, colour = _STATES[_state(model)]
        traffic = state.traffic_of(model.name, at)
        rate = f"{figure(traffic.requests_per_second)} req/s" if model.replicas else ""
        return [
            joined(
                cell(model.name, name, MUTED if model.state == "available" else "bold"),
                cell(words, 16, colour),
                cell(wanted(model, state), 22),
                cell(rate, 11, right=True),
                cell(", ".join(nodes) or output.size(model.size_bytes), max(8, width - name - 53), MUTED),
            )
        ]

    return Row(Target("model", model.name), f"{model.name} {model.state} {' '.join(nodes)} {model.backend}", 1, draw)


def wanted(model: ModelView, state: FleetState) -> str:
    """`1 of 3 replicas`; without a schedule only what is there."""
    schedule, running = state.schedules.get(model.name), len(model.replicas)
    if schedule is None or not (schedule.min_replicas or schedule.spread_all):
        return counted(running, "replica") if running or model.state != "available" else ""
    if schedule.spread_all:
        return f"{counted(running, 'replica')}, one per node"
    return f"{running} of {counted(schedule.min_replicas, 'replica')}"


def explained(found: ShownExplanation, width: int) -> list[Row]:
    """Where another replica would go, and per node why not."""
    need = f"{format_bytes(found.needs_bytes)} ({found.needs_from})" if found.needs_bytes else "unknown"
    stops = f" after stopping {', '.join(found.stops)}, which nobody uses" if found.stops else ""
    pairs = [
        ("model", found.model),
        ("memory needed", need),
        ("replicas", f"{found.replicas} running, {found.wanted} wanted"),
        ("the next goes to", f"{found.chosen}{stops}" if found.chosen else "no node"),
        *((one.node_name, "has room" if one.fits else one.reason) for one in found.nodes),
        *(("would help", one) for one in found.would_help),
        ("last failure", found.last_failure),
    ]
    if found.retry_in_seconds is not None:
        pairs.append(("next try", f"in {found.retry_in_seconds:.0f} s, or when a node joins or becomes free"))
    return facts(pairs, width)


def planned(plan: FleetPlan, width: int) -> list[Row]:
    """What a request would do, node by node."""
    rows = [line_row(NO_TARGET, _planned_node(one)) for one in plan.nodes]
    for one in plan.excluded:
        rows += facts([(one.node_name, f"left out: {one.reason}")], width)
    if plan.canaries:
        then = "the others follow if the new version stays ready there"
        rows += facts([("first", f"{', '.join(plan.canaries)}; {then}")], width)
    if plan.download_bytes:
        rows += facts([("fetches", f"at most {format_bytes(plan.download_bytes)}")], width)
    return rows


def _planned_node(one: NodePlan) -> Text:
    before = one.installed_version or output.short_digest(one.installed_digest or "") or UNKNOWN
    after = one.version or output.short_digest(one.digest or "") or UNKNOWN
    note = f"  {one.note}" if one.note else ""
    does = one.does or "nothing"
    return joined(
        cell(one.node_name, 18, "bold"),
        cell(does, 10, MUTED if does == "nothing" else NEWS),
        plain(f"{before} → {after}{note}"),
    )
