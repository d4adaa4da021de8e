"""`enginehouse logs`: the last lines of a model's engine on a node, or every line as it comes."""

from __future__ import annotations

import sys

import click
import msgspec
from msgspec import Struct

from enginehouse.cli.client.connect import connect, read, segment
from enginehouse.cli.options.shared import command, wants_json
from enginehouse.cli.terminal import output
from enginehouse.core.name import check_model_name


class _LoggedLine(Struct):
    timestamp: str
    stream: str
    text: str


@command(
    "logs",
    examples=(
        "enginehouse logs attic tiny-chat",
        "enginehouse logs attic tiny-chat -f",
        "enginehouse logs attic tiny-chat#1 -n 20",
    ),
)
@click.argument("node")
@click.argument("model")
@click.option("-f", "--follow", is_flag=True, help="Show new lines until Ctrl-C.")
@click.option("-n", "--lines", type=click.IntRange(0, 1000), default=100, metavar="LINES", help="How many (100).")
def entry(node: str, model: str, follow: bool, lines: int) -> int:
    """Show what the engine of MODEL on NODE has logged.

    MODEL#SLOT is one replica; without a slot, the lines of all replicas on the node are shown by time.
    """
    frontend = connect()
    path = f"/api/nodes/{segment(node)}/logs/{segment(check_model_name(model))}?lines={lines}"
    if not follow:
        for line in read(frontend.get(path), list[_LoggedLine]):
            _show(line)
        return 0
    with frontend.client.stream_events(f"{path}&follow=1") as events:
        for event in events:
            _show(msgspec.json.decode(event.data, type=_LoggedLine))
    return 0


def _show(line: _LoggedLine) -> None:
    if wants_json():
        output.emit_json_line(line)
    else:
        output.say(f"{line.timestamp[:19]}  {line.text}")
        sys.stdout.flush()  # a follower in a pipe wants each line at once
