"""The catalogue of states that an operator can meet, as the API would show them.

Made of the API's own structs, so a field that is renamed breaks this first. Every state is a `Scene`: what the lists
and the stream answer, and who is signed in. Times are relative to when the scene is made.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from enginehouse.core.backend import InstalledBackend
from enginehouse.core.capacity import GraphicsCard
from enginehouse.core.ids import IntentId, NodeId, OperationId
from enginehouse.core.operation import Excluded, RequestOptions
from enginehouse.core.replica import FailedReplica, RunningReplica
from enginehouse.core.views import CanaryRow, CanaryView, ModelView, NodeRow, NodeView, OperationView, ReplicaView
from enginehouse.frontend.watching.views import render_time

GIB = 1024**3
MARKUP = "<img src=x onerror=alert(1)><script>alert(2)</script>"
HOSTILE = f"{MARKUP}\u202egnp.exe\x1b[31mred\x1b[0m"


@dataclass
class Scene:
    nodes: list[NodeView] = field(default_factory=list)
    models: list[ModelView] = field(default_factory=list)
    operations: list[OperationView] = field(default_factory=list)
    role: str = "admin"  # "" if nobody is signed in
    pulse: dict[str, Any] | None = None
    offers: list[dict[str, Any]] = field(default_factory=list)
    upgrades: dict[str, Any] = field(default_factory=dict)
    answers: dict[str, Any] = field(default_factory=dict)  # other paths
    stream: str = "open"  # open, refused, silent (never answers), ending (closes at once)
    address: str = "#/fleet"  # where it is looked at


def node(name: str, **more: Any) -> NodeView:
    now = time.time()
    age = more.pop("age", 2.0)
    described: dict[str, Any] = {
        "id": NodeId(f"id-{name}"),
        "name": name,
        "node_type": "backend",
        "address": f"192.168.1.{abs(hash(name)) % 200 + 10}:50051",
        "status": "healthy",
        "health": "healthy",
        "approved": True,
        "capability": "default",
        "platform": "linux/amd64",
        "fingerprint": "1750-7026-1c9c-cdac",
        "worker_version": "0.1.0",
        "engine_confinement": "landlock",
        "labels": {"site": "home"},
        "cores": 16,
        "total_ram": 64 * GIB,
        "available_ram": 41 * GIB,
        "total_disk": 900 * GIB,
        "available_disk": 410 * GIB,
        "last_heartbeat": render_time(now - age),
        "heartbeat_age_seconds": age,
        "created_at": render_time(now - 86400 * 30),
        "updated_at": render_time(now - 60),
    }
    return NodeView(**{**described, **more})


def card(name: str, total: int, free: int | None) -> dict[str, Any]:
    return {
        "gpu_vendor": "nvidia",
        "gpu_cards": (GraphicsCard(index=0, name=name, total_vram=total * GIB, available_vram=free and free * GIB),),
        "total_vram": total * GIB,
        "available_vram": (free or 0) * GIB,
        "capability": "nvidia-cuda-12",
    }


def backend(name: str, version: str, **more: Any) -> InstalledBackend:
    digest = "sha256:" + f"{abs(hash(version)):064x}"[-64:]
    return InstalledBackend(name=name, is_system=False, is_meta=False, version=version, digest=digest, **more)


def running(model: str, slot: int = 0, **more: Any) -> RunningReplica:
    return RunningReplica(model_id=model, replica_index=slot, backend="llama-cpp", memory_bytes=5 * GIB, **more)


def row(of: NodeView, status: str, **more: Any) -> NodeRow:
    states = {"success": "succeeded", "error": "failed", "queued": "accepted", "cancelled": "cancelled"}
    described: dict[str, Any] = {
        "node_id": of.id,
        "node_name": of.name,
        "status": status,
        "percentage": 100.0 if status == "success" else 0.0,
        "action": "install llama-cpp",
        "kind": "install",
        "intent": IntentId(f"intent-{of.name}-{more.get('action', '')}"),
        "state": states.get(status, "running"),
        "attempt": 0 if status == "queued" else 1,
    }
    return NodeRow(**{**described, **more})


def operation(number: int, kind: str, name: str, status: str, rows: list[NodeRow], **more: Any) -> OperationView:
    now = time.time()
    counts: dict[str, int] = {}
    for one in rows:
        counts[one.status] = counts.get(one.status, 0) + 1
    ended = status not in ("queued", "running")
    age = more.pop("age", 40.0 + 60 * number)
    described: dict[str, Any] = {
        "id": name,
        "name": name,
        "fullName": name,
        "jobID": OperationId(f"{number:08x}-0000-4000-8000-000000000000"),
        "progress": int(sum(one.percentage for one in rows) / len(rows)) if rows else 0,
        "taskType": kind,
        "isDeletion": kind == "delete",
        "isBackend": kind in ("install", "upgrade", "delete", "rollback"),
        "isQueued": status == "queued",
        "cancellable": not ended,
        "message": status,
        "kind": kind,
        "status": status,
        "isParked": False,
        "author": "admin",
        "createdAt": render_time(now - age),
        "finishedAt": render_time(now - age + 31) if ended else "",
        "excluded": (),
        "targets": tuple(one.node_id for one in rows),
        "asked": RequestOptions(),
        "dismissed": False,
        "counts": counts,
        "nodes": rows,
        "currentBytes": sum(one.current_bytes or 0 for one in rows),
        "totalBytes": sum(one.total_bytes or 0 for one in rows),
        "revision": 5,
    }
    return OperationView(**{**described, **more})


def model(name: str, state: str, nodes: list[NodeView] | None = None, **more: Any) -> ModelView:
    views = tuple(ReplicaView(one.id, one.name, 0) for one in nodes or ())
    described: dict[str, Any] = {"backend": "llama-cpp", "license": "apache-2.0", "size_bytes": 4 * GIB}
    return ModelView(name=name, state=state, replicas=views, created_at=time.time(), **{**described, **more})


def pulse(nodes: list[NodeView], **more: Any) -> dict[str, Any]:
    now = time.time()
    traffic = {
        "requests_per_second": 12.4,
        "tokens_per_second": 318.0,
        "time_to_first_token_seconds": 0.21,
        "errors_per_second": 0.0,
        "in_flight": 3,
        "queued": 0,
    }
    figures = {
        one.id: {
            "heard_at": now - (one.heartbeat_age_seconds or 0.0),
            "available_ram": one.available_ram,
            "available_vram": one.available_vram,
            "available_disk": one.available_disk,
            "used_cores": round(one.cores * 0.3, 1) if one.health == "healthy" else None,
            "in_flight": 0,
            "requests_per_second": 2.1 if one.replicas else 0.0,
        }
        for one in nodes
        if one.approved
    }
    return {"at": now, "traffic": {**traffic, **more}, "nodes": figures, "models": {}}


def house() -> list[NodeView]:
    """Five unlike machines."""
    return [
        node(
            "desk",
            **card("RTX 4070", 12, 3),
            backends=(backend("cuda12-llama-cpp", "1.4"), backend("whisper", "0.9")),
            replicas=(running("qwen"), running("tiny-chat", 0)),
        ),
        node(
            "dgx",
            **card("GB10", 128, 60),
            cores=20,
            backends=(backend("cuda12-llama-cpp", "1.3", previous_version="1.2", previous_digest="sha256:0"),),
            replicas=(running("qwen"),),
        ),
        node(
            "jetson",
            health="offline",
            status="offline",
            age=3 * 3600.0 + 240,
            platform="linux/arm64",
            capability="nvidia-l4t-cuda-12",
            labels={"site": "shed", "power": "low"},
            backends=(backend("cuda12-llama-cpp", "1.3"),),
        ),
        node("laptop", drained=True, status="draining", backends=(backend("llama-cpp", "1.4"),)),
        node("spare", backends=(backend("llama-cpp", "1.4", is_broken=True),), available_disk=20 * GIB),
    ]


def _healthy() -> Scene:
    nodes = house()[:2]
    models = [
        model("qwen", "loaded", nodes),
        model("tiny-chat", "loaded", nodes[:1], size_bytes=2_159_040),
        model("smollm2", "available", size_bytes=98_362_432, description="A small real chat model."),
    ]
    return Scene(nodes, models, pulse=pulse(nodes))


def _mixed() -> Scene:
    nodes = house()
    shown = "9f2c-55aa-01d1-77e0"
    pending = node("shed-pi", approved=False, status="pending", platform="linux/arm64", fingerprint=shown)
    again = node("attic", approved=False, status="pending", waits_for="its address changed from 10.0.0.4 to 10.0.0.9")
    rows = [
        row(nodes[0], "success", note="installed 102.6 MiB (64.1 MiB reused)"),
        row(
            nodes[1],
            "downloading",
            phase="downloading",
            file_name="layer-3.tar.gz",
            percentage=41.0,
            current_bytes=int(0.9 * GIB),
            total_bytes=int(2.2 * GIB),
        ),
        row(nodes[2], "queued", reason="node_away", error="the node is offline; this starts when it reconnects"),
        row(
            nodes[3],
            "running_on_worker",
            percentage=88.0,
            current_bytes=90,
            total_bytes=100,
            error="no progress for 130 s; it may still be running there, and its result will be stored",
        ),
        row(nodes[4], "error", attempt=10, error="needs 3.1 GiB, 1.2 GiB free on /var/lib/enginehouse"),
    ]
    left_out = (Excluded(NodeId("id-agent"), "agent-1", "it is an agent, which runs no backends"),)
    upgrade = operation(
        1,
        "upgrade",
        "llama-cpp",
        "running",
        rows,
        excluded=left_out,
        canary=CanaryView(
            phase="watching",
            seconds=30.0,
            nodes=[CanaryRow(node_id=nodes[0].id, node_name="desk", state="watched", waits_for="22 s more")],
        ),
    )
    ended = [
        operation(2, "install", "whisper", "succeeded", [row(nodes[0], "success")]),
        operation(
            3,
            "install",
            "bark",
            "partial",
            [row(nodes[0], "success"), row(nodes[1], "error", error="manifest unknown")],
        ),
        operation(
            4, "delete", "piper", "failed", [row(nodes[4], "error", error="permission denied: /opt/backends/piper")]
        ),
        operation(5, "load", "qwen", "cancelled", [row(nodes[1], "cancelled")]),
        operation(6, "upgrade", "llama-cpp", "superseded", [row(nodes[1], "superseded")]),
    ]
    loading = operation(
        7,
        "load",
        "mistral",
        "running",
        [
            row(nodes[0], "success", action="install llama-cpp"),
            row(
                nodes[0],
                "downloading",
                action="place the files of mistral",
                kind="pull_model",
                phase="downloading",
                file_name="mistral-7b-q4_k_m.gguf",
                percentage=63.0,
                current_bytes=int(2.6 * GIB),
                total_bytes=int(4.1 * GIB),
            ),
        ],
        author="loader",
    )
    models = [
        model("qwen", "loaded", nodes[:2]),
        model("mistral", "loading"),
        model("gemma", "added"),
        model("smollm2", "available", size_bytes=98_362_432, description="A small real chat model."),
    ]
    failing = msgspec.structs.replace(
        nodes[1],
        failed_replicas=(FailedReplica("gemma", 0, "its engine ended 5 times in 10 min: CUDA error: out of memory"),),
    )
    nodes = [nodes[0], failing, *nodes[2:], pending, again]
    upgrades = {
        "cuda12-llama-cpp": {
            "backend_name": "cuda12-llama-cpp",
            "installed_version": "1.3",
            "available_version": "1.4",
            "nodes": [{"node_id": nodes[1].id, "node_name": "dgx"}],
        }
    }
    return Scene(nodes, models, [upgrade, *ended, loading], pulse=pulse(nodes), upgrades=upgrades, offers=offers(40))


def _first() -> Scene:
    only = node("box")
    return Scene(
        [only],
        [model("tiny-chat", "available", size_bytes=2_159_040)],
        pulse=pulse([only], requests_per_second=0.0, tokens_per_second=0.0),
    )


def _hostile() -> Scene:
    wicked = node(
        "box",
        labels={HOSTILE: HOSTILE},
        engine_confinement=HOSTILE,
        worker_version=HOSTILE,
        backends=(backend("wicked", HOSTILE),),
        replicas=(running(HOSTILE),),
    )
    wicked = msgspec.structs.replace(wicked, name=HOSTILE)
    failed = operation(
        1, "install", HOSTILE, "failed", [row(wicked, "error", error=HOSTILE, file_name=HOSTILE)], error=HOSTILE
    )
    going = operation(
        2,
        "install",
        HOSTILE,
        "running",
        [row(wicked, "downloading", phase="downloading", file_name=HOSTILE, current_bytes=1, total_bytes=2)],
    )
    offered = [
        {**one, "name": HOSTILE, "description": HOSTILE, "license": HOSTILE, "tags": [HOSTILE]} for one in offers(2)
    ]
    return Scene(
        [wicked],
        [model(HOSTILE, "loaded", [wicked], description=HOSTILE, license=HOSTILE)],
        [failed, going],
        pulse=pulse([wicked]),
        offers=offered,
    )


def hundred() -> Scene:
    nodes = []
    for number in range(100):
        health = "offline" if number % 25 == 7 else "healthy"
        more = card("A100", 80, 40 - number % 30) if number % 2 else {}
        nodes.append(
            node(
                f"node-{number:03}",
                health=health,
                status=health,
                age=4000.0 if health == "offline" else 3.0,
                **more,
                backends=(backend("llama-cpp", f"1.{number % 3}"),),
                replicas=(running("qwen"),) if number % 4 == 0 else (),
            )
        )
    ended = [
        operation(number + 10, "install", f"backend-{number}", "succeeded", [row(one, "success") for one in nodes[:3]])
        for number in range(40)
    ]
    going = operation(
        1,
        "upgrade",
        "llama-cpp",
        "running",
        [
            row(
                one,
                "downloading",
                phase="downloading",
                percentage=float(at),
                current_bytes=at * 10**7,
                total_bytes=10**9,
            )
            if one.health == "healthy"
            else row(one, "queued", reason="node_away")
            for at, one in enumerate(nodes)
        ],
    )
    return Scene(nodes, [model("qwen", "loaded", nodes[::4])], [going, *ended], pulse=pulse(nodes), offers=offers(1000))


def offers(count: int) -> list[dict[str, Any]]:
    """Entries of a gallery, as `GET /backends/available` shows them."""
    return [
        {
            "name": f"engine-{number:04}",
            "description": f"An engine for the models of family {number % 50}.",
            "license": "MIT",
            "version": f"1.{number % 9}",
            "tags": ["text" if number % 2 else "sound"],
            "gallery": {"url": "", "name": "localai"},
            "installed": number % 100 == 0,
            "is_meta": number % 3 == 0,
            "is_development": number % 10 == 9,
            "is_variant": number % 5 == 4,
            "fits": True,
            "stale": False,
        }
        for number in range(count)
    ]


SCENES: dict[str, Callable[[], Scene]] = {
    "signed-out": lambda: Scene(role=""),
    "empty": lambda: Scene(),
    "loading": lambda: Scene(stream="silent"),
    "first-start": _first,
    "healthy": _healthy,
    "mixed": _mixed,
    "read-only": lambda: _as_viewer(_mixed()),
    "hostile-names": _hostile,
    "hundred-nodes": hundred,
    "connection-lost": lambda: _with(_healthy(), stream="ending"),
    "not-allowed": lambda: _with(_healthy(), stream="refused"),
}


def _with(scene: Scene, **more: Any) -> Scene:
    for name, value in more.items():
        setattr(scene, name, value)
    return scene


def _as_viewer(scene: Scene) -> Scene:
    return _with(scene, role="viewer")
