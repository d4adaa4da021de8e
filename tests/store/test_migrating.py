"""A database of every earlier schema comes to the newest one with its rows, on SQLite and on PostgreSQL."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import MetaData, text
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


def test_the_migrations_make_exactly_the_schema(empty_url: str) -> None:
    engine = engine_of(empty_url)
    with engine.begin() as connection:
        migrating.upgrade(connection, migrating.revisions()[-1])
        assert list(compare_metadata(MigrationContext.configure(connection), metadata)) == []
    engine.dispose()


def shape_of(connection: Connection) -> dict[str, object]:
    """All that a database says of its tables, in no order."""
    seen = sqlalchemy.inspect(connection)

    def described(found: Iterable[Mapping[str, Any]]) -> list[str]:
        return sorted(str({key: str(value) for key, value in sorted(one.items())}) for one in found)

    return {
        table: (
            described(seen.get_columns(table)),
            described(seen.get_indexes(table)),
            described(seen.get_foreign_keys(table)),
            described(seen.get_unique_constraints(table)),
            described(seen.get_check_constraints(table)),
            str(seen.get_pk_constraint(table)),
            str(seen.get_table_options(table)),
        )
        for table in seen.get_table_names()
    }


def test_a_new_database_is_as_the_migrations_would_have_made_it(empty_url: str) -> None:
    engine = engine_of(empty_url)
    with engine.begin() as connection:
        migrating.upgrade(connection, migrating.revisions()[-1])
        migrated, revision = shape_of(connection), migrating.current(connection)
        everything = MetaData()
        everything.reflect(connection)
        everything.drop_all(connection)
        assert shape_of(connection) == {}, "the other way begins with nothing too"
        migrating.upgrade(connection)
        assert shape_of(connection) == migrated
        assert migrating.current(connection) == revision == migrating.revisions()[-1]
    engine.dispose()


def test_a_database_with_tables_of_others_is_migrated_beside_them(empty_url: str) -> None:
    engine = engine_of(empty_url)
    with engine.begin() as connection:
        connection.execute(text("create table theirs (id integer primary key)"))
        migrating.upgrade(connection)
        assert {"theirs", "alembic_version", *metadata.tables} <= set(shape_of(connection))
    engine.dispose()


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


def test_the_revisions_are_those_that_alembic_finds_in_its_order() -> None:
    config = Config()
    config.set_main_option("script_location", str(Path(migrating.__file__).parent / "migrations"))
    found = ScriptDirectory.from_config(config).walk_revisions()
    assert migrating.revisions() == [one.revision for one in found][::-1]


def test_only_a_database_of_an_earlier_schema_loads_the_migrations(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'a.db'}"
    script = (
        "import asyncio, sys\n"
        "from enginehouse.store.db import Store\n"
        f"asyncio.run(Store.open('{url}')).close()\n"
        "print('alembic' in sys.modules)"
    )

    def loads() -> bool:
        said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
        return said == "True\n"

    assert not loads(), "a new one"
    assert not loads(), "a current one"
    (tmp_path / "a.db").unlink()
    make_old(url, migrating.revisions()[-2])
    assert loads(), "an old one"
