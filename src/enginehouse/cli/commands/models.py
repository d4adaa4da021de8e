"""`enginehouse models`: the models that are served, and where they run."""

from __future__ import annotations

import click

from enginehouse.cli.client.connect import FrontendApi, connect, read, segment
from enginehouse.cli.commands import models_define, models_gallery, models_schedule
from enginehouse.cli.commands.ops import finish
from enginehouse.cli.commands.replicas import list_replicas
from enginehouse.cli.options.names import node_body
from enginehouse.cli.options.shared import command, emit, emit_json, group, no_follow_option
from enginehouse.cli.terminal import output
from enginehouse.core.name import check_model_name
from enginehouse.core.views import ModelView


@group(
    "models",
    examples=(
        "enginehouse models list",
        "enginehouse models add llama hf:bartowski/Llama-3.2-1B-Instruct-GGUF --load",
        "enginehouse models load tiny-chat",
    ),
)
def entry() -> None:
    """Add, import, list, load, unload and delete models."""


@command("list", examples=("enginehouse models list",))
def list_models() -> None:
    """List models, with their state and nodes."""
    answer = connect().get("/api/models")
    if emit_json(answer):
        return
    rows = [
        (
            model.name,
            model.state,
            ", ".join(dict.fromkeys(replica.node_name for replica in model.replicas)),
            model.backend,
            output.size(model.size_bytes),
            model.license,
            model.description,
        )
        for model in read(answer, tuple[ModelView, ...])
    ]
    columns = ("NAME", "STATE", "NODES", "BACKEND", "SIZE", "LICENSE", "DESCRIPTION")
    output.emit_table(columns, rows, "no models")


@command("load", examples=("enginehouse models load tiny-chat", "enginehouse models load tiny-chat --node attic"))
@click.argument("name")
@click.option("--node", metavar="NODE", help="Load it on this node.")
@no_follow_option
def load(name: str, node: str | None, no_follow: bool) -> int:
    """Load the model NAME; installs what it needs."""
    frontend = connect()
    answer = request_load(frontend, name, node)
    if not is_ready(answer):
        return finish(frontend, answer, no_follow=no_follow)
    emit(answer, f"{name} is already running")
    return 0


@command("unload", examples=("enginehouse models unload tiny-chat",))
@click.argument("name")
@click.option("--node", metavar="NODE", help="Stop it on this node only.")
@no_follow_option
def unload(name: str, node: str | None, no_follow: bool) -> int:
    """Stop the replicas of the model NAME."""
    frontend = connect()
    answer = frontend.request("POST", f"/api/models/{segment(check_model_name(name))}/unload", node_body(node))
    return finish(frontend, answer, no_follow=no_follow)


@command("delete", examples=("enginehouse models delete tiny-chat",))
@click.argument("name")
@no_follow_option
def delete(name: str, no_follow: bool) -> int:
    """Stop serving the model NAME and remove its files from every node."""
    frontend = connect()
    answer = frontend.request("DELETE", f"/api/models/{segment(check_model_name(name))}")
    return finish(frontend, answer, no_follow=no_follow)


@command("replicas", examples=("enginehouse models replicas",))
@click.pass_context
def replicas(context: click.Context) -> None:
    """The same as `replicas list`."""
    context.invoke(list_replicas, model=None, node=None)


def request_load(frontend: FrontendApi, name: str, node: str | None) -> object:
    """The operation that loads the model, or an answer that it is already running."""
    return frontend.request("POST", f"/api/models/{segment(check_model_name(name))}/load", node_body(node))


def is_ready(answer: object) -> bool:
    return isinstance(answer, dict) and answer.get("ready") is True


_OTHERS = (*models_define.COMMANDS, *models_gallery.COMMANDS, *models_schedule.COMMANDS)
for each in (list_models, load, unload, delete, replicas, *_OTHERS):
    entry.add_command(each)
