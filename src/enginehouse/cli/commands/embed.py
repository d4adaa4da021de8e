"""`enginehouse embed`: the vectors of texts, or how near the texts are to each other."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence

import click
import msgspec
from msgspec import Struct

from enginehouse.cli.client.connect import connect, read, waiting
from enginehouse.cli.client.selectors import selector_option
from enginehouse.cli.commands.models import place_for
from enginehouse.cli.commands.run import make_ready
from enginehouse.cli.options.shared import command, given, wants_json
from enginehouse.cli.terminal import output
from enginehouse.core.errors import Invalid
from enginehouse.core.name import check_model_name

ANSWER_SECONDS = 900.0  # many texts on a slow machine
SHOWN_CHARACTERS = 30  # of a text beside its figures


class _Vector(Struct):
    index: int
    embedding: list[float]


class _Vectors(Struct):
    data: list[_Vector]


@command(
    "embed",
    examples=(
        'enginehouse embed minilm "A cat sits on the mat."',
        'enginehouse embed minilm --similarity "a cat" "a kitten" "a car"',
        "enginehouse embed minilm < sentences.txt",
    ),
)
@click.argument("name")
@click.argument("texts", nargs=-1)
@click.option("--similarity", is_flag=True, help="Show the cosine of each pair of texts instead of the vectors.")
@click.option("--node", metavar="NODE", help="Load the model on this node.")
@selector_option
def entry(name: str, texts: tuple[str, ...], similarity: bool, node: str | None, selectors: tuple[str, ...]) -> int:
    """Print the vector of each TEXT, one JSON array per line; installs and starts what the model NAME needs.

    Without TEXT, every line of stdin is one.
    """
    check_model_name(name)
    given()  # reads a token from stdin before the texts are read from there
    asked = list(texts) or [line.strip() for line in sys.stdin.read().splitlines() if line.strip()]
    if not asked:
        raise Invalid(f"cannot embed with {name}: there is no text; give one or pipe lines in", code="invalid_setting")
    frontend = connect()
    make_ready(frontend, name, place_for(frontend, name, node, selectors))
    with waiting("embedding"):
        answer = frontend.post("/v1/embeddings", {"model": name, "input": asked}, timeout_seconds=ANSWER_SECONDS)
    if wants_json():
        output.emit_json(answer)
        return 0
    found = sorted(read(answer, _Vectors).data, key=lambda one: one.index)
    vectors = [one.embedding for one in found]
    if similarity:
        rows = [
            [_shortened(text), *(f"{cosine(vector, other):.3f}" for other in vectors)]
            for text, vector in zip(asked, vectors, strict=True)
        ]
        output.emit_table(["", *(str(number) for number in range(1, len(asked) + 1))], rows, "")
        return 0
    for vector in vectors:
        output.say(msgspec.json.encode(vector).decode())
    return 0


def cosine(one: Sequence[float], other: Sequence[float]) -> float:
    length = math.sqrt(sum(x * x for x in one) * sum(y * y for y in other))
    return sum(x * y for x, y in zip(one, other, strict=True)) / length if length else 0.0


def _shortened(text: str) -> str:
    return text if len(text) <= SHOWN_CHARACTERS else text[: SHOWN_CHARACTERS - 1] + "…"
