"""Tokens of LocalAI's workers: learned when they are presented, sealed in the store, read by whoever has the secret."""

from __future__ import annotations

from functools import partial

import pytest
from tests.frontend.world import World

from enginehouse.core.errors import Unavailable
from enginehouse.frontend.localai.worker_tokens import WorkerTokens
from enginehouse.store import nodes

SECRET = "eh-admin-0123456789abcdef0123456789abcdef"


async def test_a_token_is_learned_once_shared_by_those_with_the_secret_and_learned_again(world: World) -> None:
    node = await world.join("go", is_localai=True)
    first, second, stranger = (WorkerTokens(world.store, partial(str, one)) for one in (SECRET, SECRET, "other"))
    await first.learn(node.id, "a token")
    (sealed,) = (await world.store.transaction(lambda c: nodes.sealed_tokens(c, [node.id]))).values()
    assert "a token" not in sealed
    await second.learn(node.id, "a token")
    assert await world.store.transaction(lambda c: nodes.sealed_tokens(c, [node.id])) == {node.id: sealed}
    assert await world.store.transaction(lambda c: second.of(c, node.id)) == "a token"
    with pytest.raises(Unavailable) as caught:
        await world.store.transaction(lambda c: stranger.of(c, node.id))
    assert (caught.value.code, "ENGINEHOUSE_ADMIN_TOKEN" in caught.value.message) == ("token_unknown", True)
    await second.learn(node.id, "another")
    assert await world.store.transaction(lambda c: first.of(c, node.id)) == "another"


async def test_without_a_secret_nothing_is_stored_or_read(world: World) -> None:
    node = await world.join("go", is_localai=True)
    tokens = WorkerTokens(world.store, lambda: "")
    await tokens.learn(node.id, "a token")
    assert await world.store.transaction(lambda c: nodes.sealed_tokens(c, [node.id])) == {}
    assert await world.store.transaction(lambda c: tokens.every(c, [node.id])) == {}
