"""`enginehouse nodes`: the nodes of the cluster."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

import click

from enginehouse.cli.options.shared import command, emit, group, no_follow_option, wants_json
from enginehouse.cli.terminal import output
from enginehouse.core.name import check_name

if TYPE_CHECKING:
    from enginehouse.core.backend import InstalledBackend
    from enginehouse.core.replica import RunningReplica


JOIN_SECONDS = 15.0  # a pending worker asks every two seconds, then connects
LOOK_SECONDS = 0.2


@group("nodes", examples=("enginehouse nodes list", "enginehouse nodes approve attic"))
def entry() -> None:
    """List, approve, drain and remove nodes."""


@command("list", examples=("enginehouse nodes list", "enginehouse nodes list --json"))
def list_nodes() -> None:
    """List nodes, with their state, backends and models."""
    from enginehouse.cli.client.connect import connect, read
    from enginehouse.core.views import NodeView

    answer = connect().get("/api/nodes")
    if wants_json():
        output.emit_json(answer)
        return
    rows = [
        (
            node.name,
            "degraded" if node.degraded and node.status == "unhealthy" else node.status,
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
    from enginehouse.cli.client.connect import connect, read, segment
    from enginehouse.core.views import NodeView

    answer = connect().get(f"/api/nodes/{segment(check_name(node, 'node'))}")
    if wants_json():
        output.emit_json(answer)
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
        ("cores", str(found.cores or "")),
        ("gpu", _accelerator(found.gpu_vendor, found.total_vram)),
        ("free ram", free_of(found.available_ram, found.total_ram)),
        ("free vram", free_of(found.available_vram, found.total_vram)),
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
    """Approve a pending NODE (a name or id) and wait a few seconds until it has joined."""
    from enginehouse.cli.client.connect import connect, read, segment
    from enginehouse.core.views import NodeView

    frontend = connect()
    answer = frontend.post(f"/api/nodes/{segment(check_name(node, 'node'))}/approve")
    found = read(answer, NodeView)
    deadline = time.monotonic() + (0.0 if no_wait else JOIN_SECONDS)
    while found.status != "healthy" and time.monotonic() < deadline:
        time.sleep(LOOK_SECONDS)
        answer = frontend.get(f"/api/nodes/{segment(found.id)}")
        found = read(answer, NodeView)
    if wants_json():
        output.emit_json(answer)
        return
    has_joined = found.status == "healthy"
    output.say(f"approved {found.name}" + ("; it has joined" if has_joined and not no_wait else ""))
    if not has_joined and not no_wait:
        output.remark(
            f"{found.name} has not joined within {JOIN_SECONDS:.0f} s (heard {heard(found.heartbeat_age_seconds)}): "
            "its operations wait until then. Check that its worker is running"
        )


@command("drain", examples=("enginehouse nodes drain attic",))
@click.argument("node")
@no_follow_option
def drain(node: str, no_follow: bool) -> int:
    """Give NODE no more work and stop its replicas.

    Operations for it wait until `enginehouse nodes resume`.
    """
    from enginehouse.cli.client.connect import connect, segment
    from enginehouse.cli.commands.ops import finish

    frontend = connect()
    answer = frontend.request("POST", f"/api/nodes/{segment(check_name(node, 'node'))}/drain")
    return finish(frontend, answer, no_follow=no_follow)


@command("resume", examples=("enginehouse nodes resume attic",))
@click.argument("node")
def resume(node: str) -> None:
    """Give a drained NODE work again."""
    from enginehouse.cli.client.connect import connect, segment

    answer = connect().post(f"/api/nodes/{segment(check_name(node, 'node'))}/resume")
    emit(answer, f"resumed {node}")


@command("remove", examples=("enginehouse nodes remove attic",))
@click.argument("node")
def remove(node: str) -> None:
    """Remove NODE and cancel its waiting operations. A worker that still runs there registers again as pending."""
    from enginehouse.cli.client.connect import connect, segment

    answer = connect().delete(f"/api/nodes/{segment(check_name(node, 'node'))}")
    emit(answer, f"removed {node}")


def _installed(backend: InstalledBackend) -> str:
    """The name, with the version or the build that a meta backend points to."""
    version = backend.version or output.short_digest(backend.digest)
    what = f"({backend.meta_backend_for})" if backend.meta_backend_for else version
    return f"{backend.name} {what}{' (broken)' if backend.is_broken else ''}".strip()


def _running(replica: RunningReplica) -> str:
    unchecked = "" if replica.checks_key else " (its engine answers without a key)"
    return f"{replica.model_id}#{replica.replica_index}{unchecked}"


def heard(age_seconds: float | None) -> str:
    return "" if age_seconds is None else f"{output.age(age_seconds)} ago"


def free_of(available: int, total: int) -> str:
    """Empty if the total is 0: the machine did not report it."""
    return f"{output.size(available)} of {output.size(total)}" if total else ""


def _accelerator(vendor: str, total_vram: int) -> str:
    return f"{vendor} {output.size(total_vram)}".strip()


for each in (list_nodes, show, approve, drain, resume, remove):
    entry.add_command(each)
