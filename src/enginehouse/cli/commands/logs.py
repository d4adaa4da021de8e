"""`enginehouse logs`: what a frontend, a worker, NATS or the engines of a model have logged, from anywhere.

Everything comes through the frontend. Engines of one model on several nodes are read side by side; then every line says
where it is from.
"""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Iterator

import click
import msgspec
from msgspec import Struct

from enginehouse.cli.client.connect import FrontendApi, connect, read, segment
from enginehouse.cli.client.listing import every_node
from enginehouse.cli.client.selectors import checked_selectors, has_labels, selector_option
from enginehouse.cli.options.shared import command, wants_json
from enginehouse.cli.terminal import output
from enginehouse.core.errors import EnginehouseError, Invalid, NotFound
from enginehouse.core.name import check_model_name, check_name, shown
from enginehouse.core.views import NodeView

PROGRAMS = ("frontend", "nats")
WORKER = "worker"


class _Line(Struct):
    timestamp: str
    stream: str
    text: str
    node: str = ""


class _Source(Struct, frozen=True):
    """One log: its path at the frontend, and what its lines are marked with if there are several."""

    path: str
    node: str = ""


@command(
    "logs",
    examples=(
        "enginehouse logs frontend",
        "enginehouse logs worker --node attic -f",
        "enginehouse logs tiny-chat -f",
        "enginehouse logs attic tiny-chat#1 -n 20",
    ),
)
@click.argument("words", nargs=-1, metavar="[frontend|worker|nats|MODEL|NODE MODEL]")
@click.option("--node", metavar="NODE", help="Only of this node (a name or id).")
@selector_option
@click.option("-f", "--follow", is_flag=True, help="Show new lines until Ctrl-C.")
@click.option("-n", "--lines", type=click.IntRange(0, 1000), default=100, metavar="LINES", help="How many (100).")
def entry(words: tuple[str, ...], node: str | None, selectors: tuple[str, ...], follow: bool, lines: int) -> int:
    """Show the log of a frontend, a worker, NATS or the engines of a model.

    `frontend` (the default) is the frontend that answers, `worker` the worker of --node, `nats` the server that
    `enginehouse up` runs. A MODEL is looked for on every node, or on --node; MODEL#SLOT is one replica. The older form
    NODE MODEL means the same, also for a model named `worker`. Keys and tokens are left out of the lines.
    """
    if len(words) > 2:
        raise click.UsageError("give one thing to look at, or NODE MODEL")
    if len(words) == 2 and (node is not None or selectors):
        raise click.UsageError("give the node once: as the first word, or with --node")
    frontend = connect()
    sources = _sources(frontend, words, node, selectors)
    if follow:
        for line in _followed(frontend, sources, lines):
            _show(line, is_marked=len(sources) > 1)
        return 0
    found = [_marked(line, source) for source in sources for line in _read(frontend, source, lines)]
    found.sort(key=lambda line: line.timestamp)
    for line in found[-lines:] if lines else []:
        _show(line, is_marked=len(sources) > 1)
    return 0


def _sources(
    frontend: FrontendApi, words: tuple[str, ...], node: str | None, selectors: tuple[str, ...]
) -> list[_Source]:
    if len(words) == 2:
        return [_of_engine(*words)]
    word = words[0] if words else "frontend" if node is None and not selectors else WORKER
    if word in PROGRAMS:
        if node is not None or selectors:
            raise click.UsageError(f"{word} is on the server side: leave --node and --selector out")
        return [_Source(f"/api/logs/{word}")]
    if node is not None and not selectors:
        check_name(node, "node")
        return [_Source(f"/api/nodes/{segment(node)}/worker-log", node) if word == WORKER else _of_engine(node, word)]
    every = read(every_node(frontend), tuple[NodeView, ...])
    wanted = checked_selectors(selectors)
    nodes = [one for one in every if one.approved and node in (None, one.name, one.id)]
    nodes = [one for one in nodes if has_labels(one.labels, wanted)]
    if word != WORKER:
        return _of_model(word, nodes)
    if not nodes or (len(nodes) > 1 and not selectors):
        names = ", ".join(one.name for one in nodes[:5])
        raise Invalid(
            f"cannot tell which worker is meant: name its node with --node{f' ({names})' if names else ''}",
            code="invalid_name",
            param="node",
        )
    return [_Source(f"/api/nodes/{segment(one.id)}/worker-log", one.name) for one in nodes]


def _of_engine(node: str, model: str) -> _Source:
    return _Source(f"/api/nodes/{segment(node)}/logs/{segment(check_model_name(model))}", node)


def _of_model(word: str, nodes: list[NodeView]) -> list[_Source]:
    """The nodes on which a model runs, or was given up; a `#SLOT` chooses among them."""
    model = check_model_name(word)
    plain = model.rpartition("#")[0] if model.rpartition("#")[2].isdecimal() else ""
    found = []
    for node in nodes:
        here = [(one.model_id, one.replica_index) for one in node.replicas]
        here += [(one.model_id, one.replica_index) for one in node.failed_replicas]
        if any(name in (model, plain) and (name == model or f"{name}#{slot}" == model) for name, slot in here):
            found.append(_Source(f"/api/nodes/{segment(node.id)}/logs/{segment(model)}", node.name))
    if not found:
        raise NotFound(
            f"cannot find a running engine of {shown(model)}. If it ran before, name its node: "
            f"enginehouse logs NODE {model}",
            param="model",
        )
    return found


def _read(frontend: FrontendApi, source: _Source, lines: int) -> list[_Line]:
    return read(frontend.get(f"{source.path}?lines={lines}"), list[_Line])


def _followed(frontend: FrontendApi, sources: list[_Source], lines: int) -> Iterator[_Line]:
    """The lines of all sources as they come, until all have ended; then the error of the last that failed, if any."""
    arrived: queue.SimpleQueue[_Line | EnginehouseError | None] = queue.SimpleQueue()

    def follow(source: _Source) -> None:
        try:
            with frontend.client.stream_events(f"{source.path}?lines={lines}&follow=1") as events:
                for event in events:
                    arrived.put(_marked(msgspec.json.decode(event.data, type=_Line), source))
            arrived.put(None)
        except EnginehouseError as error:
            arrived.put(error)

    for source in sources:
        threading.Thread(target=follow, args=(source,), daemon=True).start()
    left = len(sources)
    while left:
        got = arrived.get()
        if isinstance(got, _Line):
            yield got
            continue
        left -= 1
        if got is not None and not left:
            raise got
        if got is not None:
            output.remark(f"enginehouse: {got.message}")


def _marked(line: _Line, source: _Source) -> _Line:
    return msgspec.structs.replace(line, node=source.node)


def _show(line: _Line, *, is_marked: bool) -> None:
    if wants_json():
        output.emit_json_line(line)
        return
    mark = f"{line.node}  " if is_marked else ""
    output.say(f"{line.timestamp[:19]:19}  {mark}{line.text}")
    sys.stdout.flush()  # a follower in a pipe wants each line at once
