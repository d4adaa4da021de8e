"""A database of every earlier schema comes to the newest one with its rows, on SQLite and on PostgreSQL."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from sqlalchemy import text
from tests.store.old_rows import NODE, ROWS, engine_of, lost, make_old, rows_of

from enginehouse.core.errors import Hopeless
from enginehouse.core.ids import NodeId, OperationId
from enginehouse.store import keys, migrating, models, nodes, operations
from enginehouse.store.db import Connection, Store
from enginehouse.store.schema import metadata

# Columns that a migration computes anew from others.
COMPUTED = {"ended_as"}


@pytest.fixture(params=["sqlite", "postgres"])
def empty_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A database without any table."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'old.db'}"
    make_database: Callable[[str], str] = request.getfixturevalue("postgres")
    return make_database("template1")


@pytest.mark.parametrize("revision", migrating.revisions())
async def test_every_earlier_schema_migrates_with_its_rows(empty_url: str, revision: str) -> None:
    before = make_old(empty_url, revision)
    store = await Store.open(empty_url)

    def work(connection: Connection) -> tuple[object, ...]:
        node = nodes.get(connection, NodeId(NODE))
        assert node is not None
        operation = operations.many(connection, [OperationId(ROWS["operations"][0]["id"])])
        return node.name, node.approved, [one.name for one in keys.every(connection)], len(operation)

    assert await store.transaction(work) == ("attic", True, ["admin", "app"], 1)
    assert [one.name for one, _ in await store.transaction(models.every)] == ["tiny"]
    store.close()
    kept = {
        name: [{column: value for column, value in row.items() if column not in COMPUTED} for row in rows]
        for name, rows in before.items()
    }
    assert lost(kept, rows_of(empty_url)) == []


def test_every_table_has_a_row_to_be_lost() -> None:
    assert {table.name for table in metadata.sorted_tables} - set(ROWS) == {"leases", "clock"}


async def test_a_database_of_a_newer_schema_is_refused_in_one_sentence(database_url: str) -> None:
    engine = engine_of(database_url)
    with engine.begin() as connection:
        connection.execute(text("update alembic_version set version_num = '9999'"))
    engine.dispose()
    before = rows_of(database_url)
    with pytest.raises(Hopeless, match="its schema 9999 is newer than this program") as caught:
        await Store.open(database_url)
    assert caught.value.message.count(". ") == 1
    assert rows_of(database_url) == before
