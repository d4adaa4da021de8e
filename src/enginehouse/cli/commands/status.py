"""`enginehouse status`: what is so and what needs a person, on one screen, in the words of the page and of `top`.

Reads the lists once and the figures of the last pulse; it changes nothing and follows nothing.
"""

from __future__ import annotations

import shutil
import sys
import textwrap
import time
from contextlib import suppress

import msgspec

from enginehouse.cli.client.connect import FrontendApi, connect
from enginehouse.cli.client.live import LiveCluster
from enginehouse.cli.client.reaching import not_ready
from enginehouse.cli.client.watching import watchable
from enginehouse.cli.options.shared import command, emit_json
from enginehouse.cli.terminal import fleet_words as words
from enginehouse.cli.terminal import output
from enginehouse.cli.terminal.fleet_state import FleetState, ListName
from enginehouse.cli.terminal.progress import brief
from enginehouse.core.errors import EnginehouseError
from enginehouse.core.progress import format_bytes
from enginehouse.core.views import NodeView, OperationView

PULSE_SECONDS = 1.0  # the stream begins with the last pulse; without one the figures are unknown
NEEDED: tuple[ListName, ...] = ("nodes", "operations", "models", "schedules")
SHOWN = 10  # of each list; one screen has no more room, and the lists show all
PLAIN = {"●": "*", "◔": "?", "◌": "-", "○": "o", "◒": "=", "·": "|"}


@command("status", examples=("enginehouse status", "enginehouse status --watch", "enginehouse status --json"))
@watchable
def entry() -> None:
    """Show what is so and what needs you, on one screen, with the command for each."""
    frontend = connect()
    state, at = read_state(frontend), time.monotonic()
    needs = [*_of_server(frontend), *words.needs(state, at)]
    if emit_json(_document(frontend, state, needs, at)):
        return
    _say(" · ".join(words.truth(state, at)))
    _say(f"server: {frontend.url}")
    output.say("")
    if not needs:
        _say(words.nothing(state, at))
    else:
        _say(f"{words.counted(len(needs), 'thing')} {'needs' if len(needs) == 1 else 'need'} you:")
    for need in needs[:SHOWN]:
        _say(need.sentence, first="  ! ", later="    ")
        if need.command:
            _say(need.command, first="    → " if _is_fancy() else "    > ", later="      ")
    _more(len(needs), "things; see `enginehouse top`")
    _show_nodes(state, at)
    _show_operations(state)


def _of_server(frontend: FrontendApi) -> list[words.Need]:
    reasons = not_ready(frontend.client)
    if not reasons:
        return []
    sentence = f"The server is not ready: {reasons}"
    return [words.Need(kind="server", id="", sentence=sentence, command="enginehouse doctor")]


def read_state(frontend: FrontendApi) -> FleetState:
    """The state of the cluster as of now."""
    state, cluster = FleetState(), LiveCluster(frontend)
    state.connected(time.monotonic(), is_resumed=False)
    for name in NEEDED:
        began = time.monotonic()
        state.take_list(name, cluster.list(name), began, time.monotonic())
    with suppress(EnginehouseError):
        # Figures are a courtesy: without a pulse they are unknown, and everything else is shown.
        with frontend.client.stream_events("/api/events", silence_seconds=PULSE_SECONDS) as events:
            deadline = time.monotonic() + PULSE_SECONDS
            for event in events:
                if event.event == "pulse":
                    state.take_event("pulse", event.data, time.monotonic())
                if event.event == "pulse" or time.monotonic() > deadline:
                    break
    return state


def _show_nodes(state: FleetState, at: float) -> None:
    nodes = sorted(state.nodes.rows.values(), key=lambda node: node.name)
    if not nodes:
        output.say("")
        output.say("No nodes yet. Join one: enginehouse join")
        return
    output.say("")
    output.say("Nodes")
    rows = [_node_row(node, state, at) for node in nodes[:SHOWN]]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    for row in rows:
        line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False))
        _say(f"  {line}  {row[-1]}".rstrip(), is_cut=True)
    _more(len(nodes), "nodes: enginehouse nodes list")


def _node_row(node: NodeView, state: FleetState, at: float) -> list[str]:
    mark, word = words.state_of(node)
    figures = state.figures(node)
    free = f"{format_bytes(figures.available_ram or 0)} RAM free" if node.total_ram else ""
    running = ", ".join(dict.fromkeys(one.model_id for one in node.replicas))
    heard = words.ago(state.heartbeat_age(node.id, at))
    return [mark, node.name, word, heard, free, running]


def _show_operations(state: FleetState) -> None:
    running = sorted((one for one in state.operations.values() if not one.has_ended), key=lambda one: one.createdAt)
    if not running:
        return
    output.say("")
    output.say("Running")
    for one in running[:SHOWN]:
        _say(_operation_line(one, state), first="  ", later="    ")
    _more(len(running), "operations: enginehouse ops list --open")


def _operation_line(operation: OperationView, state: FleetState) -> str:
    headline, why = words.headline(operation, state), brief(operation)
    is_said = "is offline" in why and " wait" in headline
    return headline if is_said or not why else f"{headline} {why}"


def _more(count: int, what: str) -> None:
    if count > SHOWN:
        output.say(f"  and {count - SHOWN} more {what}")


def _is_fancy() -> bool:
    return output.can_show("●→·", sys.stdout)


def _say(text: str, *, first: str = "", later: str = "", is_cut: bool = False) -> None:
    """Print a text within the width of a terminal; in a pipe it is one line."""
    text = output.printable(text)
    if not _is_fancy():
        text = "".join(PLAIN.get(character, character) for character in text)
    if not output.is_terminal(sys.stdout):
        output.say(first + text)
        return
    width = shutil.get_terminal_size().columns
    if is_cut:
        output.say(text if len(text) <= width else text[: width - 1] + "…")
        return
    for line in textwrap.wrap(
        text, width, initial_indent=first, subsequent_indent=later, break_long_words=False, break_on_hyphens=False
    ):
        output.say(line)


def _document(frontend: FrontendApi, state: FleetState, needs: list[words.Need], at: float) -> dict[str, object]:
    return {
        "url": frontend.url,
        "summary": words.truth(state, at),
        "needs": [msgspec.to_builtins(one) for one in needs],
        "nodes": [
            {"id": node.id, "name": node.name, "state": words.state_of(node)[1], "models": sorted(_models(node))}
            for node in sorted(state.nodes.rows.values(), key=lambda node: node.name)
        ],
        "operations": [
            {"id": one.jobID, "what": words.title(one, state), "status": one.status, "why": brief(one)}
            for one in state.operations.values()
            if not one.has_ended
        ],
    }


def _models(node: NodeView) -> set[str]:
    return {one.model_id for one in node.replicas}
