"""`enginehouse nodes`: the nodes of the cluster."""

from __future__ import annotations

import os
import re
import sys
import time

import click

from enginehouse.cli.answers import RejectedNode
from enginehouse.cli.client.connect import FrontendApi, connect, read, segment
from enginehouse.cli.client.listing import every_node
from enginehouse.cli.client.selectors import checked_selectors, has_labels, selector_option
from enginehouse.cli.client.several import before, emit_answers, emit_each, for_each, raise_refused
from enginehouse.cli.client.watching import watchable
from enginehouse.cli.commands.nodes_add import add
from enginehouse.cli.commands.nodes_drain import drain
from enginehouse.cli.options.shared import (
    NO_SERVER,
    command,
    emit,
    emit_json,
    given,
    group,
    wants_json,
)
from enginehouse.cli.terminal import output
from enginehouse.core.backend import InstalledBackend
from enginehouse.core.capacity import GraphicsCard
from enginehouse.core.errors import Conflict, Invalid
from enginehouse.core.fingerprint import DIGITS, fingerprint_of
from enginehouse.core.name import check_name
from enginehouse.core.progress import format_bytes
from enginehouse.core.replica import RunningReplica
from enginehouse.core.views import NodeView
from enginehouse.settings.programs import UpSettings, load

JOIN_SECONDS = 20.0  # a worker that has been pending for long asks every fifteen seconds, then connects
LOOK_SECONDS = 0.2


@group("nodes", examples=("enginehouse nodes list", "enginehouse nodes add", "enginehouse nodes approve attic"))
def entry() -> None:
    """List, approve, reject, drain and remove nodes."""


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
            f"{node.worker_version} (behind)" if node.behind else node.worker_version,
            _accelerator(node.gpu_vendor, node.total_vram),
            free_of(node.available_ram, node.total_ram),
            ", ".join(backend.name for backend in node.backends if not backend.is_meta),
            ", ".join(replica.model_id for replica in node.replicas),
            node.id,
        )
        for node in read(answer, tuple[NodeView, ...])
    ]
    columns = ("NAME", "STATUS", "HEARD", "PLATFORM", "VERSION", "GPU", "FREE RAM", "BACKENDS", "MODELS", "ID")
    # The id would wrap the lines on a terminal; a pipe and `nodes show` have it.
    shown = len(columns) - 1 if output.is_terminal(sys.stdout) else len(columns)
    output.emit_table(
        columns[:shown], [row[:shown] for row in rows], "no nodes yet; `enginehouse nodes add` says how to join one"
    )


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
        ("version", f"{found.worker_version} (behind this server)" if found.behind else found.worker_version),
        ("engines confined", found.engine_confinement),
        ("joined", f"{output.age_of(found.created_at)} ago" if found.created_at else ""),
        *(("backend", _installed(one)) for one in found.backends),
        *(("model", _running(one)) for one in found.replicas),
    ]
    output.emit_facts(facts)


@command(
    "approve",
    examples=(
        "enginehouse nodes approve attic --fingerprint 3f2a-91bc-07de-55a1",
        "enginehouse nodes approve attic cellar --no-wait",
    ),
)
@click.argument("nodes", nargs=-1, required=True, metavar="NODE...")
@click.option("--fingerprint", default="", metavar="WORDS", help="Only the machine with this key, as `join` shows.")
@click.option("--no-wait", is_flag=True, help="Do not wait until it has joined.")
def approve(nodes: tuple[str, ...], fingerprint: str, no_wait: bool) -> None:
    """Approve each pending NODE (a name or id) and wait until it has joined, at most 20 seconds.

    Compare the fingerprint with what `join` shows on that machine: with --fingerprint another machine that uses the
    name is refused.
    """
    if fingerprint and len(nodes) > 1:
        raise click.UsageError("--fingerprint is that of one machine: name one node")
    frontend = connect()
    wanted = [_with_key(frontend, check_name(node, "node"), fingerprint) for node in nodes]
    if len(wanted) > 1:
        before(frontend, wanted)
    body = {"fingerprint": fingerprint} if fingerprint else None

    def change(node: str) -> tuple[object, bool]:
        """The node, and whether it is approved by this."""
        try:
            return frontend.post(f"/api/nodes/{segment(node)}/approve", body), True
        except Conflict as error:
            if error.code != "already_approved":
                raise
            return frontend.get(f"/api/nodes/{segment(node)}"), False

    answers, refused = for_each(wanted, change)
    deadline = time.monotonic() + (0.0 if no_wait else JOIN_SECONDS)
    approved = [
        _wait_for(frontend, answer, deadline, no_wait=no_wait) if is_new else _unchanged(answer)
        for answer, is_new in answers
    ]
    emit_answers(approved, is_list=len(nodes) > 1)
    raise_refused(refused)


def _with_key(frontend: FrontendApi, node: str, fingerprint: str) -> str:
    """The id of the pending node that has this key; the name itself if no fingerprint is given. An older frontend does
    not compare keys, and a key has one node of this name.
    """
    if not fingerprint:
        return node
    every = read(frontend.get(f"/api/nodes?name={segment(node)}"), tuple[NodeView, ...])
    pending = [one for one in every if node in (one.name, one.id) and not one.approved]
    digits = re.sub("[^0-9a-f]", "", fingerprint.lower())[:DIGITS]
    found = [one for one in pending if digits == re.sub("-", "", one.fingerprint)]
    if pending and not found:
        shown = ", ".join(one.fingerprint or "none" for one in pending)
        raise Conflict(
            f"cannot approve {node}: its key is {shown}, not {fingerprint}. Another machine may use its name",
            code="fingerprint_mismatch",
        )
    return found[0].id if found else node


