"""Which nodes a pull names as peers: those that have the file or fetch it, that may be asked, and no other."""

from __future__ import annotations

import hashlib

import msgspec
from nacl.signing import SigningKey
from tests.frontend.world import World, installed

from enginehouse.core import node_api, subjects, wire
from enginehouse.core.ids import NodeId
from enginehouse.core.intent import Outcome
from enginehouse.core.model import HeldModel, Model, ModelFile
from enginehouse.core.node import Node
from enginehouse.core.peer import MAX_PEERS, FilePeer
from enginehouse.core.ticket import for_file, is_valid_ticket
from enginehouse.store import models, nodes

DIGEST = "ab" * 32
MODEL = Model(name="big", backend="engine", files=(ModelFile("big.gguf", "https://hub.example/big", DIGEST, 3),))
HELD = HeldModel("another-name", (DIGEST,))


async def add_model(world: World, model: Model = MODEL) -> None:
    await world.store.transaction(lambda c: models.insert(c, model, 1.0))


async def join(world: World, name: str, *held: HeldModel, host: str = "", **fields: object) -> Node:
    """A node with the engine, whose worker serves HTTP at a host of its own."""
    key = SigningKey(hashlib.sha256(name.encode()).digest())
    given = {"address": f"{host or name}:50051", "http_address": f"{host or name}:50050", **fields}
    registered = await world.nodes.register(await world.signed(name, key, **given))
    await world.nodes.approve(registered.node.id)
    await world.reports.heartbeat(registered.node.id, node_api.HeartbeatRequest())
    await world.report(registered.node.id, models=held, backends=(installed("engine", "sha256:1"),))
    return (await world.nodes.get(registered.node.id))[0]


async def sent_pulls(world: World, *names: str) -> dict[NodeId, tuple[FilePeer, ...]]:
    """Load the model on each of the nodes; the peers that each is told."""
    for name in names:
        await world.loader.request("big", name, "someone")
    await world.loader.step()
    await world.dispatcher.step()
    found = {}
    for sent in world.bus.take():
        if sent.subject.endswith(subjects.PULL_MODEL):
            found[NodeId(sent.subject.split(".")[1])] = wire.decode(sent.payload, wire.ModelPullRequest, "a pull").peers
    return found


async def test_a_node_that_has_the_file_under_any_name_is_named_with_its_own_ticket(world: World) -> None:
    await add_model(world)
    holder, own = await join(world, "holder", HELD), await join(world, "own")
    await join(world, "without")
    [peer] = (await sent_pulls(world, "own"))[own.id]
    assert (peer.sha256, peer.address) == (DIGEST, "holder:50050")
    tokens = {one.node_id: one.hash for one in await world.store.transaction(nodes.tokens)}
    now = await world.now()
    assert is_valid_ticket(peer.ticket, tokens[holder.id], for_file(DIGEST), now)
    assert not is_valid_ticket(peer.ticket, tokens[own.id], for_file(DIGEST), now)
    assert not is_valid_ticket(peer.ticket, tokens[holder.id], for_file("cd" * 32), now)


async def test_of_nodes_that_fetch_at_once_each_is_told_of_those_before_it_only(world: World) -> None:
    await add_model(world)
    joined = [await join(world, f"node-{number}") for number in range(3)]
    told = await sent_pulls(world, *(node.name for node in joined))
    assert sorted(len(peers) for peers in told.values()) == [0, 1, 2]
    graph = {node.name: {peer.address.partition(":")[0] for peer in told[node.id]} for node in joined}
    assert not [name for name in graph for other in graph[name] if name in graph[other]], "they wait for each other"


async def test_a_fetch_that_ended_well_after_the_last_report_counts(world: World) -> None:
    await add_model(world)
    first, second = await join(world, "first"), await join(world, "second")
    await sent_pulls(world, "first")
    [intent] = await world.open_intents(first.id)
    await world.reply(intent, Outcome())
    [peer] = (await sent_pulls(world, "second"))[second.id]
    assert peer.address == "first:50050"


async def test_nodes_that_may_not_be_asked_are_not_named(world: World) -> None:
    await add_model(world)
    own = await join(world, "own")
    away = await join(world, "away", HELD)
    await world.set_health(away.id, "unhealthy")
    await join(world, "elsewhere", HELD, http_address="10.9.9.9:50050")
    await join(world, "silent", HELD, http_address="")
    await join(world, "loopback", HELD, host="127.0.0.1")
    waiting = await join(world, "waiting", HELD)
    await world.store.transaction(lambda c: nodes.set_pending(c, waiting.id, "its address changed", 1.0))
    assert (await sent_pulls(world, "own"))[own.id] == ()


async def test_nodes_on_one_machine_with_the_frontend_are_peers_of_each_other(world: World) -> None:
    await add_model(world)
    await join(world, "holder", HELD, host="127.0.0.1")
    own = await join(world, "own", host="127.0.0.1")
    assert [peer.address for peer in (await sent_pulls(world, "own"))[own.id]] == ["127.0.0.1:50050"]


async def test_files_without_a_digest_or_at_hand_have_no_peers_and_others_a_few(world: World) -> None:
    files = (
        ModelFile("plain.gguf", "https://hub.example/plain", ""),
        ModelFile("own.gguf", "builtin:own.gguf", "cd" * 32, 3),
        ModelFile("shared.gguf", "file:///mnt/shared.gguf", "ef" * 32, 3),
    )
    await add_model(world, msgspec.structs.replace(MODEL, files=(*files, *MODEL.files)))
    held = HeldModel("x", ("cd" * 32, "ef" * 32, DIGEST))
    for number in range(MAX_PEERS + 3):
        await join(world, f"holder-{number}", held)
    own = await join(world, "own")
    peers = (await sent_pulls(world, "own"))[own.id]
    assert {peer.sha256 for peer in peers} == {DIGEST}
    assert len({peer.address for peer in peers}) == MAX_PEERS
