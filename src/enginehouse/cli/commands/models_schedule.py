"""`enginehouse models schedule`, `scale`, `pin` and `explain`: wanted replicas, and where they go."""

from __future__ import annotations

from typing import Any

import click

from enginehouse.cli.answers import ShownExplanation, StoredSchedule
from enginehouse.cli.client.connect import FrontendApi, connect, read, segment
from enginehouse.cli.options.durations import DURATION
from enginehouse.cli.options.shared import command, emit, emit_json, wants_json
from enginehouse.cli.terminal import output
from enginehouse.core.errors import Invalid, NotFound
from enginehouse.core.name import check_model_name, check_name

_PATH = "/api/nodes/scheduling"
REASONS_SHOWN = 3  # `models explain` has all


@command(
    "schedule",
    examples=(
        "enginehouse models schedule",
        "enginehouse models schedule tiny-chat --min 2 --max 4",
        "enginehouse models schedule tiny-chat --every-node --selector zone=home",
        "enginehouse models schedule tiny-chat --policy round_robin",
        "enginehouse models schedule tiny-chat --remove",
    ),
)
@click.argument("name", required=False)
@click.option("--min", "lowest", type=click.IntRange(0), metavar="N", help="Replicas that are kept without a request.")
@click.option("--max", "highest", type=click.IntRange(0), metavar="N", help="Most replicas; 0 means no limit.")
@click.option("--every-node", is_flag=True, help="One replica on each node that the selector matches.")
@click.option("--selector", multiple=True, metavar="KEY=VALUE", help="Only nodes with this label; may be repeated.")
@click.option("--idle", type=DURATION, metavar="DURATION", help="Stop all replicas after so long unused.")
@click.option(
    "--policy",
    type=click.Choice(["prefix_cache", "round_robin", "default"]),
    help="Requests that begin alike go to one replica, or all replicas take turns.",
)
@click.option("--remove", is_flag=True, help="Remove the schedule; replicas stay until they are unloaded.")
def schedule(
    name: str | None,
    lowest: int | None,
    highest: int | None,
    every_node: bool,
    selector: tuple[str, ...],
    idle: float | None,
    policy: str | None,
    remove: bool,
) -> None:
    """Show or set how many replicas of the model NAME are wanted, and where. Without NAME, list all schedules."""
    frontend = connect()
    if name is None:
        _list(frontend)
        return
    path = f"{_PATH}/{segment(check_model_name(name))}"
    if remove:
        emit(frontend.delete(path), f"removed the schedule of {name}")
        return
    before = _stored(frontend, name)
    if (lowest, highest, every_node, selector, idle, policy) == (None, None, False, (), None, None):
        _show_one(name, before)
        return
    body: dict[str, Any] = {
        "model_name": name,
        "min_replicas": 0 if every_node else before.min_replicas if lowest is None else lowest,
        "max_replicas": 0 if every_node else before.max_replicas if highest is None else highest,
        "spread_all": every_node or (before.spread_all and lowest is None and highest is None),
        "node_selector": _labels(selector) if selector else before.selector,
        "idle_seconds": before.idle_seconds if idle is None else idle,
    }
    if policy is not None:
        body["route_policy"] = "" if policy == "default" else policy
    _put(frontend, body, before)


@command("scale", examples=("enginehouse models scale tiny-chat 3",))
@click.argument("name")
@click.argument("replicas", type=click.IntRange(0))
def scale(name: str, replicas: int) -> None:
    """Keep exactly so many REPLICAS of the model NAME; 0 keeps none."""
    frontend = connect()
    before = _stored(frontend, check_model_name(name))
    body = {"model_name": name, "min_replicas": replicas, "max_replicas": replicas, "node_selector": before.selector}
    _put(frontend, body, before)


@command("pin", examples=("enginehouse models pin tiny-chat attic",))
@click.argument("name")
@click.argument("node")
def pin(name: str, node: str) -> None:
    """Keep a replica of the model NAME on NODE, and only there."""
    body = {
        "model_name": check_model_name(name),
        "min_replicas": 1,
        "max_replicas": 1,
        "node_selector": {"node.name": check_name(node, "node")},
    }
    frontend = connect()
    _put(frontend, body, _stored(frontend, name))


