"""`enginehouse nodes`: the nodes of the cluster."""

from __future__ import annotations

import sys
import time

import click

from enginehouse.cli.client.connect import connect, read, segment
from enginehouse.cli.client.follow import exit_code_of, follow
from enginehouse.cli.client.listing import every_node
from enginehouse.cli.client.selectors import checked_selectors, has_labels, selector_option
from enginehouse.cli.client.watching import watchable
from enginehouse.cli.commands.ops import finish
from enginehouse.cli.options.durations import DURATION
from enginehouse.cli.options.shared import command, emit, emit_json, group, no_follow_option, wants_json
from enginehouse.cli.terminal import output
from enginehouse.core.backend import InstalledBackend
from enginehouse.core.capacity import GraphicsCard
from enginehouse.core.errors import Invalid
from enginehouse.core.name import check_name
from enginehouse.core.progress import format_bytes
from enginehouse.core.replica import RunningReplica
from enginehouse.core.views import NodeView

JOIN_SECONDS = 20.0  # a worker that has been pending for long asks every fifteen seconds, then connects
LOOK_SECONDS = 0.2
NOT_YET_SAFE = 3  # the exit code of a drain that did not end in time: a part of it is done


@group("nodes", examples=("enginehouse nodes list", "enginehouse nodes approve attic"))
def entry() -> None:
    """List, approve, drain and remove nodes."""


@command("list", examples=("enginehouse nodes list", "enginehouse nodes list --watch", "enginehouse nodes list --json"))
@selector_option
@watchable
def list_nodes(selectors: tuple[str, ...]) -> None:
    """List nodes, with their state, backends and models."""
    wanted = checked_selectors(selectors)
    answer = every_node(connect())
    if wanted and isinstance(answer, list):
        answer = [one for one in answer if has_labels(one.get("labels") or {}, wanted)]
    if emit_json(answer):
        return
    rows = [
        (
            node.name,
            facts_of(node),
            heard(node.heartbeat_age_seconds),
            node.platform,
            _accelerator(node.gpu_vendor, node.total_vram),
            free_of(node.available_ram, node.total_ram),
            ", ".join(backend.name for backend in node.backends if not backend.is_meta),
            ", ".join(replica.model_id for replica in node.replicas),
            node.id,
        )
        for node in read(answer, tuple[NodeView, ...])
    ]
    columns = ("NAME", "STATUS", "HEARD", "PLATFORM", "GPU", "FREE RAM", "BACKENDS", "MODELS", "ID")
    # The id would wrap the lines on a terminal; a pipe and `nodes show` have it.
    shown = len(columns) - 1 if output.is_terminal(sys.stdout) else len(columns)
    output.emit_table(columns[:shown], [row[:shown] for row in rows], "no nodes yet; join one with `enginehouse join`")


@command("show", examples=("enginehouse nodes show attic",))
@click.argument("node")
def show(node: str) -> None:
    """Show all about NODE (a name or id)."""
    answer = connect().get(f"/api/nodes/{segment(check_name(node, 'node'))}")
    if emit_json(answer):
        return
    found = read(answer, NodeView)
    facts = [
        ("name", found.name),
        ("id", found.id),
        ("status", found.status),
        ("approved", "yes" if found.approved else "no; run `enginehouse nodes approve`"),
        ("waits", found.waits_for),
        ("address", found.address),
        ("health", found.health),
        ("bus", "disconnected: the node gets no commands; its replicas go on serving" if found.degraded else ""),
        ("drained", "yes" if found.drained else ""),
        ("heard", heard(found.heartbeat_age_seconds)),
        ("platform", found.platform),
        ("capability", found.capability),
        ("cores", _cores(found)),
        ("gpu", _accelerator(found.gpu_vendor, found.total_vram)),
        ("free ram", free_of(found.available_ram, found.total_ram)),
        ("free vram", free_of(found.available_vram, found.total_vram)),
        *((f"card {card.index}", _card(card)) for card in found.gpu_cards),
        ("free disk", free_of(found.available_disk, found.total_disk)),
        ("labels", ", ".join(f"{key}={value}" for key, value in sorted(found.labels.items()))),
        ("key", found.fingerprint),
        ("version", found.worker_version),
        ("engines confined", found.engine_confinement),
        ("joined", f"{output.age_of(found.created_at)} ago" if found.created_at else ""),
        *(("backend", _installed(one)) for one in found.backends),
        *(("model", _running(one)) for one in found.replicas),
    ]
    output.emit_facts(facts)


@command("approve", examples=("enginehouse nodes approve attic", "enginehouse nodes approve attic --no-wait"))
@click.argument("node")
@click.option("--no-wait", is_flag=True, help="Do not wait until it has joined.")
def approve(node: str, no_wait: bool) -> None:
    """Approve a pending NODE (a name or id) and wait until it has joined, at most 20 seconds."""
    frontend = connect()
    answer = frontend.post(f"/api/nodes/{segment(check_name(node, 'node'))}/approve")
    found = read(answer, NodeView)
    deadline = time.monotonic() + (0.0 if no_wait else JOIN_SECONDS)
    while found.status != "healthy" and time.monotonic() < deadline:
        time.sleep(LOOK_SECONDS)
        answer = frontend.get(f"/api/nodes/{segment(found.id)}")
        found = read(answer, NodeView)
    if emit_json(answer):
        return
    has_joined = found.status == "healthy"
    output.say(f"approved {found.name}" + ("; it has joined" if has_joined and not no_wait else ""))
    if not has_joined and not no_wait:
        output.remark(
            f"{found.name} has not joined within {JOIN_SECONDS:.0f} s (heard {heard(found.heartbeat_age_seconds)}): "
            "its operations wait until then. Check that its worker is running"
        )


