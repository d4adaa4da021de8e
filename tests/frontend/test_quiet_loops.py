"""What the loops of a frontend cost the store while nothing happens: no transaction, and no row of nodes that nobody
asked for.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest
from sqlalchemy import event
from tests.frontend.world import Time, World

from enginehouse.store.db import Connection

T = Callable[[Connection], object]


@pytest.fixture
async def transactions(world: World, monkeypatch: pytest.MonkeyPatch) -> list[T]:
    """The transactions from now on."""
    await world.join_many("a", "b", "c")
    await world.router.step()
    await world.keys.step()
    seen: list[T] = []
    really = world.store.transaction

    async def noted(work: T) -> object:
        seen.append(work)
        return await really(work)

    monkeypatch.setattr(world.store, "transaction", noted)
    return seen


async def test_loops_that_find_nothing_to_do_only_look(world: World, transactions: list[T]) -> None:
    steps: list[Callable[[], Awaitable[None]]] = [
        world.router.step,
        world.reconciler.step,
        world.canaries.step,
        world.keys.step,
        world.keys.watch_step,
        world.poller.step,
        world.models.step,
    ]
    for step in steps:
        await step()
        assert not transactions, step


async def test_routes_models_and_passes_read_no_node_without_replicas(world: World, transactions: list[T]) -> None:
    statements: list[str] = []

    def note(_connection: object, _cursor: object, statement: str, *_: object) -> None:
        statements.append(" ".join(statement.split()))

    engine = world.store._reading.engine
    event.listen(engine, "before_cursor_execute", note)
    try:
        await world.router.step()
        await world.reconciler.step()
        await world.canaries.step()
        await world.models.every()
    finally:
        event.remove(engine, "before_cursor_execute", note)
    assert statements
    # A checksum over all nodes is one row.
    assert not [one for one in statements if "FROM nodes" in one and not one.startswith("SELECT count(*)")]


async def test_where_nothing_waits_the_dispatcher_asks_only_that(world: World) -> None:
    await world.join_many("a", "b", "c")
    statements: list[str] = []

    def note(_connection: object, _cursor: object, statement: str, *_: object) -> None:
        statements.append(" ".join(statement.split()))

    event.listen(world.store._engine, "before_cursor_execute", note)
    try:
        await world.dispatcher.step()
        assert len(statements) <= 3, statements  # it begins, asks for the time, and asks
        await world.install("a")
        statements.clear()
        await world.dispatcher.step()
        assert len(statements) > 3
    finally:
        event.remove(world.store._engine, "before_cursor_execute", note)
    assert len(world.bus.take()) == 1


async def test_where_nothing_changed_other_frontends_ask_only_that(world: World, time: Time) -> None:
    await world.join_many("a", "b", "c")
    await world.board.catch_up_step()
    time.passed += 60
    await world.board.catch_up_step()
    statements: list[str] = []

    def note(_connection: object, _cursor: object, statement: str, *_: object) -> None:
        statements.append(" ".join(statement.split()))

    engine = world.store._reading.engine
    event.listen(engine, "before_cursor_execute", note)
    try:
        await world.board.catch_up_step()
    finally:
        event.remove(engine, "before_cursor_execute", note)
    assert len(statements) <= 3, statements  # it begins, asks for the time, and asks


async def test_a_node_of_localais_is_planned_for_in_one_transaction(world: World, transactions: list[T]) -> None:
    await world.join("old", is_localai=True)
    transactions.clear()
    await world.poller.step()
    assert len(transactions) == 1