def _unchanged(answer: object) -> object:
    if not wants_json():
        output.say(f"= {read(answer, NodeView).name} is already approved")
    return answer


def _wait_for(frontend: FrontendApi, answer: object, deadline: float, *, no_wait: bool) -> object:
    found = read(answer, NodeView)
    while found.status != "healthy" and time.monotonic() < deadline:
        time.sleep(LOOK_SECONDS)
        answer = frontend.get(f"/api/nodes/{segment(found.id)}")
        found = read(answer, NodeView)
    if wants_json():
        return answer
    has_joined = found.status == "healthy"
    output.say(f"approved {found.name}" + ("; it has joined" if has_joined and not no_wait else ""))
    if not has_joined and not no_wait:
        output.remark(
            f"{found.name} has not joined within {JOIN_SECONDS:.0f} s (heard {heard(found.heartbeat_age_seconds)}): "
            "its operations wait until then. Check that its worker is running"
        )
    return answer


@command(
    "reject",
    examples=(
        "enginehouse nodes reject stranger",
        "enginehouse nodes reject --list",
        "enginehouse nodes reject stranger --undo",
    ),
)
@click.argument("nodes", nargs=-1, metavar="NODE...")
@click.option("--undo", is_flag=True, help="Let it ask to join again.")
@click.option("--list", "is_list", is_flag=True, help="List what was rejected.")
def reject(nodes: tuple[str, ...], undo: bool, is_list: bool) -> None:
    """Remove each pending NODE (a name or id) and refuse its key, whatever name it uses.

    One of LocalAI's workers has no key: revoke its join token too.
    """
    frontend = connect()
    if is_list:
        answer = frontend.get("/api/nodes/rejected")
        if not emit_json(answer):
            rows = [
                (one.name, one.fingerprint, output.age_of(one.rejected_at))
                for one in read(answer, tuple[RejectedNode, ...])
            ]
            output.emit_table(("NAME", "FINGERPRINT", "AGE"), rows, "no rejected machines")
        return
    if not nodes:
        raise click.UsageError("name a node, or give --list")

    def change(node: str) -> tuple[object, str]:
        if undo:
            return frontend.delete(f"/api/nodes/rejected/{segment(node)}"), f"{node} may ask to join again"
        return frontend.post(f"/api/nodes/{segment(check_name(node, 'node'))}/reject"), f"rejected {node}"

    if len(nodes) > 1 and not undo:
        before(frontend, nodes)
    emit_each(nodes, change)


@command("resume", examples=("enginehouse nodes resume attic", "enginehouse nodes resume attic cellar"))
@click.argument("nodes", nargs=-1, required=True, metavar="NODE...")
def resume(nodes: tuple[str, ...]) -> None:
    """Give each drained NODE work again."""
    frontend = connect()
    were = before(frontend, nodes)

    def change(node: str) -> tuple[object, str]:
        answer = frontend.post(f"/api/nodes/{segment(node)}/resume")
        return answer, f"resumed {node}" if were[node].drained else f"= {node} was not drained"

    emit_each(were, change)


@command("remove", examples=("enginehouse nodes remove attic", "enginehouse nodes remove attic cellar --force"))
@click.argument("nodes", nargs=-1, required=True, metavar="NODE...")
@click.option("--force", is_flag=True, help="Also a healthy node that is not drained.")
def remove(nodes: tuple[str, ...], force: bool) -> None:
    """Remove each NODE and cancel its waiting operations.

    A healthy node that is not drained is refused without --force. A worker that still runs there registers again as
    pending. The name stays in the history.
    """
    frontend, query = connect(), "?force=true" if force else ""
    if len(nodes) > 1:
        before(frontend, nodes)

    def change(node: str) -> tuple[object, str]:
        return frontend.delete(f"/api/nodes/{segment(check_name(node, 'node'))}{query}"), f"removed {node}"

    emit_each(nodes, change)


@command("key", meanings=NO_SERVER, examples=("enginehouse nodes key",))
def key() -> None:
    """Print the public key of this machine as a node; it is made now if there is none.

    A server that was started with --approve-keys and this key lets the machine join without approval and token.
    """
    settings = load(UpSettings, {"data": given().data}, os.environ)
    from enginehouse import run

    public_key = run.node_key(settings.data)
    fingerprint = fingerprint_of(public_key)
    if not emit_json({"public_key": public_key, "fingerprint": fingerprint}):
        output.say(public_key)
        output.remark(f"fingerprint: {fingerprint}")


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
    was = frontend.get(path)
    if wanted:
        frontend.request("PATCH", path, wanted)
    for key, sign, _ in pairs:
        if not sign:
            frontend.delete(f"{path}/{segment(key[:-1])}")
    answer = frontend.get(path)
    shown = ", ".join(f"{key}={value}" for key, value in sorted(read(answer, dict[str, str]).items()))
    emit(answer, f"{'= ' if answer == was else ''}labels of {node}: {shown or 'none'}")


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
        return "pending"  # it sends no heartbeats yet, so its health says nothing; `heard` tells when it asked
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


for each in (list_nodes, show, add, approve, reject, drain, resume, remove, label, key):
    entry.add_command(each)
