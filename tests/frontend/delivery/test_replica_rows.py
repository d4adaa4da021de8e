"""Rows of replicas follow what workers report: a process that its worker started again gets its row, and no other."""

from __future__ import annotations

import msgspec
import pytest
from tests.frontend.serving.test_loader import add_model
from tests.frontend.world import World, installed, running

from enginehouse.core.action import StartReplica
from enginehouse.core.intent import Intent, Outcome
from enginehouse.core.model import HeldModel
from enginehouse.core.node import Node
from enginehouse.core.replica import FailedReplica, Replica
from enginehouse.store import models, replicas

HERE = {"backends": (installed("engine", "sha256:1"),), "models": (HeldModel("tiny", ("ab",)),)}


async def rows(world: World) -> list[Replica]:
    return await world.store.transaction(replicas.every)


async def started(world: World) -> tuple[Node, Intent]:
    """A replica that runs as process `one`."""
    await add_model(world)
    node = await world.join("node")
    await world.report(node.id, **HERE)
    await world.loader.request("tiny", None, "someone")
    await world.loader.step()
    await world.dispatcher.step()
    [intent] = await world.open_intents(node.id)
    assert isinstance(intent.action, StartReplica)
    await world.reply(intent, Outcome(address="h:1", nonce="one"))
    [row] = await rows(world)
    assert row.nonce == "one"
    return node, intent


async def test_a_process_that_its_worker_started_again_serves_with_the_key_of_the_one_before(world: World) -> None:
    node, intent = await started(world)
    await world.router.step()
    assert [route.nonce for route in world.router.routes()] == ["one"]
    await world.report(node.id, sequence=2, **HERE)
    assert await rows(world) == []
    again = msgspec.structs.replace(running("two", generation=intent.generation), address="h:2")
    await world.report(node.id, sequence=3, replicas=(again,), **HERE)
    [row] = await rows(world)
    assert isinstance(intent.action, StartReplica)
    assert (row.nonce, row.address, row.key) == ("two", "h:2", intent.action.key)
    await world.router.step()
    assert [route.nonce for route in world.router.routes()] == ["two"]


async def test_one_report_may_show_both_the_end_and_the_new_process(world: World) -> None:
    node, intent = await started(world)
    await world.report(node.id, sequence=2, replicas=(running("two", generation=intent.generation),), **HERE)
    assert [row.nonce for row in await rows(world)] == ["two"]


@pytest.mark.parametrize("why", ["first process", "older request", "model gone", "address", "no nonce"])
async def test_no_other_process_gets_a_row(world: World, why: str) -> None:
    node, intent = await started(world)
    await world.report(node.id, sequence=2, **HERE)
    shown = running("two", generation=intent.generation)
    match why:
        case "first process":  # a late report, from before it was stopped
            shown = msgspec.structs.replace(shown, nonce="one")
        case "older request":
            shown = msgspec.structs.replace(shown, generation=intent.generation - 1)
        case "model gone":
            await world.store.transaction(lambda c: models.remove(c, "tiny"))
        case "address":
            shown = msgspec.structs.replace(shown, address="10.1.1.1:9")
        case _:
            shown = msgspec.structs.replace(shown, nonce="")
    await world.report(node.id, sequence=3, replicas=(shown,), **HERE)
    assert await rows(world) == []


async def test_a_replica_that_its_worker_gave_up_is_shown_with_the_reason(world: World) -> None:
    node, _ = await started(world)
    message = "cannot keep tiny running: its engine ended 6 times in 30 s, the last time with code 7: no memory"
    await world.report(node.id, sequence=2, failed=(FailedReplica("tiny", 0, message),), **HERE)
    (known, _) = await world.nodes.get(node.id)
    assert [one.message for one in known.report.failed] == [message]
