"""The head of the view: the line of truth with the state of the connection, and what needs a person."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from rich.text import Text

from enginehouse.cli.terminal.fleet_state import FleetState
from enginehouse.cli.terminal.fleet_words import Need, link, truth
from enginehouse.cli.terminal.top.drawing import MUTED, NO_TARGET, OK, WARN, Row, Target, cell, joined, line_row, plain

LABEL = "NEEDS YOU"
ROOMY = 90  # columns from which on there is room for it


def truth_lines(state: FleetState, at: float, width: int) -> Text:
    """The first line, in two where the terminal is narrow; the connection is at its right end."""
    said = link(state, at)
    lines, room = [""], width - len(said) - 3
    for part in truth(state, at):
        joint = f"{lines[-1]} · {part}" if lines[-1] else part
        if len(joint) <= room or not lines[-1]:
            lines[-1] = joint
        else:
            lines.append(part)
    colour = OK if state.is_live(at) else WARN
    first = joined(cell(lines[0], max(1, width - len(said) - 1), "bold"), plain(said, colour))
    return Text("\n").join([first, *(plain(line, "bold") for line in lines[1:])])


def need_rows(wanted: Sequence[Need], otherwise: str) -> list[Row]:
    """What needs a person, with the key that helps; `otherwise` is said if nothing does."""
    if not wanted:
        return [line_row(NO_TARGET, plain(otherwise, MUTED))]
    return [
        Row(Target(need.kind, need.id), need.sentence, 1, partial(_need, need, is_first=number == 0))
        for number, need in enumerate(wanted)
    ]


def _need(need: Need, width: int, *, is_first: bool) -> list[Text]:
    room = len(LABEL) + 1 if width >= ROOMY else 1
    label = cell((LABEL if is_first else "") if width >= ROOMY else "!", room, f"bold {WARN}")
    return [joined(label, cell(need.sentence, max(10, width - room - 11)), cell(need.key, 9, MUTED, right=True))]
