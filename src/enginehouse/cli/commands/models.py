"""`enginehouse models`: what can be asked for by name, and where it runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from enginehouse.cli.options.shared import command, group, wants_json
from enginehouse.cli.terminal import output
from enginehouse.core.name import check_model_name, check_name

if TYPE_CHECKING:
    from enginehouse.cli.client.connect import FrontendApi


@group("models", examples=("enginehouse models list", "enginehouse models load tiny-chat"))
def entry() -> None:
    """See, load, unload and delete models."""


@command("list", examples=("enginehouse models list",))
def list_models() -> None:
    """All models, what state they are in and where they run."""
    from enginehouse.cli.answers import ListedModel
    from enginehouse.cli.client.connect import connect, read

    answer = connect().get("/api/models")
    if wants_json():
        output.emit_json(answer)
        return
    rows = [
        (
            model.name,
            model.state,
            ", ".join(dict.fromkeys(replica.node_name for replica in model.replicas or ())),
            model.backend,
            output.size(model.size_bytes),
            model.license,
            model.description,
        )
        for model in read(answer, tuple[ListedModel, ...])
    ]
    columns = ("NAME", "STATE", "NODES", "BACKEND", "SIZE", "LICENSE", "DESCRIPTION")
    output.emit_table(columns, rows, "no models")


@command("load", examples=("enginehouse models load tiny-chat", "enginehouse models load tiny-chat --node attic"))
@click.argument("name")
@click.option("--node", metavar="NODE", help="On this node.")
@click.option("--no-follow", is_flag=True, help="Do not wait; show the operation and end.")
def load(name: str, node: str | None, no_follow: bool) -> int:
    """Start the model NAME, with whatever it needs."""
    from enginehouse.cli.client.connect import connect
    from enginehouse.cli.commands.ops import finish

    frontend = connect()
    answer = request_load(frontend, name, node)
    if not is_ready(answer):
        return finish(frontend, answer, no_follow=no_follow)
    if wants_json():
        output.emit_json(answer)
    else:
        output.say(f"{name} is already running")
    return 0


@command("unload", examples=("enginehouse models unload tiny-chat",))
@click.argument("name")
@click.option("--node", metavar="NODE", help="On this node only.")
@click.option("--no-follow", is_flag=True, help="Do not wait; show the operation and end.")
def unload(name: str, node: str | None, no_follow: bool) -> int:
    """Stop the model NAME."""
    from enginehouse.cli.client.connect import connect, segment
    from enginehouse.cli.commands.ops import finish

    frontend = connect()
    answer = frontend.request("POST", f"/api/models/{segment(check_model_name(name))}/unload", _on(node))
    return finish(frontend, answer, no_follow=no_follow)


@command("delete", examples=("enginehouse models delete tiny-chat",))
@click.argument("name")
@click.option("--no-follow", is_flag=True, help="Do not wait; show the operation and end.")
def delete(name: str, no_follow: bool) -> int:
    """Serve the model NAME no longer, and remove its files from every node that has them."""
    from enginehouse.cli.client.connect import connect, segment
    from enginehouse.cli.commands.ops import finish

    frontend = connect()
    answer = frontend.request("DELETE", f"/api/models/{segment(check_model_name(name))}")
    return finish(frontend, answer, no_follow=no_follow)


def request_load(frontend: FrontendApi, name: str, node: str | None) -> object:
    """The operation that loads the model, or the word that it already runs."""
    from enginehouse.cli.client.connect import segment

    return frontend.request("POST", f"/api/models/{segment(check_model_name(name))}/load", _on(node))


def is_ready(answer: object) -> bool:
    return isinstance(answer, dict) and answer.get("ready") is True


def _on(node: str | None) -> dict[str, str]:
    return {"node": check_name(node, "node")} if node is not None else {}


for each in (list_models, load, unload, delete):
    entry.add_command(each)
