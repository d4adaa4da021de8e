"""A delete that would stop models is refused and names them, unless it is forced; it counts only what runs there."""

from __future__ import annotations

from functools import partial

import pytest
from tests.frontend.world import World, installed

from enginehouse.core.errors import Conflict
from enginehouse.core.operation import BackendRequest
from enginehouse.core.replica import Replica
from enginehouse.frontend.acceptance import Requester
from enginehouse.store import nodes, replicas

ME = Requester(author="me")


async def serving(world: World, model: str, *names: str, backend: str = "image") -> None:
    for name in names:
        known = {one.name: one for one in await world.store.transaction(nodes.every)}
        node = known.get(name) or await world.join(name)
        if name not in known:
            held = (installed("image", "sha256:one"), installed("other", "sha256:two"))
            await world.report(node.id, backends=held)
        one = Replica(
            node_id=node.id,
            model=model,
            slot=0,
            revision="r",
            address="h:1",
            nonce=f"{model}-{node.id}",
            backend=backend,
        )
        await world.store.transaction(partial(replicas.put, replica=one, now=1.0))


def delete(name: str = "image", *nodes: str, force: bool = False) -> BackendRequest:
    return BackendRequest(kind="delete", name=name, nodes=nodes or None, force=force)


async def test_models_that_would_stop_are_named_with_their_nodes_and_nothing_is_stored(world: World) -> None:
    await serving(world, "tiny", "attic", "cellar")
    await serving(world, "large", "attic")
    with pytest.raises(Conflict, match="would stop large on attic; tiny on attic, cellar") as caught:
        await world.operations.request(delete(), ME)
    assert caught.value.code == "in_use"
    assert caught.value.details["models"] == [
        {"model": "large", "nodes": ["attic"]},
        {"model": "tiny", "nodes": ["attic", "cellar"]},
    ]
    assert await world.board.page(10, None) == []


async def test_by_force_it_is_deleted(world: World) -> None:
    await serving(world, "tiny", "attic")
    view = await world.board.view(await world.operations.request(delete(force=True), ME))
    assert [row.node_name for row in view.nodes] == ["attic"]
    assert view.asked.force


async def test_what_runs_elsewhere_or_from_another_backend_does_not_count(world: World) -> None:
    await serving(world, "tiny", "attic")
    await serving(world, "other-model", "cellar", backend="other")
    view = await world.board.view(await world.operations.request(delete("image", "cellar"), ME))
    assert [row.node_name for row in view.nodes] == ["cellar"]
    with pytest.raises(Conflict, match="other-model on cellar"):
        await world.operations.request(delete("other", "cellar"), ME)


async def test_a_plan_is_never_refused_for_that(world: World) -> None:
    await serving(world, "tiny", "attic")
    assert [row.does for row in (await world.planner.plan(delete())).nodes] == ["delete"]