@command("drain", examples=("enginehouse nodes drain attic", "enginehouse nodes drain attic --wait 2m"))
@click.argument("node")
@click.option(
    "--wait",
    "wait_seconds",
    type=DURATION,
    metavar="DURATION",
    help="Wait so long at most until it is safe to stop; exit with 3 if it is not by then.",
)
@no_follow_option
def drain(node: str, wait_seconds: float | None, no_follow: bool) -> int:
    """Give NODE no more work and stop its replicas, until it is safe to stop its machine.

    Replicas stop when their answers have ended. Models that have no other replica are loaded on another node first.
    Operations for NODE wait until `enginehouse nodes resume`. A node that is away is drained when it returns; without
    --wait the command does not wait for that.
    """
    if no_follow and wait_seconds is not None:
        raise click.UsageError("--wait and --no-follow exclude each other")
    frontend = connect()
    answer = frontend.request("POST", f"/api/nodes/{segment(check_name(node, 'node'))}/drain")
    if no_follow:
        return finish(frontend, answer, no_follow=True)
    ended = follow(frontend, answer, limit_seconds=wait_seconds)
    if ended.status == "succeeded" and not wants_json():
        output.say(f"{ended.name} is drained and safe to stop")
    if wait_seconds is not None and not ended.has_ended:
        left = f"see it with `enginehouse ops follow {ended.jobID}`"
        output.remark(f"{ended.name} is not safe to stop after {wait_seconds:g} s; the drain goes on, {left}")
        return NOT_YET_SAFE
    return exit_code_of(ended)


@command("resume", examples=("enginehouse nodes resume attic",))
@click.argument("node")
def resume(node: str) -> None:
    """Give a drained NODE work again."""
    answer = connect().post(f"/api/nodes/{segment(check_name(node, 'node'))}/resume")
    emit(answer, f"resumed {node}")


@command("remove", examples=("enginehouse nodes remove attic",))
@click.argument("node")
def remove(node: str) -> None:
    """Remove NODE and cancel its waiting operations. A worker that still runs there registers again as pending."""
    answer = connect().delete(f"/api/nodes/{segment(check_name(node, 'node'))}")
    emit(answer, f"removed {node}")


@command("label", examples=("enginehouse nodes label attic zone=home gpu=big", "enginehouse nodes label attic zone-"))
@click.argument("node")
@click.argument("labels", nargs=-1, required=True, metavar="KEY=VALUE|KEY-...")
def label(node: str, labels: tuple[str, ...]) -> None:
    """Set labels of NODE, or remove those that end with a minus; schedules select nodes by them."""
    frontend, path = connect(), f"/api/nodes/{segment(check_name(node, 'node'))}/labels"
    pairs = [one.partition("=") for one in labels]
    for key, sign, _ in pairs:
        if not sign and not (key.endswith("-") and key != "-"):
            raise Invalid(f"cannot read the label {key!r}: write KEY=VALUE, or KEY- to remove it", param="labels")
    wanted = {key: value for key, sign, value in pairs if sign}
    if wanted:
        frontend.request("PATCH", path, wanted)
    for key, sign, _ in pairs:
        if not sign:
            frontend.delete(f"{path}/{segment(key[:-1])}")
    answer = frontend.get(path)
    shown = ", ".join(f"{key}={value}" for key, value in sorted(read(answer, dict[str, str]).items()))
    emit(answer, f"labels of {node}: {shown or 'none'}")


def _installed(backend: InstalledBackend) -> str:
    """The name, with the version or the build that a meta backend points to."""
    version = backend.version or output.short_digest(backend.digest)
    what = f"({backend.meta_backend_for})" if backend.meta_backend_for else version
    return f"{backend.name} {what}{' (broken)' if backend.is_broken else ''}".strip()


def _running(replica: RunningReplica) -> str:
    unchecked = "" if replica.checks_key else " (its engine answers without a key)"
    return f"{replica.model_id}#{replica.replica_index}{unchecked}"


def facts_of(node: NodeView) -> str:
    """The facts about a node that are so at the same time, such as `healthy,drained`."""
    if not node.health:
        return node.status  # an older frontend tells no facts
    if not node.approved:
        return "pending" if node.health == "healthy" else f"{node.health},pending"
    # Its heartbeats arrive, and commands do not reach it.
    health = "degraded" if node.degraded and node.health != "offline" else node.health
    return f"{health},drained" if node.drained else health


def heard(age_seconds: float | None) -> str:
    return "" if age_seconds is None else f"{output.age(age_seconds)} ago"


def free_of(available: int, total: int) -> str:
    """Empty if the total is 0: the machine did not report it."""
    return f"{output.size(available)} of {output.size(total)}" if total else ""


def _cores(node: NodeView) -> str:
    if not node.cores or node.used_cores is None:
        return str(node.cores or "")
    return f"{node.cores}, {node.used_cores:.1f} in use"


def _accelerator(vendor: str, total_vram: int) -> str:
    return f"{vendor} {output.size(total_vram)}".strip()


def _card(card: GraphicsCard) -> str:
    total, free = card.total_vram, card.available_vram
    memory = f"{output.size(total)}" if total else "memory unknown"
    if total and free is not None:
        memory = f"{format_bytes(free)} of {output.size(total)} free"
    return f"{card.name}: {memory}" if card.name else memory


for each in (list_nodes, show, approve, drain, resume, remove, label):
    entry.add_command(each)
