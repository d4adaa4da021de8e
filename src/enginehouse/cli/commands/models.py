"""`enginehouse models`: the models that are served, and where they run."""

from __future__ import annotations

import click

from enginehouse.cli.answers import ShownExplanation
from enginehouse.cli.client.connect import FrontendApi, connect, read, segment
from enginehouse.cli.client.selectors import one_at_a_time, selected_nodes, selector_option
from enginehouse.cli.client.watching import watchable
from enginehouse.cli.commands import models_define, models_gallery, models_schedule
from enginehouse.cli.commands.ops import finish
from enginehouse.cli.commands.replicas import list_replicas
from enginehouse.cli.options.names import node_body
from enginehouse.cli.options.shared import command, emit, emit_json, group, no_follow_option
from enginehouse.cli.terminal import output
from enginehouse.core.errors import NotFound
from enginehouse.core.name import check_model_name
from enginehouse.core.views import ListedReplica, ModelView


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


@command("list", examples=("enginehouse models list", "enginehouse models list --watch"))
@watchable
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
    output.emit_table(columns, rows, "no models", is_last_cut=True)


@command("load", examples=("enginehouse models load tiny-chat", "enginehouse models load tiny-chat --node attic"))
@click.argument("name")
@click.option("--node", metavar="NODE", help="Load it on this node.")
@selector_option
@no_follow_option
def load(name: str, node: str | None, selectors: tuple[str, ...], no_follow: bool) -> int:
    """Load the model NAME; installs what it needs. With --selector it is loaded on the best of these nodes."""
    frontend = connect()
    answer = request_load(frontend, name, place_for(frontend, name, node, selectors))
    if not is_ready(answer):
        return finish(frontend, answer, no_follow=no_follow)
    emit(answer, f"= {name} is already running")
    return 0


@command("unload", examples=("enginehouse models unload tiny-chat",))
@click.argument("name")
@click.option("--node", metavar="NODE", help="Stop it on this node only.")
@selector_option
@no_follow_option
def unload(name: str, node: str | None, selectors: tuple[str, ...], no_follow: bool) -> int:
    """Stop the replicas of the model NAME."""
    frontend = connect()
    path = f"/api/models/{segment(check_model_name(name))}/unload"
    places = one_at_a_time(frontend, node, selectors)
    if selectors:
        replicas = read(frontend.get("/api/replicas"), tuple[ListedReplica, ...])
        places = [one for one in places if any(row.model == name and row.node_id == one for row in replicas)]
        if not places:
            raise NotFound(f"cannot unload {name}: it has no replica on the selected nodes", param="selector")
    answers = [frontend.request("POST", path, node_body(one)) for one in places]
    return max(finish(frontend, answer, no_follow=no_follow) for answer in answers)


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
    context.invoke(list_replicas, model=None, node=None, selectors=())


def request_load(frontend: FrontendApi, name: str, node: str | None) -> object:
    """The operation that loads the model, or an answer that it is already running."""
    return frontend.request("POST", f"/api/models/{segment(check_model_name(name))}/load", node_body(node))


def place_for(frontend: FrontendApi, name: str, node: str | None, selectors: tuple[str, ...]) -> str | None:
    """The node to load a model on: the one that was named, or the best of those with the labels."""
    if not selectors:
        return node
    if node is not None:
        raise click.UsageError("--node and --selector exclude each other")
    found = {one.name: one for one in selected_nodes(frontend, selectors)}
    answer = frontend.get(f"/api/models/{segment(check_model_name(name))}/explain")
    explained = read(answer, ShownExplanation)
    fitting = [one.node_name for one in explained.nodes if one.fits and one.node_name in found]
    best = explained.chosen if explained.chosen in found else next(iter(fitting), None)
    return found[best].id if best is not None else next(iter(found.values())).id


def is_ready(answer: object) -> bool:
    return isinstance(answer, dict) and answer.get("ready") is True


_OTHERS = (*models_define.COMMANDS, *models_gallery.COMMANDS, *models_schedule.COMMANDS)
for each in (list_models, load, unload, delete, replicas, *_OTHERS):
    entry.add_command(each)
