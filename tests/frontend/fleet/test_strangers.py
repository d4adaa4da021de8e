"""What a machine can do that nobody has approved: to be seen, and nothing that costs others."""

from __future__ import annotations

import pytest
from nacl.signing import SigningKey
from tests.frontend.world import World, installed, registration

from enginehouse.core.errors import Conflict
from enginehouse.core.report import Report

KEY = SigningKey(b"1" * 32)


async def test_a_report_of_a_machine_that_waits_for_approval_is_not_kept(world: World) -> None:
    node = await world.join("first", approve=False)
    said = Report(boot_id="b", backends=(installed("engine", "sha256:1"),))
    await world.reports.report(node.id, said)
    assert (await world.nodes.get(node.id))[0].report == Report()
    await world.nodes.approve(node.id)
    await world.reports.report(node.id, said)
    assert (await world.nodes.get(node.id))[0].report.backends == said.backends


async def test_an_approval_without_an_address_is_for_none(world: World) -> None:
    await world.nodes.register(await world.signed("first", KEY, address=""))
    await world.nodes.approve("first")
    again = await world.nodes.register(await world.signed("first", KEY, address=""))
    assert again.node.approved
    told = await world.nodes.register(await world.signed("first", KEY, address="10.0.0.66:80"))
    assert (told.node.status, told.node.address) == ("pending", "10.0.0.66:80")
    assert "not given" in told.node.waits_for


async def test_many_machines_of_one_name_are_told_apart_in_a_line(world: World) -> None:
    for number in range(20):
        await world.nodes.register(registration("first", address=f"10.0.0.{number + 1}:50051"))
        world.time.passed += 1.0
    real = await world.register("first", KEY)
    with pytest.raises(Conflict) as caught:
        await world.nodes.approve("first")
    # The one that was heard last comes first: a machine that is there asks again and again.
    assert caught.value.message.partition(" ids ")[2].startswith(real.node.id)
    assert "and 16 more" in caught.value.message
    assert len(caught.value.message) < 500


async def test_a_crowd_that_waits_for_approval_is_counted_and_not_listed(world: World) -> None:
    await world.join("first")
    for number in range(30):
        await world.nodes.register(registration(f"junk{number}"))
    view = await world.install()
    assert len(view.excluded) == 10
    assert {one.reason for one in view.excluded[:-1]} == {"it waits for approval"}
    assert view.excluded[-1].reason == "it waits for approval, as do 20 more nodes"
