"""What nodes get for the bus: on record while it is valid, and revoked when its node is removed or refused."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from nacl.signing import SigningKey
from tests.frontend.world import World, registration

from enginehouse.core.errors import Unavailable
from enginehouse.core.ids import NodeId
from enginehouse.frontend.fleet.bus_credentials import BusCredentials, BusIssuer, Minted

KEY = SigningKey(b"1" * 32)


class Server:
    """The server's side: what it was told last, and a wall clock."""

    def __init__(self, world: World) -> None:
        self.now = 1000.0
        self.made = 0
        self.told: list[dict[str, int]] = []
        self.is_away = False
        self.credentials = BusCredentials(
            world.store,
            BusIssuer(mint=self.mint, url_for=lambda host: f"nats://{host}:4222", revoke=self.revoke),
            wall=lambda: self.now,
        )

    async def mint(self, node_id: NodeId) -> Minted:
        self.made += 1
        return Minted(f"jwt of {node_id}", "seed", f"U{self.made}", self.now + 3600.0)

    async def revoke(self, revoked: Mapping[str, int]) -> None:
        if self.is_away:
            raise Unavailable("cannot reach the bus", code="bus_unavailable")
        self.told.append(dict(revoked))


@pytest.fixture
def server(world: World) -> Server:
    return Server(world)


async def test_all_that_a_removed_node_had_is_revoked_until_it_ends_by_itself(world: World, server: Server) -> None:
    first, second = await world.join_many("first", "second")
    for node in (first, first, second):
        given = await server.credentials.issue(node, "here")
        assert (given.nats_url, given.nats_life_seconds) == ("nats://here:4222", 3600.0)
    await server.credentials.step()
    assert server.told == []
    await world.cancellation.remove_node("first", "someone")
    await server.credentials.step()
    await server.credentials.step()
    assert server.told == [{"U1": 4601, "U2": 4601}]
    server.now += 3601.0
    await server.credentials.step()
    assert server.told[-1] == {}


async def test_a_server_that_was_away_or_is_new_is_told_again(world: World, server: Server) -> None:
    await server.credentials.issue(await world.join("first"), "here")
    await world.cancellation.remove_node("first", "someone")
    server.is_away = True
    with pytest.raises(Unavailable):
        await server.credentials.step()
    server.is_away = False
    await server.credentials.step()
    server.credentials.send_again()
    await server.credentials.step()
    assert server.told == [{"U1": 4601}, {"U1": 4601}]


async def test_a_node_that_lost_its_approval_loses_the_bus(world: World, server: Server) -> None:
    await world.nodes.register(await world.signed("first", KEY, address="10.0.0.5:50051"))
    node, _ = await world.nodes.approve("first")
    await server.credentials.issue(node, "here")
    await world.nodes.register(await world.signed("first", KEY, address="10.0.0.66:50051"))
    await server.credentials.step()
    assert server.told == [{"U1": 4601}]


async def test_a_credential_that_was_made_while_its_node_was_removed_is_revoked(world: World, server: Server) -> None:
    """Whoever asks for one knows the node from before; nothing orders the two transactions."""
    node = await world.join("first")
    await world.cancellation.remove_node("first", "someone")
    await server.credentials.issue(node, "here")
    await server.credentials.step()
    assert server.told == [{"U1": 4601}]


async def test_one_of_localais_workers_that_renews_its_credential_was_not_restarted(
    world: World, server: Server, time: object
) -> None:
    node = await world.join("go", is_localai=True)
    assert not await server.credentials.is_refresh(node.id)
    await server.credentials.issue(node, "here")
    for passed, is_refresh in ((10.0, False), (2690.0, True), (900.0, True), (1400.0, False)):
        world.time.passed += passed
        assert await server.credentials.is_refresh(node.id) == is_refresh, passed
    assert registration("go").public_key == ""
