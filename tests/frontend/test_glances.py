"""One statement per second says what changed or is due; loops rest by it, and no longer than it is true."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from sqlalchemy import event
from tests.frontend.serving_rows import a_model, a_node, a_replica
from tests.frontend.world import Time, WatchedStore, World

from enginehouse.build_frontend import make_quiet_loops
from enginehouse.core.ids import NodeId
from enginehouse.core.intent import Outcome
from enginehouse.core.schedule import Schedule
from enginehouse.frontend import quiet_loops
from enginehouse.loop import Loop
from enginehouse.store import bus_credentials, db, models, nodes, replicas, schedules
from enginehouse.store.db import Connection

RESTING = {
    *("dispatch", "catch-up", "watch-keys", "renew", "load", "canary", "poll", "revoke", "route", "reconcile", "keys")
}
Act = Callable[["Pair"], Awaitable[object]]


async def _nothing() -> None:
    """The step of a loop that is never run."""


class Pair:
    """A frontend with its glances, and another one over the same rows, of which it hears nothing."""

    def __init__(self, own: World, other: World) -> None:
        self.own, self.other = own, other
        self.quiet = make_quiet_loops(own.frontend)
        self.loops = {name: Loop(name, _nothing, 60.0) for name in sorted(RESTING)}
        self.quiet.hold(self.loops.values())

    async def settle(self) -> None:
        """Until there is nothing to do."""
        self.own.time.passed += 60.0
        self.other.time.passed = self.own.time.passed
        for step in (
            *(self.own.keys.step, self.own.router.step, self.own.reconciler.step, self.own.dispatcher.step),
            *(self.own.board.catch_up_step, self.own.frontend.bus_credentials.step, self.own.poller.step),
        ):
            await step()
        await self.quiet.step()
        self.woken()

    def woken(self) -> set[str]:
        """The loops that were woken since the last call."""
        found = {name for name, loop in self.loops.items() if loop._woken.is_set()}
        for loop in self.loops.values():
            loop._woken.clear()
        return found

    def resting(self) -> set[str]:
        return {name for name, loop in self.loops.items() if loop._is_idle()}

    async def look(self) -> set[str]:
        await self.quiet.step()
        return self.woken()


@pytest.fixture
async def pair(sqlite_url: str, time: Time, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Pair]:
    # Time stands still in these tests.
    monkeypatch.setattr(quiet_loops, "CHECKSUM_SECONDS", 0.0)
    monkeypatch.setattr(quiet_loops, "SETTLED_SECONDS", 0.0)
    worlds = []
    for owner in ("own", "other"):
        store = await WatchedStore.open(sqlite_url)
        assert isinstance(store, WatchedStore)
        worlds.append(World(store, time, owner=owner))
        await worlds[-1].start()
    made = Pair(*worlds)
    await worlds[1].join("first")
    await made.settle()
    yield made
    for world in worlds:
        world.store.close()


async def test_where_nothing_happens_every_loop_rests_by_one_look(pair: Pair) -> None:
    assert await pair.look() == set()
    assert pair.resting() == RESTING
    looks: list[str] = []
    engine = pair.own.store._reading.engine
    event.listen(engine, "begin", lambda *_: looks.append("look"))
    await pair.quiet.step()
    assert len(looks) == 1


async def test_before_the_first_glance_and_after_an_old_one_no_loop_rests(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not Pair(pair.own, pair.other).resting()
    for name in ("FRESH_SECONDS", "FRESH_CHECKSUM_SECONDS"):
        monkeypatch.setattr(quiet_loops, name, -1.0)
    assert not pair.resting()


async def test_a_look_that_fails_says_nothing(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    await pair.own.keys.create("user", "someone")
    assert "watch-keys" in await pair.look() | pair.resting()
    monkeypatch.setattr(quiet_loops, "FRESH_SECONDS", -1.0)
    pair.own.store.is_away = True
    with pytest.raises(Exception, match="cannot use the database"):
        await pair.quiet.step()
    assert not pair.resting() & {"dispatch", "catch-up", "watch-keys", "renew"}


async def _removed(pair: Pair) -> None:
    node, _ = await pair.other.nodes.get("first")
    await pair.other.cancellation.remove_node(node.id, "someone", force=True)


async def _claimed(pair: Pair) -> None:
    await pair.other.install("first")
    await pair.other.dispatcher.step()


async def _stored(pair: Pair, work: Callable[[Connection], object]) -> None:
    await pair.other.store.transaction(work)


def _replica(connection: Connection) -> None:
    nodes.insert(connection, a_node(0, [], 1.0), "hash")
    replicas.put(connection, a_replica(0, a_model(0)), 1.0)


ACTS: dict[str, tuple[Act, set[str]]] = {
    "a request": (lambda pair: pair.other.install("first"), {"dispatch", "catch-up"}),
    "a claim": (_claimed, {"catch-up"}),
    "a new token": (lambda pair: pair.other.keys.create("user", "someone"), {"watch-keys", "keys"}),
    "a drained node": (
        lambda pair: _stored(pair, lambda c: nodes.set_drained(c, nodes.ids(c)[0], True, db.now(c))),
        {"catch-up", "revoke", "route"},
    ),
    "a removed node": (_removed, {"catch-up", "revoke", "route", "watch-keys", "keys"}),
    "another machine": (lambda pair: pair.other.join("second"), {"catch-up", "revoke", "route", "keys"}),
    "a model": (lambda pair: _stored(pair, lambda c: models.insert(c, a_model(0), 1.0)), {"route"}),
    "a replica": (lambda pair: _stored(pair, _replica), {"catch-up", "route", "reconcile"}),
    "a schedule": (
        lambda pair: _stored(pair, lambda c: schedules.put(c, Schedule(model_name="m", min_replicas=1), 1.0)),
        {"route", "reconcile"},
    ),
    "another token of a node": (
        lambda pair: _stored(pair, lambda c: nodes.set_token(c, nodes.ids(c)[0], "other hash")),
        {"keys"},
    ),
}


@pytest.mark.parametrize(("act", "concerned"), ACTS.values(), ids=ACTS)
async def test_what_another_frontend_did_wakes_those_whose_concern_it_is(
    pair: Pair, act: Act, concerned: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    await pair.look()
    monkeypatch.setattr(quiet_loops, "SETTLED_SECONDS", 5.0)
    pair.quiet._nodes_changed_at -= 5.0
    assert pair.resting() == RESTING
    await act(pair)
    assert await pair.look() >= concerned
    assert not pair.resting() & concerned, "nor do they rest until they have acted"


async def test_what_is_due_later_is_sent_then(pair: Pair, time: Time) -> None:
    await _claimed(pair)
    intent = await pair.other.intent((await pair.other.board.unfinished(1))[0])
    failed = Outcome(code="upstream_error", message="cannot fetch it", can_heal=True)
    await pair.other.reply(intent, failed)
    await pair.own.board.catch_up_step()
    await pair.look()
    assert "dispatch" in pair.resting()
    time.passed += 600.0
    await pair.look()
    assert "dispatch" not in pair.resting()


async def test_leases_are_renewed_while_anything_runs(pair: Pair) -> None:
    await _claimed(pair)
    await pair.look()
    assert "renew" not in pair.resting()


async def test_routes_that_a_glance_confirms_need_no_look_of_their_own(pair: Pair) -> None:
    router = pair.own.router
    router._looked_at = 0.0
    await pair.quiet.step()
    assert pair.loops["route"]._is_idle()
    assert router._looked_at > 0.0
    router._looked_at = 0.0
    await _stored(pair, lambda c: models.insert(c, a_model(0), 1.0))
    await pair.quiet.step()
    assert not pair.loops["route"]._is_idle()
    assert router._looked_at == 0.0


async def test_a_credential_for_a_removed_node_is_revoked_by_the_next_steps(pair: Pair) -> None:
    """It may be stored a moment after the node was removed."""
    await _removed(pair)
    await pair.look()
    await _stored(pair, lambda c: bus_credentials.insert(c, "user", NodeId("gone"), 1.0, 1.0))
    pair.quiet._nodes_changed_at += quiet_loops.SETTLED_SECONDS + 10.0
    assert "revoke" not in pair.resting()
