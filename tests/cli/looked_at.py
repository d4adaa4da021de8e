"""A cluster in the middle of a bad day, as a frontend answers about it: for what shows it."""

from __future__ import annotations

from tests.cli.recorded import JOB, Answer, Reaction, Stream, operation, row

MIB, GIB = 1024**2, 1024**3


def node(name: str, **fields: object) -> dict[str, object]:
    return {
        "id": f"11111111-1111-4111-8111-{abs(hash(name)) % 10**12:012}",
        "name": name,
        "node_type": "backend",
        "status": "healthy",
        "approved": True,
        "health": "healthy",
        "drained": False,
        "platform": "linux/amd64",
        "gpu_vendor": "nvidia",
        "total_vram": 24 * GIB,
        "total_ram": 64 * GIB,
        "available_ram": 31 * GIB,
        "total_disk": 500 * GIB,
        "available_disk": 200 * GIB,
        "heartbeat_age_seconds": 3.2,
        "backends": [{"name": "cuda12-llama-cpp", "is_system": False, "is_meta": False, "version": "1.4"}],
        "replicas": [{"model_id": "qwen3-30b-a3b-instruct", "replica_index": 0}],
        **fields,
    }


NODES = [
    node("attic", drained=True),
    node("cellar", health="offline", status="offline", heartbeat_age_seconds=7300.0, replicas=[]),
    node("desk-with-a-long-name"),
    node("jetson", approved=False, status="pending", fingerprint="ab:cd", replicas=[], backends=[]),
    node("spare", failed_replicas=[{"model_id": "tiny", "replica_index": 0, "message": "it ended with code 1"}]),
]
WAITING = row(
    "spare",
    "queued",
    state="waiting",
    reason="insufficient_memory",
    error="cannot start tiny: it needs 103 MiB, 59 free",
    action="start tiny",
    failures=4,
    due_in_seconds=14.0,
)
OPERATIONS = [
    operation("running", WAITING, kind="load", name="tiny", isBackend=False),
    operation(
        "failed",
        row("attic", "error", error="cannot fetch the image: the registry refuses the connection", action="upgrade x"),
        row("attic", "success", action="place files"),
        row("cellar", "success", action="upgrade x"),
        jobID=JOB.replace("1", "2"),
        kind="upgrade",
        error="attic: cannot fetch the image: the registry refuses the connection",
    ),
]
REPLICAS = [
    {
        "model": "qwen3-30b-a3b-instruct",
        "node_id": str(one["id"]),
        "node_name": str(one["name"]),
        "slot": slot,
        "state": "ready",
        "backend": "cuda12-llama-cpp",
        "revision": "0123456789abcdef",
        "outdated": "",
        "in_flight": 3,
        "age_seconds": 7300.0,
        "unused_seconds": 4.2,
        "memory_bytes": 19 * GIB,
    }
    for slot, one in enumerate(NODES[::2])
]
MODELS = [
    {
        "name": "qwen3-30b-a3b-instruct",
        "backend": "llama-cpp",
        "description": "A large model that answers in many languages and is described at length",
        "license": "Apache-2.0",
        "size_bytes": 18 * GIB,
        "state": "loaded",
        "replicas": [{"node_id": "1", "node_name": "attic", "slot": 0}],
        "created_at": 1767225600.0,
    }
]
BACKENDS = [
    {
        "Name": "cuda12-llama-cpp",
        "nodes": [
            {
                "node_name": name,
                "node_status": "healthy",
                "version": "2026.10.11549-1",
                "digest": "sha256:" + "0123456789abcdef" * 4,
                "installed_at": "2026-01-01T00:00:00Z",
                "report_age_seconds": 3.0,
            }
            for name in ("attic", "desk-with-a-long-name")
        ],
    }
]
TOKENS = [
    {
        "id": "ce9e1dcf-b219-41af-a308-a4377c9172c4",
        "role": "viewer",
        "name": "wall-in-the-hall",
        "created_at": "2026-01-01T00:00:00Z",
        "expires_at": "2027-01-01T00:00:00Z",
        "requests_per_minute": 60,
    },
    # Two of one name: their ids are needed to tell them apart.
    {
        "id": "0b7c5e1a-93d4-4c1b-8a51-6f0d8a2b9e77",
        "role": "user",
        "name": "wall-in-the-hall",
        "created_at": "2026-01-01T00:00:00Z",
    },
]
AUDIT = {
    "audit": [
        {
            "at": "2026-01-01T00:00:00Z",
            "who": "admin",
            "role": "admin",
            "address": "192.168.100.100",
            "method": "POST",
            "path": "/api/models/qwen3-30b-a3b-instruct/load",
            "status": 202,
            "operation_id": JOB,
        }
    ]
}
AVAILABLE = [
    {
        "name": "a-backend-with-a-name",
        "gallery": {"name": "localai"},
        "version": "2026.10.1",
        "license": "Apache-2.0",
        "description": "An engine for many things " * 4,
    }
]
PLAN = {
    "nodes": [
        {
            **{"node_name": "desk-with-a-long-name", "does": "upgrade", "backend": "cuda12-llama-cpp"},
            **{"installed_version": "2026.9.1-1", "version": "2026.10.1-1", "download_bytes": 3 * GIB},
            "free_disk_bytes": 200 * GIB,
        }
    ]
}
UPGRADES = {
    "llama-cpp": {
        "backend_name": "llama-cpp",
        "nodes": [
            {
                "node_id": "1",
                "node_name": "desk-with-a-long-name",
                "installed_version": "2026.9.11549-1",
                "available_version": "2026.10.11549-1",
            }
        ],
    }
}
SCHEDULES = [
    {
        "model_name": "qwen3-30b-a3b-instruct",
        "min_replicas": 2,
        "max_replicas": 4,
        "node_selector": '{"zone":"home"}',
        "reason": "cannot place qwen3-30b-a3b-instruct: it needs 19 GiB, and no node with zone=home has that free",
    }
]
PULSE = {
    "at": "2026-01-01T00:00:00Z",
    "traffic": {"requests_per_second": 2.1, "tokens_per_second": 43.0},
    "nodes": {},
    "models": {},
}
ANSWERS: dict[str, Reaction] = {
    "GET /api/nodes?limit=500": Answer(NODES),
    "GET /api/operations": Answer({"operations": OPERATIONS}),
    "GET /api/operations?all=true&limit=50": Answer({"operations": OPERATIONS}),
    "GET /api/replicas": Answer(REPLICAS),
    "GET /api/models": Answer(MODELS),
    "GET /api/nodes/scheduling": Answer(SCHEDULES),
    "GET /backends": Answer(BACKENDS),
    "GET /backends/available": Answer(AVAILABLE),
    "POST /backends/upgrades/check": Answer(UPGRADES),
    "POST /api/operations/plan": Answer(PLAN),
    "GET /api/tokens": Answer(TOKENS),
    "GET /api/audit?limit=50": Answer(AUDIT),
    "GET /api/events": Stream([("hello", {}), ("pulse", PULSE)]),
}
# Every list there is, by its words.
LISTS = (
    ("nodes", "list"),
    ("ops", "list"),
    ("ops", "list", "--open", "--limit", "50"),
    ("replicas", "list"),
    ("models", "list"),
    ("models", "replicas"),
    ("models", "schedule"),
    ("backends", "list"),
    ("backends", "available"),
    ("backends", "upgrades"),
    ("backends", "plan", "llama-cpp"),
    ("tokens", "list"),
    ("audit",),
    ("keys", "list"),
    ("contexts", "list"),
    ("ps",),
    ("status",),
)
ANSWERS["GET /api/operations?limit=50"] = Answer({"operations": OPERATIONS})
