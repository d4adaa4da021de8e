"""Every route that creates an operation takes an Idempotency-Key: the whole table is walked."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TypeVar

import pytest
from tests.api.whole_frontend import LOCAL, Site, site

from enginehouse.core.backend import InstalledBackend
from enginehouse.core.errors import Unavailable
from enginehouse.core.ids import NodeId
from enginehouse.core.model import Model
from enginehouse.core.replica import Replica
from enginehouse.core.report import Report
from enginehouse.store import db, models, nodes, operations, replicas
from enginehouse.store.db import Connection

T = TypeVar("T")
# What each of them is asked here so that it is accepted.
CREATING: dict[tuple[str, str], object] = {
    ("POST", "/api/operations"): {"kind": "install", "name": "llama-cpp"},
    ("POST", "/api/operations/{id}/retry"): {},
    ("POST", "/api/nodes/{id}/drain"): None,
    ("POST", "/api/nodes/{id}/backends/install"): {"backend": "llama-cpp"},
    ("POST", "/api/nodes/{id}/backends/upgrade"): {"backend": "llama-cpp"},
    ("POST", "/api/nodes/{id}/backends/delete"): {"backend": "llama-cpp"},
    ("POST", "/backends/apply"): {"id": "llama-cpp"},
    ("POST", "/backends/upgrade/{name}"): None,
    ("POST", "/backends/delete/{name}"): None,
    ("POST", "/api/models/{name:path}/load"): {},
    ("POST", "/api/models/{name:path}/unload"): {},
    ("DELETE", "/api/models/{name:path}"): None,
    ("POST", "/api/models"): {
        **{"name": "another", "backend": "llama-cpp", "load": True},
        "files": [{"name": "t.gguf", "uri": "builtin:tiny-chat-2m-q8_0.gguf", "sha256": "0" * 64}],
    },
    ("POST", "/models/apply"): {"id": "tiny-chat"},
    ("POST", "/models/delete/{name:path}"): None,
}
# Those that change something and create none. A new route fails here until somebody has said which it is.
OTHERS = {
    ("POST", "/api/node/challenge"),
    ("POST", "/api/node/register"),
    ("POST", "/api/node/{id}/heartbeat"),
    ("POST", "/api/node/{id}/deregister"),
    ("DELETE", "/api/node/{id}"),
    ("POST", "/api/node/{id}/drain"),
    ("POST", "/api/node/{id}/resume"),
    ("DELETE", "/api/nodes/{id}"),
    ("POST", "/api/nodes/{id}/resume"),
    ("POST", "/api/nodes/{id}/approve"),
    ("POST", "/api/nodes/{id}/reject"),
    ("DELETE", "/api/nodes/rejected/{id}"),
    ("POST", "/api/tokens/{id}/rotate"),
    ("POST", "/api/operations/plan"),
    ("POST", "/api/operations/{id}/cancel"),
    ("POST", "/api/operations/{id}/release"),
    ("POST", "/api/operations/{id}/dismiss"),
    ("POST", "/backends/upgrades/check"),
    ("POST", "/api/session"),
    ("DELETE", "/api/session"),
    ("POST", "/api/session/links"),
    ("DELETE", "/api/sessions/{id}"),
    ("POST", "/api/tokens"),
    ("PUT", "/api/models/{name:path}"),
    ("PATCH", "/api/models/{name:path}"),
    ("POST", "/api/models/{name:path}/copy"),
    ("POST", "/api/nodes/scheduling"),
    ("DELETE", "/api/nodes/scheduling/{model:path}"),
    ("PUT", "/api/nodes/{id}/labels"),
    ("PATCH", "/api/nodes/{id}/labels"),
    ("DELETE", "/api/nodes/{id}/labels/{key}"),
    ("POST", "/models/import"),
    ("POST", "/models/plan"),
    ("HEAD", "/api/uploads/{sha256}"),
    ("PUT", "/api/uploads/{sha256}"),
    ("DELETE", "/api/tokens/{id}"),
    *(
        ("POST", f"{prefix}/{name}")
        for prefix in ("/v1", "")
        for name in ("chat/completions", "completions", "embeddings", "rerank", "tokenize", "detokenize")
    ),
    ("POST", "/v1/{path:path}"),
    ("POST", "/api/engines/{model:path}/{call}"),
}


@pytest.fixture
async def here(tmp_path: Path) -> AsyncIterator[Site]:
    async with site(tmp_path) as made:
        await made.ask("POST", "/api/nodes/old/approve", token=made.tokens["admin"])
        yield made
        await made.frontend.galleries.close()


async def prepare(here: Site, path: str) -> str:
    """A node with a backend, a model and a replica of it, and an operation that was cancelled: whatever a route is
    about is there. The path with its names filled in.
    """
    node_id = here.tokens["node id"]
    operation_id = await ask(here, "POST", "/api/operations", {"kind": "install", "name": "llama-cpp"}, "before")
    await ask(here, "POST", f"/api/operations/{operation_id}/cancel", {}, "")

    def work(connection: Connection) -> float:
        now = db.now(connection)
        models.insert(connection, Model(name="tiny", backend="llama-cpp", files=()), now)
        if not path.endswith("/load"):
            replica = Replica(
                node_id=NodeId(node_id),
                model="tiny",
                slot=0,
                revision="",
                address="h:1",
                nonce="n",
                backend="b",
                key="k",
            )
            replicas.put(connection, replica, now)
        return now

    mark = await here.store.transaction(work)
    backend = InstalledBackend(name="xllamacpp", is_system=False, is_meta=False, digest="sha256:old")
    pointer = InstalledBackend(name="llama-cpp", is_system=False, is_meta=True, meta_backend_for="xllamacpp")
    report = Report(boot_id="b", sequence=1, mark=mark - 1, boot_mark=1.0, backends=(backend, pointer))
    await here.frontend.reports.report(NodeId(node_id), report)
    filled = path.replace("{name:path}", "tiny").replace("{name}", "llama-cpp")
    return filled.replace("{id}", operation_id if "/operations/" in path else node_id)


async def ask(here: Site, method: str, path: str, body: object, key: str) -> str:
    """The id of the operation that the answer names, if it names one."""
    headers = (*LOCAL, ("idempotency-key", key)) if key else LOCAL
    answer = await here.ask(method, path, body, token=here.tokens["admin"], headers=headers)
    assert answer.status in (200, 202), answer.body
    found = answer.json
    return str(found.get("jobID") or found.get("id") or found.get("uuid") or "")


async def refusal(here: Site, method: str, path: str, body: object, key: str) -> str:
    headers = (*LOCAL, ("idempotency-key", key))
    answer = await here.ask(method, path, body, token=here.tokens["admin"], headers=headers)
    assert answer.status == 422, answer.body
    return answer.error["code"]


async def count(here: Site) -> int:
    return len(await here.store.transaction(lambda connection: operations.recent(connection, 100)))


async def test_every_route_that_changes_something_is_known_here(here: Site) -> None:
    changing = {(route.method, route.path) for route in here.routes if route.method != "GET"}
    assert changing == OTHERS | set(CREATING)


@pytest.mark.parametrize(("method", "path"), sorted(CREATING))
async def test_the_same_request_under_one_key_is_one_operation(here: Site, method: str, path: str) -> None:
    body, address = CREATING[method, path], await prepare(here, path)
    before = await count(here)
    first = await ask(here, method, address, body, "k")
    assert first
    assert await count(here) == before + 1
    # Also after it has ended, when the same request without a key would be another operation.
    await here.ask("POST", f"/api/operations/{first}/cancel", {}, token=here.tokens["admin"])
    assert await ask(here, method, address, body, "k") == first
    assert await count(here) == before + 1
    assert await refusal(here, "POST", "/api/operations", {"kind": "delete", "name": "other"}, "k") == (
        "idempotency_mismatch"
    )


@pytest.mark.parametrize(("method", "path"), sorted(CREATING))
async def test_what_was_stored_is_accepted_although_the_store_is_gone_afterwards(
    here: Site, method: str, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """G1: a refusal means that nothing was stored. The answer needs no second transaction."""
    body, address = CREATING[method, path], await prepare(here, path)
    real, before, is_away = here.store.transaction, await count(here), False

    async def transaction(work: Callable[[Connection], T]) -> T:
        nonlocal is_away
        if is_away:
            raise Unavailable("cannot use the database now", code="store_unavailable")
        result = await real(work)
        is_away = len(await real(lambda connection: operations.recent(connection, 100))) > before
        return result

    monkeypatch.setattr(here.store, "transaction", transaction)
    accepted = await ask(here, method, address, body, "k")
    monkeypatch.undo()
    assert is_away
    assert accepted in {one.id for one in await here.store.transaction(lambda c: operations.recent(c, 100))}


async def test_an_approval_that_was_stored_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with site(tmp_path) as made:
        real, is_away = made.store.transaction, False

        async def transaction(work: Callable[[Connection], T]) -> T:
            nonlocal is_away
            if is_away:
                raise Unavailable("cannot use the database now", code="store_unavailable")
            result = await real(work)
            is_away = any(node.approved for node in await real(nodes.every))
            return result

        monkeypatch.setattr(made.store, "transaction", transaction)
        answer = await made.ask("POST", "/api/nodes/old/approve", token=made.tokens["admin"])
        assert (answer.status, is_away) == (200, True), answer.body
        monkeypatch.undo()
        await made.frontend.galleries.close()