@command("explain", examples=("enginehouse models explain tiny-chat",))
@click.argument("name")
def explain(name: str) -> None:
    """Say where another replica of the model NAME would go, and per node why not."""
    answer = connect().get(f"/api/models/{segment(check_model_name(name))}/explain")
    if emit_json(answer):
        return
    found = read(answer, ShownExplanation)
    need = f"{output.size(found.needs_bytes)} ({found.needs_from})" if found.needs_bytes else "unknown"
    stops = f" after stopping {', '.join(found.stops)}, which nobody uses" if found.stops else ""
    facts = [
        ("model", found.model),
        ("memory needed", need),
        ("replicas", f"{found.replicas} running, {found.wanted} wanted"),
        ("the next goes to", f"{found.chosen}{stops}" if found.chosen else "no node"),
        *((one.node_name, "has room" if one.fits else one.reason) for one in found.nodes),
        *(("would help", one) for one in found.would_help),
        ("last failure", found.last_failure),
    ]
    if found.retry_in_seconds is not None:
        facts.append(("next try", f"in {found.retry_in_seconds:.0f} s, or when a node joins or becomes free"))
    output.emit_facts(facts)


def _labels(given: tuple[str, ...]) -> dict[str, str]:
    for one in given:
        if not one.partition("=")[0] or "=" not in one:
            raise Invalid(f"cannot read the selector {one!r}: write KEY=VALUE", param="selector")
    return dict(one.split("=", 1) for one in given)


def _stored(frontend: FrontendApi, name: str) -> StoredSchedule:
    try:
        return read(frontend.get(f"{_PATH}/{segment(name)}"), StoredSchedule)
    except NotFound:
        return StoredSchedule(model_name=name)


def _put(frontend: FrontendApi, body: dict[str, Any], before: StoredSchedule) -> None:
    """Store a schedule and say what it changed."""
    answer = frontend.post(_PATH, body)
    was, now = _phrase(before), _phrase(read(answer, StoredSchedule))
    name = body["model_name"]
    emit(answer, f"= {name}: already {now}" if was == now else f"{name}: {was} → {now}")
    if not wants_json():
        _remark_on_room(frontend, name)


def _remark_on_room(frontend: FrontendApi, name: str) -> None:
    """Say at once why what is wanted cannot be."""
    try:
        found = read(frontend.get(f"/api/models/{segment(name)}/explain"), ShownExplanation)
    except NotFound:
        return  # a schedule may be there before its model
    if found.replicas < found.wanted and not found.chosen:
        said = [f"{one.node_name}: {one.reason}" for one in found.nodes]
        more = [f"and {len(said) - REASONS_SHOWN} more"] if len(said) > REASONS_SHOWN else []
        why = f" ({'; '.join([*said[:REASONS_SHOWN], *more])})" if said else ""
        output.remark(
            f"no node has room for another replica now{why}. It is tried again when a node joins or becomes free"
        )


def _phrase(one: StoredSchedule) -> str:
    if one.spread_all:
        wanted = "one replica on each node"
    elif one.min_replicas == one.max_replicas == 0:
        wanted = "replicas on request"  # 0 is no limit
    elif one.min_replicas == one.max_replicas:
        wanted = f"{one.min_replicas} replicas" if one.min_replicas != 1 else "1 replica"
    else:
        wanted = f"at least {one.min_replicas}, at most {one.max_replicas or 'any number of'} replicas"
    where = ", ".join(f"{key}={value}" for key, value in sorted(one.selector.items()))
    idle = f"; stopped after {one.idle_seconds:g} s unused" if one.idle_seconds else ""
    policy = f"; {one.route_policy}" if one.route_policy else ""
    return wanted + (f" where {where}" if where else "") + idle + policy


def _list(frontend: FrontendApi) -> None:
    answer = frontend.get(_PATH)
    if emit_json(answer):
        return
    rows = [(one.model_name, _phrase(one), one.reason) for one in read(answer, tuple[StoredSchedule, ...])]
    output.emit_table(("MODEL", "WANTED", "PROBLEM"), rows, "no schedules")


def _show_one(name: str, one: StoredSchedule) -> None:
    if emit_json(one):
        return
    output.say(f"{name}: {_phrase(one)}" + (f". {one.reason}" if one.reason else ""))


COMMANDS = (schedule, scale, pin, explain)
