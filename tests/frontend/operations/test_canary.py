"""Upgrades that begin with some nodes: the others follow, or nobody does and the first get their version back."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest
from nacl.signing import SigningKey
from tests.frontend.world import Time, World, installed

from enginehouse.core import node_api
from enginehouse.core.action import InstallBackend, StartReplica
from enginehouse.core.backend import InstalledBackend
from enginehouse.core.errors import Conflict
from enginehouse.core.ids import IntentId, NodeId, OperationId
from enginehouse.core.intent import CANARY, Outcome
from enginehouse.core.model import Model
from enginehouse.core.node import Node
from enginehouse.core.operation import BackendRequest, is_return
from enginehouse.core.replica import Replica, RunningReplica
from enginehouse.core.report import Report
from enginehouse.core.usage import HOUR_SECONDS
from enginehouse.core.views import OperationView
from enginehouse.frontend.acceptance import Requester
from enginehouse.store import db, replicas, usage
from enginehouse.store.supersession import add_intent

ME = Requester(author="me")
URI = "registry.example/image:latest"
OLD, NEW = "sha256:" + "1" * 64, "sha256:" + "2" * 64


class Upgrade:
    """Nodes that serve `tiny` with the image, and an upgrade of it."""

    def __init__(self, world: World, nodes: Sequence[Node]) -> None:
        self.world = world
        self.nodes = {node.name: node for node in nodes}
        self.sequence = 1

    async def request(self, *names: str, **fields: object) -> OperationView:
        asked = BackendRequest(kind="upgrade", name="image", nodes=names or None, **fields)  # type: ignore[arg-type]
        return await self.view(await self.world.operations.request(asked, ME))

    async def view(self, operation_id: OperationId) -> OperationView:
        return await self.world.board.view(operation_id)

    async def show(self, name: str, digest: str, **fields: object) -> None:
        """A report of a node: its version, and a replica of it."""
        self.sequence += 1
        shown = RunningReplica(model_id="tiny", replica_index=0, address="h:1", nonce=f"n-{name}", backend="image")
        plain: dict[str, object] = {"backends": (image(digest),), "replicas": (shown,), "sequence": self.sequence}
        await self.world.report(self.nodes[name].id, **(plain | fields))

    async def install(self, name: str, outcome: Outcome) -> None:
        """The dispatcher sends what is due; this node answers."""
        await self.world.dispatcher.step()
        (intent,) = [one for one in await self.world.open_intents(self.nodes[name].id) if not one.is_held]
        await self.world.reply(intent, outcome)

    async def sent(self) -> list[str]:
        """The nodes that were sent something since the last look."""
        await self.world.dispatcher.step()
        names = {node.id: name for name, node in self.nodes.items()}
        return sorted(names[NodeId(one.subject.split(".")[1])] for one in self.world.bus.take())

    async def fail_start(self, name: str) -> None:
        """The replica of the new version did not start there."""
        model = Model(name="tiny", backend="image", files=())
        action = StartReplica(model=model, slot=1, directory="image", key="k")
        operation = (await self.world.install(name, name="other")).jobID
        node_id, intent_id = self.nodes[name].id, IntentId(f"start-{name}")

        def add(connection: db.Connection) -> None:
            add_intent(connection, operation, node_id, action, intent_id, db.now(connection))

        await self.world.store.transaction(add)
        await self.world.dispatcher.step()
        for one in await self.world.open_intents(node_id):
            if one.id == intent_id:
                await self.world.reply(one, Outcome(code="backend_exited", message="it ended with code 3"))


def image(digest: str) -> InstalledBackend:
    return msgspec.structs.replace(installed("image", digest), uri=URI, version="1" if digest == OLD else "2")


async def serving(world: World, *names: str) -> Upgrade:
    made = Upgrade(world, await world.join_many(*names))
    for name, node in made.nodes.items():
        await made.show(name, OLD)
        replica = Replica(
            node_id=node.id, model="tiny", slot=0, revision="r", address="h:1", nonce=f"n-{name}", backend="image"
        )

        def put(connection: db.Connection, replica: Replica = replica) -> None:
            replicas.put(connection, replica, db.now(connection))

        await world.store.transaction(put)
    world.registry.digests[URI] = NEW
    return made


async def passing(upgrade: Upgrade, time: Time, name: str) -> None:
    """The canary installs, and stays ready."""
    await upgrade.install(name, Outcome(digest=NEW))
    await upgrade.show(name, NEW)
    await upgrade.world.canaries.step()
    time.passed += 31.0
    for other in upgrade.nodes:
        await upgrade.show(other, NEW if other == name else OLD)
        await upgrade.world.set_health(upgrade.nodes[other].id, "healthy")
    await upgrade.world.canaries.step()


def first_of(view: OperationView) -> str:
    assert view.canary is not None
    return view.canary.nodes[-1].node_name


def states(view: OperationView) -> dict[str, str]:
    return {f"{row.node_name}: {row.action}": row.state for row in view.nodes}


async def test_the_others_follow_after_the_first_stayed_ready(world: World, time: Time) -> None:
    upgrade = await serving(world, "a", "b", "c")
    view = await upgrade.request()
    first = first_of(view)
    held = [row for row in view.nodes if row.reason == CANARY]
    assert len(held) == 2
    assert held[0].error == f"waits until {first} has run the new version for 30 s"
    assert held[0].due_in_seconds is None
    assert await upgrade.sent() == [first]
    await upgrade.install(first, Outcome(digest=NEW))
    assert await upgrade.sent() == []
    await upgrade.show(first, NEW)
    await world.canaries.step()
    time.passed += 29.0
    for name in upgrade.nodes:
        await upgrade.show(name, NEW if name == first else OLD)
    await world.canaries.step()
    assert await upgrade.sent() == []
    assert (await upgrade.view(view.jobID)).status == "running"
    time.passed += 2.0
    await world.canaries.step()
    after = await upgrade.view(view.jobID)
    assert after.canary is not None
    assert after.canary.phase == "passed"
    for _ in range(2):
        (name,) = await upgrade.sent()  # with the width that upgrades have
        await upgrade.install(name, Outcome(digest=NEW))
    assert (await upgrade.view(view.jobID)).status == "succeeded"


async def test_a_replica_that_does_not_start_takes_the_first_back_and_leaves_the_others_alone(world: World) -> None:
    upgrade = await serving(world, "a", "b")
    view = await upgrade.request()
    first = first_of(view)
    (other,) = set(upgrade.nodes) - {first}
    await upgrade.install(first, Outcome(digest=NEW))
    await world.canaries.step()
    await upgrade.fail_start(first)
    world.bus.take()
    await world.canaries.step()
    after = await upgrade.view(view.jobID)
    assert (after.status, after.errorCode) == ("running", "canary_failed")
    assert after.error == (f"canary failed on {first}: tiny could not be started: it ended with code 3; returning to 1")
    assert states(after) == {
        f"{first}: upgrade image": "succeeded",
        f"{first}: return image to 1": "accepted",
        f"{other}: upgrade image": "cancelled",
    }
    assert await upgrade.sent() == [first]
    back = next(one for one in await world.open_intents(upgrade.nodes[first].id) if is_return(one))
    assert isinstance(back.action, InstallBackend)
    assert (back.action.resolved.digest, back.action.resolved.uri) == (OLD, URI)
    await world.reply(back, Outcome(digest=OLD))
    ended = await upgrade.view(view.jobID)
    assert ended.status == "failed"
    assert ended.error.endswith("; returned to 1")
    listed = await world.board.page(10, is_ended=True)
    assert view.jobID in {one.jobID for one in listed}
    await world.canaries.step()
    assert states(await upgrade.view(view.jobID)) == states(ended)


async def test_an_install_that_fails_for_good_fails_the_canary_and_changes_nothing_else(world: World) -> None:
    upgrade = await serving(world, "a", "b")
    view = await upgrade.request()
    first = first_of(view)
    await upgrade.install(first, Outcome(code="digest_mismatch", message="other bytes"))
    await world.canaries.step()
    after = await upgrade.view(view.jobID)
    assert "the install failed: other bytes" in after.error
    # The worker has the version already, and says so.
    await upgrade.install(first, Outcome(digest=OLD))
    assert (await upgrade.view(view.jobID)).status == "failed"


async def test_a_rate_of_failures_that_rises_takes_the_first_back(world: World) -> None:
    upgrade = await serving(world, "a", "b")
    view = await upgrade.request()
    first = first_of(view)
    (other,) = set(upgrade.nodes) - {first}

    async def count(node: str, requests: int, failures: int) -> None:
        def work(connection: db.Connection) -> None:
            now = int(db.now(connection))
            counts = {("t", "t", "tiny", node): (requests, failures, 0, 0, failures)}
            usage.add(connection, now - now % HOUR_SECONDS, counts)

        await world.store.transaction(work)

    await count(first, 10, 9)  # before the swap
    await upgrade.install(first, Outcome(digest=NEW))
    await upgrade.show(first, NEW)
    await world.canaries.step()
    await count(first, 20, 4)
    await count(other, 20, 0)
    await world.canaries.step()
    assert not (await upgrade.view(view.jobID)).errorCode
    await count(first, 0, 1)
    await world.canaries.step()
    after = await upgrade.view(view.jobID)
    assert "5 of 20 requests failed, 25% where it was 0% on the other nodes" in after.error


async def test_another_node_takes_the_place_of_a_canary_that_goes_away(world: World) -> None:
    upgrade = await serving(world, "a", "b", "c")
    view = await upgrade.request()
    first = first_of(view)
    await world.set_health(upgrade.nodes[first].id, "offline")
    await world.canaries.step()
    after = await upgrade.view(view.jobID)
    second = first_of(after)
    assert second != first
    assert after.canary is not None
    assert [one.state for one in after.canary.nodes] == ["left", "watched"]
    assert await upgrade.sent() == [second]
    (last,) = set(upgrade.nodes) - {first, second}
    row = next(row for row in after.nodes if row.node_name == last)
    assert row.error == f"waits until {second} has run the new version for 30 s"


async def test_without_another_node_the_upgrade_waits_for_the_one_that_is_away(world: World, time: Time) -> None:
    upgrade = await serving(world, "a", "b")
    view = await upgrade.request()
    for node in upgrade.nodes.values():
        await world.set_health(node.id, "offline")
    await world.canaries.step()
    time.passed += 5000.0
    await world.canaries.step()
    after = await upgrade.view(view.jobID)
    assert (after.status, after.errorCode, after.isParked) == ("queued", "", True)
    for node in upgrade.nodes.values():
        await world.set_health(node.id, "healthy")
    await passing(upgrade, time, first_of(view))
    assert (await upgrade.view(view.jobID)).canary.phase == "passed"  # type: ignore[union-attr]


@pytest.mark.parametrize("fields", [{"canary": False}, {}])
async def test_nothing_is_held_where_nobody_wants_it_or_it_protects_nothing(
    world: World, fields: dict[str, object]
) -> None:
    upgrade = await serving(world, "a", "b")
    view = await upgrade.request(*([] if fields else ["a"]), **fields)
    assert view.canary is None
    assert not [row for row in view.nodes if row.reason]


async def test_a_cancel_ends_the_phase_and_a_retry_begins_it_anew(world: World) -> None:
    upgrade = await serving(world, "a", "b")
    view = await upgrade.request()
    await world.cancellation.cancel(view.jobID, None, "me")
    after = await upgrade.view(view.jobID)
    assert (after.status, after.canary.phase if after.canary else "") == ("cancelled", "ended")
    await world.canaries.step()
    again = await upgrade.view(await world.cancellation.retry(view.jobID, None, ME))
    assert again.canary is not None
    assert again.canary.phase == "watching"
    assert len([row for row in again.nodes if row.reason == CANARY]) == 1


async def test_a_retry_after_a_failed_canary_upgrades_all_nodes_again(world: World) -> None:
    upgrade = await serving(world, "a", "b")
    view = await upgrade.request()
    first = first_of(view)
    await upgrade.install(first, Outcome(digest=NEW))
    await world.canaries.step()
    await upgrade.fail_start(first)
    await world.canaries.step()
    await world.dispatcher.step()
    (back,) = [one for one in await world.open_intents(upgrade.nodes[first].id) if is_return(one)]
    await world.reply(back, Outcome(digest=OLD))
    again = await upgrade.view(await world.cancellation.retry(view.jobID, None, ME))
    assert sorted(row.action for row in again.nodes) == ["upgrade image", "upgrade image"]
    assert {row.node_name for row in again.nodes} == {"a", "b"}
    assert again.canary is not None


async def test_an_operator_may_release_the_rest(world: World) -> None:
    upgrade = await serving(world, "a", "b", "c")
    view = await upgrade.request(max_parallel=3)
    await world.canaries.release(view.jobID, "me")
    assert await upgrade.sent() == ["a", "b", "c"]
    after = await upgrade.view(view.jobID)
    assert after.canary is not None
    assert (after.canary.phase, after.canary.message) == ("released", "released by me")
    with pytest.raises(Conflict, match="no canary phase"):
        await world.canaries.release(view.jobID, "me")


async def test_a_second_request_meanwhile_is_refused_and_one_without_a_canary_is_not(world: World) -> None:
    upgrade = await serving(world, "a", "b", "c")
    view = await upgrade.request()
    with pytest.raises(Conflict, match=view.jobID):
        await upgrade.request()
    with pytest.raises(Conflict, match="watching its canary"):
        await upgrade.request(*sorted(set(upgrade.nodes) - {first_of(view)})[:1])
    second = await upgrade.request(canary=False, max_parallel=3)
    assert not [row for row in second.nodes if row.reason == CANARY]
    await world.canaries.step()
    ended = await upgrade.view(view.jobID)
    assert ended.canary is not None
    assert ended.canary.phase == "ended"


async def test_a_canary_that_somebody_changes_is_not_taken_back(world: World) -> None:
    upgrade = await serving(world, "a", "b", "c")
    view = await upgrade.request()
    first = first_of(view)
    await upgrade.install(first, Outcome(digest=NEW))
    await upgrade.show(first, NEW)
    await world.canaries.step()
    await world.request("delete", first, name="image")
    await world.canaries.step()
    after = await upgrade.view(view.jobID)
    assert first_of(after) != first
    second = first_of(after)
    await upgrade.install(second, Outcome(code="unsupported", message="no"))
    await world.canaries.step()
    back = [row for row in (await upgrade.view(view.jobID)).nodes if row.action.startswith("return")]
    assert [row.node_name for row in back] == [second]


async def test_nodes_that_cannot_be_canaries_follow_when_there_is_nobody_left_to_watch(world: World) -> None:
    """The canary was removed, and the other node has lost what it could be returned to."""
    upgrade = await serving(world, "a", "b")
    view = await upgrade.request()
    first = first_of(view)
    (other,) = set(upgrade.nodes) - {first}
    await upgrade.show(other, OLD, backends=(), replicas=())
    await world.cancellation.remove_node(first, "me")
    await world.canaries.step()
    assert await upgrade.sent() == [other]


async def test_workers_of_localai_follow_after_the_canaries_of_other_kinds(world: World, time: Time) -> None:
    upgrade = await serving(world, "a", "b")
    key = SigningKey(b"7" * 32)
    asked = await world.signed("gpu", key, capability="nvidia", gpu_vendor="nvidia", total_vram=24 * 1024**3)
    old = await world.nodes.register(msgspec.structs.replace(asked, public_key="", signature="", challenge=""))
    await world.nodes.approve(old.node.id)
    await world.reports.heartbeat(old.node.id, node_api.HeartbeatRequest())
    upgrade.nodes["gpu"] = (await world.nodes.get(old.node.id))[0]
    await world.reports.report(old.node.id, Report(mark=await world.now(), backends=(image(OLD),)))
    view = await upgrade.request()
    first = first_of(view)
    assert {row.node_name for row in view.nodes if row.reason == CANARY} == {"a", "b", "gpu"} - {first}
    del upgrade.nodes["gpu"]
    await passing(upgrade, time, first)
    after = await upgrade.view(view.jobID)
    assert not [row for row in after.nodes if row.reason == CANARY], "nobody is left behind"


async def test_one_frontend_at_a_time_watches_and_another_goes_on(world: World, time: Time) -> None:
    upgrade = await serving(world, "a", "b")
    view = await upgrade.request()
    first = first_of(view)
    await upgrade.install(first, Outcome(digest=NEW))
    await upgrade.show(first, NEW)
    await world.canaries.step()
    other = World(world.store, time, owner="other")
    time.passed += 31.0
    for name in upgrade.nodes:
        await upgrade.show(name, NEW if name == first else OLD)
    await other.canaries.step()
    after = await upgrade.view(view.jobID)
    assert after.canary is not None
    assert after.canary.phase == "passed"
