"""`enginehouse models available, install`: models that galleries of LocalAI's form offer."""

from __future__ import annotations

import click
from msgspec import Struct, field

from enginehouse.cli.client.connect import FrontendApi, connect, read, segment
from enginehouse.cli.commands.models_define import FIND_SECONDS, asks, show_model, tell, yes_option
from enginehouse.cli.commands.ops import finish
from enginehouse.cli.options.shared import command, emit_json, no_follow_option, wants_json
from enginehouse.cli.terminal import output
from enginehouse.core.model_answers import DefinedModel


class _Gallery(Struct):
    name: str = ""


class OfferedModel(Struct):
    """An entry of `GET /models/available`."""

    name: str
    description: str = ""
    license: str = ""
    backend: str = ""
    installed: bool = False
    gallery: _Gallery = field(default_factory=_Gallery)


@command("available", examples=("enginehouse models available", "enginehouse models available qwen coder"))
@click.argument("words", metavar="[QUERY]…", nargs=-1)
def available(words: tuple[str, ...]) -> None:
    """List the models that galleries offer, or those that QUERY finds."""
    query = f"?term={segment(' '.join(words))}" if words else ""
    answer = connect().get(f"/models/available{query}")
    if emit_json(answer):
        return
    columns = ("NAME", "GALLERY", "BACKEND", "LICENCE", "INSTALLED", "DESCRIPTION")
    rows = [
        (
            model.name,
            model.gallery.name,
            model.backend,
            model.license,
            "yes" if model.installed else "",
            " ".join(model.description.split()),
        )
        for model in read(answer, tuple[OfferedModel, ...])
    ]
    output.emit_table(columns, rows, "no gallery offers such a model", is_last_cut=True)


@command(
    "install",
    examples=(
        "enginehouse models install qwen3-4b",
        "enginehouse models install localai@qwen3-4b --name chat --variant qwen3-4b-q8",
    ),
)
@click.argument("entry", metavar="NAME")
@click.option("--name", metavar="NAME", default="", help="Serve it under this name.")
@click.option("--variant", metavar="NAME", default="", help="Take this build instead of the one that fits best.")
@yes_option
@no_follow_option
def install(entry: str, name: str, variant: str, yes: bool, no_follow: bool) -> int:
    """Add the model NAME of a gallery and load it; NAME may be GALLERY@NAME."""
    frontend = connect()
    body = {key: value for key, value in (("id", entry), ("name", name), ("variant", variant)) if value}
    if not wants_json():
        planned = read(frontend.request("POST", "/models/plan", body, timeout_seconds=FIND_SECONDS), DefinedModel)
        if asks(yes):
            show_model(planned)
            click.confirm(f"Install {planned.name}?", default=True, abort=True, err=True)
        else:
            tell(planned)
    answer = frontend.request("POST", "/models/apply", body, timeout_seconds=FIND_SECONDS)
    return _follow(frontend, answer, no_follow=no_follow)


def _follow(frontend: FrontendApi, answer: object, *, no_follow: bool) -> int:
    operation_id = str(answer.get("uuid", "")) if isinstance(answer, dict) else ""
    return finish(frontend, frontend.get(f"/api/operations/{segment(operation_id)}"), no_follow=no_follow)


COMMANDS = (available, install)
