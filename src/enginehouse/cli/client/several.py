"""Changes of several nodes by one command: an unknown name changes nothing, a refusal leaves none of the others out."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import TypeVar

from enginehouse.cli.client.connect import FrontendApi, read, segment
from enginehouse.cli.options.shared import wants_json
from enginehouse.cli.terminal import output
from enginehouse.core.errors import Conflict, EnginehouseError, NotFound
from enginehouse.core.name import check_name
from enginehouse.core.views import NodeView

T = TypeVar("T")


def before(frontend: FrontendApi, nodes: Iterable[str]) -> dict[str, NodeView]:
    """The nodes as they are before a change; raises where a name is no node's."""
    return {
        node: read(frontend.get(f"/api/nodes/{segment(node)}"), NodeView)
        for node in [check_name(one, "node") for one in nodes]
    }


def for_each(nodes: Iterable[str], change: Callable[[str], T]) -> tuple[list[T], list[EnginehouseError]]:
    """What came of each change, and the refusals."""
    done: list[T] = []
    refused: list[EnginehouseError] = []
    for node in nodes:
        try:
            done.append(change(node))
        except (Conflict, NotFound) as error:
            refused.append(error)
    return done, refused


def emit_each(nodes: Collection[str], change: Callable[[str], tuple[object, str]]) -> None:
    """Print what came of each change: a sentence at once, or with --json all answers as one document."""
    answers: list[object] = []

    def emitted(node: str) -> None:
        answer, sentence = change(node)
        answers.append(answer)
        if not wants_json():
            output.say(sentence)

    refused = for_each(nodes, emitted)[1]
    emit_answers(answers, is_list=len(nodes) > 1)
    raise_refused(refused)


def emit_answers(answers: list[object], *, is_list: bool) -> None:
    if wants_json() and answers:
        output.emit_json(answers if is_list else answers[0])


def raise_refused(refused: list[EnginehouseError]) -> None:
    """Say all refusals; the last one is the error of the command."""
    for error in refused[:-1]:
        output.remark(f"enginehouse: {error.message}")
    if refused:
        raise refused[-1]
